//! Clipping by the norm of all gradients, on the device: one pass over the gradients, and one
//! number with which the optimizer multiplies them. That number also divides them by the global
//! batch.
//!
//! Squares are summed by quantum, then over the quanta of all parameters in the arena's order.
//! Under ZeRO-1 each rank sums the quanta of its slices, and then the ranks add theirs. Each
//! quantum is 0 on all ranks but one, so that addition rounds nothing; the sum over quanta has the
//! same order as on one rank, so the norm has the same bits on any number of ranks.

use std::ops::Range;

use ddp_kernels::ops::{ChunkTable, QUANTUM, StepMarks};
use ddp_kernels::{DType, Tensor, ops};

use crate::error::{Error, Result};
use crate::params::Params;

/// A part of the gradients of which this rank sums the squares.
#[derive(Debug)]
struct NormSlice {
    /// Its elements in the gradients' arena.
    range: Range<usize>,
    /// With offsets from its start.
    chunks: ChunkTable,
    /// Its quanta among those of all parameters.
    quanta: Range<usize>,
}

/// The norm of the gradients and the scale that clips them. Letters: Q quanta of all trained
/// parameters, in the arena's order.
#[derive(Debug)]
pub struct Clip {
    max_norm: f64,
    slices: Vec<NormSlice>,
    /// Whether each rank has its own slices.
    is_shared: bool,
    /// f64 (Q), the sum of squares of each quantum.
    partials: Tensor,
    /// `[2]`: scale and norm.
    out: Tensor,
}

impl Clip {
    /// Clips the gradients of `params` to the norm `max_norm`; 0 clips nothing.
    pub fn new(max_norm: f64, params: &Params) -> Result<Clip> {
        let all = params.trained_part();
        Clip::of_slices(max_norm, params, std::slice::from_ref(&all))
    }

    /// As `new`, for a rank that has the sums over ranks only in these ranges of the gradients'
    /// arena: those that the reducer owns.
    pub fn of_slices(max_norm: f64, params: &Params, ranges: &[Range<usize>]) -> Result<Clip> {
        if !(0.0..f64::INFINITY).contains(&max_norm) {
            return Err(Error::Usage(format!(
                "the norm to clip at: expected 0 (off) or more, got {max_norm}; help: 1 is usual"
            )));
        }
        let slice = |range: &Range<usize>| -> Result<NormSlice> {
            assert!(
                range.start.is_multiple_of(QUANTUM),
                "a slice from {} on begins within a quantum",
                range.start
            );
            let chunks = params.chunks_of(range.clone())?;
            chunks.bring_to(params.device())?;
            let before = params.chunks_of(0..range.start)?.quanta();
            Ok(NormSlice {
                range: range.clone(),
                quanta: before..before + chunks.quanta(),
                chunks,
            })
        };
        let slices = ranges.iter().map(slice).collect::<Result<Vec<_>>>()?;
        let is_shared = !matches!(ranges, [all] if *all == params.trained_part());
        assert!(
            !is_shared || params.shares() > 1,
            "parameters that begin within a quantum cannot be shared"
        );
        let quanta = params.chunks()?.quanta();
        let partials =
            Tensor::zeros(&[quanta], DType::F64, params.device())?.named("squares of gradients");
        let out = Tensor::zeros(&[2], params.master_dtype(), params.device())?
            .named("gradient scale and norm");
        Ok(Clip {
            max_norm,
            slices,
            is_shared,
            partials,
            out,
        })
    }

    /// The same for other ranges, with the scale and norm so far.
    pub fn slice_anew(&self, params: &Params, ranges: &[Range<usize>]) -> Result<Clip> {
        let new = Clip::of_slices(self.max_norm, params, ranges)?;
        let out = self.out.clone();
        Ok(Clip { out, ..new })
    }

    /// Whether a norm to clip at was given.
    pub fn is_on(&self) -> bool {
        self.max_norm > 0.0
    }

    /// Whether each rank has its own slices.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// What this rank measures: elements of the gradients' arena, their chunks with offsets from
    /// the first, and their quanta among those of all parameters.
    pub fn slices(&self) -> impl Iterator<Item = (Range<usize>, &ChunkTable, Range<usize>)> {
        let slices = self.slices.iter();
        slices.map(|slice| (slice.range.clone(), &slice.chunks, slice.quanta.clone()))
    }

    /// Whether to measure the gradients in a step, given whether the log `wants_norm`. Ranks with
    /// their own slices always do, because only the norm tells all of them of a non-finite
    /// gradient.
    pub fn measures(&self, wants_norm: bool) -> bool {
        self.is_on() || wants_norm || self.is_shared
    }

    /// Measures the gradients and writes the scale: 1 / `divisor`, or less if the norm of the
    /// divided gradients is above the maximum. `divisor` is one number on the device. The norm is
    /// written if clipping is on or `wants_norm`; otherwise it is 0 and the gradients are not read.
    /// For a rank that has all gradients.
    pub fn compute(
        &self,
        params: &Params,
        divisor: Option<&Tensor>,
        wants_norm: bool,
    ) -> Result<()> {
        assert!(!self.is_shared, "ranks with slices call measure and finish");
        let measured = self.measures(wants_norm);
        if measured {
            self.measure(params, |_| Ok(()))?;
        }
        self.finish(measured.then_some(&self.partials), divisor, None)
    }

    /// Sums the squares of this rank's gradients by quantum. If each rank has its own slices, calls
    /// `sum_over_ranks` to complete the partial sums.
    pub fn measure(
        &self,
        params: &Params,
        sum_over_ranks: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<()> {
        if self.is_shared {
            // Remove the other ranks' quanta of the last step.
            ops::zero(&self.partials)?;
        }
        for slice in &self.slices {
            let gradients = params.gradients_of(slice.range.clone())?;
            let partials = self.partials.slice(slice.quanta.clone())?;
            ops::grad_norm_partials(&partials, &gradients, &slice.chunks)?;
        }
        if self.is_shared && self.partials.count() > 0 {
            sum_over_ranks(&self.partials)
        } else {
            Ok(())
        }
    }

    /// f64 (Q), the sums of squares that `measure` wrote.
    pub fn partials(&self) -> &Tensor {
        &self.partials
    }

    /// Writes scale and norm as `compute` does, the norm from these partial sums if given. Marks
    /// the step as bad if one of them or a statistic is not finite.
    pub fn finish(
        &self,
        partials: Option<&Tensor>,
        divisor: Option<&Tensor>,
        marks: Option<StepMarks<'_>>,
    ) -> Result<()> {
        let (out, max_norm) = (&self.out, self.max_norm);
        Ok(ops::decide_step(out, partials, max_norm, divisor, marks)?)
    }

    /// `[2]`: the scale for gradients, and the norm of the divided gradients before clipping.
    pub fn out(&self) -> &Tensor {
        &self.out
    }
}
