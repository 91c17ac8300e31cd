//! Learning classes: the cross-entropy.

mod evaluation;
mod predictions;
mod survey;

use ddp_data::{Classes, TensorSpec};
use ddp_kernels::transfer::announced;
use ddp_kernels::{Device, Tensor};
use ddp_nn::{CrossEntropy, Loss};

use super::task::{Evaluation, LossOptions, PredictionOptions, Predictions, Survey, Task};
use crate::error::{Error, Result};
use crate::evidence::Evidence;
use crate::step::Stats;

/// One of some classes for each row, or for each position of a row.
#[derive(Clone, Debug)]
pub(super) struct LearnClasses(pub(super) Classes);

impl Task for LearnClasses {
    fn check(&self, options: &LossOptions, data: &str) -> Result<()> {
        let (classes, weights) = (self.0.count(), options.class_weights.len());
        if weights == 0 || weights == classes {
            return Ok(());
        }
        let given: Vec<String> = options.class_weights.iter().map(f64::to_string).collect();
        Err(Error::Usage(format!(
            "`class-weights` {}: expected {classes} weights, one for each class of {data}, got \
             {weights}; help: give as many, or leave `class-weights` out",
            given.join(",")
        )))
    }

    fn loss(&self, options: &LossOptions, device: Device) -> Result<Box<dyn Loss>> {
        Ok(Box::new(CrossEntropy {
            label_smoothing: options.label_smoothing,
            class_weights: weights(&options.class_weights, device)?,
            ignore_index: None,
        }))
    }

    fn accuracy(&self, stats: &Stats) -> Option<f64> {
        Some(stats.accuracy())
    }

    fn wrong_target(&self, target: f64) -> Option<String> {
        let count = self.0.count();
        let is_class = (0.0..count as f64).contains(&target);
        (!is_class).then(|| format!("target {target} is no class: there are {count}, from 0"))
    }

    fn evidence(&self, targets: &TensorSpec) -> Option<Evidence> {
        let is_one_a_row = targets.elements() == 1;
        is_one_a_row.then(|| Evidence::of(&self.0))
    }

    fn evaluation(&self) -> Box<dyn Evaluation> {
        Box::new(evaluation::Answers::of(&self.0))
    }

    fn predictions(&self, options: PredictionOptions) -> Result<Box<dyn Predictions>> {
        Ok(Box::new(predictions::ClassesOfRows::new(&self.0, options)))
    }

    fn survey(&self) -> Option<Box<dyn Survey>> {
        Some(Box::new(survey::RowsOfClasses::of(&self.0)))
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
