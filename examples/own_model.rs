//! Trains your own model on your own data, with everything else that `ddp-train` has: the metrics
//! log, evaluations, checkpoints, resuming, and saving on Ctrl-C. Started again, it continues from
//! its newest checkpoint.
//!
//! ```sh
//! cargo build --release -p ddp-examples --example own_model
//! mpirun -n 2 target/release/examples/own_model spirals 5000   # the run's folder, its steps
//! ```

use std::process::ExitCode;

use ddp::Trainer;
use ddp::comm::{Options, World};
use ddp::config::{Config, Resume};
use ddp::data::{Data, InMemory, TaskSpec};
use ddp::kernels::{Device, Tensor};
use ddp::models::OwnLayers;
use ddp::nn::{Activate, CrossEntropy, Linear, Sequential};

/// This many points on three spirals, after `first` others.
fn spirals(rows: usize, first: usize) -> ddp::Result<InMemory> {
    let (mut points, mut classes) = (Vec::new(), Vec::new());
    for row in first..first + rows {
        let (class, radius) = (row % 3, (row / 3 * 7 % 1000) as f32 / 1000.0);
        let angle = 4.0 * radius + class as f32 * std::f32::consts::TAU / 3.0;
        points.extend([radius * angle.cos(), radius * angle.sin()]);
        classes.push(class as i64);
    }
    let points = Tensor::from_slice(&points, &[rows, 2], Device::Cpu)?;
    let classes = Tensor::from_slice(&classes, &[rows], Device::Cpu)?;
    let names = ["red", "green", "blue"].map(String::from).to_vec();
    Ok(InMemory::new(
        points,
        classes,
        TaskSpec::named_classes(names),
    )?)
}

fn train(world: &World) -> ddp::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let out = arguments.next().unwrap_or_else(|| "spirals".into()).into();
    let steps = arguments.next().and_then(|steps| steps.parse().ok());
    let model = OwnLayers::new(|data| {
        let hidden = Sequential::new()
            .then(Linear::new(64))
            .then(Activate::relu());
        Ok(hidden.then(Linear::new(data.outputs)))
    });
    let data = Data::own(spirals(2400, 0)?, spirals(600, 2400)?);
    Trainer::builder(model, CrossEntropy::default(), data)
        .config(Config {
            steps: steps.or(Some(600)),
            batch_size: Some(60),
            lr: Some(0.01),
            checkpoint_every: Some(100),
            resume: Resume::Auto,
            out,
            ..Config::default()
        })
        .run(world)
}

fn main() -> ExitCode {
    let options = Options {
        catches_stop: true,
        ..Options::default()
    };
    // An error on one rank ends all ranks and is printed once.
    World::run(&options, train)
}
