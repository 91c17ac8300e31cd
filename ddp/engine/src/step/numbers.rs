//! The numbers that differ from step to step, sent to the device before the step's work: which step it is, and where each
//! micro-batch begins. The work itself reads tensors alone, so that it can be captured once and launched again.

use ddp_kernels::transfer::Scalars;
use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;
use ddp_data::Batch;
use ddp_nn::optim::Optimizer;

/// Positions that travel in one message: its 256 bytes.
const POSITIONS_A_MESSAGE: usize = 16;

/// Where a step's work finds its numbers. Letters: M micro-batches, at most.
#[derive(Debug)]
pub(super) struct Numbers {
    /// i64 `[M, 2]`: the step, from 1, and the row of the global batch where the micro-batch begins.
    positions: Tensor,
    /// The rows of it, `[2]` each.
    rows: Vec<Tensor>,
    /// i64 `[1]`: the step; the first of all positions.
    step: Tensor,
    way: Scalars,
}

impl Numbers {
    /// Room for so many micro-batches, at least one.
    pub(super) fn new(device: Device, micro_batches: usize) -> Result<Numbers> {
        let count = micro_batches.max(1);
        let positions = Tensor::zeros(&[count, 2], DType::I64, device)?.named("positions");
        let rows = (0..count)
            .map(|index| positions.index(index))
            .collect::<Result<Vec<_>, _>>()?;
        let step = rows[0].slice(0..1)?.named("step");
        // The positions, and the optimizer's numbers.
        let messages = count.div_ceil(POSITIONS_A_MESSAGE) + 1;
        Ok(Numbers {
            positions,
            rows,
            step,
            way: Scalars::new(device, messages)?,
        })
    }

    /// How many micro-batches there is room for.
    pub(super) fn room(&self) -> usize {
        self.rows.len()
    }

    /// Sends what the work of step number `step` on `batch` reads. There must be room.
    pub(super) fn send_positions(&mut self, step: u64, batch: &Batch) -> Result<()> {
        let count = batch.micro_count().max(1);
        for first in (0..count).step_by(POSITIONS_A_MESSAGE) {
            let part = first..(first + POSITIONS_A_MESSAGE).min(count);
            let mut message = [0i64; 2 * POSITIONS_A_MESSAGE];
            for (position, index) in message.chunks_mut(2).zip(part.clone()) {
                position.copy_from_slice(&[step as i64, batch.first_of_micro(index) as i64]);
            }
            let target = self.positions.slice(part.clone())?;
            self.way.send(&target, &message[..2 * part.len()])?;
        }
        Ok(())
    }

    /// Sends the optimizer's.
    pub(super) fn send_rates(
        &mut self,
        optimizer: &Optimizer,
        step: u64,
        learning_rate: f64,
    ) -> Result<()> {
        Ok(optimizer.send(&mut self.way, step, learning_rate)?)
    }

    /// i64 `[1]`: the step, from 1.
    pub(super) fn step(&self) -> &Tensor {
        &self.step
    }

    /// i64 `[2]`: the step, and the row of the global batch where this micro-batch begins.
    pub(super) fn position(&self, micro_batch: usize) -> &Tensor {
        &self.rows[micro_batch]
    }
}
