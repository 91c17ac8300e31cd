//! Modules made by rules, split over devices and computed again, have the bits of the whole.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::pass::tests::in_pass;
use crate::{Convolution, CustomOp, SelfAttention};

/// A row: four positions of six numbers.
const ROW: [usize; 2] = [4, 6];

/// A layer of a kind, which keeps the shape.
fn layer(kind: usize, name: &str, m: &mut Scope<'_>, x: &Var) -> Var {
    let linear = || Linear::new(6);
    m.within(name, |m| match kind {
        0 => m.layer("linear", x, linear()),
        1 => x.gelu(),
        2 => m.layer_norm("norm", x),
        3 => m.layer("drop", x, Dropout::new(0.25)),
        4 => x + m.layer("linear", x, linear()).silu(),
        5 => x * m.parameter("scale", &[6], Init::Constant(0.7)).exp(),
        6 => m.recompute(|m| {
            let inner = m.layer("linear", x, linear()).tanh();
            x + m.layer("drop", &inner, Dropout::new(0.5))
        }),
        7 => {
            let both = Var::concatenate(&[x, &m.layer("first", x, linear())], -1);
            m.layer("second", &both, linear())
        }
        8 => m.layer(
            "attention",
            x,
            SelfAttention::causal(6, 2, 2, [&Linear::new; 2]),
        ),
        9 => x * x.mean(-1).sigmoid(),
        10 => x.without_gradient() * 0.5 + m.layer("linear", x, linear()),
        _ => x.without_gradient() * m.parameter("scale", &[6], Init::Constant(1.5)),
    })
}

/// The model of these kinds over so many devices, which computes so many parts again.
fn made(kinds: &[usize], parts: usize, recomputed: usize) -> Result<Vec<Model>> {
    let kinds = kinds.to_vec();
    let all = move |m: &mut Scope<'_>, x: &Var| {
        let each = kinds.iter().enumerate();
        each.fold(x.clone(), |x, (at, kind)| {
            layer(*kind, &at.to_string(), m, &x)
        })
    };
    of_formula(Precision::F32, all, &ROW, parts, recomputed)
}

fn of_formula(
    precision: Precision,
    formula: impl Fn(&mut Scope<'_>, &Var) -> Var + Send + Sync + 'static,
    row: &[usize],
    parts: usize,
    recomputed: usize,
) -> Result<Vec<Model>> {
    let devices = vec![Device::Cpu; parts];
    let layers = Sequential::new().then(Formula(formula));
    let mut models = Model::split(layers, row, &devices, |layers, shape, device| {
        Model::new(layers, shape, precision, device, 3, &|_| false)
    })?;
    models
        .iter_mut()
        .for_each(|it| it.recompute_parts(recomputed));
    Ok(models)
}

/// The output of an evaluation.
fn evaluated(models: &[Model], x: &Tensor) -> Vec<f32> {
    let forward = |x: Tensor, model: &Model| {
        in_pass(model, false, |mut pass| model.forward(&mut pass, &x)).unwrap()
    };
    models.iter().fold(x.clone(), forward).to_vec().unwrap()
}

#[test]
fn modules_made_by_rules_have_the_bits_of_the_whole() {
    let (mut splits, mut kinds_seen) = (0, [false; 12]);
    for seed in 0..50usize {
        // A permutation of 2^16 numbers.
        let mut state = 7919 * seed + 1;
        let mut below = |end: usize| {
            state = (state * 25173 + 13849) % 65536;
            (state >> 4) % end
        };
        let count = 2 + below(5);
        let kinds: Vec<usize> = (0..count).map(|_| below(12)).collect();
        kinds.iter().for_each(|kind| kinds_seen[*kind] = true);
        let whole = made(&kinds, 1, 0).unwrap();
        // Also as many rows as positions.
        let x = numbers(&whole, [5, ROW[0]][seed % 2]);
        let (trains, evaluates) = (pass_over(&whole, &x), evaluated(&whole, &x));
        for parts in 1..=4 {
            for recomputed in [0, 1, 2, 9] {
                let Ok(models) = made(&kinds, parts, recomputed) else {
                    continue;
                };
                splits += usize::from(parts > 1);
                let what = format!("{kinds:?} over {parts}, {recomputed} again");
                assert!(pass_over(&models, &x) == trains, "{what}");
                assert!(evaluated(&models, &x) == evaluates, "{what}");
            }
        }
    }
    assert!(
        splits > 300 && kinds_seen == [true; 12],
        "{splits} {kinds_seen:?}"
    );
}

/// Without dropout, what is cut is another value.
#[test]
fn a_part_may_begin_with_another_value_in_evaluation() {
    let pooled = |m: &mut Scope<'_>, x: &Var| {
        let hidden = m.linear("a", x, 12).reshape(&[6, 2]);
        let pooled = hidden.mean(-1).reshape(&[6]);
        let kept = m.layer("drop", &pooled, Dropout::new(0.5));
        m.linear("b", &kept, 3)
    };
    let of = |parts| of_formula(Precision::F32, pooled, &[5], parts, 0).unwrap();
    let x = numbers(&of(1), 5);
    assert_eq!(evaluated(&of(2), &x), evaluated(&of(1), &x));
    assert!(pass_over(&of(2), &x) == pass_over(&of(1), &x));
}

/// A sum stays f32, which a linear layer reads rounded.
#[test]
fn what_follows_a_sum_is_computed_again_in_bf16() {
    let summed = |m: &mut Scope<'_>, x: &Var| {
        let sums = x.reshape(&[4, 3, 2]).sum(-1).reshape(&[4, 3]);
        m.linear("a", &sums, 6).gelu_tanh()
    };
    let of = |recomputed| of_formula(Precision::Bf16, summed, &ROW, 1, recomputed).unwrap();
    let x = numbers(&of(0), 5);
    assert_eq!(pass_over(&of(0), &x).0, pass_over(&of(1), &x).0);
}

/// How often `Counted` has run.
static RUNS: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Counted;

impl CustomOp for Counted {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, inputs: &[&Tensor], out: &Tensor) -> Result<()> {
        RUNS.fetch_add(1, Ordering::Relaxed);
        Ok(out.copy_from(inputs[0])?)
    }

    fn backward(&self, _: &[&Tensor], out: [&Tensor; 2], gradients: &[&Tensor]) -> Result<()> {
        Ok(gradients[0].copy_from(out[1])?)
    }
}

#[test]
fn an_operation_by_hand_is_not_run_again() {
    let counted = |m: &mut Scope<'_>, x: &Var| {
        let hidden = m.linear("a", x, 6).gelu();
        let hidden = m.custom(Arc::new(Counted), &[&hidden]);
        m.linear("b", &hidden.gelu(), 6)
    };
    let models = of_formula(Precision::F32, counted, &ROW, 1, 9).unwrap();
    pass_over(&models, &numbers(&models, 5));
    assert_eq!(RUNS.load(Ordering::Relaxed), 1);
}

/// Convolutions without bias unfold their input, whose first axis is then not the batch.
#[test]
fn convolutions_are_cut_before_their_windows() {
    let images = |m: &mut Scope<'_>, x: &Var| {
        let plain = |outputs: usize| Convolution::new(outputs, 3).padding(1).without_bias();
        let first = m.conv2d("a", x, Convolution::new(3, 3).padding(1)).relu();
        let second = m.conv2d("b", &first, plain(3)).relu();
        m.conv2d("c", &second, plain(2))
    };
    let of = |parts| of_formula(Precision::F32, images, &[2, 6, 6], parts, 0).unwrap();
    let split = of(3);
    let x = numbers(&split, 5);
    assert!(pass_over(&split, &x) == pass_over(&of(1), &x));
    let rows: Vec<_> = split.iter().map(|part| part.output_shape.clone()).collect();
    assert!(
        rows.iter()
            .all(|row| row.len() == 3 && row[1..] == rows[0][1..]),
        "{rows:?}"
    );
}
