//! What a benchmark of training steps trains: a model, its loss, and random rows.

use ddp_kernels::{DType, Device, Random, Tensor};
use serde_json::Value;

use crate::error::Result;
use crate::nn::{Loss, Sequential};

/// A model that is trained on random rows.
pub(super) struct Subject {
    pub(super) layers: Sequential,
    pub(super) loss: Box<dyn Loss>,
    pub(super) inputs: RandomRows,
    pub(super) targets: RandomRows,
    /// Rows of a step, over all ranks.
    pub(super) batch: u64,
    /// Rows of a micro-batch; 0 for all.
    pub(super) micro_batch: u64,
    /// The norm to which gradients are clipped; 0 for no clipping.
    pub(super) clip_norm: f64,
    /// Multiplications and additions of a step.
    pub(super) flop: f64,
    /// The first fields of the line.
    pub(super) described: Value,
    /// What a row counts as, and how often: `samples`, 1.
    pub(super) unit: (&'static str, u64),
}

/// Random values of a row, by its shape.
pub(super) enum RandomRows {
    /// Numbers of mean 0 and variance 1.
    Normal(Vec<usize>),
    /// Whole numbers below this one.
    Below(usize, Vec<usize>),
}

impl RandomRows {
    pub(super) fn row_shape(&self) -> &[usize] {
        let (RandomRows::Normal(shape) | RandomRows::Below(_, shape)) = self;
        shape
    }

    pub(super) fn make(&self, rows: usize, device: Device, random: &mut Random) -> Result<Tensor> {
        let shape = [&[rows], self.row_shape()].concat();
        Ok(match self {
            RandomRows::Normal(_) => Tensor::randn(&shape, DType::F32, device, random)?,
            RandomRows::Below(end, _) => {
                Tensor::randint(*end as u32, &shape, DType::I64, device, random)?
            }
        })
    }
}
