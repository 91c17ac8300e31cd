//! Your own layer, on the CPU and on GPUs: layer normalization over a row, with a learned gain and
//! bias. Checks its derivatives, then trains it for a few steps. `cargo run --release --example
//! custom_layer`. Letters: B rows of a batch, C columns.

use ddp::comm::World;
use ddp::data::{InMemory, Loader};
use ddp::kernels::{DType, Device, Random, Seed, Tensor, ops};
use ddp::nn::check::DerivativeCheck;
use ddp::nn::{
    Activate, Build, Init, Layer, Linear, Mse, Pass, PassOptions, Result, Saved, Scratch,
    Sequential,
};
use ddp::optim::{AdamW, Schedule, Shape};
use ddp::params::ParamId;
use ddp::step::Step;

/// y = n · gain + bias with n = (x − mean) / √(variance + 1e-5), for each row (C).
#[derive(Debug, Default)]
struct LayerNorm {
    /// Gain and bias, (C) each.
    parameters: Option<[ParamId; 2]>,
}

impl LayerNorm {
    fn parameters(&self) -> [ParamId; 2] {
        self.parameters.expect("built before it runs")
    }
}

impl Layer for LayerNorm {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let gain = build.parameter("weight", shape, Init::Constant(1.0))?;
        let bias = build.parameter("bias", shape, Init::Constant(0.0))?;
        self.parameters = Some([gain, bias]);
        Ok(shape.to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let [gain, bias] = self.parameters();
        let [n, y] = [pass.take(x.shape())?, pass.take(x.shape())?]; // (B, C)
        let [mean, scale] = [
            pass.take(&[x.shape()[0], 1])?,
            pass.take(&[x.shape()[0], 1])?,
        ];
        ops::row_mean_into(&mean, x)?;
        ops::sub_into(&n, x, &mean)?;
        ops::mul_into(&y, &n, &n)?;
        ops::row_mean_into(&mean, &y)?; // the variance
        ops::rsqrt_into(&scale, &mean, 1e-5)?;
        ops::mul_into(&n, &n, &scale)?;
        ops::mul_into(&y, &n, pass.value(gain)?)?;
        ops::add_into(&y, &y, pass.value(bias)?)?;
        if pass.is_training() {
            pass.save(&n);
            pass.save(&scale);
        }
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let [gain, bias] = self.parameters();
        let (scale, n) = (pass.restore(), pass.restore());
        let [dx, part] = [pass.take(n.shape())?, pass.take(n.shape())?];
        if let Some(gradient) = pass.gradient(bias) {
            ops::column_sum_into(gradient.tensor, dy, gradient.accumulate)?;
        }
        pass.finished(bias)?;
        if let Some(gradient) = pass.gradient(gain) {
            ops::mul_into(&part, dy, &n)?;
            ops::column_sum_into(gradient.tensor, &part, gradient.accumulate)?;
        }
        pass.finished(gain)?;
        // dx = scale · (dn − mean of dn − n · mean of (dn · n)) with dn = dy · gain.
        let mean = pass.take(scale.shape())?;
        ops::mul_into(&dx, dy, pass.value(gain)?)?;
        ops::mul_into(&part, &dx, &n)?;
        ops::row_mean_into(&mean, &part)?;
        ops::mul_into(&part, &n, &mean)?;
        ops::row_mean_into(&mean, &dx)?;
        ops::sub_into(&dx, &dx, &mean)?;
        ops::sub_into(&dx, &dx, &part)?;
        ops::mul_into(&dx, &dx, &scale)?;
        Ok(Some(dx))
    }
}

/// The gradients of the input and of the parameters on `device`, for random numbers.
fn gradients(device: Device) -> Result<[Vec<f32>; 2]> {
    let layers = Sequential::new().then(LayerNorm::default());
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
    let mut layer = LayerNorm::default();
    let worst = DerivativeCheck::new(&[8]).worst(&mut layer)?;
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
        .then(LayerNorm::default())
        .then(Activate::relu())
        .then(Linear::new(1))
        .build(&[1], device, Seed(1))?;
    let mut step = Step::builder(model, Mse, AdamW::default()).build(&world)?;
    let mut loader = Loader::builder(data)
        .batch_size(64)
        .shuffle(Seed(1))
        .build(&world)?;
    let schedule = Schedule::new(Shape::Cosine, 0.05, 0.0, 10, STEPS)?;
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
