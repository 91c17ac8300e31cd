//! Claims about the rows of a batch: a formula computes each row by itself. No operation touches
//! the first axis, so that ranks, shards and micro-batches may divide the batch.

use std::sync::Arc;

use ddp::models::Model;
use ddp::nn::{Convolution, CustomOp, Embedding, Formula, Init, Module, Result};
use ddp::nn::{Scope, SelfAttention, Sequential, Var};
use ddp_kernels::ops::{Activation, Attention};
use ddp_kernels::{DType, Device, Random, Tensor};

use crate::formulas::CASES;
use crate::support::pass::in_pass;

/// An output for `x`.
type Of = fn(&mut Scope<'_>, &Var) -> Var;

fn weight(m: &mut Scope<'_>, name: &str, shape: &[usize]) -> Var {
    m.parameter(name, shape, Init::Normal { deviation: 1.0 })
}

/// The error of a module of this formula for rows (4, 6).
fn refusal(formula: Of) -> String {
    let layers = Sequential::new().then(Formula(formula));
    let built = layers.build(&[4, 6], Device::Cpu, ddp_kernels::Seed(1));
    built.unwrap_err().to_string()
}

#[test]
fn no_operation_touches_the_rows() {
    let line = line!() + 1;
    let text = refusal(|_, x| x - x.mean(0));
    let expected = format!(
        "0 ({}:{line}): mean: expected an axis within a row, not axis 0, the rows of the batch, got \
         x [rows, 4, 6]; help: a formula computes each row by itself; ",
        file!()
    );
    assert!(text.starts_with(&expected), "{text}");
    let along: [(&str, Of); 17] = [
        ("sum", |_, x| x.sum(0)),
        ("sum", |_, x| x.sum(-3)),
        ("largest", |_, x| x.largest(0)),
        ("smallest", |_, x| x.smallest(0)),
        ("softmax", |_, x| x.softmax(0)),
        ("log_softmax", |_, x| x.log_softmax(-3)),
        ("slice", |_, x| x.slice(0, 0..1)),
        ("every", |_, x| x.every(0, 2)),
        ("windows", |_, x| x.windows(0, 1, 1)),
        ("pad", |_, x| x.pad(0, 1, 0)),
        ("split", |_, x| x.split(0, &[1, 1]).remove(0)),
        ("concatenate", |_, x| Var::concatenate(&[x, x], 0)),
        ("concatenate", |m, x| {
            Var::concatenate(&[&weight(m, "w", &[1, 4, 6]), x], 0)
        }),
        ("gather", |m, x| x.gather(0, &m.indices(1))),
        ("transpose", |_, x| x.transpose(0, 1)),
        ("max_pool2d", |_, x| x.reshape(&[24]).max_pool2d(1, 1, 0)),
        ("avg_pool2d", |_, x| x.reshape(&[24]).avg_pool2d(1, 1)),
    ];
    for (name, formula) in along {
        let text = refusal(formula);
        let is_said = text.contains(&format!(": {name}: expected an axis within a row"));
        assert!(is_said && text.contains(file!()), "{name}: {text}");
    }
    let others: [(&str, Of); 14] = [
        (
            "permute: expected the rows to stay the first axis",
            |_, x| x.permute(&[1, 0, 2]),
        ),
        ("add: expected values with rows to have equally", |_, x| {
            x + x.sum(-1).reshape(&[4])
        }),
        // As long as the batch of two rows for which a model is traced first.
        ("mul: expected values with rows to have equally", |m, x| {
            x * weight(m, "w", &[2, 1, 1])
        }),
        ("mul: expected values with rows to have equally", |m, x| {
            x * weight(m, "w", &[1, 1, 4, 6])
        }),
        ("concatenate: expected values with rows to have", |m, x| {
            Var::concatenate(&[x, &weight(m, "w", &[2, 4, 6])], 1)
        }),
        ("gather: expected values with rows to have", |m, x| {
            x.gather(1, &m.numbers(&[0.0; 4], &[2, 2]))
        }),
        ("gather: expected indices of the same shape", |m, x| {
            x + weight(m, "w", &[4, 6]).gather(1, &x.number(0.0)).sum(0)
        }),
        ("rows: expected a table that is the same", |m, x| {
            x.rows(&m.indices(2))
        }),
        (
            "matmul: expected a second matrix that is the same",
            |m, x| weight(m, "w", &[5, 2]).matmul(&x.reshape(&[24])),
        ),
        ("matmul: expected values with rows to have", |m, x| {
            x.reshape(&[24]).matmul(&weight(m, "w", &[2, 24, 3]))
        }),
        ("linear: expected (…, inputs), a weight", |_, x| {
            x.reshape(&[24]).linear(&x.reshape(&[24]), None)
        }),
        ("convolution: expected a weight that is the same", |_, x| {
            let image = x.reshape(&[2, 12]);
            image.convolve(&x.reshape(&[2, 12]), Convolution::new(2, 12))
        }),
        ("gated: expected an even last axis", |_, x| {
            x.sum(-1).sum(-2).reshape(&[]).gated(ddp::nn::Gate::Swiglu)
        }),
        ("dropout: expected a value that has rows", |m, x| {
            let w = weight(m, "w", &[2, 4, 6]);
            x + m.dropout("d", &w, 0.5).sum(0)
        }),
    ];
    for (expected, formula) in others {
        let text = refusal(formula);
        assert!(text.contains(expected) && text.contains(file!()), "{text}");
    }
}

/// How formulas were written while the number of rows was known.
#[test]
fn what_names_the_number_of_rows_is_refused_with_its_line() {
    let old: [(&str, Of); 6] = [
        ("size: expected an axis within a row", |_, x| {
            x.reshape(&[x.size(0), 24])
        }),
        ("reshape and expand take the lengths of a row", |_, x| {
            x * (1.0 / x.size(0) as f64)
        }),
        ("size: expected an axis within a row", |_, x| {
            x + x.number(1.0).expand(&[x.size(0), 4, 6])
        }),
        (
            "reshape: expected as many elements as [8, 6] has",
            |_, x| x.reshape(&[8, 6]).softmax(-1),
        ),
        ("give the lengths of a row, without the number", |_, x| {
            x.reshape(&[2, 24])
        }),
        ("expand: expected lengths of [2, 4, 6], or 1", |_, x| {
            x.expand(&[2, 4, 6])
        }),
    ];
    for (expected, formula) in old {
        let text = refusal(formula);
        let begins = text.starts_with(&format!("0 ({}:", file!()));
        assert!(begins && text.contains(expected), "{text}");
    }
    // Axes are counted as before.
    let same: Of = |_, x| x.slice(1, 1..3).mean(1);
    assert_eq!(tried(same, &rows(2, &[4, 6])).shape()[..], [2, 1, 6]);
    let text = refusal(|m, _| weight(m, "w", &[2, 6]));
    assert!(
        text.contains("w [2, 6], which is the same for all rows"),
        "{text}"
    );
}

/// So many random rows of this shape; the first ones do not depend on how many there are.
fn rows(count: usize, row: &[usize]) -> Tensor {
    let random = &mut Random::new(5);
    let shape = [&[count], row].concat();
    Tensor::randn(&shape, DType::F32, Device::Cpu, random).unwrap()
}

fn model(layer: impl Module, row: &[usize], dtype: DType) -> Model {
    let layers = Box::new(Sequential::new().then(layer));
    Model::new(layers, row, dtype, Device::Cpu, 1, &|_| false).unwrap()
}

fn tried(formula: Of, x: &Tensor) -> Tensor {
    let model = model(Formula(formula), &x.shape()[1..], DType::F32);
    in_pass(&model, true, |mut pass| model.forward(&mut pass, x)).unwrap()
}

/// The output, and the gradient of the input of the sum of outputs.
fn passed(model: &Model, x: &Tensor) -> [Vec<f64>; 2] {
    in_pass(model, true, |mut pass| {
        let y = model.forward(&mut pass, x).unwrap();
        let dy = y.ones_like().unwrap();
        let dx = model.backward_to_input(&mut pass, &dy).unwrap();
        let wide = |it: &Tensor| it.to_dtype(DType::F64).unwrap().to_vec().unwrap();
        [wide(&y), dx.as_ref().map_or_else(Vec::new, wide)]
    })
}

/// Sums over axis 1 beside later axes: of one row alone they are added in another order.
const SUMMED_OTHERWISE: [&str; 3] = ["softmax", "sum", "mean"];

/// Each row of a batch has the bits that it has in a batch of seven, whatever the batch.
fn assert_rows_apart(name: &str, model: &Model, x: &Tensor) {
    let all = passed(model, x);
    let dtype = model.params.dtype();
    for batch in [0..0, 0..1, 3..4, 0..2, 5..7] {
        let some = passed(model, &x.slice(batch.clone()).unwrap());
        for (some, all) in some.iter().zip(&all) {
            let of_row = all.len() / 7;
            let expected = &all[batch.start * of_row..batch.end * of_row];
            assert_eq!(some.len(), expected.len());
            let is_near = batch.len() == 1 && SUMMED_OTHERWISE.contains(&name);
            let bound = if is_near { 8.0 * epsilon(dtype) } else { 0.0 };
            for (some, expected) in some.iter().zip(expected) {
                let is_same = some.to_bits() == expected.to_bits();
                let apart = (some - expected).abs() / expected.abs().max(1.0);
                assert!(
                    is_same || apart <= bound && bound > 0.0,
                    "{name} in {dtype}, rows {batch:?}: {some}, not {expected}"
                );
            }
        }
    }
}

/// The distance of 1 from the next number.
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        _ => 2f64.powi(-7),
    }
}

#[test]
fn every_operation_gives_a_row_the_same_bits_in_every_batch() {
    for (name, row, formula) in CASES {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let model = model(Formula(formula), row, dtype);
            assert_rows_apart(name, &model, &rows(7, row).to_dtype(dtype).unwrap());
        }
    }
    let more: [(&str, Of); 10] = [
        ("activations within linear layers and apart", |m, x| {
            Activation::all().fold(x.clone(), |sum, it| {
                let of_linear = m.linear(&format!("{it:?}"), x, 6).activate(it);
                sum + of_linear + (x * 1.5).activate(it)
            })
        }),
        ("gather", |m, x| {
            x.gather(1, &m.numbers(&[3.0, 0.0, 3.0], &[1, 3])) + x.gather(1, &(x * 0.0)).sum(1)
        }),
        ("gather from what is the same", |m, x| {
            let first = x.equal(&x.largest(-1)).sum(-1).reshape(&[1, 4]);
            weight(m, "w", &[1, 1, 9]).gather(-1, &first.reshape(&[1, 4]))
        }),
        ("rows", |m, x| {
            let table = weight(m, "w", &[3, 2]);
            table.rows(&x.less(&x.number(0.0))) * x.reshape(&[4, 6, 1])
        }),
        ("joined to each row", |m, x| {
            Var::concatenate(&[&weight(m, "token", &[1, 1, 6]), x], 1)
        }),
        ("the same numbers", |m, x| {
            x + m.numbers(&[1.0, 2.0], &[2, 1]).sum(0).expand(&[4, 1])
        }),
        ("a recomputed part", |m, x| {
            m.recompute(|m| m.linear("l", x, 6).gelu()) * x.pow(0.0)
        }),
        ("masked attention", |m, x| {
            let at = m.indices(4);
            let later = at.reshape(&[4, 1]).less(&at) * -1e9;
            let q = x.reshape(&[4, 2, 3]).permute(&[0, 2, 1, 3]);
            let mixed = (q.matmul(&q.transpose(-1, -2)) + later)
                .softmax(-1)
                .matmul(&q);
            mixed.permute(&[0, 2, 1, 3]).reshape(&[4, 6])
        }),
        ("attention and norms", |m, x| {
            let layer = SelfAttention::causal(6, 2, 2, [&ddp::nn::Linear::new; 2]);
            let normed = m.layer_norm("n", x);
            let y = m.layer("a", &normed, layer);
            m.rms_norm("r", &y).gated(ddp::nn::Gate::Geglu)
        }),
        ("lengths of a row", |_, x| {
            x.reshape(&[2, 12])
                .softmax(-1)
                .reshape(&[3, 8])
                .transpose(1, 2)
        }),
    ];
    for (name, formula) in more {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let model = model(Formula(formula), &[4, 6], dtype);
            assert_rows_apart(name, &model, &rows(7, &[4, 6]).to_dtype(dtype).unwrap());
        }
    }
    let tokens = model(Embedding::new(5, 3).with_positions(4), &[4], DType::F32);
    let random = &mut Random::new(6);
    let x = Tensor::randint(5, &[7, 4], DType::I64, Device::Cpu, random).unwrap();
    assert_rows_apart("embedding", &tokens, &x);
}

/// The mean over the batch, which is the same for all rows.
#[derive(Debug)]
struct MeanOfBatch {
    has_rows: bool,
}

impl CustomOp for MeanOfBatch {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok([&[1], &inputs[0][1..]].concat())
    }

    fn has_rows(&self) -> bool {
        self.has_rows
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        Ok(out.copy_from(&x[0].slice(0..1)?)?)
    }

    fn backward(&self, _: &[&Tensor], _: [&Tensor; 2], dx: &[&Tensor]) -> Result<()> {
        Ok(ddp_kernels::ops::zero(dx[0])?)
    }
}

#[test]
fn an_own_operation_says_whether_its_output_has_rows() {
    let declared: Of = |m, x| x - m.custom(Arc::new(MeanOfBatch { has_rows: false }), &[x]);
    assert_eq!(tried(declared, &rows(3, &[4, 6])).shape()[..], [3, 4, 6]);
    let text = refusal(|m, x| x - m.custom(Arc::new(MeanOfBatch { has_rows: true }), &[x]));
    let expected = "expected an output whose first axis is the rows, got x [rows, 4, 6]; help: \
                    return false from has_rows";
    assert!(text.contains(expected), "{text}");
}

/// A parameter of another shape in another mode.
#[test]
fn a_parameter_that_depends_on_the_mode_is_refused() {
    let formula: Of = |m, x| {
        let width = if m.is_training() { 6 } else { 1 };
        x * m.parameter("w", &[width], Init::Constant(1.0))
    };
    let model = model(Formula(formula), &[4, 6], DType::F32);
    let tried = in_pass(&model, false, |mut pass| {
        model.forward(&mut pass, &rows(2, &[4, 6]))
    });
    let text = tried.unwrap_err().to_string();
    let expected = "parameter 0.w: expected shape [6], as in the first trace, got [1]";
    assert!(text.contains(expected), "{text}");
}

/// More values were refused at the first step.
#[test]
fn many_values_are_concatenated() {
    let stacked: Of = |_, x| {
        let steps: Vec<Var> = (0..300).map(|it| x.slice(1, it % 4..it % 4 + 1)).collect();
        Var::concatenate(&steps.iter().collect::<Vec<_>>(), 1)
    };
    assert_eq!(tried(stacked, &rows(2, &[4, 6])).shape()[..], [2, 300, 6]);
}

/// Of more than 16 values, 16 that are the same for all rows were refused.
#[test]
fn many_values_without_rows_are_concatenated_with_one_that_has_them() {
    for count in [15, 16, 17, 33] {
        let layers = Sequential::new().then(Formula(move |m: &mut Scope<'_>, x: &Var| {
            let mut all: Vec<Var> = Vec::new();
            for at in 0..count {
                all.push(weight(m, &format!("w{at}"), &[1, 1, 6]));
            }
            all.push(x.clone());
            Var::concatenate(&all.iter().collect::<Vec<_>>(), 1)
        }));
        let built = layers.build(&[4, 6], Device::Cpu, ddp_kernels::Seed(1));
        assert_eq!(built.unwrap().output_shape, [count + 4, 6], "{count}");
    }
}

/// Of 4 tokens and 2 heads of 3 columns.
const SEES_ALL: Attention = Attention {
    time: 4,
    heads: 2,
    kv_heads: 2,
    head_size: 3,
    causal: false,
    scale: None,
    window: None,
    cap: None,
};

/// Where documents begin in its rows reached a value that is the same for all.
#[test]
fn attention_is_between_tokens_of_rows() {
    let text = refusal(|m, x| {
        let same = weight(m, "p", &[1, 4, 18]);
        x + m.attention(&same, SEES_ALL)
    });
    assert!(
        text.contains("attention: expected a value with rows"),
        "{text}"
    );
}

#[test]
fn a_value_is_shown_without_the_number_of_rows() {
    let text = refusal(|_, x| {
        assert_eq!(format!("{x:?}"), "x [rows, 4, 6]");
        x.sum(0)
    });
    assert!(text.contains("[rows, 4, 6]"), "{text}");
}
