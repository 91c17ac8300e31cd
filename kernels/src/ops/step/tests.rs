//! Tests of grad_norm.

mod nonfinite;
mod vote_stopped;

use super::*;
use crate::ops::chunks::{Chunk, QUANTUM};
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};
use crate::threads;

fn partials(grads: &Tensor, chunks: &ChunkTable) -> Vec<f64> {
    let out = cpu_of(&vec![-1.0f64; chunks.quanta()], &[chunks.quanta()]);
    grad_norm_partials(&out, grads, chunks).unwrap();
    out.to_vec().unwrap()
}

#[test]
fn partials_are_the_sums_of_squares_of_each_quantum_for_any_number_of_threads() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    for size in SIZES {
        let x = random_f32(size, 1);
        let chunks = ChunkTable::whole(size);
        let square_sum = |piece: &[f32]| piece.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        let want: Vec<f64> = x.chunks(QUANTUM).map(square_sum).collect();
        threads::set_count(1).unwrap();
        let got = partials(&cpu(&x, &[size]), &chunks);
        for (got, want) in got.iter().zip(&want) {
            // Two orders of summing 1024 positive numbers: at most 1024 roundings.
            assert!(
                (got - want).abs() <= 1024.0 * f64::EPSILON * want,
                "{got} {want}"
            );
        }
        for count in [2, 3] {
            threads::set_count(count).unwrap();
            assert_eq!(partials(&cpu(&x, &[size]), &chunks), got);
        }
    }
}

#[test]
fn slices_of_two_ranks_in_order_give_the_norm_of_one() {
    let x = cpu(&random_f32(10 * QUANTUM, 2), &[10 * QUANTUM]);
    let whole = partials(&x, &ChunkTable::whole(10 * QUANTUM));
    let chunk = |offset: usize, len: usize| Chunk {
        offset: offset * QUANTUM,
        len: len * QUANTUM,
        decay: true,
    };
    let ranks = [
        vec![chunk(0, 2), chunk(4, 3)],
        vec![chunk(2, 2), chunk(7, 3)],
    ];
    let [first, second] = ranks.map(|chunks| partials(&x, &ChunkTable::new(chunks).unwrap()));
    assert_eq!(
        [&first[..2], &second[..2], &first[2..], &second[2..]].concat(),
        whole
    );
}

/// PyTorch 2.11: `q.grad = torch.tensor([3., 4., 12.]); torch.nn.utils.clip_grad_norm_([q], 2.0)`
/// gives 13.0 and leaves `[0.4615384340286255, 0.615384578704834, 1.846153736114502]`.
#[test]
fn the_scale_clips_as_pytorch_does_and_never_enlarges() {
    let (out, parts) = (cpu(&[9.0; 2], &[2]), cpu_of(&[9.0f64, 16.0, 144.0], &[3]));
    let scale = |max_norm: f64, divisor: f32| -> [f32; 2] {
        clip_scale(&out, Some(&parts), max_norm, Some(&cpu(&[divisor], &[1]))).unwrap();
        out.to_vec::<f32>().unwrap().try_into().unwrap()
    };
    let [factor, norm] = scale(2.0, 1.0);
    assert_eq!(norm, 13.0);
    for (x, want) in [(3.0, 0.461_538_43), (4.0, 0.615_384_6), (12.0, 1.846_153_7)] {
        // PyTorch divides in f32: two roundings there, two here.
        assert!(
            (x * factor - want).abs() <= 4.0 * f32::EPSILON * want,
            "{} {want}",
            x * factor
        );
    }
    assert_eq!(scale(0.0, 2.0), [0.5, 6.5]);
    assert_eq!(scale(100.0, 2.0), [0.5, 6.5]);
    assert_eq!(scale(1.0, 0.0), [0.0, 0.0], "no row: nothing to learn");
    let [factor, norm] = scale(1.0, 2.0);
    // max_norm + 1e-6 in the quotient, and the rounding to f32.
    assert!(norm == 6.5 && (factor - 0.5 / 6.5).abs() < 1e-7, "{factor}");
    clip_scale(&out, Some(&cpu_of(&[f64::NAN], &[1])), 1.0, None).unwrap();
    assert!(out.to_vec::<f32>().unwrap()[0].is_nan());
    clip_scale(&out, Some(&cpu_of::<f64>(&[], &[0])), 1.0, None).unwrap();
    assert_eq!(out.to_vec::<f32>().unwrap(), [1.0, 0.0]);
    clip_scale(&out, None, 0.0, Some(&cpu(&[4.0], &[1]))).unwrap();
    assert_eq!(out.to_vec::<f32>().unwrap(), [0.25, 0.0]);
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let (out, parts) = (cpu(&[0.0; 2], &[2]), cpu_of(&[1.0f64], &[1]));
    for (max_norm, partials, wanted) in [
        (
            -1.0,
            Some(&parts),
            "max_norm: expected 0 (no clipping) or more, got -1",
        ),
        (
            f64::NAN,
            Some(&parts),
            "max_norm: expected 0 (no clipping) or more, got NaN",
        ),
        (
            1.0,
            None,
            "max_norm: expected 0, since there are no partials to clip by, got 1",
        ),
    ] {
        let error = clip_scale(&out, partials, max_norm, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let error = grad_norm_partials(
        &parts,
        &cpu(&[0.0; 2000], &[2000]),
        &ChunkTable::whole(2000),
    )
    .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("partials f64[1] on cpu: expected shape [2]"),
        "{error}"
    );
    let error = grad_norm_partials(&parts, &out, &ChunkTable::whole(3))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(
            "grads f32[2] on cpu: expected at least 3 elements, where the last chunk ends"
        ),
        "{error}"
    );
}

#[test]
fn a_step_is_bad_by_its_statistics_its_norm_or_an_earlier_gradient_and_the_first_one_counts() {
    let (fine, nan) = ([1.0, 2.0], [1.0, f32::NAN]);
    // Flags before, statistics, sum of squares; flags and own flag after, in step 5.
    for (before, stats, squares, after, own) in [
        ([0i64, 0, 4], fine, 1.0, [0, 0, 5], 0),
        ([0, 0, 4], nan, 1.0, [5, 0, 5], 5),
        ([0, 0, 4], fine, f64::NAN, [5, 0, 5], 0),
        ([0, 0, 4], fine, 1e300, [5, 0, 5], 0),
        ([0, 4, 4], fine, 1.0, [4, 4, 5], 0),
        ([0, 4, 4], nan, 1.0, [4, 4, 5], 5),
        ([3, 4, 4], nan, f64::NAN, [3, 4, 5], 5),
    ] {
        let (out, own_flag) = (cpu(&[9.0; 2], &[2]), cpu_of(&[0i64], &[1]));
        let (flags, partials) = (cpu_of(&before, &[3]), cpu_of(&[squares], &[1]));
        let (stats, step) = (cpu(&stats, &[2]), cpu_of(&[5i64], &[1]));
        let marks = StepMarks {
            flags: &flags,
            own: Some(&own_flag),
            stats: &stats,
            step: &step,
            stop: None,
            stopped: None,
        };
        decide_step(&out, Some(&partials), 0.0, None, Some(marks)).unwrap();
        let what = format!("{before:?}, {squares}");
        assert_eq!(flags.to_vec::<i64>().unwrap(), after, "{what}");
        assert_eq!(own_flag.to_vec::<i64>().unwrap(), [own], "{what}");
    }
}
