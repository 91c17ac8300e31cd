//! Tests of attention.

mod reference;
mod refusals;

use std::ops::Range;

use super::backward::Sweep;
use super::*;
use crate::dtype::{bf16_nearest, bf16_wide};
use crate::ops::matmul::Plain;
#[cfg(target_arch = "x86_64")]
use crate::ops::matmul::{Avx2F32, Avx512F32};
use crate::ops::testing::{alone_with_the_pool, cpu_of, random_f32};
use crate::ops::{Bf16Order, with_bf16_order};
#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Level};
use crate::{DType, Element, threads};
use reference::Reference;

type ForwardPiece =
    unsafe fn(&Forward<'_, f32>, usize, Range<usize>, &mut forward::ForwardBuffers<f32>);
type BackwardPiece =
    unsafe fn(&Backward<'_, f32>, usize, &Sweep, &mut backward::BackwardBuffers<f32>);

/// Both directions with each f32 kernel that this processor can run, by name.
fn f32_kernels() -> Vec<(&'static str, ForwardPiece, BackwardPiece)> {
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(unused_mut, reason = "one kernel there")
    )]
    let mut kernels: Vec<(&'static str, ForwardPiece, BackwardPiece)> = vec![(
        "plain",
        forward::piece::<f32, Plain>,
        backward::piece::<f32, Plain>,
    )];
    #[cfg(target_arch = "x86_64")]
    {
        if simd::level() >= Level::Avx2 {
            let (forward, backward) = (forward::piece::<_, Avx2F32>, backward::piece::<_, Avx2F32>);
            kernels.push(("AVX2", forward, backward));
        }
        if simd::level() >= Level::Avx512 {
            let forward = forward::piece::<_, Avx512F32>;
            kernels.push(("AVX-512", forward, backward::piece::<_, Avx512F32>));
        }
    }
    kernels
}

fn attention(time: usize, [heads, kv_heads, head_size]: [usize; 3], causal: bool) -> Attention {
    Attention {
        time,
        heads,
        kv_heads,
        head_size,
        causal,
        scale: None,
        window: None,
        cap: None,
    }
}

/// Sequences, their length, and heads of what size: one token, less than a block, one more than a
/// block, three blocks; grouped queries; heads of a column, of no whole tile, and the widest.
fn cases() -> Vec<(usize, Attention)> {
    let shapes = [
        (0, 5, [2, 1, 8]),
        (1, 1, [1, 1, 1]),
        (2, 1, [2, 2, 5]),
        (1, 31, [3, 1, 16]),
        (2, 33, [4, 2, 40]),
        (1, 97, [2, 2, 64]),
        (1, 200, [2, 1, 33]),
        (1, 96, [1, 1, 256]),
    ];
    let both =
        |(batch, time, heads)| [false, true].map(|causal| (batch, attention(time, heads, causal)));
    shapes.into_iter().flat_map(both).collect()
}

/// Inputs of one attention, and tensors for its outputs.
struct Run<T> {
    attention: Attention,
    begins: Option<Tensor>,
    qkv: Vec<T>,
    dout: Vec<T>,
    tensors: [Tensor; 6],
}

impl<T: Element> Run<T> {
    fn new(batch: usize, attention: Attention, of: impl Fn(f32) -> T) -> Run<T> {
        let rows = batch * attention.time;
        let width = attention.heads * attention.head_size;
        let all = width + 2 * attention.kv_heads * attention.head_size;
        let random = |count, seed| random_f32(count, seed).into_iter().map(&of).collect();
        let (qkv, dout): (Vec<T>, Vec<T>) = (random(rows * all, 1), random(rows * width, 2));
        let lines = [batch * attention.heads, attention.time];
        // What was there before does not matter.
        let full = |shape: &[usize]| {
            let count = shape.iter().product();
            cpu_of(&vec![of(f32::NAN); count], shape)
        };
        let tensors = [
            cpu_of(&qkv, &[rows, all]),
            cpu_of(&dout, &[rows, width]),
            full(&[rows, width]),
            full(&lines),
            full(&lines),
            full(&[rows, all]),
        ];
        Run {
            attention,
            begins: None,
            qkv,
            dout,
            tensors,
        }
    }

    /// `out`, `log_sum_exp` and `dqkv`, from packed tensors.
    fn packed(&self) -> [Vec<T>; 3] {
        let [qkv, dout, out, lse, delta, dqkv] = &self.tensors;
        let (begins, of) = (self.begins.as_ref(), &self.attention);
        attention_into(out, lse, qkv, begins, of).unwrap();
        attention_backward_into(dqkv, delta, [dout, out], lse, qkv, begins, of).unwrap();
        [out, lse, dqkv].map(|tensor| tensor.to_vec().unwrap())
    }

    fn reference(&self) -> Reference {
        let wide = |x: &[T]| x.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
        let begins = self.begins.as_ref().map(|begins| begins.to_vec().unwrap());
        let (begins, qkv) = (begins.unwrap_or_default(), wide(&self.qkv));
        Reference::new(&self.attention, &begins, &qkv, &wide(&self.dout))
    }

    /// The same with documents that begin at these tokens of each sequence.
    fn with_documents(self, starts: &[usize]) -> Run<T> {
        let (time, rows) = (self.attention.time, self.tensors[0].shape()[0]);
        let begin = |row: usize| *starts.iter().rfind(|&&it| it <= row % time).unwrap() as i32;
        let begins: Vec<i32> = (0..rows).map(begin).collect();
        Run {
            begins: Some(cpu_of(&begins, &[rows])),
            ..self
        }
    }

    fn check(&self, epsilon: f64) {
        let got = self
            .packed()
            .map(|part| part.into_iter().map(Element::to_f64).collect::<Vec<f64>>());
        let got = [&got[0][..], &got[1], &got[2]];
        self.reference().check(&self.attention, epsilon, 0.0, got);
    }
}

#[test]
fn bf16_is_within_its_roundings_of_the_textbook_in_both_orders() {
    let windowed = Attention {
        window: Some(50),
        cap: Some(0.5),
        ..attention(230, [2, 1, 16], true)
    };
    for (batch, attention) in cases().into_iter().chain([(2, windowed)]) {
        let mut run = Run::<f32>::new(batch, attention, |x| bf16_wide(bf16_nearest(x)));
        if attention.window.is_some() {
            run = run.with_documents(&[0, 20, 120]);
        }
        let narrow = run
            .tensors
            .each_ref()
            .map(|x| x.to_dtype(DType::BF16).unwrap());
        let ([qkv, dout, out, .., dqkv], [.., lse, delta, _]) = (&narrow, &run.tensors);
        for order in [Bf16Order::Amx, Bf16Order::Dpbf16] {
            with_bf16_order(order, || {
                let (begins, of) = (run.begins.as_ref(), &attention);
                attention_into(out, lse, qkv, begins, of).unwrap();
                attention_backward_into(dqkv, delta, [dout, out], lse, qkv, begins, of).unwrap();
            });
            let wide = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
            let [out, lse, dqkv] = [out, lse, dqkv].map(wide);
            let (half_ulp, narrow) = (f64::from(f32::EPSILON) / 2.0, f64::powi(2.0, -9));
            run.reference()
                .check(&attention, half_ulp, narrow, [&out, &lse, &dqkv]);
        }
    }
}

#[test]
fn both_directions_are_within_rounding_of_the_textbook() {
    for (batch, attention) in cases() {
        Run::<f32>::new(batch, attention, |x| x).check(f64::from(f32::EPSILON) / 2.0);
        Run::<f64>::new(batch, attention, f64::from).check(f64::EPSILON / 2.0);
    }
    let scaled = Attention {
        scale: Some(-0.3),
        ..attention(40, [2, 1, 8], true)
    };
    Run::<f32>::new(2, scaled, |x| x).check(f64::from(f32::EPSILON) / 2.0);
}

/// Windows, documents and soft caps: within a block, over several, of one token, at the edges of
/// blocks.
#[test]
fn windows_documents_and_caps_are_within_rounding_of_the_textbook() {
    let half_ulp = f64::from(f32::EPSILON) / 2.0;
    for window in [1, 2, 40, 96, 97, 150, 1000] {
        let attention = Attention {
            window: Some(window),
            ..attention(250, [2, 1, 16], true)
        };
        Run::<f32>::new(2, attention, |x| x).check(half_ulp);
        Run::<f64>::new(1, attention, f64::from).check(f64::EPSILON / 2.0);
    }
    let starts: [&[usize]; 4] = [&[0], &[0, 1, 2, 40, 95, 96], &[0, 97, 230], &[0, 192, 249]];
    for starts in starts {
        for (window, cap) in [
            (None, None),
            (Some(60), None),
            (None, Some(0.5)),
            (Some(60), Some(2.0)),
        ] {
            let attention = Attention {
                window,
                cap,
                ..attention(250, [2, 1, 16], true)
            };
            let run = Run::<f32>::new(2, attention, |x| x).with_documents(starts);
            run.check(half_ulp);
        }
    }
}

#[test]
fn a_document_has_the_gradients_that_it_has_alone() {
    const LENGTHS: [usize; 4] = [30, 1, 140, 79];
    let starts: Vec<usize> = (0..LENGTHS.len())
        .map(|of| LENGTHS[..of].iter().sum())
        .collect();
    let time = LENGTHS.iter().sum();
    let whole = Run::<f64>::new(1, attention(time, [2, 1, 8], true), f64::from);
    let whole = whole.with_documents(&starts);
    let [out, _, dqkv] = whole.packed();
    for (&start, length) in starts.iter().zip(LENGTHS) {
        let mut alone = Run::<f64>::new(1, attention(length, [2, 1, 8], true), f64::from);
        let rows = |of: &[f64], width: usize| of[start * width..(start + length) * width].to_vec();
        alone.tensors[0] = cpu_of(&rows(&whole.qkv, 32), &[length, 32]);
        alone.tensors[1] = cpu_of(&rows(&whole.dout, 16), &[length, 16]);
        let [out_alone, _, dqkv_alone] = alone.packed();
        // Up to 140 addends of at most about 1 in another order: 1.6e-14 for each of some sums.
        let differs = |a: &[f64], b: &[f64]| a.iter().zip(b).any(|(a, b)| (a - b).abs() > 1e-13);
        assert!(!differs(&rows(&out, 16), &out_alone), "{length}");
        assert!(!differs(&rows(&dqkv, 32), &dqkv_alone), "{length}");
    }
}

#[test]
fn a_cache_with_a_window_and_a_cap_gives_the_rows_of_the_whole() {
    let attention = Attention {
        window: Some(7),
        cap: Some(0.7),
        ..attention(40, [2, 1, 8], true)
    };
    let run = Run::<f64>::new(1, attention, f64::from);
    let [expected, ..] = run.packed();
    let (cache, out) = (
        cpu_of(&[0.0f64; 40 * 16], &[40, 16]),
        cpu_of(&[0.0f64; 20 * 16], &[20, 16]),
    );
    for first in [0, 20] {
        let (cache, qkv) = (
            cache.slice(0..first + 20).unwrap(),
            run.tensors[0].slice(first..first + 20).unwrap(),
        );
        let attention = Attention {
            time: first + 20,
            ..attention
        };
        attention_cached_into(&out, &cache, &qkv, &attention).unwrap();
        let got = out.to_vec::<f64>().unwrap();
        let expected = &expected[first * 16..(first + 20) * 16];
        // As above, for 7 addends.
        assert!(
            got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-13),
            "{first}"
        );
    }
}

#[test]
fn gradients_are_the_slopes_of_the_output() {
    let capped = Attention {
        cap: Some(0.6),
        ..attention(5, [2, 1, 3], true)
    };
    for (batch, attention) in [
        (2, attention(5, [4, 2, 3], true)),
        (1, attention(4, [2, 1, 2], false)),
        (1, capped),
    ] {
        let run = Run::<f64>::new(batch, attention, f64::from);
        let [_, _, gradient] = run.packed();
        let [_, _, out, lse, ..] = &run.tensors;
        let loss = |qkv: &[f64]| -> f64 {
            let qkv = cpu_of(qkv, run.tensors[0].shape().dims());
            attention_into(out, lse, &qkv, None, &attention).unwrap();
            let out = out.to_vec::<f64>().unwrap();
            out.iter()
                .zip(&run.dout)
                .map(|(out, dout)| out * dout)
                .sum()
        };
        for (index, &gradient) in gradient.iter().enumerate() {
            const STEP: f64 = 1e-5;
            let [above, below] = [STEP, -STEP].map(|step| {
                let mut moved = run.qkv.clone();
                moved[index] += step;
                loss(&moved)
            });
            let slope = (above - below) / (2.0 * STEP);
            // A third of STEP² times a third derivative, whose terms are at most a few hundred,
            // and the rounding of a sum of 60 addends, divided by STEP.
            assert!(
                (slope - gradient).abs() < 1e-8,
                "{index}: {slope} {gradient}"
            );
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let _alone = alone_with_the_pool();
    let before = threads::count();
    for causal in [true, false] {
        let run = Run::<f32>::new(1, attention(300, [2, 1, 16], causal), |x| x);
        let mut first = None;
        for count in [1, 2, 3] {
            threads::set_count(count).unwrap();
            let bits = run
                .packed()
                .map(|part| part.into_iter().map(f32::to_bits).collect::<Vec<_>>());
            let first = first.get_or_insert_with(|| bits.clone());
            assert!(*first == bits, "{count} threads, causal: {causal}");
        }
    }
    threads::set_count(before).unwrap();
}

#[test]
fn every_kernel_has_the_same_bits() {
    for causal in [true, false] {
        let attention = attention(203, [2, 1, 40], causal);
        let run = Run::<f32>::new(1, attention, |x| x);
        let [expected_out, expected_lse, expected_dqkv] = run.packed();
        let sizes = attention.check_numbers(&OpCall::new("attention")).unwrap();
        let blocks = 0..sizes.time.div_ceil(blocks::BLOCK);
        let mut delta = vec![0.0; expected_lse.len()];
        write_delta(&mut delta, &run.dout, &expected_out, sizes);
        for (name, forward, backward) in f32_kernels() {
            let mut out = vec![f32::NAN; expected_out.len()];
            let mut lse = vec![f32::NAN; expected_lse.len()];
            let work = Forward {
                sizes,
                firsts: Firsts::new(sizes, None),
                out: Shares::new(&mut out),
                log_sum_exp: Shares::new(&mut lse),
                qkv: &run.qkv,
            };
            // SAFETY: all blocks, on this thread alone, with a kernel that exists here.
            unsafe { forward(&work, 0, blocks.clone(), &mut Default::default()) };
            assert!(out == expected_out && lse == expected_lse, "{name}");
            let mut dqkv = vec![f32::NAN; expected_dqkv.len()];
            let work = Backward {
                sizes,
                firsts: Firsts::new(sizes, None),
                dqkv: Shares::new(&mut dqkv),
                delta: &delta,
                dout: &run.dout,
                log_sum_exp: &lse,
                qkv: &run.qkv,
            };
            let sweep = Sweep {
                queries: blocks.clone(),
                keys: blocks.clone(),
                dq: true,
                dkv: true,
            };
            // SAFETY: as above.
            unsafe { backward(&work, 0, &sweep, &mut Default::default()) };
            assert!(dqkv == expected_dqkv, "{name}, causal: {causal}");
        }
    }
}

#[test]
fn scores_of_any_size_give_finite_weights() {
    // Scores up to 1e37 either way: the weight of the largest is 1, those of others 0.
    let attention = Attention {
        scale: Some(1e30),
        ..attention(130, [1, 1, 4], true)
    };
    let run = Run::<f32>::new(1, attention, |x| x * 1000.0);
    for part in run.packed() {
        assert!(part.iter().all(|x| x.is_finite()));
    }
    let [out, ..] = run.packed();
    let rows: Vec<&[f32]> = run.qkv.chunks(12).map(|row| &row[8..]).collect();
    for (index, out) in out.chunks(4).enumerate() {
        assert!(rows[..=index].contains(&out), "row {index} is a row of v");
    }
}

#[test]
fn a_token_does_not_see_later_ones() {
    let attention = attention(150, [1, 1, 8], true);
    let mut run = Run::<f32>::new(1, attention, |x| x);
    let [before, ..] = run.packed();
    // Row 100 changes, and its row of the output is the first that does.
    run.qkv[100 * 24..101 * 24].fill(3.0);
    run.tensors[0] = cpu_of(&run.qkv, &[150, 24]);
    let [after, ..] = run.packed();
    let changed = before.iter().zip(&after).position(|(a, b)| a != b);
    assert!(changed.is_some_and(|index| index / 8 == 100), "{changed:?}");
}

#[test]
fn nan_reaches_the_output() {
    let mut run = Run::<f32>::new(1, attention(40, [1, 1, 8], false), |x| x);
    run.qkv[5 * 24 + 8] = f32::NAN;
    run.tensors[0] = cpu_of(&run.qkv, &[40, 24]);
    let [out, _, dqkv] = run.packed();
    assert!(out.iter().all(|x| x.is_nan()) && dqkv[..8].iter().all(|x| x.is_nan()));
}
