//! The program of docs/own-program.md: a perceptron learns which points are near the origin, on as
//! many ranks as a launcher starts.

use ddp::comm::{Options, World};
use ddp::data::{InMemory, Loader};
use ddp::kernels::{DType, Device, Random, Seed, Tensor};
use ddp::nn::{CrossEntropy, Formula, Scope, Sequential, Var};
use ddp::optim::AdamW;
use ddp::step::Step;

fn forward(m: &mut Scope<'_>, x: &Var) -> Var {
    // this is the model; gradients follow from it
    let hidden = m.linear("hidden", x, 32).relu();
    m.linear("output", &hidden, 2)
}
fn train(world: &World) -> ddp::Result<()> {
    let points = Tensor::rand(&[600, 2], DType::F32, Device::Cpu, &mut Random::new(1))?;
    let is_near = |point: &[f32]| i64::from(point[0].hypot(point[1]) < 0.8);
    let labels: Vec<i64> = points.to_vec()?.chunks(2).map(is_near).collect();
    let data = InMemory::classes(points, labels, 2)?;
    let model = Sequential::new()
        .then(Formula(forward))
        .build(&[2], world.device()?, Seed(1))?;
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
