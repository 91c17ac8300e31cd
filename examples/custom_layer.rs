//! Your own layer: swish with a learned slope, y = x·σ(βx). Checks its derivatives, then trains it
//! for a moment. `cargo run --release --example custom_layer`. B is the number of rows of a batch.

use ddp::models::Model;
use ddp::nn::check::{Objective, worst_derivative};
use ddp::nn::{
    Build, Fold, Folded, Init, Layer, Linear, Loss, Mse, Pass, PassOptions, Saved, Scratch,
    Sequential,
};
use ddp::optim::{Clip, Optimizer, Rule, Schedule, Shape};
use ddp::params::ParamId;
use ddp_kernels::{DType, Device, Element, Random, Tensor, ops};

/// Swish with one slope for all elements.
#[derive(Debug, Default)]
struct Swish {
    slope: Option<ParamId>,
}

impl Swish {
    fn slope(&self) -> ParamId {
        self.slope.expect("built before it runs")
    }
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

/// `out = f(a, b)` elementwise in host memory, in f32 or (for the derivative check) f64.
fn map(out: &Tensor, a: &Tensor, b: &Tensor, f: impl Fn(f64, f64) -> f64) -> ddp::Result<()> {
    fn of<T: Element>(
        out: &Tensor,
        a: &Tensor,
        b: &Tensor,
        f: impl Fn(f64, f64) -> f64,
    ) -> ddp::Result<()> {
        let all = |out: &mut [T], a: &[T], b: &[T]| {
            let pairs = a
                .iter()
                .zip(b)
                .map(|(a, b)| T::from_f64(f(a.to_f64(), b.to_f64())));
            out.iter_mut()
                .zip(pairs)
                .for_each(|(out, value)| *out = value);
        };
        Ok(a.with_slice(|a| b.with_slice(|b| out.with_slice_mut(|out| all(out, a, b))))???)
    }
    if out.dtype() == DType::F64 {
        of::<f64>(out, a, b, f)
    } else {
        of::<f32>(out, a, b, f)
    }
}

impl Layer for Swish {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> ddp::nn::Result<Vec<usize>> {
        self.slope = Some(build.parameter("slope", &[1], Init::Constant(1.0))?);
        Ok(shape.to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> ddp::nn::Result<Tensor> {
        // Reading a number is free on the CPU. On a GPU it would wait; write a kernel there.
        let slope = pass.value(self.slope())?.index(0)?.item()?;
        let y = pass.take(x.shape())?;
        map(&y, x, x, |x, _| x * sigmoid(slope * x))?;
        if pass.is_training() {
            pass.save(x);
        }
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> ddp::nn::Result<Folded> {
        let slope = pass.value(self.slope())?.index(0)?.item()?;
        let x = pass.restore();
        let dx = pass.take(x.shape())?;
        if let Some(gradient) = pass.gradient(self.slope()) {
            // First use dx for each element's part of the slope's gradient: x²·σ(1 − σ)·dy.
            map(&dx, &x, dy, |x, dy| {
                let s = sigmoid(slope * x);
                x * x * s * (1.0 - s) * dy
            })?;
            let sum = pass.take(&[])?;
            ops::sum_into(&sum, &dx)?;
            gradient.write(&sum.reshape(&[1])?)?;
        }
        pass.finished(self.slope())?;
        map(&dx, &x, dy, |x, dy| {
            let s = sigmoid(slope * x);
            (s + slope * x * s * (1.0 - s)) * dy
        })?;
        pass.fold(dx, fold)
    }
}

const ROWS: usize = 256;
const STEPS: u64 = 300;

fn main() -> ddp::Result<()> {
    let device = Device::Cpu;
    let worst = worst_derivative(
        &mut Swish::default(),
        &[8],
        4,
        1,
        Objective::Projection,
        &|_| false,
    )?;
    println!(
        "derivatives of swish: within {:.0e} of finite differences (furthest by {})",
        worst.error(),
        worst.by
    );
    assert!(worst.error() < 1e-8);

    let layers = Sequential::new()
        .then(Linear::new(32))
        .then(Swish::default())
        .then(Linear::new(1));
    let model = Model::new(Box::new(layers), &[1], DType::F32, device, 1, &|_| false)?;
    let mut optimizer = Optimizer::new(Rule::adamw(), &model.params)?;
    let clip = Clip::new(0.0, &model.params)?;
    let schedule = Schedule::new(Shape::Cosine, 0.1, 0.0, 10, STEPS)?;
    let (mut scratch, mut saved) = (Scratch::new(device), Saved::default());
    let stats = Tensor::zeros(&[4], DType::F32, device)?;

    // y = sin 3x on [-1, 1).
    let x = Tensor::rand(&[ROWS, 1], DType::F32, device, &mut Random::new(2))?;
    x.with_slice_mut(|x: &mut [f32]| x.iter_mut().for_each(|x| *x = 2.0 * *x - 1.0))?;
    let y = x.empty_like()?;
    map(&y, &x, &x, |x, _| (3.0 * x).sin())?;

    let (mut first_loss, mut loss) = (None, 0.0);
    for step in 1..=STEPS {
        ops::zero(&stats)?;
        let position = Tensor::from_slice(&[step as i64, 0], &[2], device)?;
        let options = PassOptions {
            training: true,
            accumulate: false,
            last: true,
            seed: 1,
            position: &position,
        };
        let mut ready = |_| Ok(()); // A reducer would start to all-reduce this gradient here.
        let mut pass = Pass::new(&model.params, &mut scratch, &mut saved, options, &mut ready);
        let output = model.forward(&mut pass, &x)?; // (B, 1)
        let gradient = Mse.gradient(&mut pass, &output, &y, &stats)?;
        model.backward(&mut pass, &gradient)?;
        clip.compute(&model.params, Some(&stats.slice(1..2)?), false)?;
        optimizer.update(
            &model.params,
            step,
            schedule.learning_rate(step),
            Some(clip.out()),
            None,
        )?;
        loss = stats.index(0)?.item()? / ROWS as f64;
        first_loss.get_or_insert(loss);
        if step == 1 || step % 100 == 0 {
            println!("step {step:3}: loss {loss:.6}");
        }
    }
    let slope = model
        .params
        .value(model.params.find("1.slope")?.id)
        .index(0)?
        .item()?;
    println!("the slope went from 1 to {slope:.3}");
    assert!(loss < 0.05 * first_loss.unwrap_or(0.0), "it learns");
    Ok(())
}
