//! The program of README.md: a perceptron learns which points are near the origin, on as many ranks
//! as a launcher starts.

use ddp::comm::{Options, World};
use ddp::data::{InMemory, Loader};
use ddp::kernels::{DType, Device, Random, Seed, Tensor};
use ddp::nn::{Activate, CrossEntropy, Linear, Sequential};
use ddp::optim::AdamW;
use ddp::step::Step;

fn train(world: &World) -> ddp::Result<()> {
    let device = world.device()?; // this rank's GPU, or the CPU
    let points = Tensor::rand(&[600, 2], DType::F32, Device::Cpu, &mut Random::new(1))?;
    let is_near = |point: &[f32]| i64::from(point[0].hypot(point[1]) < 0.8);
    let labels: Vec<i64> = points.to_vec()?.chunks(2).map(is_near).collect();
    let data = InMemory::classes(points, labels, 2)?;
    let layers = Sequential::new()
        .then(Linear::new(32))
        .then(Activate::relu())
        .then(Linear::new(2));
    let model = layers.build(&[2], device, Seed(1))?;
    let mut loader = Loader::builder(data)
        .batch_size(60)
        .shuffle(Seed(1))
        .build(world)?;
    let mut step = Step::builder(model, CrossEntropy::default(), AdamW::default()).build(world)?;
    for index in 0..300 {
        step.run(loader.load(index)?, 0.01)?;
    }
    println!("accuracy {}", step.report()?.accuracy());
    Ok(())
}
fn main() -> std::process::ExitCode {
    World::run(&Options::default(), train)
}
