//! The scalars that vary from step to step, sent to a device before the step's work in one message:
//! zeros to which the losses are added, the optimizer's numbers, the step's number, and where each
//! micro-batch starts.
//!
//! The work reads them from tensors, so it can be captured once and launched again.

use ddp_data::Batch;
use ddp_kernels::transfer::Scalars;
use ddp_kernels::{DType, Tensor};
use ddp_nn::loss::STATS;
use ddp_nn::optim::Optimizer;

use super::stats;
use crate::error::Result;

/// Bytes of a position.
const POSITION: usize = 2 * size_of::<i64>();

/// The scalars of one device. Letters: M micro-batches, at most; S rows of statistics.
#[derive(Debug)]
pub(super) struct StepScalars {
    /// U8: the statistics and the optimizer's numbers, in whole positions, then the positions.
    pub(super) all: Tensor,
    /// (S, 4), flat: the first elements of `all`, the statistics of each shard in the rows that
    /// `stats::row_of` says.
    pub(super) all_stats: Tensor,
    /// (4): the first row of `all_stats`, the [`Stats`](super::Stats) of this rank's rows.
    pub(super) stats: Tensor,
    /// (2) each: the step, from 1, and the micro-batch's first row in the global batch.
    rows: Vec<Tensor>,
    /// i64 (1): the step, which is the first element of the first position.
    pub(super) step: Tensor,
    /// What is sent, with room for `all`.
    message: Vec<u8>,
    sender: Scalars,
}

impl StepScalars {
    /// Room for this many micro-batches, at least one, and for the statistics of this many shards.
    /// `optimizer` reads its numbers there.
    pub(super) fn new(
        optimizer: &mut Optimizer,
        micro_batches: usize,
        shards: Option<usize>,
    ) -> Result<StepScalars> {
        let (count, numbers) = (micro_batches.max(1), optimizer.numbers());
        let (device, dtype) = (numbers.device(), numbers.dtype());
        let stats_end = stats::rows(shards) * STATS * dtype.bytes();
        let numbers_end = stats_end + numbers.bytes();
        let first = numbers_end.next_multiple_of(POSITION);
        let bytes = first + count * POSITION;
        let all = Tensor::zeros(&[bytes], DType::U8, device)?.named("scalars of the step");
        let all_stats = all.slice(0..stats_end)?.bits_as(dtype)?;
        let stats = all_stats.slice(0..STATS)?;
        optimizer.read_numbers_from(all.slice(stats_end..numbers_end)?.bits_as(dtype)?);
        let positions = all.slice(first..bytes)?.bits_as(DType::I64)?;
        let rows = (0..count)
            .map(|index| positions.slice(2 * index..2 * index + 2))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(StepScalars {
            step: positions.slice(0..1)?.named("step"),
            all,
            stats: stats.named("loss statistics"),
            all_stats: all_stats.named("loss statistics"),
            rows,
            message: Vec::with_capacity(bytes),
            sender: Scalars::with_room(device, 1, bytes)?,
        })
    }

    /// How many micro-batches there is room for.
    pub(super) fn room(&self) -> usize {
        self.rows.len()
    }

    /// Sends the positions of `batch`, for which there must be room, and what `optimizer` needs for
    /// its step. Also sets the statistics to 0.
    pub(super) fn send(
        &mut self,
        optimizer: &Optimizer,
        batch: &Batch,
        learning_rate: f64,
    ) -> Result<()> {
        self.message.clear();
        self.message.resize(self.all_stats.bytes(), 0);
        let number = number_of(batch);
        optimizer.append_numbers(number, learning_rate, &mut self.message)?;
        let first = self.message.len().next_multiple_of(POSITION);
        self.message.resize(first, 0);
        self.send_positions_from(first, batch)
    }

    /// Sends only the positions of `batch`, for which there must be room.
    pub(super) fn send_positions(&mut self, batch: &Batch) -> Result<()> {
        self.message.clear();
        self.send_positions_from(0, batch)
    }

    /// Appends the positions of `batch` to the message, which has `begun` bytes, and sends it to
    /// where the positions then are in their place.
    fn send_positions_from(&mut self, begun: usize, batch: &Batch) -> Result<()> {
        let (step, count) = (number_of(batch) as i64, batch.micro_count().max(1));
        for index in 0..count {
            for number in [step, batch.first_of_micro(index) as i64] {
                self.message.extend(number.to_ne_bytes());
            }
        }
        let end = self.all.count() - (self.room() - count) * POSITION;
        let start = end - begun - count * POSITION;
        let target = self.all.slice(start..end)?;
        Ok(self.sender.send(&target, &self.message[..])?)
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
