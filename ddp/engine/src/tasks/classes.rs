//! Learning classes: the cross-entropy.

mod evaluation;
mod predictions;
mod weights;

use ddp_data::{Classes, Data, TensorSpec};
use ddp_kernels::transfer::announced;
use ddp_kernels::{Device, Tensor};
use ddp_nn::{CrossEntropy, Loss};

pub use self::weights::ClassWeights;
use super::best::BestBy;
use super::task::{Evaluation, LossOptions, PredictionOptions, Predictions, Task};
use crate::confusion::ClassCounts;
use crate::error::Result;
use crate::step::Stats;

/// One of some classes for each row, or for each position of a row.
#[derive(Clone, Debug)]
pub(super) struct LearnClasses(pub(super) Classes);

impl Task for LearnClasses {
    fn learns(&self) -> &'static str {
        "classes"
    }

    fn loss_settings(&self) -> &'static [&'static str] {
        &["class-weights", "label-smoothing"]
    }

    fn check_values(&self, options: &LossOptions, data: &str) -> Result<()> {
        match &options.class_weights {
            // Refused with the rows of the classes, if at all.
            ClassWeights::Balanced => Ok(()),
            weights => weights.of(&self.0, None, data).map(drop),
        }
    }

    fn with_weights(&self, options: &LossOptions, data: &Data, name: &str) -> Result<LossOptions> {
        let rows = data.train.rows_of_classes();
        let weights = options.class_weights.of(&self.0, rows, name)?;
        Ok(LossOptions {
            class_weights: weights.unwrap_or_default().into(),
            ..options.clone()
        })
    }

    fn loss(&self, options: &LossOptions, device: Device) -> Result<Box<dyn Loss>> {
        Ok(Box::new(CrossEntropy {
            label_smoothing: options.label_smoothing,
            class_weights: weights(&options.class_weights.numbers(), device)?,
            ignore_index: None,
        }))
    }

    fn accuracy(&self, stats: &Stats) -> Option<f64> {
        Some(stats.accuracy())
    }

    fn measures(&self, targets: &TensorSpec) -> Vec<BestBy> {
        use BestBy::{Accuracy, Auc, Balanced, Loss};
        match (targets.elements(), self.0.count()) {
            (1, 2) => vec![Loss, Accuracy, Balanced, Auc],
            (1, _) => vec![Loss, Accuracy, Balanced],
            _ => vec![Loss, Accuracy],
        }
    }

    fn wrong_target(&self, target: f64) -> Option<String> {
        let count = self.0.count();
        let is_class = (0.0..count as f64).contains(&target);
        (!is_class).then(|| format!("target {target}: expected a class from 0 to {}", count - 1))
    }

    fn class_counts(&self, targets: &TensorSpec) -> Option<ClassCounts> {
        let is_one_a_row = targets.elements() == 1;
        is_one_a_row.then(|| ClassCounts::of(self.0.count()))
    }

    fn evaluation(&self, _columns: Option<Vec<String>>) -> Box<dyn Evaluation> {
        Box::new(evaluation::Answers::of(&self.0))
    }

    fn predictions(&self, options: PredictionOptions) -> Result<Box<dyn Predictions>> {
        Ok(Box::new(predictions::ClassesOfRows::new(&self.0, options)))
    }
}

/// The weight of each class, f32 (C) on `device`; None for equal weights.
fn weights(class_weights: &[f64], device: Device) -> Result<Option<Tensor>> {
    if class_weights.is_empty() {
        return Ok(None);
    }
    let weights: Vec<f32> = class_weights.iter().map(|&weight| weight as f32).collect();
    let weights = Tensor::from_slice(&weights, &[weights.len()], Device::Cpu)?;
    let weights = weights.named("class weights");
    Ok(Some(announced("the class weights", || weights.to(device))?))
}
