//! The model and the loss that a configuration describes: for training, and for using what was trained.

use ddp_kernels::{Device, Tensor};

use crate::config::Config;
use crate::data::Task;
use crate::error::Result;
use crate::models::{Mlp, Model};
use crate::nn::{CrossEntropy, Loss, Mse};

/// The parts of the model on `devices`, for rows of this shape. `frozen` says by name what is not trained.
pub(crate) fn models(
    config: &Config,
    row_shape: &[usize],
    task: &Task,
    devices: &[Device],
    frozen: &dyn Fn(&str) -> bool,
    shares: usize,
) -> Result<Vec<Model>> {
    let layers = Mlp {
        hidden: config.hidden.clone(),
        outputs: task.outputs(),
        activation: config.activation.op(),
        dropout: config.dropout,
    };
    Model::split(layers.layers(), row_shape, devices, |layers, shape, device| {
        Model::with_shares(layers, shape, config.dtype, device, config.seed, frozen, shares)
    })
}

/// The loss of this task, on the last of the model's devices.
pub(crate) fn loss(config: &Config, task: &Task, device: Device) -> Result<Box<dyn Loss>> {
    let Task::Classification { .. } = task else { return Ok(Box::new(Mse)) };
    let class_weights = if config.class_weights.is_empty() {
        None
    } else {
        let weights: Vec<f32> = config.class_weights.iter().map(|&weight| weight as f32).collect();
        let weights = Tensor::from_slice(&weights, &[weights.len()], Device::Cpu)?.named("class weights");
        Some(ddp_kernels::transfer::announced("the class weights", || weights.to(device))?)
    };
    Ok(Box::new(CrossEntropy { label_smoothing: config.label_smoothing, class_weights, ignore_index: None }))
}
