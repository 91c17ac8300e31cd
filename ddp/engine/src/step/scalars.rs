//! The scalars that vary from step to step, sent to a device before the step's work: the step's
//! number, where each micro-batch starts, and the optimizer's numbers.
//!
//! The work reads them from tensors, so it can be captured once and launched again.

use ddp_data::Batch;
use ddp_kernels::transfer::Scalars;
use ddp_kernels::{DType, Device, Tensor};
use ddp_nn::optim::Optimizer;

use crate::error::Result;

/// Positions per message: its 256 bytes.
const POSITIONS_PER_MESSAGE: usize = 16;

/// The scalars of one device. Letters: M micro-batches, at most.
#[derive(Debug)]
pub(super) struct StepScalars {
    /// i64 (M, 2): the step, from 1, and the micro-batch's first row in the global batch.
    positions: Tensor,
    /// (2) each: the rows of `positions`.
    rows: Vec<Tensor>,
    /// i64 (1): the step, which is the first element of `positions`.
    step: Tensor,
    sender: Scalars,
}

impl StepScalars {
    /// Room for this many micro-batches, at least one.
    pub(super) fn new(device: Device, micro_batches: usize) -> Result<StepScalars> {
        let count = micro_batches.max(1);
        let positions = Tensor::zeros(&[count, 2], DType::I64, device)?.named("positions");
        let rows = (0..count)
            .map(|index| positions.index(index))
            .collect::<Result<Vec<_>, _>>()?;
        let step = rows[0].slice(0..1)?.named("step");
        // One more message for the optimizer.
        let messages = count.div_ceil(POSITIONS_PER_MESSAGE) + 1;
        Ok(StepScalars {
            positions,
            rows,
            step,
            sender: Scalars::new(device, messages)?,
        })
    }

    /// How many micro-batches there is room for.
    pub(super) fn room(&self) -> usize {
        self.rows.len()
    }

    /// Sends the positions of `batch`, for which there must be room.
    pub(super) fn send_positions(&mut self, batch: &Batch) -> Result<()> {
        let step = number_of(batch) as i64;
        let count = batch.micro_count().max(1);
        for first in (0..count).step_by(POSITIONS_PER_MESSAGE) {
            let part = first..(first + POSITIONS_PER_MESSAGE).min(count);
            let mut message = [0i64; 2 * POSITIONS_PER_MESSAGE];
            for (position, index) in message.chunks_mut(2).zip(part.clone()) {
                position.copy_from_slice(&[step, batch.first_of_micro(index) as i64]);
            }
            let target = self.positions.slice(part.clone())?;
            self.sender.send(&target, &message[..2 * part.len()])?;
        }
        Ok(())
    }

    /// Sends what `optimizer` needs for the step of `batch`.
    pub(super) fn send_rates(
        &mut self,
        optimizer: &Optimizer,
        batch: &Batch,
        learning_rate: f64,
    ) -> Result<()> {
        Ok(optimizer.send(&mut self.sender, number_of(batch), learning_rate)?)
    }

    /// i64 (1): the step, from 1.
    pub(super) fn step(&self) -> &Tensor {
        &self.step
    }

    /// i64 (2): the step, and the micro-batch's first row in the global batch.
    pub(super) fn position(&self, micro_batch: usize) -> &Tensor {
        &self.rows[micro_batch]
    }
}

/// The number of a batch's step, from 1: 0 is the model before training.
pub(super) fn number_of(batch: &Batch) -> u64 {
    batch.step + 1
}
