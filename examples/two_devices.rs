//! One model on two GPUs of one process: the first layers on one, the last on the other.
//! `cargo run --release --example two_devices`.
//!
//! In PyTorch's tutorial on model parallelism you write `x.to("cuda:1")` in `forward`. Here the
//! layers are split for you. Activations and their gradients cross only at the split; the table at
//! the end lists every crossing with its source line. With fewer than two GPUs both halves share
//! one device.
//!
//! `ddp-train --devices-per-rank 2` does this in a full training run.

use ddp::comm::World;
use ddp::data::Loader;
use ddp::kernels::device::discover;
use ddp::kernels::transfer::{Ledger, Phase};
use ddp::kernels::{Device, Seed};
use ddp::nn::{Activate, CrossEntropy, Linear, Sequential};
use ddp::optim::AdamW;
use ddp::step::Step;

const STEPS: u64 = 60;
const BATCH: u64 = 64;

/// Two GPUs, or the best device twice.
fn two_devices() -> [Device; 2] {
    let gpus = discover().gpus.len();
    if gpus >= 2 {
        return [Device::Cuda(0), Device::Cuda(1)];
    }
    let only = Device::best();
    println!(
        "this takes two GPUs, and here are {gpus}: both halves of the model lie on {only}, and nothing crosses"
    );
    [only; 2]
}

fn main() -> ddp::Result<()> {
    let devices = two_devices();
    let data = ddp::data::open(
        &"synthetic:classification,rows=2048,held-out=0,features=16,classes=4".parse()?,
    )?
    .train;

    // The split gives both devices about the same number of parameters. An activation stays with
    // its layer.
    let layers = Sequential::new()
        .then(Linear::new(64))
        .then(Activate::relu())
        .then(Linear::new(64))
        .then(Activate::relu())
        .then(Linear::new(4));
    let models = layers.build_over(data.row_shape(), &devices, Seed(1))?;
    let world = World::single()?;
    let mut step =
        Step::builder_over(models, CrossEntropy::default(), AdamW::default()).build(&world)?;
    for stage in step.stages() {
        for parameter in stage.model().params.in_order() {
            println!("{}", stage.model().params.value(parameter.id));
        }
    }

    // Features go to the first device, targets to the last.
    let mut loader = Loader::builder(data)
        .batch_size(BATCH)
        .shuffle(Seed(1))
        .devices(devices[0], devices[1])
        .build(&world)?;
    let mut losses = Vec::new();
    for step0 in 0..STEPS {
        step.run(loader.load(step0)?, 0.01)?;
        if step0 == 0 || (step0 + 1) % 20 == 0 {
            losses.push(step.report()?.loss());
            println!("step {:2}: loss {:.4}", step0 + 1, losses[losses.len() - 1]);
        }
    }
    assert!(losses[losses.len() - 1] < 0.5 * losses[0], "it learns");

    let crossed = Ledger::current();
    print!("what crossed, and where in the source:\n{crossed}");
    let between = |row: &&ddp::kernels::transfer::Row| {
        row.phase == Phase::Step && row.source.is_accelerator()
    };
    let bytes: u64 = crossed
        .rows()
        .iter()
        .filter(between)
        .map(|row| row.bytes)
        .sum();
    println!("between the two devices: {} bytes a step", bytes / STEPS);
    Ok(())
}
