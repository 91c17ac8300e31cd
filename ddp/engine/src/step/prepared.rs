//! What a GPU keeps of a step under ZeRO-1 where ranks may be lost: other ranks may have completed
//! a step that this one has not.
//!
//! The host is some steps ahead of the GPU, and calls that end without a result leave garbage in
//! gradients and values. So all that an update reads is copied first, unless the steps were stopped.
//! Then the ranks sum their votes: an update is made only if every rank has its copies. A rank whose
//! steps were stopped after that makes the update from them. Values are copied after each update.

use std::ops::Range;

use ddp_kernels::{DType, Tensor, ops};
use ddp_nn::params::Params;

use super::stage::Stage;
use crate::error::Result;
use crate::faults::{self, FaultPoint};
use crate::reducer::Cut;

/// Copies on one device. Letters: O elements that this rank owns and keeps, Q quanta.
#[derive(Debug)]
pub(super) struct Prepared {
    /// Those elements in the gradients' arena.
    ranges: Vec<Range<usize>>,
    /// f32 (O): sums of gradients, and values after the last complete update.
    sums: Tensor,
    values: Tensor,
    /// f64 (Q): squares of the gradients.
    squares: Tensor,
    /// Those of `StepScalars`, with the number of the step.
    pub(super) scalars: Tensor,
    /// f32 (1): how many ranks do not have their copies.
    pub(super) vote: Tensor,
}

impl Prepared {
    /// Its parts of `kept`, each with the same elements of `arena`.
    fn pairs(&self, kept: &Tensor, arena: &Tensor) -> Result<Vec<[Tensor; 2]>> {
        let mut at = 0;
        let pair = |range: &Range<usize>| {
            at += range.len();
            let kept = kept.slice(at - range.len()..at)?;
            Ok([kept, arena.slice(range.clone())?])
        };
        self.ranges.iter().map(pair).collect()
    }

    fn values(&self, params: &Params) -> Result<Vec<[Tensor; 2]>> {
        self.pairs(&self.values, params.trained_values())
    }

    /// Bytes of what grows with the model.
    pub(super) fn bytes(&self) -> usize {
        self.sums.bytes() + self.values.bytes() + self.squares.bytes()
    }
}

impl Stage {
    /// Makes room on a GPU for what this rank has by `cut`, and keeps the values, which are current.
    pub(super) fn make_copies(&mut self, cut: Option<Cut>) -> Result<()> {
        self.prepared = None;
        let params = &self.model.params;
        let is_shared = |cut: &Cut| cut.ranks > 1 && params.device().is_accelerator();
        let Some(cut) = cut.filter(is_shared) else {
            return Ok(());
        };
        let ranges = cut.ranges(params, self.reducer.options).concat();
        let count = ranges.iter().map(Range::len).sum();
        let room = || Tensor::zeros(&[count], params.master_dtype(), params.device());
        let prepared = Prepared {
            ranges,
            sums: room()?.named("sums of a step that others may complete"),
            values: room()?.named("values after the last step"),
            squares: self.clip.partials().zeros_like()?,
            scalars: self.scalars.all.zeros_like()?,
            vote: Tensor::zeros(&[1], DType::F32, params.device())?.named("ranks not ready"),
        };
        for [kept, now] in prepared.values(params)? {
            kept.copy_from(&now)?;
        }
        self.prepared = Some(prepared);
        Ok(())
    }

    /// All pairs of what the update reads: the copy, and the tensor itself. The scalars are last.
    fn update_reads(&self, of: &Prepared) -> Result<Vec<[Tensor; 2]>> {
        let mut all = of.pairs(&of.sums, self.model.params.gradients())?;
        let words = |tensor: &Tensor| tensor.bits_as(DType::F32);
        all.push([words(&of.squares)?, words(self.clip.partials())?]);
        all.push([words(&of.scalars)?, words(&self.scalars.all)?]);
        Ok(all)
    }

    /// Copies what the update reads, and sums the ranks' votes.
    pub(super) fn copy_sums(&mut self) -> Result<()> {
        let Some(prepared) = &self.prepared else {
            return Ok(());
        };
        let (flags, stop) = (&self.bad_step, self.reducer.group().stop_word());
        let all = self.update_reads(prepared)?;
        for (index, [copy, now]) in all.iter().enumerate() {
            let vote = (index + 1 == all.len()).then_some(&prepared.vote);
            ops::copy_valid(copy, now, flags, vote, stop)?;
        }
        self.reducer.sum(&prepared.vote)?;
        faults::at(FaultPoint::Agreed)
    }

    /// Copies the values after a complete update.
    pub(super) fn copy_values(&self) -> Result<()> {
        if let Some(prepared) = &self.prepared {
            for [copy, now] in prepared.values(&self.model.params)? {
                ops::copy_valid(&copy, &now, &self.bad_step, None, None)?;
            }
        }
        Ok(())
    }

    /// Puts the values after the last complete step back in place. Returns the last step whose
    /// update this rank can make without the others; 0 for none.
    pub(super) fn restore_values(&self) -> Result<u64> {
        let (Some(prepared), params) = (&self.prepared, &self.model.params) else {
            return Ok(0);
        };
        // What other ranks own arrives anew, but for padding.
        ops::zero(params.trained_values())?;
        for [copy, now] in prepared.values(params)? {
            now.copy_from(&copy)?;
        }
        for range in &prepared.ranges {
            params.refresh(range.clone())?;
        }
        let step = self.scalars.step_of(&prepared.scalars)?;
        Ok(step.to_vec::<i64>()?[0] as u64)
    }

    /// Puts what the update of that step reads back in place.
    pub(super) fn restore_sums(&self) -> Result<()> {
        let pairs = self.prepared.as_ref().map(|it| self.update_reads(it));
        for [copy, now] in pairs.transpose()?.into_iter().flatten() {
            now.copy_from(&copy)?;
        }
        Ok(())
    }
}
