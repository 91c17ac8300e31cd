//! Your own data and training loop, on any number of ranks: a small model learns to tell three
//! spirals apart.
//!
//! ```sh
//! cargo build --release -p ddp-examples --example own_data
//! mpirun -n 2 target/release/examples/own_data
//! ```

use std::process::ExitCode;

use ddp::comm::{Options, World};
use ddp::data::{Dataset, Loader, RowSpec, TaskSpec};
use ddp::kernels::{Seed, Tensor};
use ddp::nn::{Activate, CrossEntropy, Linear, Sequential};
use ddp::optim::{AdamW, Schedule, ScheduleShape};
use ddp::step::Step;

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
    let device = world.device()?;
    let model = Sequential::new()
        .then(Linear::new(64))
        .then(Activate::relu())
        .then(Linear::new(3))
        .build(&[2], device, Seed(1))?;
    let mut step = Step::builder(model, CrossEntropy::default(), AdamW::default()).build(world)?;
    let mut loader = Loader::builder(Spirals::new(3000, 0))
        .batch_size(64)
        .shuffle(Seed(1))
        .build(world)?;
    let mut held_out = Loader::builder(Spirals::new(600, 3000))
        .batch_size(256)
        .build_in_order(world)?;
    // Every rank creates the same groups in the same order.
    let evaluation = world.group("evaluation")?;
    let schedule = Schedule::new(ScheduleShape::Cosine, 0.02, 0.0, 20, STEPS)?;
    for step0 in 0..STEPS {
        step.run(loader.load(step0)?, schedule.learning_rate(step0))?;
        if (step0 + 1) % 200 == 0 {
            let report = step.report()?;
            let tried = step.evaluate(&mut held_out, &evaluation)?;
            if world.rank() == 0 {
                let (loss, accuracy) = (report.loss(), 100.0 * tried.accuracy());
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
