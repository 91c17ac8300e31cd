//! Clipping by the norm of all gradients, without leaving the device: one pass over the gradients, and one number that the
//! optimizer multiplies them by. That number also divides them by the global batch.
//!
//! Squares are summed by quantum, then over the quanta of all parameters in the arena's order. Under ZeRO-1 a rank sums the quanta of its own
//! slices, and the ranks add what they have: each quantum is a number on one rank and 0 on the others, so nothing is rounded. The sum over all quanta
//! then runs in the same order as on a rank alone, and the norm has the same bits for any number of ranks.

use std::ops::Range;

use ddp_kernels::ops::{ChunkTable, QUANTUM};
use ddp_kernels::{DType, Tensor, ops};

use crate::error::{Error, Result};
use crate::params::Params;

/// A part of the gradients whose squares this rank sums.
#[derive(Debug)]
struct Slice {
    /// Its elements of the gradients' arena.
    range: Range<usize>,
    /// Counted from its start.
    chunks: ChunkTable,
    /// Where its quanta are among those of all parameters.
    quanta: Range<usize>,
}

/// The norm of the gradients and the scale that clips them.
#[derive(Debug)]
pub struct Clip {
    max_norm: f64,
    slices: Vec<Slice>,
    /// Whether other ranks have other slices.
    is_shared: bool,
    /// f64 [quanta of all trained parameters, in the arena's order]
    partials: Tensor,
    /// [scale, norm]
    out: Tensor,
}

impl Clip {
    /// Clips the gradients of `params` to a norm of `max_norm`; 0 clips nothing.
    pub fn new(max_norm: f64, params: &Params) -> Result<Clip> {
        Clip::of_slices(max_norm, params, std::slice::from_ref(&(0..params.gradients().count())))
    }

    /// As `new`, where this rank has the sums of these ranges of the gradients' arena alone: [`Reducer::owned`](crate::reducer::Reducer::owned).
    pub fn of_slices(max_norm: f64, params: &Params, ranges: &[Range<usize>]) -> Result<Clip> {
        if !(0.0..f64::INFINITY).contains(&max_norm) {
            return Err(Error::Usage(format!("the norm to clip at: expected 0 (off) or more, got {max_norm}")));
        }
        let slice = |range: &Range<usize>| -> Result<Slice> {
            assert!(range.start.is_multiple_of(QUANTUM), "a slice from {} on begins within a quantum", range.start);
            let chunks = params.chunks_of(range.clone())?;
            chunks.bring_to(params.device())?;
            let before = params.chunks_of(0..range.start)?.quanta();
            Ok(Slice { range: range.clone(), quanta: before..before + chunks.quanta(), chunks })
        };
        let slices = ranges.iter().map(slice).collect::<Result<Vec<_>>>()?;
        let is_shared = !matches!(ranges, [all] if *all == (0..params.gradients().count()));
        assert!(!is_shared || params.shares() > 1, "parameters that begin within a quantum cannot be shared");
        let quanta = params.chunks()?.quanta();
        let partials = Tensor::zeros(&[quanta], DType::F64, params.device())?.named("squares of gradients");
        let out = Tensor::zeros(&[2], params.master_dtype(), params.device())?.named("gradient scale and norm");
        Ok(Clip { max_norm, slices, is_shared, partials, out })
    }

    /// Whether anything is ever clipped.
    pub fn is_on(&self) -> bool {
        self.max_norm > 0.0
    }

    /// Whether the gradients are measured in a step in which the log `wants_norm`, or does not. Ranks that see their own slices alone always do:
    /// the norm tells all of them alike of a gradient that is not finite.
    pub fn measures(&self, wants_norm: bool) -> bool {
        self.is_on() || wants_norm || self.is_shared
    }

    /// Measures the gradients and writes the scale: 1 / `divisor`, and smaller where the norm of the gradients so divided
    /// is above the maximum. `divisor` is one number on the device. The norm is written when clipping is on or
    /// `wants_norm`; otherwise it is 0, and the gradients are not read. For a rank that has all of them.
    pub fn compute(&self, params: &Params, divisor: Option<&Tensor>, wants_norm: bool) -> Result<()> {
        assert!(!self.is_shared, "the ranks sum their parts: measure and finish");
        let measured = self.measures(wants_norm);
        if measured {
            self.measure(params, |_| Ok(()))?;
        }
        self.finish(measured.then_some(&self.partials), divisor)
    }

    /// Sums the squares of this rank's gradients by quantum. `sum_over_ranks` is called where other ranks have other slices; then the partials are those
    /// of all.
    pub fn measure(&self, params: &Params, sum_over_ranks: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        if self.is_shared {
            // The last step left the others' quanta here.
            ops::zero(&self.partials)?;
        }
        for slice in &self.slices {
            let gradients = params.gradients().slice(slice.range.clone())?;
            ops::grad_norm_partials(&self.partials.slice(slice.quanta.clone())?, &gradients, &slice.chunks)?;
        }
        // Where nothing is trained there is nothing to say.
        if self.is_shared && self.partials.count() > 0 { sum_over_ranks(&self.partials) } else { Ok(()) }
    }

    /// f64 \[quanta of all trained parameters, in the arena's order\]: what `measure` wrote.
    pub fn partials(&self) -> &Tensor {
        &self.partials
    }

    /// Writes scale and norm, the norm from these partials if there are any. As `compute` otherwise.
    pub fn finish(&self, partials: Option<&Tensor>, divisor: Option<&Tensor>) -> Result<()> {
        Ok(ops::clip_scale(&self.out, partials, self.max_norm, divisor)?)
    }

    /// \[2\]: what to multiply gradients by, and the norm of the divided gradients before clipping.
    pub fn out(&self) -> &Tensor {
        &self.out
    }
}
