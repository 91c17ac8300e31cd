//! Your own data and training loop, on any number of ranks: a small model learns to tell three
//! spirals apart.
//!
//! ```sh
//! cargo build --release -p ddp-examples --example own_data
//! mpirun -n 2 target/release/examples/own_data
//! ```

use std::process::ExitCode;
use std::sync::Arc;

use ddp::comm::{Options, World};
use ddp::data::{Dataset, InOrder, Loader, RowSpec, Sampler, Source, TaskSpec};
use ddp::kernels::{DType, Device, Tensor};
use ddp::models::Model;
use ddp::nn::{Activate, CrossEntropy, Linear, Sequential};
use ddp::optim::{Optimizer, Rule, Schedule, Shape};
use ddp::step::{Step, StepOptions};

/// Points on three spirals. A row is a pure function of its number, so all ranks have the same
/// data.
#[derive(Debug)]
struct Spirals {
    rows: u64,
    /// Number of the first row: the rows before it belong to another set.
    first: u64,
    spec: RowSpec,
}

impl Spirals {
    fn new(rows: u64, first: u64) -> Spirals {
        let names = ["red", "green", "blue"].map(String::from).to_vec();
        let task = TaskSpec::named_classes(names);
        Spirals {
            rows,
            first,
            spec: RowSpec::features(2, task),
        }
    }
}

impl Dataset for Spirals {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    fn fingerprint(&self) -> ddp::data::Result<String> {
        Ok(format!(
            "spirals {} {} {:x}",
            self.rows,
            self.first,
            ddp::data::sampled_hash(self)?
        ))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> ddp::data::Result<()> {
        inputs.with_slice_mut(|points: &mut [f32]| {
            targets.with_slice_mut(|classes: &mut [i64]| {
                let points = points.chunks_exact_mut(2);
                for ((row, point), class) in rows.iter().zip(points).zip(classes) {
                    let drawn = (row + self.first).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    *class = (drawn % 3) as i64;
                    let radius = ((drawn >> 20) % 1000) as f32 / 1000.0;
                    let angle = 4.0 * radius + *class as f32 * std::f32::consts::TAU / 3.0;
                    point.copy_from_slice(&[radius * angle.cos(), radius * angle.sin()]);
                }
            })
        })??;
        Ok(())
    }
}

const STEPS: u64 = 600;

fn train(world: &World) -> ddp::Result<()> {
    let (device, rank, size) = (Device::Cpu, world.rank(), world.size());
    let data: Arc<dyn Dataset> = Arc::new(Spirals::new(3000, 0));
    let held_out: Arc<dyn Dataset> = Arc::new(Spirals::new(600, 3000));

    let layers = Sequential::new()
        .then(Linear::new(64))
        .then(Activate::relu())
        .then(Linear::new(3));
    let model = Model::new(
        Box::new(layers),
        data.row_shape(),
        DType::F32,
        device,
        1,
        &|_name| false,
    )?;
    let optimizer = Optimizer::new(Rule::adamw(), &model.params)?;
    // Every rank creates the same groups in the same order. The reducer uses one of them.
    let (gradients, evaluation) = (world.group("gradients")?, world.group("evaluation")?);
    let loss = Box::new(CrossEntropy::default());
    let mut step = Step::new(model, loss, optimizer, gradients, &StepOptions::default())?;

    let sampler = Sampler::new(data.rows(), 64, 1, false)?;
    let mut loader = Loader::new(Source::new(data, [device; 2]), sampler, rank, size, None)?;
    let mut held_out = InOrder::new(Source::new(held_out, [device; 2]), rank, size, 256)?;
    let schedule = Schedule::new(Shape::Cosine, 0.02, 0.0, 20, STEPS)?;
    for step0 in 0..STEPS {
        step.run(loader.load(step0)?, schedule.learning_rate(step0), false)?;
        if (step0 + 1) % 200 == 0 {
            let report = step.report(false)?;
            let tried = step.evaluate(&mut held_out, &evaluation)?;
            if rank == 0 {
                let (loss, accuracy) = (report.stats.loss(), 100.0 * tried.accuracy());
                println!(
                    "step {}: loss {loss:.4}, {accuracy:.1}% of held-out points right",
                    step0 + 1
                );
            }
            assert!(step0 + 1 < STEPS || tried.accuracy() > 0.95, "it learns");
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    // An error on one rank ends all ranks and is printed once.
    World::run(&Options::default(), train)
}
