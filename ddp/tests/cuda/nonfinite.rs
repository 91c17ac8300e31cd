//! A loss that is no number, found on the GPU: the model stays what it was, and the rows are named.

use std::sync::Arc;

use ddp::Result;
use ddp::config::GraphChoice;
use ddp::data::{Dataset, Targets, Task};

use crate::common::uniform;
use crate::{Setup, gpu};

/// The row whose target is no class, and that target.
const BAD: (u64, i64) = (37, 4);
const STEPS: u64 = 12;

/// Sixty-four rows of 4 classes, and one row that is of none.
#[derive(Debug)]
struct Mislabelled(Task);

impl Dataset for Mislabelled {
    fn rows(&self) -> u64 {
        64
    }
    fn row_shape(&self) -> &[usize] {
        &[6]
    }
    fn task(&self) -> &Task {
        &self.0
    }
    fn fingerprint(&self) -> Result<String> {
        Ok("rows of a test".into())
    }
    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()> {
        for (row, x) in rows.iter().zip(x.chunks_mut(6)) {
            x.iter_mut().enumerate().for_each(|(at, x)| *x = uniform(1, row * 6 + at as u64));
        }
        let Targets::Classes(classes) = targets else { panic!("classes") };
        rows.iter().zip(classes).for_each(|(&row, class)| *class = if row == BAD.0 { BAD.1 } else { (row % 4) as i64 });
        Ok(())
    }
}

fn setup() -> Setup {
    let task = Task::Classification { classes: 4, names: Vec::new() };
    Setup { data: Arc::new(Mislabelled(task)), batch: 8, micro: Some(3), ..Setup::new("glyphs,rows=1,held-out=0") }
}

#[test]
fn a_target_that_is_no_class_stops_the_updates_and_is_found_by_its_row() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    for graph in [GraphChoice::Off, GraphChoice::On] {
        let mut training = setup().start(device, graph).unwrap();
        // In the second epoch, when steps are launches: the first sees the row too, so it begins behind it.
        let step_of = |epoch: u64, training: &mut crate::Training| {
            let steps = epoch * 8..(epoch + 1) * 8;
            let has = |step0: &u64| {
                training.loader.load(*step0).unwrap();
                training.loader.rows().contains(&BAD.0)
            };
            steps.clone().find(has).expect("every row is in every epoch")
        };
        let [first, second] = [step_of(0, &mut training), step_of(1, &mut training)];
        let mut before = training.bits().unwrap();
        let mut taken = 0;
        for step0 in (first + 1..second).chain(second..second + 4) {
            training.take(step0, 0.01, false).unwrap();
            taken += 1;
            let after = training.bits().unwrap();
            let report = training.step.report(false).unwrap();
            let is_bad = step0 >= second;
            assert_eq!(report.bad_step, is_bad.then_some(second + 1), "graph {graph:?}, step {}", step0 + 1);
            assert_eq!(report.own_bad_step, report.bad_step);
            let (values, old) = (without_gradients(&training, &after), without_gradients(&training, &before));
            assert_eq!(values == old, is_bad, "graph {graph:?}, step {}: values and moments", step0 + 1);
            before = after;
        }
        assert!(taken < STEPS + 8, "{taken}");
        let batch = training.loader.load(second).unwrap().clone();
        let losses = training.step.losses_of(&batch).unwrap();
        let bad: Vec<u64> =
            losses.iter().zip(training.loader.rows()).filter(|(loss, _)| loss.is_nan()).map(|(_, &row)| row).collect();
        assert_eq!(bad, [BAD.0], "graph {graph:?}: {losses:?}");
    }
}

/// The gradients' bits come last.
fn without_gradients(training: &crate::Training, bits: &[u32]) -> Vec<u32> {
    bits[..bits.len() - training.step.model().params.gradients().count()].to_vec()
}
