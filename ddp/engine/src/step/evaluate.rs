//! What a step computes without an update: held-out rows, and the loss of each row.

use ddp_comm::{Group, Reduce};
use ddp_data::{Batch, InOrder};
use ddp_kernels::ops::{Chain, ChainStep, ChainView, Function};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor, ops};

use super::stage::StagePass;
use super::{Stats, Step, check_shards, stats};
use crate::error::Result;

impl Step {
    /// Outputs for held-out rows count as clipped to these ranges, one for each, as predictions
    /// are.
    pub(crate) fn clip_outputs(&mut self, ranges: Vec<[f32; 2]>) {
        self.output_ranges = ranges;
    }

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
        let mut output = self.model.forward(&pass, x)?;
        if !training && !self.output_ranges.is_empty() {
            output = clipped(&output, &self.output_ranges)?;
        }
        let of = [&output, targets, stats];
        let rows = self.model.losses(&pass, &*self.loss, of)?;
        Ok((output, rows))
    }
}

/// Outputs (B, O), each brought into its range. NaN stays what it is.
fn clipped(output: &Tensor, ranges: &[[f32; 2]]) -> Result<Tensor> {
    let columns = ranges.len();
    let dims = [output.count() / columns, columns];
    let limits = [0, 1].map(|end| -> Result<Tensor> {
        let values: Vec<f32> = ranges.iter().map(|range| range[end]).collect();
        let values = Tensor::from_slice(&values, &[columns], Device::Cpu)?;
        let to = || values.to((output.device(), output.dtype()));
        Ok(announced("the range of labels", to)?)
    });
    let [least, greatest] = limits;
    let limit = ChainView {
        offset: 0,
        strides: vec![0, 1],
    };
    let whole = ChainView::whole(&dims);
    let steps = vec![
        ChainStep::Load(0),
        ChainStep::Load(1),
        ChainStep::Load(2),
        ChainStep::Apply(Function::Max, [0, 1, 0]),
        ChainStep::Apply(Function::Min, [3, 2, 0]),
        ChainStep::Store(0, 4),
    ];
    let views = [vec![whole.clone(), limit.clone(), limit], vec![whole]];
    let chain = Chain::new("clip", &dims, 0, steps, views)?;
    let clipped = output.zeros_like()?;
    ops::chain_into(&chain, &[&clipped], &[output, &least?, &greatest?])?;
    Ok(clipped)
}
