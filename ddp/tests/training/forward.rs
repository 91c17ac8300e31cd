//! Modules by their formula: every operation's derivative against finite differences in f64, and
//! what a module is as a layer: names, errors with lines, order of gradients, any batch, same bits.

use std::sync::Arc;

use ddp::models::Model;
use ddp::nn::check::DerivativeCheck;
use ddp::nn::{
    Convolution, CustomOp, Formula, Init, Linear, Module, Normalize, Pass, PassOptions, Result,
    Saved, Scope, Scratch, SelfAttention, Sequential, Var,
};
use ddp::params::ParamId;
use ddp_kernels::{DType, Device, Random, Tensor, ops};

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

#[test]
fn functions_of_one_value() {
    assert_derivatives(&[5], |_, x| x.exp());
    assert_derivatives(&[5], |_, x| (x * x + 0.5).log());
    assert_derivatives(&[5], |_, x| (x * x + 0.5).sqrt());
    assert_derivatives(&[5], |_, x| (x * x + 0.5).rsqrt());
    assert_derivatives(&[5], |_, x| x.tanh());
    assert_derivatives(&[5], |_, x| x.sigmoid());
    assert_derivatives(&[5], |_, x| x.silu());
    assert_derivatives(&[5], |_, x| x.gelu());
    assert_derivatives(&[5], |_, x| x.gelu_tanh());
    assert_derivatives(&[5], |_, x| x.relu() + x.abs() * 0.5);
    assert_derivatives(&[5], |_, x| -x * 3.0 - 1.0 / (x * x + 1.0) + (2.0 - x));
    for power in [0, 1, 2, 3, 7] {
        let formulas: [Of; 5] = [
            |_, x| x.pow(0.0),
            |_, x| x.pow(1.0),
            |_, x| x.pow(2.0),
            |_, x| x.pow(-3.0),
            |_, x| (x * x + 0.1).pow(1.3),
        ];
        let formula = formulas[power.min(4)];
        if power != 3 {
            assert_derivatives(&[4], formula);
        }
    }
    assert_derivatives(&[4], |_, x| {
        (x * x + 1.0).pow(-3.0) + (x * x + 1.0).pow(-0.5)
    });
}

/// Values and derivatives of a formula at these numbers, each of which is a row.
fn derivatives_at(formula: Of, dtype: DType, values: &[f64]) -> Vec<[f64; 2]> {
    let layers = Box::new(Sequential::new().then(Formula(formula)));
    let model = Model::new(layers, &[1], dtype, Device::Cpu, 1, &|_| false).unwrap();
    let x = Tensor::from_slice(values, &[values.len(), 1], Device::Cpu).unwrap();
    let [y, dx] = of_rows(&model, &x.to_dtype(dtype).unwrap());
    y.into_iter().zip(dx).map(|(y, dx)| [y, dx]).collect()
}

/// The output for `x`, and the gradient of the sum of outputs by it.
pub(crate) fn of_rows(model: &Model, x: &Tensor) -> [Vec<f64>; 2] {
    let of = try_rows(model, x).unwrap();
    of.map(|it| it.to_dtype(DType::F64).unwrap().to_vec().unwrap())
}

pub(crate) fn try_rows(model: &Model, x: &Tensor) -> Result<[Tensor; 2]> {
    let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
    let options = PassOptions {
        training: true,
        accumulate: false,
        last: true,
        seed: 1,
        position: &position,
    };
    let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
    let mut ready = |_: ParamId| Ok(());
    let mut pass = Pass::new(&model.params, &mut scratch, &mut saved, options, &mut ready);
    let y = model.forward(&mut pass, x)?;
    let dx = model.backward_to_input(&mut pass, &y.ones_like()?)?;
    Ok([y.clone(), dx.map_or_else(|| y.zeros_like(), Ok)?])
}

/// `pow(1.5)` gave NaN at 0, `pow(-2.0)` an infinite derivative at 1e-10, `pow(33.0)` NaN below 0,
/// and a maximum with NaN the derivative 0.
#[test]
fn derivatives_at_zeros_ties_and_infinities_are_pytorchs() {
    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    let cases: [(&str, Of, &[[f64; 3]]); 16] = [
        (
            "1.5",
            |_, x| x.pow(1.5),
            &[
                [0.0, 0.0, 0.0],
                [4.0, 8.0, 3.0],
                [INF, INF, INF],
                [-1.0, NAN, NAN],
            ],
        ),
        (
            "2.5",
            |_, x| x.pow(2.5),
            &[[0.0, 0.0, 0.0], [4.0, 32.0, 20.0]],
        ),
        (
            "1.25",
            |_, x| x.pow(1.25),
            &[[0.0, 0.0, 0.0], [INF, INF, INF]],
        ),
        ("0.25", |_, x| x.pow(0.25), &[[0.0, 0.0, INF]]),
        (
            "0",
            |_, x| x.pow(0.0),
            &[[0.0, 1.0, 0.0], [INF, 1.0, 0.0], [NAN, 1.0, 0.0]],
        ),
        (
            "-1",
            |_, x| x.pow(-1.0),
            &[[0.0, INF, -INF], [-2.0, -0.5, -0.25]],
        ),
        (
            "-2",
            |_, x| x.pow(-2.0),
            &[[0.0, INF, -INF], [2.0, 0.25, -0.25], [-INF, 0.0, 0.0]],
        ),
        (
            "-1.5",
            |_, x| x.pow(-1.5),
            &[[0.0, INF, -INF], [INF, 0.0, 0.0]],
        ),
        (
            "33",
            |_, x| x.pow(33.0),
            &[[-1.0, -1.0, 33.0], [0.0, 0.0, 0.0]],
        ),
        (
            "sqrt",
            |_, x| x.sqrt(),
            &[[0.0, 0.0, INF], [4.0, 2.0, 0.25]],
        ),
        (
            "rsqrt",
            |_, x| x.rsqrt(),
            &[[0.0, INF, -INF], [4.0, 0.5, -0.0625]],
        ),
        ("abs", |_, x| x.abs(), &[[0.0, 0.0, 0.0], [-2.0, 2.0, -1.0]]),
        (
            "maximum",
            |_, x| x.maximum(&x.number(1.0)),
            &[[0.0, 1.0, 0.0], [1.0, 1.0, 0.5], [NAN, NAN, 1.0]],
        ),
        (
            "minimum",
            |_, x| x.minimum(&x.number(1.0)),
            &[[2.0, 1.0, 0.0], [1.0, 1.0, 0.5], [NAN, NAN, 1.0]],
        ),
        (
            "relu",
            |_, x| x.relu(),
            &[
                [0.0, 0.0, 0.0],
                [-1.0, 0.0, 0.0],
                [2.0, 2.0, 1.0],
                [NAN, NAN, 1.0],
            ],
        ),
        // 0·∞, as in PyTorch: the branch that is not taken is differentiated, too.
        (
            "where",
            |_, x| x.equal(&x.number(0.0)).select(x, &(1.0 / x)),
            &[[0.0, 0.0, NAN], [2.0, 0.5, -0.25]],
        ),
    ];
    for (name, formula, points) in cases {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let values: Vec<f64> = points.iter().map(|it| it[0]).collect();
            let got = derivatives_at(formula, dtype, &values);
            for ([x, value, slope], got) in points.iter().zip(got) {
                for (expected, got) in [*value, *slope].into_iter().zip(got) {
                    let is_near = (got - expected).abs() <= 0.01 * expected.abs();
                    let is_near = is_near && expected.is_finite();
                    let is_same = got == expected || got.is_nan() && expected.is_nan();
                    assert!(
                        is_near || is_same,
                        "{name} at {x}, {dtype}: {got}, in PyTorch {expected}"
                    );
                }
            }
        }
    }
    let [[_, slope]] = derivatives_at(|_, x| x.pow(-2.0), DType::F32, &[1e-10])[..] else {
        panic!("one row")
    };
    assert!((slope / -2e30 - 1.0).abs() < 1e-5, "{slope}");
}

#[test]
fn functions_of_two_values_with_every_broadcast() {
    for shape in [&[4][..], &[1, 4], &[3, 1], &[3, 4], &[2, 3, 4], &[1, 1, 1]] {
        assert_derivatives(shape, |m, x| {
            let own = x.shape();
            let mut sum = x * 1.0;
            // Each axis of the parameter is as long as x's, 1, or missing.
            for mask in 0..1 << (own.len() - 1) {
                for missing in 0..own.len() {
                    let kept = own[1..].iter().enumerate().skip(missing);
                    let shape: Vec<usize> = kept
                        .map(|(at, &length)| if mask >> at & 1 == 1 { 1 } else { length })
                        .collect();
                    let w = weight(m, &format!("w{mask}.{missing}"), &shape);
                    sum = sum + x * &w - &w / (&w * &w + 1.0) + &w * 0.1;
                }
            }
            sum
        });
    }
    assert_derivatives(&[6], |m, x| {
        x.maximum(&weight(m, "w", &[6])) + x.minimum(&weight(m, "v", &[1]))
    });
    assert_derivatives(&[6], |m, x| {
        let w = weight(m, "w", &[6]);
        let yes = x.less(&w);
        yes.select(&(x * x), &(&w * 2.0)) + x.less_equal(&w) * x + x.equal(x) * &w
    });
}

#[test]
fn reductions_over_every_axis() {
    assert_derivatives(&[2, 3, 4], |_, x| {
        x.sum(1) * x + x.mean(2) * x.mean(-1) - x.sum(3)
    });
    assert_derivatives(&[2, 3, 4], |_, x| {
        x * x.largest(1) + x.largest(3) - x.smallest(2) * x
    });
    assert_derivatives(&[2, 3], |_, x| x.softmax(-1) + x.softmax(1) * 2.0);
    assert_derivatives(&[2, 3], |_, x| x.log_softmax(-1) * x.log_softmax(1));
    assert_derivatives(&[1, 1], |_, x| x.softmax(-1) + x.sum(1) * x.mean(-1));
    // Longer than a block of values, so that rows are run through several times.
    assert_derivatives(&[1030], |_, x| (x * 0.1).softmax(-1) * 100.0);
}

#[test]
fn shapes_and_views() {
    assert_derivatives(&[2, 3, 4], |m, x| {
        let b = x.size(0);
        let turned = x.permute(&[0, 3, 1, 2]) * weight(m, "w", &[4, 2, 3]);
        turned.transpose(1, -1).reshape(&[b, 24])
    });
    assert_derivatives(&[5, 2], |_, x| {
        let parts = x.split(1, &[1, 3, 1]);
        let both = Var::concatenate(&[&parts[2], &(&parts[1] * &parts[0]), &parts[0]], 1);
        both.slice(1, 1..4) * both.slice(1, 0..3) + x.slice(-1, 1..2).slice(1, 0..3)
    });
    assert_derivatives(&[1, 3], |_, x| {
        x.expand(&[x.size(0), 4, 3]).permute(&[0, 2, 1]).exp()
    });
}

#[test]
fn windows_steps_and_padding() {
    // Windows apart, side by side and over each other; some leave the end of the axis out.
    for (size, step) in [(1, 1), (2, 1), (3, 2), (2, 3), (3, 3), (7, 1)] {
        let windows = move |x: &Var, axis: isize| (x * x).windows(axis, size, step);
        assert_derivatives_by(&[7], move |_, x| windows(x, 1));
        assert_derivatives_by(&[7, 2], move |m, x| {
            let y = windows(x, -2).softmax(-1);
            y * weight(m, "w", &[size]) + x.sum(1).reshape(&[x.size(0), 1, 2, 1])
        });
    }
    assert_derivatives(&[4, 5], |_, x| x.windows(1, 2, 1).windows(2, 3, 2).exp());
    for step in [1, 2, 3, 9] {
        assert_derivatives_by(&[7], move |_, x| x.every(-1, step) * x.every(1, step));
        assert_derivatives_by(&[5, 2], move |_, x| x.exp().every(1, step).tanh());
    }
    for (before, after) in [(0, 0), (1, 0), (0, 2), (3, 1)] {
        assert_derivatives_by(&[3], move |_, x| x.pad(1, before, after).exp());
        assert_derivatives_by(&[3, 2], move |m, x| {
            let padded = (x * x).pad(1, before, after);
            padded * weight(m, "w", &[3 + before + after, 1])
        });
    }
}

#[test]
fn convolutions_with_every_option() {
    let of = |outputs, size: usize| Convolution::new(outputs, size);
    let of_one_axis = [
        of(3, 1),
        of(3, 2).without_bias(),
        of(2, 3).stride(2).padding(1),
        of(4, 2).dilation(3).groups(2),
        of(2, 5).padding(4).stride(3).dilation(2).groups(2),
    ];
    for of in of_one_axis {
        assert_derivatives_by(&[2, 6], move |m, x| m.conv1d("c", x, of));
    }
    let of_two_axes = [
        of(3, 1),
        of(2, 3).padding(1),
        Convolution::new(3, [3, 2]).stride([2, 1]).without_bias(),
        Convolution::new(4, [1, 2]).padding([2, 1]).groups(2),
        of(4, 2)
            .dilation([2, 1])
            .stride(2)
            .padding([0, 1])
            .groups(2),
    ];
    for of in of_two_axes {
        assert_derivatives_by(&[2, 4, 3], move |m, x| m.conv2d("c", &x.tanh(), of));
    }
    // A weight that is computed.
    assert_derivatives(&[2, 4, 3], |m, x| {
        let weight = weight(m, "w", &[2, 2, 2, 3]).tanh();
        x.convolve(&weight, Convolution::new(2, [2, 3])) * x.slice(2, 1..4).mean(-1)
    });
}

#[test]
fn pools_and_norms_of_groups() {
    for (size, stride, padding) in [(1, 1, 0), (2, 2, 0), (2, 1, 0), (3, 2, 1), (2, 3, 1)] {
        assert_derivatives_by(&[2, 5, 4], move |_, x| {
            (x * x).max_pool2d(size, stride, padding)
        });
        assert_derivatives_by(&[2, 5, 4], move |_, x| x.exp().avg_pool2d(size, stride));
    }
    // Of equal ones the first of a window has the gradient; in a window with NaN that has it.
    let layers = Box::new(
        Sequential::new().then(Formula(|_: &mut Scope<'_>, x: &Var| x.max_pool2d(2, 2, 0))),
    );
    let model = Model::new(layers, &[1, 2, 4], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let x = [
        3.0,
        7.0,
        1.0,
        5.0,
        7.0,
        7.0,
        5.0,
        5.0,
        2.0,
        2.0,
        f32::NAN,
        1.0,
        2.0,
        2.0,
        1.0,
        1.0,
    ];
    let x = Tensor::from_slice(&x, &[2, 1, 2, 4], Device::Cpu).unwrap();
    let [y, dx] = of_rows(&model, &x);
    assert_eq!(y[..3], [7.0, 5.0, 2.0]);
    assert!(y[3].is_nan());
    let taken: Vec<usize> = (0..16).filter(|&at| dx[at] != 0.0).collect();
    assert_eq!(taken, [1, 3, 8, 10]);
    for groups in [1, 2, 4] {
        for shape in [&[4][..], &[4, 3], &[4, 2, 3]] {
            // Groups of one number are 0, whatever it is.
            if groups < 4 || shape.len() > 1 {
                assert_derivatives_by(shape, move |m, x| m.group_norm("n", x, groups) * x);
            }
        }
    }
}

#[test]
fn matmuls_of_two_to_four_axes_with_broadcast_and_transposed_factors() {
    assert_derivatives(&[4], |m, x| x.matmul(&weight(m, "w", &[4, 3])));
    assert_derivatives(&[4], |m, x| {
        x.matmul(&weight(m, "w", &[3, 4]).transpose(0, 1))
    });
    assert_derivatives(&[2, 4], |m, x| x.matmul(&weight(m, "w", &[4, 3])));
    assert_derivatives(&[2, 4], |m, x| {
        weight(m, "w", &[3, 2]).matmul(x).matmul(&x.transpose(1, 2))
    });
    assert_derivatives(&[2, 3, 4], |m, x| {
        let w = weight(m, "w", &[2, 4, 5]);
        x.matmul(&w).matmul(&w.transpose(-1, -2))
            + x.transpose(-1, -2).matmul(x).sum(-1).transpose(-1, -2)
    });
    assert_derivatives(&[2, 3, 4], |m, x| {
        x.transpose(1, 3)
            .transpose(1, 2)
            .matmul(&weight(m, "w", &[1, 2, 2]))
    });
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

/// x · factor, by hand.
#[derive(Debug)]
struct Scaled(f64);

impl CustomOp for Scaled {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        ops::mul_into(out, x[0], x[1])?;
        Ok(ops::scale_into(out, out, self.0)?)
    }

    fn backward(
        &self,
        x: &[&Tensor],
        [_, dout]: [&Tensor; 2],
        gradients: &[&Tensor],
    ) -> Result<()> {
        for (at, gradient) in gradients.iter().enumerate() {
            ops::mul_into(gradient, dout, x[1 - at])?;
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
fn errors_name_operation_operands_and_line() {
    let refused = |formula: Of, row: &[usize]| -> String {
        let layers = Sequential::new().then(Formula(formula));
        let built = layers.build(row, Device::Cpu, ddp_kernels::Seed(1));
        built.unwrap_err().to_string()
    };
    let line = line!() + 2;
    let text = refused(
        |m, x| x.exp() + m.parameter("wrong", &[7], Init::Constant(0.0)),
        &[5],
    );
    let at = format!(
        "0 ({0}:{line}): add: expected equal lengths, or 1, got exp [2, 5] of {0}:{line} \
         and 0.wrong [7]; help: ",
        file!()
    );
    assert!(text.starts_with(&at), "{text}");
    let cases: [(Of, &str); 19] = [
        (|_, x| x.sum(4), ": sum: "),
        (|_, x| x.mean(4), ": mean: "),
        (|_, x| x.smallest(4), ": smallest: "),
        (|_, x| x.softmax(4), ": softmax: "),
        (|_, x| x.log_softmax(4), ": log_softmax: "),
        (
            |m, x| m.dropout("drop", x, 0.5) + m.dropout("drop", x, 0.5),
            "dropout: expected a name that no other dropout has",
        ),
        (
            |_, x| x.reshape(&[3]),
            "expected as many elements as [3] has, got x [2, 5]",
        ),
        (|_, x| x.permute(&[0, 0]), "each of its axes once in [0, 0]"),
        (|_, x| x.slice(1, 2..9), "expected indices 2..9 below 5"),
        (
            |_, x| x.matmul(x),
            "as many rows of the second as columns of the first, 5",
        ),
        (
            |_, x| x.reshape(&[5, 2]),
            "output: expected the batch as its first axis",
        ),
        (
            |m, x| m.linear("up", x, 3).relu() + x.matmul(&weight(m, "w", &[5, 4])).named("mixed"),
            "got relu [2, 3] of ddp/tests/",
        ),
        (
            |m, x| m.linear("up", x, 3) + x.matmul(&weight(m, "w", &[5, 4])).named("mixed"),
            " and mixed [2, 4] of ddp/tests/",
        ),
        (
            |m, x| x.softmax(-1) + m.linear("up", x, 3),
            "got softmax [2, 5] of ddp/tests/",
        ),
        (
            |m, x| x.pow(1.5) + m.linear("up", x, 3),
            "got pow [2, 5] of ddp/tests/",
        ),
        (
            |m, x| m.linear("a", x, 5) + m.linear("a", x, 5),
            "0.a.weight: expected a name that is not taken, got it twice",
        ),
        (
            |_, x| Var::concatenate(&[x, &x.exp().slice(0, 0..1)], 1),
            ": concatenate: ",
        ),
        (
            |_, x| {
                if x.tanh() > x.exp() {
                    x.exp()
                } else {
                    x.tanh()
                }
            },
            ": >: expected no branch on values, which a formula does not see, got tanh [2, 5] of ",
        ),
        (
            |_, x| if &x.tanh() == x { x.exp() } else { x.tanh() },
            "; help: write a.equal(&b).select(&yes, &no)",
        ),
    ];
    for (formula, expected) in cases {
        let text = refused(formula, &[5]);
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

/// They were accepted. A window of 0 was none on a GPU.
#[test]
fn settings_that_mean_nothing_are_refused() {
    let cases: [(Of, &[usize], &str); 3] = [
        (
            |m, x| m.conv1d("c", x, Convolution::new(2, 3).dilation(0)),
            &[2, 9],
            "convolution: expected (batch, channels)",
        ),
        (
            |m, x| {
                m.parameter(
                    "w",
                    &[3],
                    Init::Normal {
                        deviation: f64::NAN,
                    },
                ) + x
            },
            &[3],
            "0.w: expected finite initial weights, got Normal { deviation: NaN }",
        ),
        (
            |m, x| {
                let attention = SelfAttention::causal(8, 2, 2, [&Linear::new, &Linear::new]);
                m.layer("a", x, attention.windowed(0))
            },
            &[4, 8],
            "attention: expected a window of at least 1 token",
        ),
    ];
    for (formula, row, expected) in cases {
        let layers = Sequential::new().then(Formula(formula));
        let built = layers.build(row, Device::Cpu, ddp_kernels::Seed(1));
        let text = built.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
}

/// Errors within a module of the user's own named the line that calls the module.
#[test]
fn errors_within_own_modules_name_the_line_of_the_wrong_operation() {
    fn wrong(m: &mut Scope<'_>, x: &Var) -> Var {
        x + m.parameter("wrong", &[7], Init::Constant(0.0))
    }
    let line_of_add = line!() - 2;
    fn wrong_layer(m: &mut Scope<'_>, x: &Var) -> Var {
        m.linear("flat", &x.mean(0), 0)
    }
    let line_of_layer = line!() - 2;
    let cases: [(Of, u32, &str); 6] = [
        (wrong, line_of_add, "0"),
        (
            |m, x| m.layer("block", x, Formula(wrong)),
            line_of_add,
            "0.block",
        ),
        (
            |m, x| m.within("block", |m| wrong(m, x)),
            line_of_add,
            "0.block",
        ),
        (
            |m, x| m.within("blocks", |m| m.layer("0", x, Formula(wrong))),
            line_of_add,
            "0.blocks.0",
        ),
        (
            |m, x| m.layer("block", x, Formula(wrong_layer)),
            line_of_layer,
            "0.block.flat",
        ),
        (
            |m, x| {
                m.layer(
                    "all",
                    x,
                    Sequential::new().named("block", Formula(wrong_layer)),
                )
            },
            line_of_layer,
            "0.all.block.flat",
        ),
    ];
    for (formula, line, place) in cases {
        let layers = Sequential::new().then(Formula(formula));
        let built = layers.build(&[5], Device::Cpu, ddp_kernels::Seed(1));
        let text = built.unwrap_err().to_string();
        let at = format!("{place} ({}:{line}): ", file!());
        assert!(text.starts_with(&at), "{at}: {text}");
    }
}

/// x, where an element of the output, or of the gradient, is left out.
#[derive(Debug)]
struct Forgets {
    is_backward: bool,
}

impl Forgets {
    fn write(&self, to: &Tensor, of: &Tensor, forgets: bool) -> Result<()> {
        let rows = to.shape()[0] - usize::from(forgets);
        Ok(to.slice(0..rows)?.copy_from(&of.slice(0..rows)?)?)
    }
}

impl CustomOp for Forgets {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        self.write(out, x[0], !self.is_backward)
    }

    fn backward(&self, _: &[&Tensor], of: [&Tensor; 2], dx: &[&Tensor]) -> Result<()> {
        self.write(dx[0], of[1], self.is_backward)
    }
}

/// It trained on whatever the memory held.
#[test]
fn an_own_operation_that_leaves_elements_out_is_refused_with_its_line() {
    for (is_backward, what) in [(false, "forward: out"), (true, "backward: gradient 0")] {
        let line = line!() + 2;
        let formula =
            move |m: &mut Scope<'_>, x: &Var| m.custom(Arc::new(Forgets { is_backward }), &[x]);
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let layers = Sequential::new().then(Formula(formula));
            let model = Model::new(Box::new(layers), &[3], dtype, Device::Cpu, 1, &|_| false);
            let x = Tensor::zeros(&[4, 3], dtype, Device::Cpu).unwrap();
            let error = try_rows(&model.unwrap(), &x).unwrap_err();
            let expected = format!(
                "0 ({}:{line}): Forgets {{ is_backward: {is_backward} }}: {what}: expected all \
                 12 elements to be written, got 3 unwritten; help: ",
                file!()
            );
            assert!(error.to_string().starts_with(&expected), "{error}");
        }
    }
}

/// Its kernel is called wrongly.
#[derive(Debug)]
struct Wrong;

impl CustomOp for Wrong {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        Ok(ddp_kernels::ops::sum_into(out, x[0])?)
    }

    fn backward(&self, _: &[&Tensor], _: [&Tensor; 2], _: &[&Tensor]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn errors_of_a_kernel_name_the_layer_and_the_line() {
    let line = line!() + 1;
    let formula = |m: &mut Scope<'_>, x: &Var| m.custom(Arc::new(Wrong), &[&x.exp()]);
    let model = built(Sequential::new().then(Formula(formula)), &[3]);
    let x = Tensor::zeros(&[4, 3], DType::F32, Device::Cpu).unwrap();
    let text = try_rows(&model, &x).unwrap_err().to_string();
    let expected = format!("0 ({}:{line}): ", file!());
    assert!(
        text.starts_with(&expected) && text.contains("sum"),
        "{text}"
    );
}

/// Several of the first axis may be of one row of the batch.
#[test]
fn dropout_of_flat_tokens_drops_the_same_elements() {
    let shaped = of(|m, x| m.dropout("drop", x, 0.5), &[4, 6]);
    let flat = |m: &mut Scope<'_>, x: &Var| {
        let tokens = x.reshape(&[x.size(0) * 4, 6]);
        m.dropout("drop", &tokens, 0.5).reshape(&x.shape())
    };
    let shaped = passed(&shaped, 3, &mut Vec::new());
    assert!(shaped == passed(&of(flat, &[4, 6]), 3, &mut Vec::new()));
    assert!(shaped[0].contains(&0.0) && shaped[0].iter().any(|it| *it != 0.0));
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
