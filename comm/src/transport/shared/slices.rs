//! Large tensors: every rank owns a slice, and slices move in pieces through staging memory that
//! stays in the caches.
//!
//! all_reduce is three steps a piece. Give: each rank copies to staging what the others own. Make:
//! the owner reduces what it was given and its own, in rank order, into its tensor and into
//! staging. Take: every rank copies the result out. reduce_scatter is the first two steps,
//! all_gather the last two (an owner makes what it has).
//!
//! Who may touch what, and when. A slot of staging is written by one rank only. Piece k goes into
//! slot k modulo `DEPTH`.
//! * `given`: rank r writes piece k after every owner has counted `Made` past k - DEPTH, which is
//!   after they have read the slot. Owners read it after r has counted `Given` past k, and before
//!   they count `Made` past k.
//! * `made`: the owner writes piece k after all others have counted `Taken` past k - DEPTH. They
//!   read it after the owner has counted `Made` past k, and before they count `Taken` past k.
//!
//! Counting is a release and waiting an acquire, so of any write and any other access to the same
//! byte one happens before the other. Piece numbers continue from call to call, and at the end of a
//! call each rank has counted all its pieces everywhere: so the same holds across calls.
//!
//! In all_reduce and reduce_scatter the waits for free slots never sleep: when the others have
//! given piece k they are done with piece k - 3, because of the order of their steps and a `DEPTH`
//! above 2. The waits stay: they cost a few loads, and the argument above needs no other.

use std::ops::Range;

use ddp_kernels::DType;

use super::channel::{Channel, Count, NumberedCall};
use super::layout::{DEPTH, SliceCut};
use super::stream::copy_out;
use crate::collective::tree::Addend;
use crate::collective::{Partials, Reduce, Sum};
use crate::error::Result;
use ddp_kernels::sums::{Sources, add_in_order, reduce};

/// Bytes that are reduced at once and then shown: they stay in the first-level cache in between.
const BLOCK_BYTES: usize = 4096;

/// What is reduced: a tensor of each rank, or partial sums.
#[derive(Clone, Copy)]
pub(super) struct SliceTerms<'a> {
    pub(super) reduce: Reduce,
    pub(super) sum: Sum<'a>,
    /// This rank's partial sums, one after the other. One that is not in here is in the tensor that
    /// moves.
    pub(super) rows: &'a [u8],
    /// The most bytes of a piece: a slot holds one of each that a rank gives.
    pub(super) place_bytes: usize,
}

impl<'a> SliceTerms<'a> {
    /// Some bytes of one; None if it is in the tensor, which has `length` bytes.
    fn within(&self, row: usize, length: usize, range: Range<usize>) -> Option<&'a [u8]> {
        let start = row * length;
        self.rows.get(start + range.start..start + range.end)
    }
}

/// A tensor that moves through the staging of a channel.
pub(super) struct Staged<'a> {
    pub(super) channel: &'a Channel,
    pub(super) turn: &'a NumberedCall<'a>,
    pub(super) cut: SliceCut,
    /// The number of the first piece.
    pub(super) first: u32,
}

impl Staged<'_> {
    fn number(&self, piece: usize) -> u32 {
        self.first.wrapping_add(piece as u32)
    }

    fn slot(&self, piece: usize) -> usize {
        self.number(piece) as usize % DEPTH
    }

    /// The count that frees the slot of `piece`.
    fn freed(&self, piece: usize) -> u32 {
        self.number(piece)
            .wrapping_add(1)
            .wrapping_sub(DEPTH as u32)
    }

    /// Every rank's `bytes`, or with `scatter` this rank's slice of them, become the reduction of
    /// all ranks'.
    pub(super) fn reduce(
        &self,
        bytes: &mut [u8],
        dtype: DType,
        terms: SliceTerms<'_>,
        scatter: bool,
    ) -> Result<()> {
        let pieces = self.cut.pieces;
        self.give(0, bytes, terms)?;
        self.channel.meet(self.turn)?;
        for piece in 0..pieces {
            // Give one piece ahead and take one late: what other ranks wait for comes first.
            if piece + 1 < pieces {
                self.give(piece + 1, bytes, terms)?;
            }
            self.make(piece, bytes, dtype, terms, !scatter)?;
            if piece > 0 && !scatter {
                self.take(piece - 1, bytes)?;
            }
        }
        if scatter {
            self.channel.raise(Count::Taken, self.number(pieces));
            return Ok(());
        }
        self.take(pieces - 1, bytes)
    }

    /// Every rank's slice is copied to all ranks.
    pub(super) fn all_gather(&self, bytes: &mut [u8]) -> Result<()> {
        let (pieces, me) = (self.cut.pieces, self.channel.me);
        self.show(0, me, bytes)?;
        self.channel.meet(self.turn)?;
        for piece in 0..pieces {
            if piece + 1 < pieces {
                self.show(piece + 1, me, bytes)?;
            }
            self.take(piece, bytes)?;
        }
        self.channel.raise(Count::Given, self.number(pieces));
        Ok(())
    }

    /// The root's part of a broadcast. The cut has one slice.
    pub(super) fn broadcast(&self, bytes: &[u8]) -> Result<()> {
        let pieces = self.cut.pieces;
        self.show(0, 0, bytes)?;
        self.channel.meet(self.turn)?;
        (1..pieces).try_for_each(|piece| self.show(piece, 0, bytes))?;
        self.channel.raise(Count::Given, self.number(pieces));
        self.channel.raise(Count::Taken, self.number(pieces));
        Ok(())
    }

    /// The other ranks' part of a broadcast.
    pub(super) fn receive_broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        self.channel.meet(self.turn)?;
        for piece in 0..self.cut.pieces {
            self.channel.pause();
            self.channel
                .wait_for(self.turn, root, Count::Made, self.number(piece + 1))?;
            self.take_from(root, piece, &mut bytes[self.cut.piece(0, piece)]);
            self.channel.raise(Count::Taken, self.number(piece + 1));
        }
        self.channel
            .raise(Count::Given, self.number(self.cut.pieces));
        self.channel
            .raise(Count::Made, self.number(self.cut.pieces));
        Ok(())
    }

    /// Copies piece `piece` of every other rank's slice to staging.
    fn give(&self, piece: usize, bytes: &[u8], terms: SliceTerms<'_>) -> Result<()> {
        let Channel {
            segment, index, me, ..
        } = self.channel;
        self.channel
            .wait_for_all(self.turn, Count::Made, self.freed(piece))?;
        for owner in self.channel.others() {
            let range = self.cut.piece(owner, piece);
            let at = segment.layout().given(*index, *me, self.slot(piece), owner);
            let copy = |source: &[u8], start: usize| {
                let target = segment.pointer(at + start, source.len());
                assert!(start + source.len() <= segment.layout().piece_bytes);
                // SAFETY: `pointer` checked the bounds, and staging belongs to no tensor. Only
                // this rank writes there, and all ranks that read it before are done (see the top
                // of this file).
                unsafe { copy_out(target, source) };
            };
            let Sum::Tree(partials) = terms.sum else {
                copy(&bytes[range], 0);
                continue;
            };
            for part in partials.order.iter().filter(|part| part.rank == *me) {
                let source = terms.within(part.row, bytes.len(), range.clone());
                let source = source.unwrap_or(&bytes[range.clone()]);
                copy(source, part.row * terms.place_bytes);
            }
        }
        self.channel.raise(Count::Given, self.number(piece + 1));
        Ok(())
    }

    /// Reduces piece `piece` of this rank's slice, and shows it to the others if `shown`.
    fn make(
        &self,
        piece: usize,
        bytes: &mut [u8],
        dtype: DType,
        terms: SliceTerms<'_>,
        shown: bool,
    ) -> Result<()> {
        let Channel {
            segment, index, me, ..
        } = self.channel;
        let (layout, slot) = (segment.layout(), self.slot(piece));
        self.channel
            .wait_for_all(self.turn, Count::Given, self.number(piece + 1))?;
        let (length, range) = (bytes.len(), self.cut.piece(*me, piece));
        let own_bytes = range.len();
        let own = &mut bytes[range.clone()];
        assert!(own.len() <= layout.piece_bytes);
        if shown {
            self.channel
                .wait_for_all(self.turn, Count::Taken, self.freed(piece))?;
        }
        let (stride_bytes, ranks) = (layout.given_stride(), self.channel.size());
        let slot_bytes = match terms.sum {
            Sum::Transport => own.len(),
            Sum::Tree(_) => layout.piece_bytes,
        };
        let reach = (ranks - 1) * stride_bytes + slot_bytes;
        let given = segment.pointer(layout.given(*index, 0, slot, *me), reach);
        let made = segment.pointer(layout.made(*index, *me, slot), own.len());
        for (block, own) in own.chunks_mut(BLOCK_BYTES).enumerate() {
            let start = block * BLOCK_BYTES;
            let sources = Sources {
                first: given.wrapping_add(start),
                stride_bytes,
                ranks,
                mine: *me,
            };
            match terms.sum {
                // SAFETY: `pointer` checked the bounds. The others have counted this piece as
                // given, and write there again only after this rank has counted it as made (see
                // the top).
                Sum::Transport => unsafe { reduce(dtype, terms.reduce, own, sources) },
                Sum::Tree(Partials { order, .. }) => {
                    let (from, until) = (range.start + start, range.start + start + own.len());
                    let place = |part: &Addend| {
                        assert!(part.rank < ranks);
                        if part.rank == *me {
                            let row = terms.within(part.row, length, from..until);
                            return row.map(<[u8]>::as_ptr);
                        }
                        let at = part.row * terms.place_bytes;
                        assert!(at + own_bytes <= layout.piece_bytes);
                        let at = part.rank * stride_bytes + at;
                        Some(sources.first.wrapping_add(at))
                    };
                    // SAFETY: as above, and a slot ends within the layout's piece. This rank's own
                    // rows are slices.
                    unsafe { add_in_order(dtype, own, order, &place) };
                }
            }
            if shown {
                // SAFETY: as in `give`. The others read this only after it is counted, below.
                unsafe { copy_out(made.wrapping_add(start), own) };
            }
        }
        self.channel.raise(Count::Made, self.number(piece + 1));
        Ok(())
    }

    /// Shows piece `piece` of a slice unchanged.
    fn show(&self, piece: usize, slice: usize, bytes: &[u8]) -> Result<()> {
        let Channel {
            segment, index, me, ..
        } = self.channel;
        self.channel
            .wait_for_all(self.turn, Count::Taken, self.freed(piece))?;
        let source = &bytes[self.cut.piece(slice, piece)];
        let target = segment.pointer(
            segment.layout().made(*index, *me, self.slot(piece)),
            source.len(),
        );
        assert!(source.len() <= segment.layout().piece_bytes);
        // SAFETY: as in `give`.
        unsafe { copy_out(target, source) };
        self.channel.raise(Count::Made, self.number(piece + 1));
        Ok(())
    }

    /// Copies piece `piece` of every other rank's slice out of staging.
    fn take(&self, piece: usize, bytes: &mut [u8]) -> Result<()> {
        self.channel
            .wait_for_all(self.turn, Count::Made, self.number(piece + 1))?;
        for owner in self.channel.others() {
            self.take_from(owner, piece, &mut bytes[self.cut.piece(owner, piece)]);
        }
        self.channel.raise(Count::Taken, self.number(piece + 1));
        Ok(())
    }

    /// Copies what `owner` shows. `owner` must have counted this piece as made.
    fn take_from(&self, owner: usize, piece: usize, target: &mut [u8]) {
        let Channel { segment, index, .. } = self.channel;
        let source = segment.pointer(
            segment.layout().made(*index, owner, self.slot(piece)),
            target.len(),
        );
        assert!(target.len() <= segment.layout().piece_bytes);
        // SAFETY: `pointer` checked the bounds, and staging belongs to no tensor. The owner wrote
        // this before it counted it as made, which this rank has waited for, and writes there again
        // only after this rank has counted it as taken.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
    }
}
