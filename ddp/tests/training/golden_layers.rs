//! Layers, losses, clipping and optimizers against PyTorch's values in f64:
//! tests/peers/layers_torch.py made golden/layers.json. Each case is one whole batch there; here
//! also uneven micro-batches.

use ddp::models::{Mlp, Model};
use ddp::nn::{
    Activate, CrossEntropy, Linear, Loss, Module, Mse, Pass, PassOptions, Residual, Saved, Scratch,
    Sequential, Tie,
};
use ddp::optim::{Clip, Method, Optimizer, Rule};
use ddp_kernels::ops::{self, Activation, SgdConstants};
use ddp_kernels::{DType, Device, Tensor};
use serde_json::Value;

use crate::support::pass::in_pass;

const CPU: Device = Device::Cpu;
const ROWS: usize = 7;
const INPUTS: usize = 4;
const OUTPUTS: usize = 3;
const RATES: [f64; 3] = [0.05, 0.02, 0.03];

/// The script's `numbers`, between -105/256 and 105/256, times `scale`.
pub(crate) fn numbers(scale: f64, stream: usize, count: usize) -> Vec<f64> {
    let number = |i: usize| ((i * i * 37 + i * 5 + stream * 101) % 211) as f64 - 105.0;
    (1..=count).map(|i| scale * number(i) / 256.0).collect()
}

pub(crate) fn tensor(values: &[f64], shape: &[usize], dtype: DType) -> Tensor {
    Tensor::from_slice(values, shape, CPU)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

/// Fills the model as the scripts do, and compares the losses of steps of gradient descent.
pub(crate) fn assert_trains(model: &Model, [x, targets]: [&Tensor; 2], rate: f64, golden: &Value) {
    let params = &model.params;
    let mut by_id: Vec<_> = params.list().iter().collect();
    by_id.sort_by_key(|one| one.id);
    for (stream, one) in by_id.iter().enumerate() {
        let values = tensor(
            &numbers(1.0, stream, one.range.len()),
            &one.shape,
            DType::F64,
        );
        params.value(one.id).copy_from(&values).unwrap();
    }
    let count = targets.count() as f64;
    for expected in golden["losses"].as_array().unwrap() {
        let stats = Tensor::zeros(&[4], DType::F64, CPU).unwrap();
        in_pass(model, true, |mut pass| {
            let y = model.forward(&mut pass, x).unwrap();
            let dy = CrossEntropy::default().gradient(&mut pass, [&y, targets, &stats]);
            model.backward(&mut pass, &dy.unwrap()).unwrap();
        });
        let loss = stats.index(0).unwrap().item().unwrap() / count;
        let expected = expected.as_f64().unwrap();
        assert!((loss - expected).abs() < 1e-11, "{loss} {expected}");
        ops::axpy(params.values(), -rate / count, params.gradients()).unwrap();
    }
}

/// One of the script's cases.
struct Case {
    name: &'static str,
    layers: fn() -> Sequential,
    rule: Rule,
    clip: f64,
    loss: fn(DType) -> Box<dyn Loss>,
    /// Whether some targets are to be ignored.
    ignores: bool,
}

fn mlp(activation: Activation) -> Sequential {
    Mlp {
        hidden: vec![6, 5],
        outputs: OUTPUTS,
        activation,
        dropout: 0.0,
    }
    .layers()
}

fn tied() -> Sequential {
    let tie = Tie::new();
    let inner = Sequential::new()
        .then(Linear::new(4).tied(&tie))
        .then(Activate::gelu());
    let first = Sequential::new()
        .then(Linear::new(4).tied(&tie))
        .then(Activate::relu());
    first.then(Residual::new(inner)).then(Linear::new(OUTPUTS))
}

fn class_weights(dtype: DType) -> Option<Tensor> {
    Some(tensor(&[0.5, 2.0, 1.25], &[3], dtype))
}

fn cases() -> [Case; 5] {
    let adamw = |weight_decay| Rule {
        weight_decay,
        ..Rule::adamw()
    };
    let sgd = |nesterov| Rule {
        weight_decay: 0.01,
        ..Rule::of(Method::Sgd(SgdConstants {
            momentum: 0.9,
            nesterov,
        }))
    };
    let case = |name, layers, rule, clip, loss| Case {
        name,
        layers,
        rule,
        clip,
        loss,
        ignores: false,
    };
    [
        case(
            "relu_adamw",
            || mlp(Activation::Relu),
            adamw(0.1),
            0.0,
            |_| Box::new(CrossEntropy::default()),
        ),
        case(
            "gelu_momentum_clipped",
            || mlp(Activation::Gelu),
            sgd(false),
            0.0625,
            |_| Box::new(CrossEntropy::default()),
        ),
        Case {
            ignores: true,
            ..case(
                "gelu_tanh_nesterov_smoothed_weighted",
                || mlp(Activation::GeluTanh),
                sgd(true),
                0.0,
                |dtype| {
                    let class_weights = class_weights(dtype);
                    Box::new(CrossEntropy {
                        label_smoothing: 0.125,
                        class_weights,
                        ..CrossEntropy::default()
                    })
                },
            )
        },
        case(
            "gelu_adamw_smoothed_clipped",
            || mlp(Activation::Gelu),
            adamw(0.0),
            0.25,
            |_| {
                Box::new(CrossEntropy {
                    label_smoothing: 0.125,
                    ..CrossEntropy::default()
                })
            },
        ),
        case("tied_residual_squared_error", tied, adamw(0.1), 0.0, |_| {
            Box::new(Mse)
        }),
    ]
}

/// Input and targets of a step.
fn batch(case: &Case, step: usize, dtype: DType) -> (Tensor, Tensor) {
    let x = tensor(
        &numbers(4.0, 100 + step, ROWS * INPUTS),
        &[ROWS, INPUTS],
        dtype,
    );
    if case.name.ends_with("squared_error") {
        return (
            x,
            tensor(
                &numbers(1.0, 200 + step, ROWS * OUTPUTS),
                &[ROWS, OUTPUTS],
                dtype,
            ),
        );
    }
    let ignored = |row: usize| case.ignores && row >= step && (row - step).is_multiple_of(4);
    let target = |row| {
        if ignored(row) {
            -100
        } else {
            ((row * 5 + step) % OUTPUTS) as i64
        }
    };
    (
        x,
        Tensor::from_slice(&(0..ROWS).map(target).collect::<Vec<_>>(), &[ROWS], CPU).unwrap(),
    )
}

/// What one run gives, as the script writes it.
#[derive(Default)]
struct Run {
    losses: Vec<f64>,
    output: Vec<f64>,
    gradients: Vec<(String, Vec<f64>)>,
    norm: f64,
    values: Vec<(String, Vec<f64>)>,
}

fn wide(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// Three steps, each in the micro-batches between these rows.
fn run(case: &Case, dtype: DType, cuts: &[usize]) -> Run {
    let layers: Box<dyn Module> = Box::new((case.layers)());
    let model = Model::new(layers, &[INPUTS], dtype, CPU, 1, &|_| false).unwrap();
    let params = &model.params;
    let mut by_id: Vec<_> = params.list().iter().collect();
    by_id.sort_by_key(|p| p.id);
    for (stream, p) in by_id.iter().enumerate() {
        params
            .value(p.id)
            .copy_from(&tensor(
                &numbers(2.0, stream, p.range.len()),
                &p.shape,
                dtype,
            ))
            .unwrap();
    }
    let loss = (case.loss)(dtype);
    let mut optimizer = Optimizer::new(case.rule, params).unwrap();
    let clip = Clip::new(case.clip, params).unwrap();
    let (mut scratch, mut saved) = (Scratch::new(CPU), Saved::default());
    let stats = Tensor::zeros(&[4], dtype, CPU).unwrap();
    let mut result = Run::default();
    for (step, rate) in RATES.into_iter().enumerate() {
        let (x, targets) = batch(case, step, dtype);
        ops::zero(&stats).unwrap();
        for (index, rows) in cuts.windows(2).map(|cut| cut[0]..cut[1]).enumerate() {
            let position =
                Tensor::from_slice(&[step as i64, rows.start as i64], &[2], CPU).unwrap();
            let last = index + 2 == cuts.len();
            let options = PassOptions {
                training: true,
                accumulate: index > 0,
                last,
                seed: 1,
                position: &position,
            };
            let mut ready = |_| Ok(());
            let mut pass = Pass::new(params, &mut scratch, &mut saved, options, &mut ready);
            let y = model
                .forward(&mut pass, &x.slice(rows.clone()).unwrap())
                .unwrap();
            let targets = targets.slice(rows).unwrap();
            let dy = loss.gradient(&mut pass, [&y, &targets, &stats]).unwrap();
            if step == 0 {
                result.output.extend(wide(&y));
            }
            model.backward(&mut pass, &dy).unwrap();
        }
        let total = wide(&stats);
        result.losses.push(total[0] / total[1]);
        clip.compute(params, Some(&stats.slice(1..2).unwrap()), false)
            .unwrap();
        if step == 0 {
            result.norm = wide(clip.out())[1];
            let gradient = |p: &&ddp::params::Parameter| {
                let mean = wide(params.gradient(p.id).unwrap())
                    .into_iter()
                    .map(|g| g / total[1])
                    .collect();
                (p.name.clone(), mean)
            };
            result.gradients = by_id.iter().map(gradient).collect();
        }
        optimizer
            .update(params, step as u64 + 1, rate, Some(clip.out()), None)
            .unwrap();
    }
    result.values = by_id
        .iter()
        .map(|p| (p.name.clone(), wide(params.value(p.id))))
        .collect();
    result
}

fn list(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap())
        .collect()
}

#[track_caller]
fn assert_close(what: &str, got: &[f64], expected: &[f64], bound: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(
            error <= bound,
            "{what}[{index}]: got {got:e}, PyTorch {expected:e}, {error:e} apart, bound {bound:e}"
        );
    }
}

/// Bounds in units of 2⁻⁵³ or 2⁻²⁴.
struct Bounds {
    unit: f64,
    /// Of output, loss, gradients and norm.
    forward_backward: f64,
    /// Of the values after three steps, if they are looked at.
    values: Option<f64>,
}

fn check(dtype: DType, bounds: &Bounds) {
    let golden: Value = serde_json::from_str(include_str!("../golden/layers.json")).unwrap();
    for case in cases() {
        let golden = &golden[case.name];
        for cuts in [&[0, ROWS][..], &[0, 2, 6, 6, ROWS]] {
            let run = run(&case, dtype, cuts);
            let what =
                |part: &str| format!("{} in {dtype}, rows cut at {cuts:?}: {part}", case.name);
            let bound = bounds.forward_backward * bounds.unit;
            assert_close(
                &what("output"),
                &run.output,
                &list(&golden["output"]),
                bound,
            );
            assert_close(
                &what("loss"),
                &run.losses[..1],
                &list(&golden["losses"])[..1],
                bound,
            );
            for (name, gradient) in &run.gradients {
                assert_close(
                    &what(name),
                    gradient,
                    &list(&golden["gradients"][name]),
                    bound,
                );
            }
            assert_eq!(
                run.gradients.len(),
                golden["gradients"].as_object().unwrap().len()
            );
            if case.clip > 0.0 {
                assert_close(
                    &what("norm"),
                    &[run.norm],
                    &[golden["norm"].as_f64().unwrap()],
                    bound,
                );
            }
            let Some(bound) = bounds.values.map(|bound| bound * bounds.unit) else {
                continue;
            };
            assert_close(
                &what("losses"),
                &run.losses,
                &list(&golden["losses"]),
                bound,
            );
            for (name, values) in &run.values {
                assert_close(&what(name), values, &list(&golden["values"][name]), bound);
            }
        }
    }
}

/// Numbers are at most 2 in size, sums have at most 7 terms, and a gradient passes through six such
/// sums and as many elementwise operations of a few roundings: under 100 roundings of at most 2
/// units each, on both sides.
const FORWARD_BACKWARD: f64 = 2.0 * 2.0 * 100.0;

#[test]
fn pytorch_makes_the_same_in_f64_three_steps_long() {
    // AdamW divides a gradient by its own size, here at least 1e-6 unless exactly 0 on both sides,
    // with a step of 0.05: a gradient error of 4e-14 becomes 4e-14 × 0.05 / 1e-6 = 2e-9 in the
    // value at worst, 2e7 units.
    check(
        DType::F64,
        &Bounds {
            unit: f64::EPSILON / 2.0,
            forward_backward: FORWARD_BACKWARD,
            values: Some(2e7),
        },
    );
}

#[test]
fn pytorch_makes_the_same_in_f32_up_to_rounding() {
    // AdamW's values say nothing in f32, by the argument above.
    let unit = f64::from(f32::EPSILON) / 2.0;
    check(
        DType::F32,
        &Bounds {
            unit,
            forward_backward: FORWARD_BACKWARD,
            values: None,
        },
    );
}
