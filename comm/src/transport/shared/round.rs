//! Small tensors: one round. Each rank gives all its bytes when it arrives; when all have arrived,
//! each rank does all the work.
//!
//! Call n uses slot n modulo `DEPTH` of a rank's `small`. The rank writes it before it counts the
//! call as arrived; the others read it after that, and before they arrive at call n + 1. It is
//! written again for call n + DEPTH, which begins when this rank has finished call n + DEPTH - 1,
//! at which all others have then arrived. So of any write and any other access to the same byte one
//! happens before the other.

use ddp_kernels::DType;

use super::channel::{Channel, NumberedCall};
use super::layout::DEPTH;
use super::stream::copy_out;
use crate::collective::Reduce;
use crate::error::Result;
use ddp_kernels::sums::{Sources, reduce};

/// One such call.
pub(super) struct Round<'a> {
    pub(super) channel: &'a Channel,
    pub(super) turn: &'a NumberedCall<'a>,
}

impl Round<'_> {
    /// Where the bytes of `rank` in this call are.
    fn place(&self, rank: usize, bytes: usize) -> *mut u8 {
        let (segment, slot) = (&self.channel.segment, self.turn.number as usize % DEPTH);
        assert!(bytes <= segment.layout().small_bytes);
        segment.pointer(
            segment.layout().small(self.channel.index, rank, slot),
            bytes,
        )
    }

    /// Gives `bytes`, arrives, and waits for all.
    pub(super) fn exchange(&self, bytes: &[u8]) -> Result<()> {
        let target = self.place(self.channel.me, bytes.len());
        // SAFETY: `place` checked the bounds. Only this rank writes there, and the ranks that read
        // what was there have arrived at a later call (see the top of this file).
        unsafe { copy_out(target, bytes) };
        self.channel.arrive(self.turn);
        self.channel.meet(self.turn)
    }

    /// Copies what `rank` gave, from its byte `from` on. All must have arrived.
    pub(super) fn take(&self, rank: usize, target: &mut [u8]) {
        let source = self.place(rank, target.len());
        // SAFETY: `place` checked the bounds. That rank wrote this before it arrived, and writes
        // there again only after this rank has arrived at the next call.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
    }

    /// Reduces into `own` what all gave at `offset` bytes from the start. All must have arrived.
    pub(super) fn reduce(&self, own: &mut [u8], offset: usize, dtype: DType, operation: Reduce) {
        let layout = self.channel.segment.layout();
        let (stride_bytes, ranks) = (layout.small_stride(), self.channel.size());
        self.place(ranks - 1, offset + own.len());
        let first = self.place(0, offset + own.len()).wrapping_add(offset);
        let sources = Sources {
            first,
            stride_bytes,
            ranks,
            mine: self.channel.me,
        };
        // SAFETY: `place` checked the bounds for the first and the last rank. Nothing is written
        // there any more, as in `take`.
        unsafe { reduce(dtype, operation, own, sources) };
    }
}
