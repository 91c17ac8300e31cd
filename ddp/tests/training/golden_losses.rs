//! 60 steps give PyTorch's losses, with one rank and with three, in whole batches and
//! micro-batches. tests/peers/golden_torch.py makes the golden file.
//!
//! Tolerance: both sides round every operation to f32. A loss near 1 carries about 50 roundings of
//! 6e-8 forward. Training feeds each step's error into the next; with gradients of order 1 and
//! learning rates that sum to below 10 over 60 steps, errors grow at most a few hundredfold. 1e-3
//! leaves a factor of about ten. A wrong formula (decay on biases, a mean over ranks instead of
//! rows) is off by more than 1e-2 within ten steps.

use crate::support::random::{mixed, uniform};
use crate::support::training::{cpu, on_ranks, quietly};
use ddp::Result;
use ddp::data::{Batch, sampler};
use ddp::models::{Mlp, Model};
use ddp::nn::{CrossEntropy, Loss, Mse};
use ddp::optim::{Method, Optimizer, Rule};
use ddp::reducer::ReducerOptions;
use ddp::reducer::plan::BucketSizes;
use ddp::step::{Step, StepOptions};
use ddp_comm::World;
use ddp_kernels::ops::{Activation, SgdConstants};
use ddp_kernels::{DType, Device, Tensor};
use serde_json::Value;

const TOLERANCE: f64 = 1e-3;

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/losses.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn sizes(golden: &Value) -> Vec<usize> {
    golden["sizes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|size| size.as_u64().unwrap() as usize)
        .collect()
}

fn number(case: &Value, key: &str) -> f64 {
    case[key].as_f64().unwrap_or(0.0)
}

/// The step that `case` describes, with the golden file's initial weights.
fn step(golden: &Value, case: &Value, world: &World) -> Result<Step> {
    let sizes = sizes(golden);
    let activation = case["activation"].as_str();
    let activation = activation.map_or(Activation::Relu, |name| name.parse().unwrap());
    let (hidden, outputs) = (sizes[1..sizes.len() - 1].to_vec(), *sizes.last().unwrap());
    let layers = Mlp {
        hidden,
        outputs,
        activation,
        dropout: 0.0,
    }
    .layers();
    let model = Model::new(
        Box::new(layers),
        &sizes[..1],
        DType::F32,
        Device::Cpu,
        0,
        &|_| false,
    )?;
    for (index, pair) in sizes.windows(2).enumerate() {
        let bound = (1.0 / (pair[0] as f64).sqrt()) as f32;
        for (name, stream) in [("weight", 10 + 2 * index), ("bias", 11 + 2 * index)] {
            let id = model.params.find(&format!("{}.{name}", 2 * index))?.id;
            let fill = |values: &mut [f32]| {
                let draw = |(at, value): (usize, &mut f32)| {
                    *value = uniform(stream as u64, at as u64) * bound
                };
                values.iter_mut().enumerate().for_each(draw);
            };
            model.params.value(id).with_slice_mut(fill)?;
        }
    }
    let weight_decay = number(case, "weight_decay");
    let rule = match case["optimizer"].as_str().unwrap() {
        "adamw" => Rule {
            weight_decay,
            ..Rule::adamw()
        },
        _ => Rule {
            weight_decay,
            ..Rule::of(Method::Sgd(SgdConstants {
                momentum: number(case, "momentum"),
                nesterov: false,
            }))
        },
    };
    let class_weights = case["class_weights"].as_array().map(|weights| {
        let weights: Vec<f32> = weights
            .iter()
            .map(|weight| weight.as_f64().unwrap() as f32)
            .collect();
        cpu(&weights, &[weights.len()])
    });
    let label_smoothing = number(case, "smoothing");
    let loss: Box<dyn Loss> = match case["regression"].as_bool() {
        Some(true) => Box::new(Mse),
        _ => Box::new(CrossEntropy {
            label_smoothing,
            class_weights,
            ignore_index: None,
        }),
    };
    let optimizer = Optimizer::new(rule, &model.params)?;
    let reducer = ReducerOptions {
        sizes: Some(BucketSizes::of_bytes(4096)),
        dtype: DType::F32,
        ..ReducerOptions::default()
    };
    let options = StepOptions {
        reducer,
        clip_norm: number(case, "clip"),
        seed: 0,
        ..StepOptions::default()
    };
    Step::new(model, loss, optimizer, world.group("gradients")?, &options)
}

/// This rank's part of step `step0`'s rows.
fn batch(golden: &Value, case: &Value, world: &World, step0: u64, micro: usize) -> Batch {
    let sizes = sizes(golden);
    let (width, classes) = (sizes[0], *sizes.last().unwrap());
    let (global, count) = (
        golden["batch"].as_u64().unwrap(),
        golden["rows"].as_u64().unwrap(),
    );
    let mine = sampler::share(&(0..global), world.rank(), world.size());
    let rows: Vec<u64> = mine
        .clone()
        .map(|at| (step0 * global + at) % count)
        .collect();
    let x: Vec<f32> = rows
        .iter()
        .flat_map(|row| (0..width as u64).map(move |at| uniform(1, row * width as u64 + at)))
        .collect();
    let targets: Tensor = if case["regression"].as_bool() == Some(true) {
        let reversed = |features: &[f32]| {
            features[..classes]
                .iter()
                .rev()
                .map(|x| 0.5 * x)
                .collect::<Vec<_>>()
        };
        let values: Vec<f32> = x.chunks(width).flat_map(reversed).collect();
        cpu(&values, &[rows.len(), classes])
    } else {
        let largest = |features: &[f32]| {
            let first = &features[..classes];
            first
                .iter()
                .enumerate()
                .max_by(|(_, a), (_, b)| a.total_cmp(b))
                .unwrap()
                .0 as i64
        };
        let labels: Vec<i64> = x.chunks(width).map(largest).collect();
        Tensor::from_slice(&labels, &[rows.len()], Device::Cpu).unwrap()
    };
    Batch::new(
        step0,
        0,
        global,
        mine.start,
        cpu(&x, &[rows.len(), width]),
        targets,
        micro,
    )
}

fn losses(golden: &Value, case: &Value, ranks: usize, micro: usize) -> Vec<f64> {
    let run = |world: &World| -> Result<Vec<f64>> {
        let mut step = step(golden, case, world)?;
        let mut losses = Vec::new();
        for step0 in 0..60 {
            step.run(
                &batch(golden, case, world, step0, micro),
                number(case, "lr"),
            )?;
            losses.push(step.report()?.stats.loss());
        }
        Ok(losses)
    };
    on_ranks(ranks, Some(mixed(0, ranks as u64)), run).remove(0)
}

#[test]
fn sixty_steps_give_pytorchs_losses() {
    quietly();
    let golden = golden();
    for (name, case) in golden["cases"].as_object().unwrap() {
        let want: Vec<f64> = case["losses"]
            .as_array()
            .unwrap()
            .iter()
            .map(|loss| loss.as_f64().unwrap())
            .collect();
        assert_eq!(want.len(), 60);
        for (ranks, micro) in [(1, 50), (1, 8), (3, 50), (3, 7)] {
            let got = losses(&golden, case, ranks, micro);
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let bound = TOLERANCE * want.abs().max(0.1);
                let what = format!(
                    "{name}, {ranks} ranks, micro-batches of {micro}, step {}",
                    index + 1
                );
                assert!((got - want).abs() <= bound, "{what}: {got}, PyTorch {want}");
            }
        }
    }
}
