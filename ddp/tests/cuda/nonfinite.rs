//! A non-finite loss, found on the GPU: the model stays what it was, and the rows are named.

use std::sync::Arc;

use ddp::config::GraphChoice;
use ddp::data::{Dataset, InOrder, RowSpec, Source, TaskSpec};
use ddp_comm::Group;
use ddp_kernels::{Device, Tensor};

use crate::support::lines::{LINES, Lines};
use crate::support::random::uniform;
use crate::{Setup, gpu};

/// The row whose target is not a class, and that target.
const BAD: (u64, i64) = (37, 4);
const STEPS: u64 = 12;

/// Sixty-four rows of 4 classes, and one row that is of none.
#[derive(Debug)]
struct Mislabelled(RowSpec);

impl Dataset for Mislabelled {
    fn rows(&self) -> u64 {
        64
    }
    fn spec(&self) -> &RowSpec {
        &self.0
    }
    fn fingerprint(&self) -> ddp::data::Result<String> {
        Ok("rows of a test".into())
    }
    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> ddp::data::Result<()> {
        inputs.with_slice_mut(|x: &mut [f32]| {
            for (row, x) in rows.iter().zip(x.chunks_mut(6)) {
                let x = x.iter_mut().enumerate();
                x.for_each(|(at, x)| *x = uniform(1, row * 6 + at as u64));
            }
        })?;
        Ok(targets.with_slice_mut(|classes: &mut [i64]| {
            for (&row, class) in rows.iter().zip(classes) {
                *class = if row == BAD.0 {
                    BAD.1
                } else {
                    (row % 4) as i64
                };
            }
        })?)
    }
}

fn setup() -> Setup {
    let task = TaskSpec::numbered_classes(4);
    Setup {
        data: Arc::new(Mislabelled(RowSpec::features(6, task))),
        batch: 8,
        micro: Some(3),
        ..Setup::new("glyphs,rows=1,held-out=0")
    }
}

#[test]
fn an_invalid_target_stops_updates_and_its_row_is_named() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    for graph in [GraphChoice::Off, GraphChoice::On] {
        let mut training = setup().start(device, graph).unwrap();
        // In the second epoch, when steps are graph launches. The first epoch has the row too, so
        // the fault starts after it.
        let step_of = |epoch: u64, training: &mut crate::Training| {
            let steps = epoch * 8..(epoch + 1) * 8;
            let has = |step0: &u64| {
                training.loader.load(*step0).unwrap();
                training.loader.rows().contains(&BAD.0)
            };
            steps
                .clone()
                .find(has)
                .expect("every row is in every epoch")
        };
        let [first, second] = [step_of(0, &mut training), step_of(1, &mut training)];
        let mut before = training.bits().unwrap();
        let mut taken = 0;
        for step0 in (first + 1..second).chain(second..second + 4) {
            training.take(step0, 0.01, false).unwrap();
            taken += 1;
            let after = training.bits().unwrap();
            let report = training.step.report().unwrap();
            let is_bad = step0 >= second;
            assert_eq!(
                report.bad_step,
                is_bad.then_some(second + 1),
                "graph {graph:?}, step {}",
                step0 + 1
            );
            assert_eq!(report.own_bad_step, report.bad_step);
            let (values, old) = (
                without_gradients(&training, &after),
                without_gradients(&training, &before),
            );
            assert_eq!(
                values == old,
                is_bad,
                "graph {graph:?}, step {}: values and moments",
                step0 + 1
            );
            before = after;
        }
        assert!(taken < STEPS + 8, "{taken}");
        let batch = training.loader.load(second).unwrap().clone();
        let losses = training.step.losses_of(&batch).unwrap();
        let bad: Vec<u64> = losses
            .iter()
            .zip(training.loader.rows())
            .filter(|(loss, _)| loss.is_nan())
            .map(|(_, &row)| row)
            .collect();
        assert_eq!(bad, [BAD.0], "graph {graph:?}: {losses:?}");
    }
}

#[test]
fn a_target_of_a_position_that_is_no_class_is_found_by_its_row_and_position() {
    let Some(gpu) = gpu() else { return };
    let (row, position) = (37, 1);
    let rows = Lines {
        bad: Some((row, position)),
        ..Lines::new(64)
    };
    let setup = Setup {
        data: Arc::new(rows),
        batch: 8,
        micro: Some(3),
        ..Setup::new("glyphs,rows=1,held-out=0")
    };
    for graph in [GraphChoice::Off, GraphChoice::On] {
        let mut training = setup.start(gpu.device, graph).unwrap();
        (0..8).for_each(|step0| training.take(step0, 0.01, false).unwrap());
        let report = training.step.report().unwrap();
        let bad_step = report.bad_step.expect("every row is in the first epoch");
        let batch = training.loader.load(bad_step - 1).unwrap().clone();
        let losses = training.step.losses_of(&batch).unwrap();
        assert_eq!(losses.len(), batch.mine * LINES, "a loss for each position");
        let bad: Vec<usize> = (0..losses.len())
            .filter(|&at| losses[at].is_nan())
            .collect();
        let rows = training.loader.rows();
        assert_eq!(bad.len(), 1, "graph {graph:?}: {losses:?}");
        let found = (rows[bad[0] / LINES], (bad[0] % LINES) as u64);
        assert_eq!(found, (row, position), "graph {graph:?}");
    }
}

#[test]
fn every_position_of_integer_rows_is_evaluated() {
    let Some(gpu) = gpu() else { return };
    let setup = Setup {
        data: Arc::new(Lines::new(50)),
        ..Setup::new("glyphs,rows=1,held-out=0")
    };
    let mut losses = Vec::new();
    for device in [Device::Cpu, gpu.device] {
        let mut training = setup.start(device, GraphChoice::Off).unwrap();
        let mut held_out =
            InOrder::new(Source::new(setup.data.clone(), [device; 2]), 0, 1, 7).unwrap();
        let stats = training
            .step
            .evaluate(&mut held_out, &Group::alone())
            .unwrap();
        assert_eq!(stats.rows, (50 * LINES) as f64);
        losses.push(stats.loss());
    }
    // Sums of at most 24 products, and of 150 losses, in f32.
    let bound = 200.0 * f64::from(f32::EPSILON);
    assert!((losses[0] / losses[1] - 1.0).abs() < bound, "{losses:?}");
}

/// The gradients' bits come last.
fn without_gradients(training: &crate::Training, bits: &[u32]) -> Vec<u32> {
    bits[..bits.len() - training.step.stages()[0].model().params.gradients().count()].to_vec()
}
