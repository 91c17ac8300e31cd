//! What a GPU keeps of a step under ZeRO-1 where ranks may be lost: other ranks may have completed
//! a step that this one has not.
//!
//! The host is some steps ahead of the GPU, and calls that end without a result leave garbage in
//! gradients and values. So all that an update reads is copied first, unless the steps were
//! stopped. Then the ranks sum their votes: an update is made only if every rank has its copies. A
//! rank whose steps were stopped after that makes the update from them. Values are copied after
//! each update.

use std::ops::Range;

use ddp_kernels::progress::StopWord;
use ddp_kernels::{DType, Tensor, ops};
use ddp_nn::optim::Clip;
use ddp_nn::params::Params;

use super::scalars::StepScalars;
use crate::error::Result;

/// What an update reads, besides flags, and changes.
#[derive(Clone, Copy)]
pub(super) struct Now<'a> {
    pub(super) params: &'a Params,
    pub(super) clip: &'a Clip,
    pub(super) scalars: &'a StepScalars,
}

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
}

impl Prepared {
    /// Copies for these elements. The values are current.
    pub(super) fn new(now: Now<'_>, ranges: Vec<Range<usize>>) -> Result<Prepared> {
        let (params, device) = (now.params, now.params.device());
        let count = ranges.iter().map(Range::len).sum();
        let room = || Tensor::zeros(&[count], params.master_dtype(), device);
        let prepared = Prepared {
            ranges,
            sums: room()?.named("sums of a step that others may complete"),
            values: room()?.named("values after the last step"),
            squares: now.clip.partials().zeros_like()?,
            scalars: now.scalars.all.zeros_like()?,
        };
        for [copy, value] in prepared.values(params)? {
            copy.copy_from(&value)?;
        }
        Ok(prepared)
    }

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

    /// All that the update reads: the copy, and the tensor itself. The scalars are last.
    fn update_reads(&self, now: Now<'_>) -> Result<Vec<[Tensor; 2]>> {
        let mut all = self.pairs(&self.sums, now.params.gradients())?;
        let words = |tensor: &Tensor| tensor.bits_as(DType::F32);
        all.push([words(&self.squares)?, words(now.clip.partials())?]);
        all.push([words(&self.scalars)?, words(&now.scalars.all)?]);
        Ok(all)
    }

    /// Copies what the update reads, and votes.
    pub(super) fn copy_sums(
        &self,
        now: Now<'_>,
        flags: &Tensor,
        vote: Option<&Tensor>,
        stop: Option<StopWord>,
    ) -> Result<()> {
        let all = self.update_reads(now)?;
        for (index, [copy, read]) in all.iter().enumerate() {
            let vote = (index + 1 == all.len()).then_some(vote).flatten();
            ops::copy_valid(copy, read, flags, vote, stop)?;
        }
        Ok(())
    }

    /// Copies the values after a complete update.
    pub(super) fn copy_values(&self, params: &Params, flags: &Tensor) -> Result<()> {
        for [copy, value] in self.values(params)? {
            ops::copy_valid(&copy, &value, flags, None, None)?;
        }
        Ok(())
    }

    /// Puts the values after the last complete step back in place. Returns the last step whose
    /// update this rank can make without the others; 0 for none.
    pub(super) fn restore_values(&self, now: Now<'_>) -> Result<u64> {
        let params = now.params;
        // What other ranks own arrives anew, but for padding.
        ops::zero(params.trained_values())?;
        for [copy, value] in self.values(params)? {
            value.copy_from(&copy)?;
        }
        for range in &self.ranges {
            params.refresh(range.clone())?;
        }
        let step = now.scalars.step_of(&self.scalars)?;
        Ok(step.to_vec::<i64>()?[0] as u64)
    }

    /// Puts what the update of that step reads back in place.
    pub(super) fn restore_sums(&self, now: Now<'_>) -> Result<()> {
        for [copy, read] in self.update_reads(now)? {
            read.copy_from(&copy)?;
        }
        Ok(())
    }
}
