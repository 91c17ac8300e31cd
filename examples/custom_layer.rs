//! Your own layer by its formula, on the CPU and on GPUs: layer normalization over a row, with a
//! learned gain and bias. Its backward follows from the formula, and its forward is one pass over
//! memory. Checks its derivatives, then trains it for a few steps. `cargo run --release --example
//! custom_layer`.

use ddp::comm::World;
use ddp::data::{InMemory, Loader};
use ddp::kernels::{DType, Device, Random, Seed, Tensor};
use ddp::nn::check::DerivativeCheck;
use ddp::nn::{
    Activate, Init, Linear, Module, Mse, Pass, PassOptions, Result, Saved, Scope, Scratch,
    Sequential, Var,
};
use ddp::optim::{AdamW, Schedule, ScheduleShape};
use ddp::step::Step;

/// Each row (C), normalized to mean 0 and variance 1, times a gain plus a bias.
#[derive(Debug)]
struct LayerNorm;

impl Module for LayerNorm {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let columns = [x.size(-1)];
        let centred = x - x.mean(-1);
        let scale = ((&centred * &centred).mean(-1) + 1e-5).rsqrt();
        let gain = m.parameter("weight", &columns, Init::Constant(1.0));
        let bias = m.parameter("bias", &columns, Init::Constant(0.0));
        centred * scale * gain + bias
    }
}

/// The gradients of the input and of the parameters on `device`, for random numbers.
fn gradients(device: Device) -> Result<[Vec<f32>; 2]> {
    let layers = Sequential::new().then(LayerNorm);
    let model = layers.build(&[40], device, Seed(1))?;
    let mut random = Random::new(3);
    let x = Tensor::randn(&[9, 40], DType::F32, device, &mut random)?;
    let dy = x.randn_like(&mut random)?;
    let position = Tensor::from_slice(&[1i64, 0], &[2], device)?;
    let options = PassOptions {
        training: true,
        accumulate: false,
        last: true,
        seed: 1,
        position: &position,
    };
    let (mut scratch, mut saved) = (Scratch::new(device), Saved::default());
    let mut ready = |_| Ok(()); // A reducer would start to all-reduce this gradient here.
    let mut pass = Pass::new(&model.params, &mut scratch, &mut saved, options, &mut ready);
    model.forward(&mut pass, &x)?;
    let dx = model.backward_to_input(&mut pass, &dy)?;
    let dx = dx.expect("the input is of floats");
    Ok([dx.to_vec()?, model.params.gradients().to_vec()?])
}

const ROWS: usize = 256;
const STEPS: u64 = 150;

fn main() -> ddp::Result<()> {
    let world = World::single()?;
    let device = world.device()?;
    let worst = DerivativeCheck::new(&[8]).worst(LayerNorm)?;
    println!(
        "derivatives of layer normalization: within {:.0e} of finite differences (furthest by {})",
        worst.error(),
        worst.by
    );
    assert!(worst.error() < 1e-8);
    assert_eq!(
        gradients(device)?,
        gradients(Device::Cpu)?,
        "the same bits on {device}"
    );

    // y = sin 3x on [-1, 1).
    let x = Tensor::rand(&[ROWS, 1], DType::F32, Device::Cpu, &mut Random::new(2))?;
    x.with_slice_mut(|x: &mut [f32]| x.iter_mut().for_each(|x| *x = 2.0 * *x - 1.0))?;
    let y: Vec<f32> = x.to_vec()?.iter().map(|x: &f32| (3.0 * x).sin()).collect();
    let y = Tensor::from_slice(&y, &[ROWS, 1], Device::Cpu)?;
    let data = InMemory::numbers(x, y)?;

    let model = Sequential::new()
        .then(Linear::new(32))
        .then(LayerNorm)
        .then(Activate::relu())
        .then(Linear::new(1))
        .build(&[1], device, Seed(1))?;
    let mut step = Step::builder(model, Mse, AdamW::default()).build(&world)?;
    let mut loader = Loader::builder(data)
        .batch_size(64)
        .shuffle(Seed(1))
        .build(&world)?;
    let schedule = Schedule::new(ScheduleShape::Cosine, 0.05, 0.0, 10, STEPS)?;
    let (mut first_loss, mut loss) = (None, 0.0);
    for step0 in 0..STEPS {
        step.run(loader.load(step0)?, schedule.learning_rate(step0))?;
        if step0 == 0 || (step0 + 1) % 50 == 0 {
            loss = step.report()?.loss();
            first_loss.get_or_insert(loss);
            println!("step {:3}: loss {loss:.6}", step0 + 1);
        }
    }
    assert!(loss < 0.05 * first_loss.unwrap_or(0.0), "it learns");
    Ok(())
}
