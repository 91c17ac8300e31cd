//! What the host reads of a step: the statistics of its loss, and its report for the log.

use ddp_kernels::{DType, Device, Tensor, ops};
use ddp_nn::loss::STATS;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// Totals over rows, of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// The sum of the losses.
    pub loss_sum: f64,
    /// The divisor for the mean loss.
    pub weight_sum: f64,
    /// The number of correct predictions.
    pub correct: f64,
    /// The number of rows that count.
    pub rows: f64,
}

/// The result of a step, as the host reads it for the log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Over the global batch.
    pub stats: Stats,
    /// The norm of the mean gradients before clipping. None if it was not measured.
    pub grad_norm: Option<f64>,
    /// The first non-finite step on any rank. From then on the optimizer does nothing.
    pub bad_step: Option<u64>,
    /// The first non-finite step of this rank's own rows.
    pub own_bad_step: Option<u64>,
}

impl StepReport {
    /// The mean loss of the global batch.
    pub fn loss(&self) -> f64 {
        self.stats.loss()
    }

    /// The share of correct predictions.
    pub fn accuracy(&self) -> f64 {
        self.stats.accuracy()
    }
}

impl Stats {
    /// Reads f32 or f64 (4): the fields in order.
    pub(super) fn read(stats: &Tensor) -> Result<Stats> {
        let stats = read(stats)?;
        Ok(Stats {
            loss_sum: stats[0],
            weight_sum: stats[1],
            correct: stats[2],
            rows: stats[3],
        })
    }

    /// Whether all are finite.
    pub(crate) fn is_finite(&self) -> bool {
        let all = [self.loss_sum, self.weight_sum, self.correct, self.rows];
        all.iter().all(|sum| sum.is_finite())
    }

    /// The mean loss; NaN without rows.
    pub fn loss(&self) -> f64 {
        mean(self.loss_sum, self.weight_sum)
    }

    /// The share of correct predictions; NaN without rows.
    pub fn accuracy(&self) -> f64 {
        mean(self.correct, self.rows)
    }
}

fn mean(sum: f64, count: f64) -> f64 {
    if count == 0.0 { f64::NAN } else { sum / count }
}

/// How many rows of statistics there are: one, or with shards a power of two, zeros where there is
/// no shard.
pub(super) fn rows(shards: Option<usize>) -> usize {
    shards.map_or(1, usize::next_power_of_two)
}

/// (4): the row of a shard in `all`, (S, 4). Rows lie so that the halves of every subtree are in
/// the halves of the table: at the number of the shard with its bits reversed. One row is for all.
pub(super) fn row_of(all: &Tensor, shard: usize) -> Result<Tensor> {
    let bits = (all.count() / STATS).trailing_zeros();
    let reversed = shard.reverse_bits().checked_shr(usize::BITS - bits);
    let start = reversed.unwrap_or(0) * STATS;
    Ok(all.slice(start..start + STATS)?)
}

/// The first row of `all` becomes the sum of all rows, along the tree of shards.
pub(super) fn add_rows(all: &Tensor) -> Result<()> {
    let mut half = all.count() / 2;
    while half >= STATS {
        ops::axpy(&all.slice(0..half)?, 1.0, &all.slice(half..2 * half)?)?;
        half /= 2;
    }
    Ok(())
}

/// Copies a small tensor to the host, as f64.
pub(super) fn read(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()?)
}

/// Reads the first bad step: i64 (1), or the flags of a step, where an optimizer may have found it.
/// None if no step was bad.
pub(super) fn read_step(flags: &Tensor) -> Result<Option<u64>> {
    let flags = flags.to_vec::<i64>()?;
    let step = flags.into_iter().take(2).find(|&step| step != 0);
    Ok(step.map(|step| step as u64))
}
