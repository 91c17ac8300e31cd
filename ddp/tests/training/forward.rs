//! Modules by their formula: every operation's derivative against finite differences in f64, and
//! what a module is as a layer: names, errors with lines, order of gradients, any batch, same bits.

mod errors;
mod functions;

use std::sync::Arc;

use ddp::models::Model;
use ddp::nn::check::DerivativeCheck;
use ddp::nn::{
    Convolution, CustomOp, Formula, Init, Linear, Module, Normalize, Pass, PassOptions, Result,
    Saved, Scope, Scratch, SelfAttention, Sequential, Var,
};
use ddp::params::ParamId;
use ddp_kernels::{DType, Device, Random, Tensor, ops};

use crate::support::pass::in_pass;

/// An output for `x`.
type Of = fn(&mut Scope<'_>, &Var) -> Var;

#[track_caller]
fn assert_derivatives(shape: &[usize], formula: Of) {
    assert_derivatives_by(shape, formula);
}

/// As `assert_derivatives`, of a formula that may capture values.
#[track_caller]
fn assert_derivatives_by<F>(shape: &[usize], formula: F)
where
    F: Fn(&mut Scope<'_>, &Var) -> Var + Copy + Send + Sync + 'static,
{
    for seed in 1..4 {
        let check = DerivativeCheck {
            seed,
            rows: 3,
            ..DerivativeCheck::new(shape)
        };
        let worst = check.worst(Formula(formula)).unwrap();
        assert!(worst.error() < 1e-7, "seed {seed}: {worst:?}");
    }
}

/// A parameter that is not alike everywhere.
fn weight(m: &mut Scope<'_>, name: &str, shape: &[usize]) -> Var {
    m.parameter(name, shape, Init::Normal { deviation: 1.0 })
}

/// The output for `x`, and the gradient of the sum of outputs by it.
pub(crate) fn of_rows(model: &Model, x: &Tensor) -> [Vec<f64>; 2] {
    let of = try_rows(model, x).unwrap();
    of.map(|it| it.to_dtype(DType::F64).unwrap().to_vec().unwrap())
}

pub(crate) fn try_rows(model: &Model, x: &Tensor) -> Result<[Tensor; 2]> {
    in_pass(model, true, |mut pass| {
        let y = model.forward(&mut pass, x)?;
        let dx = model.backward_to_input(&mut pass, &y.ones_like()?)?;
        Ok([y.clone(), dx.map_or_else(|| y.zeros_like(), Ok)?])
    })
}

#[test]
fn chains_of_more_values_than_one_may_have_are_several() {
    assert_derivatives(&[3], |m, x| {
        let branch = |at: usize| (x * (at as f64 * 0.1 - 0.6)).tanh();
        let branches: Vec<Var> = (0..13).map(branch).collect();
        let rows = branches
            .iter()
            .fold(x.sum(-1), |sum, it| sum + it.largest(-1));
        let of = |(at, it): (usize, &Var)| m.linear(&format!("{at}"), it, 3);
        let outputs: Vec<Var> = branches.iter().enumerate().map(of).collect();
        outputs.into_iter().fold(x * rows, |sum, it| sum * 0.5 + it)
    });
}

/// The product of two inputs · factor, by hand.
#[derive(Debug)]
struct Scaled(f64);

fn multiply(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    use ops::{ChainStep, ChainView, Function};
    let dims = out.shape().dims();
    let whole = ChainView::whole(dims);
    let product = ChainStep::Apply(Function::Mul, [0, 1, 0]);
    let steps = vec![
        ChainStep::Load(0),
        ChainStep::Load(1),
        product,
        ChainStep::Store(0, 2),
    ];
    let views = [vec![whole.clone(), whole.clone()], vec![whole]];
    let chain = ops::Chain::new("multiply", dims, 0, steps, views)?;
    Ok(ops::chain_into(&chain, &[out], &[a, b])?)
}

impl CustomOp for Scaled {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        multiply(out, x[0], x[1])?;
        Ok(ops::scale_into(out, out, self.0)?)
    }

    fn backward(
        &self,
        x: &[&Tensor],
        [_, dout]: [&Tensor; 2],
        gradients: &[&Tensor],
    ) -> Result<()> {
        for (at, gradient) in gradients.iter().enumerate() {
            multiply(gradient, dout, x[1 - at])?;
            ops::scale_into(gradient, gradient, self.0)?;
        }
        Ok(())
    }
}

#[test]
fn layers_modules_and_operations_with_their_own_backward() {
    assert_derivatives(&[4], |m, x| {
        let hidden = m.linear("up", x, 6).gelu();
        let own = m.custom(Arc::new(Scaled(0.7)), &[&hidden, &(&hidden + 1.0)]);
        let norms =
            Formula(|m: &mut Scope<'_>, x: &Var| m.layer_norm("norm", x) * m.rms_norm("rms", x));
        let inner = m.within("inner", |m| norms.forward(m, &own));
        x + m.linear("down", &inner, x.size(-1))
    });
    // Parameters as the first and as a later input.
    assert_derivatives(&[4], |m, x| {
        let (v, w) = (weight(m, "v", &[4]), weight(m, "w", &[4]));
        x * m.custom(Arc::new(Scaled(0.7)), &[&v, &w])
    });
    // Operations that run within others, and some whose values others read, too.
    assert_derivatives(&[4], |m, x| {
        let w = weight(m, "w", &[6, 4]);
        let a = m.linear("a", x, 6).relu() + x.linear(&w, None);
        let b = m.linear("b", x, 6) + x.linear(&w, None);
        let hidden = m.linear("c", x, 6);
        let c = hidden.gelu() * hidden.tanh() + hidden.gelu_tanh();
        m.layer_norm("norm", &(&a + &b)) * &a + m.rms_norm("rms", &(&a + c)) + b
    });
    // A layer that does not reach the output, and a parameter that does not.
    assert_derivatives(&[4], |m, x| {
        let unused = m.linear("unused", x, 6);
        weight(m, "other", &[2, 2]);
        let _ = unused.exp();
        m.dropout("drop", &(x * x), 0.5)
    });
}

/// The output, the gradients of the parameters and of the input, for `rows` random rows.
fn passed(model: &Model, rows: usize, order: &mut Vec<usize>) -> [Vec<f32>; 3] {
    let shape: Vec<usize> = [rows].iter().chain(&model.input_shape).copied().collect();
    let mut random = Random::new(3);
    let device = model.params.device();
    let x = Tensor::randn(&shape, DType::F32, device, &mut random).unwrap();
    let position = Tensor::from_slice(&[1i64, 0], &[2], device).unwrap();
    let options = PassOptions {
        training: true,
        accumulate: false,
        last: true,
        seed: 1,
        position: &position,
    };
    let (mut scratch, mut saved) = (Scratch::new(device), Saved::default());
    let mut ready = |id: ParamId| {
        order.push(id.0);
        Ok(())
    };
    let mut pass = Pass::new(&model.params, &mut scratch, &mut saved, options, &mut ready);
    let y = model.forward(&mut pass, &x).unwrap();
    let dy = y.randn_like(&mut random).unwrap();
    let dx = model.backward_to_input(&mut pass, &dy).unwrap().unwrap();
    let y = y.to_vec().unwrap();
    [
        y,
        model.params.gradients().to_vec().unwrap(),
        dx.to_vec().unwrap(),
    ]
}

fn built(layers: Sequential, row: &[usize]) -> Model {
    layers
        .build(row, Device::Cpu, ddp_kernels::Seed(1))
        .unwrap()
}

fn of(formula: Of, row: &[usize]) -> Model {
    built(Sequential::new().then(Formula(formula)), row)
}

#[test]
fn norms_by_their_formulas_are_the_fused_ones_to_the_bit() {
    fn gain(m: &mut Scope<'_>, x: &Var) -> Var {
        m.parameter("weight", &[x.size(-1)], Init::Constant(1.0))
    }
    fn bias(m: &mut Scope<'_>, x: &Var) -> Var {
        m.parameter("bias", &[x.size(-1)], Init::Constant(0.0))
    }
    let cases: [(Of, Normalize); 3] = [
        (
            |m, x| {
                let centred = x - x.mean(-1);
                let normed = &centred * ((&centred * &centred).mean(-1) + 1e-5).rsqrt();
                normed * gain(m, x) + bias(m, x)
            },
            Normalize::layer(),
        ),
        (
            |m, x| {
                let centred = x - x.mean(-1);
                let normed = &centred / (1e-5 + centred.pow(2.0).mean(-1)).sqrt();
                gain(m, x) * normed
            },
            Normalize::layer().without_bias(),
        ),
        (
            |m, x| x * ((x * x).mean(-1) + 1e-5).rsqrt() * gain(m, x),
            Normalize::rms(),
        ),
    ];
    for (formula, norm) in cases {
        let fused = built(Sequential::new().then(norm), &[3, 1200]);
        let by_formula = of(formula, &[3, 1200]);
        let names = |model: &Model| -> Vec<String> {
            let all = model.params.list().iter();
            all.map(|it| it.name.clone()).collect()
        };
        assert_eq!(names(&by_formula), names(&fused));
        let [a, b] = [&by_formula, &fused].map(|model| passed(model, 4, &mut Vec::new()));
        assert_eq!(a, b);
    }
}

#[test]
fn what_is_nearly_a_norm_and_a_weight_of_two_norms_have_their_derivatives() {
    fn normed(x: &Var, of: &Var) -> Var {
        x * ((of * of).mean(-1) + 0.5).rsqrt()
    }
    assert_derivatives(&[3, 4], |m, x| {
        let weight = weight(m, "w", &[4]);
        normed(&(normed(x, x) * &weight), x) * &weight + &weight
    });
    assert_derivatives(&[3, 4], |m, x| {
        let weight = weight(m, "w", &[4]);
        let once = normed(x, x) * &weight;
        normed(&once, &once) * &weight
    });
    // The mean of another axis, and of other columns than those of the weight.
    assert_derivatives(&[3, 4, 4], |m, x| {
        x * ((x * x).mean(1) + 0.5).rsqrt() * weight(m, "w", &[4])
    });
    assert_derivatives(&[3, 1], |m, x| normed(x, x) * weight(m, "w", &[4]));
}

/// Linear layers with a gate of formulas between them.
fn gated(m: &mut Scope<'_>, x: &Var) -> Var {
    let hidden = m.linear("up", x, 16).gelu();
    let temperature = m.parameter("temperature", &[1], Init::Constant(1.0));
    let gate = (m.linear("gate", x, 16) / temperature).softmax(-1);
    x + m.linear("down", &(hidden * gate), x.size(-1))
}

#[test]
fn what_is_computed_again_in_backward_has_the_bits_of_what_is_kept() {
    let dropped: Of = |m, x| {
        let y = gated(m, x);
        m.dropout("drop", &y, 0.5) * x.size(1) as f64
    };
    let pairs: [[Of; 2]; 3] = [
        [gated, |m, x| m.recompute(|m| gated(m, x))],
        [gated, |m, x| m.recompute(|m| m.recompute(|m| gated(m, x)))],
        [dropped, |m, x| {
            let kept = m.recompute(|m| {
                let y = gated(m, x);
                m.dropout("drop", &y, 0.5)
            });
            kept * x.size(1) as f64
        }],
    ];
    for [kept, again] in pairs {
        let [kept, again] = [kept, again].map(|it| passed(&of(it, &[8]), 9, &mut Vec::new()));
        assert!(kept[2].iter().any(|&it| it != 0.0));
        assert_eq!(kept, again);
    }
}

#[test]
fn gradients_are_complete_from_the_last_use_to_the_first() {
    let model = of(gated, &[8]);
    let names: Vec<&str> = model.params.list().iter().map(|it| &it.name[..]).collect();
    assert_eq!(names[..3], ["0.down.bias", "0.down.weight", "0.gate.bias"]);
    let mut order = Vec::new();
    passed(&model, 5, &mut order);
    assert_eq!(order.len(), names.len());
    // `down` at once; `temperature`, which is declared early, before the layers below it.
    assert_eq!(order[..2], [6, 5]);
    let place = |id: usize| order.iter().position(|&it| it == id).unwrap();
    assert!(place(2) < place(0), "{order:?}");
}

#[test]
fn batches_of_any_size_give_each_row_the_same_bits_whatever_the_threads() {
    let model = of(gated, &[8]);
    let all = passed(&model, 70, &mut Vec::new());
    for rows in [0, 1, 2, 69] {
        let some = passed(&model, rows, &mut Vec::new());
        assert_eq!(some[0], all[0][..rows * 8], "{rows} rows");
    }
    let before = ddp_kernels::threads::count();
    ddp_kernels::threads::set_count(3).unwrap();
    let wide = |m: &mut Scope<'_>, x: &Var| {
        x.softmax(-1) * x.exp() + m.parameter("w", &[300], Init::Constant(0.5))
    };
    let other = passed(&of(wide, &[300]), 400, &mut Vec::new());
    ddp_kernels::threads::set_count(1).unwrap();
    assert!(other == passed(&of(wide, &[300]), 400, &mut Vec::new()));
    ddp_kernels::threads::set_count(before).unwrap();
}

#[test]
fn a_frozen_module_passes_its_gradient_on() {
    for frozen in ["0.", "0.gate", "0.temperature", "1."] {
        let layers = Sequential::new()
            .then(Formula(gated))
            .then(Formula(gated))
            .then(Linear::new(2));
        let is_frozen = |name: &str| name.starts_with(frozen);
        let check = DerivativeCheck {
            frozen: &is_frozen,
            ..DerivativeCheck::new(&[4])
        };
        let worst = check.worst(layers).unwrap();
        assert!(worst.error() < 1e-7, "{frozen}: {worst:?}");
    }
}
