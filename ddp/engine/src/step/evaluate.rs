//! What a step computes without an update: held-out rows, and the loss of each row.

use ddp_comm::{Group, Reduce};
use ddp_data::{Batch, InOrder};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor, ops};

use super::stage::StagePass;
use super::{Stats, Step, check_shards, stats};
use crate::error::Result;

impl Step {
    /// Evaluates the model on held-out rows, over all ranks.
    pub fn evaluate(&mut self, batches: &mut InOrder, group: &Group) -> Result<Stats> {
        self.evaluate_with(batches, group, &mut |_, _, _| Ok(()))
    }

    /// As `evaluate`, and calls `each` with every batch of this rank, its shard before it, and the
    /// model's output for it, on the last device.
    pub(crate) fn evaluate_with(
        &mut self,
        batches: &mut InOrder,
        group: &Group,
        each: &mut dyn FnMut(usize, &Batch, &Tensor) -> Result<()>,
    ) -> Result<Stats> {
        check_shards(batches.shards(), self.model.shards())?;
        self.compare_data(batches.origin(), group)?;
        self.gather()?;
        self.model.lend_values()?;
        let stats = self.held_out_stats.clone();
        ops::zero(&stats)?;
        let mut index = 0;
        for shard in batches.shards().numbers() {
            let shard_stats = stats::row_of(&stats, shard)?;
            for _ in 0..batches.count_of(shard).min(batches.count() - index) {
                let batch = batches.load(index)?;
                index += 1;
                let rows = (&batch.x, &batch.targets);
                let (output, _) = self.losses(false, 0, rows, &shard_stats)?;
                each(shard, batch, &output)?;
            }
        }
        let in_f64 = |stats: &Tensor, device| {
            let to = || stats.to((device, DType::F64));
            announced("the evaluation's result", to)
        };
        // A group of GPUs sums there.
        let device = group.device().unwrap_or(Device::Cpu);
        let stats = in_f64(&stats, device)?;
        group.all_reduce(&stats, Reduce::Sum, &Stream::current(device)?)?;
        let stats = in_f64(&stats, Device::Cpu)?;
        stats::add_rows(&stats)?;
        Stats::read(&stats)
    }

    /// The loss of each of this rank's rows in the step of `batch`, dropout included, with the
    /// model as it is now.
    pub fn losses_of(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        let stats = self.model.stats().zeros_like()?;
        let mut losses = Vec::new();
        if self.model.send_positions(batch)? {
            self.graphs.forget();
        }
        self.model.lend_values()?;
        for index in 0..batch.micro_count() {
            let micro = batch.micro(index)?;
            let (_, rows) = self.losses(true, index, (&micro.x, &micro.targets), &stats)?;
            losses.extend(announced("which rows are not finite", || {
                stats::read(&rows)
            })?);
        }
        Ok(losses)
    }

    /// A forward without backward: the output for `x`, and the loss of each row.
    fn losses(
        &mut self,
        training: bool,
        micro_batch: usize,
        (x, targets): (&Tensor, &Tensor),
        stats: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let pass = StagePass {
            training,
            micro_batch,
            accumulates: false,
            last: false,
            seed: self.seed,
            by_position: self.loss.is_by_position(),
            reserves: false,
        };
        let output = self.model.forward(&pass, x)?;
        let of = [&output, targets, stats];
        let rows = self.model.losses(&pass, &*self.loss, of)?;
        Ok((output, rows))
    }
}
