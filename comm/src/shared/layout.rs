//! Where everything lies in a segment: arithmetic on the number of ranks and the size of a piece, the same in every
//! process.
//!
//! First the board (header, causes, a page a rank), then what ranks tell of their GPUs, then the channels. A channel has, one after the other: a control
//! page a rank; `small`, what a rank gives in calls of one round; `given`, what a rank gives to each owner of a slice;
//! `made`, what an owner made of its slice; a mailbox for every pair. Almost all of it is never touched, and memory that
//! is never touched is not there.

use std::ops::{Range, RangeInclusive};

use crate::error::{Error, Result};

/// Groups that may work at the same time.
pub(super) const CHANNELS: usize = 12;
/// Slots of staging for each flow of pieces: one is filled while the other is emptied. A power of two, since slots are
/// counted round by counters that wrap.
pub(super) const DEPTH: usize = 4;
/// The most ranks of one host.
pub(super) const RANKS_MAX: usize = 256;
/// Two cache lines: processors fetch them in pairs, and what two ranks write must not share one.
pub(super) const LINE_BYTES: usize = 128;
/// Slices and pieces begin on multiples of this: whole elements of every dtype.
pub(super) const GRAIN_BYTES: usize = 64;

const PAGE_BYTES: usize = 4096;

/// Errors that are being written at the same time, before the first is published.
pub(super) const CAUSES: usize = 16;
pub(super) const CAUSE_BYTES: usize = 2 * PAGE_BYTES;

/// What a rank tells of its GPU on one channel: see `gpu_page.rs`.
pub(super) const GPU_PAGE_BYTES: usize = 17 * PAGE_BYTES;

/// What a rank gives takes this much memory, unless that makes pieces too short (every piece has its handshakes) or longer
/// than pays: see `PIECE_BYTES`.
const GIVEN_BYTES: usize = 2 << 20;
/// 7.4 MB between two ranks take 870 µs in pieces of 16 KiB, 630 of 64, 530 of 128, 510 of 256.
const PIECE_BYTES: RangeInclusive<usize> = 2048..=256 << 10;
/// The same for the letters that a rank sends.
const MAIL_BYTES: usize = 1 << 20;
const CHUNK_BYTES: RangeInclusive<usize> = 4096..=128 << 10;
/// Up to here one round is faster than three steps.
const SMALL_BYTES: usize = 4 << 10;

/// The sizes that a segment is laid out by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// How many ranks share it.
    pub(super) ranks: usize,
    /// The most bytes of one piece, a multiple of `GRAIN_BYTES`.
    pub(super) piece_bytes: usize,
    /// The most bytes that a rank gives in a call of one round.
    pub(super) small_bytes: usize,
    /// The most bytes of one letter in a mailbox.
    pub(super) chunk_bytes: usize,
}

impl Layout {
    /// The layout for `ranks` ranks of one host.
    pub(super) fn new(ranks: usize) -> Result<Layout> {
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(Error::Setup {
                action: format!("share memory between {ranks} ranks of one host"),
                reason: format!("a host may have 1 to {RANKS_MAX}"),
                way_out: "Start fewer ranks on each host, with more threads each (--threads).".to_string(),
            });
        }
        let within = |bytes: usize, limits: RangeInclusive<usize>| {
            bytes.next_power_of_two().clamp(*limits.start(), *limits.end())
        };
        Ok(Layout {
            ranks,
            piece_bytes: within(GIVEN_BYTES / (DEPTH * ranks), PIECE_BYTES),
            small_bytes: SMALL_BYTES,
            chunk_bytes: within(MAIL_BYTES / (DEPTH * ranks), CHUNK_BYTES),
        })
    }

    /// The same with tiny staging, so that tests cut small tensors into many pieces.
    #[cfg(test)]
    pub(super) fn tiny(ranks: usize) -> Layout {
        Layout { ranks, piece_bytes: 128, small_bytes: 64, chunk_bytes: 64 }
    }

    /// Bytes of the whole segment.
    pub(super) fn bytes(&self) -> usize {
        self.channel(CHANNELS)
    }

    /// The slot of cause number `index`.
    pub(super) fn cause(&self, index: usize) -> usize {
        assert!(index < CAUSES);
        PAGE_BYTES + index * CAUSE_BYTES
    }

    /// The page of a rank on the board.
    pub(super) fn place(&self, rank: usize) -> usize {
        assert!(rank <= self.ranks);
        PAGE_BYTES + CAUSES * CAUSE_BYTES + rank * PAGE_BYTES
    }

    /// What `rank` tells of its GPU on a channel.
    pub(super) fn gpu_page(&self, channel: usize, rank: usize) -> usize {
        assert!(channel <= CHANNELS && rank < self.ranks);
        self.place(self.ranks) + (channel * self.ranks + rank) * GPU_PAGE_BYTES
    }

    fn channel(&self, channel: usize) -> usize {
        self.gpu_page(CHANNELS, 0) + channel * self.channel_bytes()
    }

    fn channel_bytes(&self) -> usize {
        self.mail_start() + self.ranks * self.ranks * self.pair_bytes()
    }

    /// The control page of a rank in a channel.
    pub(super) fn control(&self, channel: usize, rank: usize) -> usize {
        assert!(channel < CHANNELS && rank < self.ranks);
        self.channel(channel) + rank * PAGE_BYTES
    }

    fn small_start(&self) -> usize {
        self.ranks * PAGE_BYTES
    }

    /// Bytes from a rank's `small` to the next one's.
    pub(super) fn small_stride(&self) -> usize {
        whole_pages(DEPTH * self.small_bytes)
    }

    /// What a rank gives in the calls of one round whose number is `slot` modulo `DEPTH`.
    pub(super) fn small(&self, channel: usize, rank: usize, slot: usize) -> usize {
        assert!(channel < CHANNELS && rank < self.ranks && slot < DEPTH);
        self.channel(channel) + self.small_start() + rank * self.small_stride() + slot * self.small_bytes
    }

    fn given_start(&self) -> usize {
        self.small_start() + self.ranks * self.small_stride()
    }

    /// Bytes from what a rank gives an owner to what the next rank gives the same one.
    pub(super) fn given_stride(&self) -> usize {
        whole_pages(DEPTH * self.ranks * self.piece_bytes)
    }

    /// What `rank` gives the rank `owner`.
    pub(super) fn given(&self, channel: usize, rank: usize, slot: usize, owner: usize) -> usize {
        assert!(channel < CHANNELS && rank < self.ranks && slot < DEPTH && owner < self.ranks);
        let piece = slot * self.ranks + owner;
        self.channel(channel) + self.given_start() + rank * self.given_stride() + piece * self.piece_bytes
    }

    fn made_start(&self) -> usize {
        self.given_start() + self.ranks * self.given_stride()
    }

    fn made_stride(&self) -> usize {
        whole_pages(DEPTH * self.piece_bytes)
    }

    /// What the rank `owner` made of its slice.
    pub(super) fn made(&self, channel: usize, owner: usize, slot: usize) -> usize {
        assert!(channel < CHANNELS && owner < self.ranks && slot < DEPTH);
        let slot = slot * self.piece_bytes;
        self.channel(channel) + self.made_start() + owner * self.made_stride() + slot
    }

    fn mail_start(&self) -> usize {
        self.made_start() + self.ranks * self.made_stride()
    }

    /// Bytes of a pair's mailbox: a page of control, then letters.
    fn pair_bytes(&self) -> usize {
        PAGE_BYTES + whole_pages(DEPTH * self.chunk_bytes)
    }

    /// The control page of the mailbox in which `from` writes to `to`.
    pub(super) fn mail(&self, channel: usize, from: usize, to: usize) -> usize {
        assert!(channel < CHANNELS && from < self.ranks && to < self.ranks);
        self.channel(channel) + self.mail_start() + (from * self.ranks + to) * self.pair_bytes()
    }

    /// A letter in it.
    pub(super) fn letter(&self, channel: usize, from: usize, to: usize, slot: usize) -> usize {
        assert!(slot < DEPTH);
        self.mail(channel, from, to) + PAGE_BYTES + slot * self.chunk_bytes
    }
}

fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE_BYTES)
}

/// How the bytes of a tensor are cut: a slice for every rank, and each slice into pieces that fit a slot. All slices have
/// the same number of pieces, of which the last may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    bytes: usize,
    slices: usize,
    /// Whether slices are exactly equal, wherever they begin, or begin on multiples of `GRAIN_BYTES`.
    equal: bool,
    piece_bytes: usize,
    /// How many pieces each slice has.
    pub(super) pieces: usize,
}

impl Cut {
    /// `slices` slices that begin on multiples of the grain and differ by one grain at most.
    pub(super) fn even(bytes: usize, slices: usize, piece_bytes_max: usize) -> Cut {
        Cut { bytes, slices, equal: false, piece_bytes: 0, pieces: 0 }.into_pieces(piece_bytes_max)
    }

    /// `slices` equal slices.
    pub(super) fn equal(bytes: usize, slices: usize, piece_bytes_max: usize) -> Cut {
        assert!(bytes.is_multiple_of(slices), "{bytes} bytes are not {slices} equal slices");
        Cut { bytes, slices, equal: true, piece_bytes: 0, pieces: 0 }.into_pieces(piece_bytes_max)
    }

    fn into_pieces(self, piece_bytes_max: usize) -> Cut {
        assert!(piece_bytes_max >= GRAIN_BYTES && piece_bytes_max.is_multiple_of(GRAIN_BYTES));
        let longest = (0..self.slices).map(|rank| self.slice(rank).len()).max().unwrap_or(0);
        let pieces = longest.div_ceil(piece_bytes_max);
        // Nearly equal pieces: a short last one would cost as many handshakes as a long one.
        let piece_bytes = longest.div_ceil(pieces.max(1)).next_multiple_of(GRAIN_BYTES);
        Cut { piece_bytes, pieces, ..self }
    }

    /// The bytes of `rank`'s slice.
    pub(super) fn slice(&self, rank: usize) -> Range<usize> {
        assert!(rank < self.slices);
        if self.equal {
            let each = self.bytes / self.slices;
            return rank * each..(rank + 1) * each;
        }
        let grains = self.bytes.div_ceil(GRAIN_BYTES);
        // The first `longer` slices have a grain more. Not `grains * rank / slices`: that may overflow.
        let (each, longer) = (grains / self.slices, grains % self.slices);
        let edge = |rank: usize| ((rank * each + rank.min(longer)) * GRAIN_BYTES).min(self.bytes);
        edge(rank)..edge(rank + 1)
    }

    /// The bytes of piece `index` of `rank`'s slice.
    pub(super) fn piece(&self, rank: usize, index: usize) -> Range<usize> {
        assert!(index < self.pieces);
        let slice = self.slice(rank);
        let edge = |index: usize| slice.end.min(slice.start + index * self.piece_bytes);
        edge(index)..edge(index + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every piece of memory that a layout hands out, with its length.
    fn everything(layout: &Layout) -> Vec<(usize, usize)> {
        let ranks = layout.ranks;
        let mut all = vec![(0, PAGE_BYTES)];
        all.extend((0..CAUSES).map(|index| (layout.cause(index), CAUSE_BYTES)));
        all.extend((0..ranks).map(|rank| (layout.place(rank), PAGE_BYTES)));
        for channel in 0..CHANNELS {
            for rank in 0..ranks {
                all.push((layout.gpu_page(channel, rank), GPU_PAGE_BYTES));
                all.push((layout.control(channel, rank), PAGE_BYTES));
                for slot in 0..DEPTH {
                    all.push((layout.small(channel, rank, slot), layout.small_bytes));
                    all.push((layout.made(channel, rank, slot), layout.piece_bytes));
                    for other in 0..ranks {
                        all.push((layout.given(channel, rank, slot, other), layout.piece_bytes));
                        all.push((layout.letter(channel, rank, other, slot), layout.chunk_bytes));
                    }
                }
                all.extend((0..ranks).map(|other| (layout.mail(channel, rank, other), PAGE_BYTES)));
            }
        }
        all
    }

    #[test]
    fn nothing_lies_on_anything_else_and_all_lies_within() {
        for layout in (1..9).chain([31]).flat_map(|ranks| [Layout::new(ranks).unwrap(), Layout::tiny(ranks)]) {
            let mut all = everything(&layout);
            all.sort_unstable();
            assert!(all.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{layout:?}");
            let &(start, bytes) = all.last().unwrap();
            assert!(start + bytes <= layout.bytes(), "{layout:?}");
            assert!(all.iter().all(|&(start, _)| start.is_multiple_of(GRAIN_BYTES)));
        }
    }

    #[test]
    fn what_ranks_give_an_owner_lies_at_equal_distances() {
        for layout in [Layout::new(5).unwrap(), Layout::tiny(5)] {
            for rank in 0..5 {
                let from = |rank| layout.given(3, rank, 1, 2);
                assert_eq!(from(rank), from(0) + rank * layout.given_stride());
                assert_eq!(layout.small(3, rank, 1), layout.small(3, 0, 1) + rank * layout.small_stride());
            }
        }
    }

    #[test]
    fn a_host_of_no_rank_or_too_many_is_refused() {
        assert!(Layout::new(0).is_err());
        assert!(Layout::new(RANKS_MAX).is_ok());
        let message = Layout::new(RANKS_MAX + 1).unwrap_err().to_string();
        assert!(message.contains("257 ranks") && message.contains("1 to 256") && message.contains("--threads"));
    }

    proptest! {
        #[test]
        fn slices_and_pieces_cover_everything_once_and_fit(
            bytes in prop_oneof![0usize..3000, (1usize << 31) - 70..(1 << 31) + 70, (1usize << 40)..(1 << 40) + 9000],
            slices in 1usize..9,
            grains in 1usize..5,
            large in any::<bool>(),
        ) {
            // Pieces of a usual size where there would be too many to look at.
            let piece_bytes_max = if bytes < 3000 { grains * GRAIN_BYTES } else { grains << 34 };
            let piece_bytes_max = if large { piece_bytes_max * 3 } else { piece_bytes_max };
            for cut in [
                Cut::even(bytes, slices, piece_bytes_max),
                Cut::equal(bytes / slices * slices, slices, piece_bytes_max),
            ] {
                let mut next = 0;
                for rank in 0..slices {
                    prop_assert_eq!(cut.slice(rank).start, next);
                    prop_assert!(cut.equal || next == cut.bytes || next.is_multiple_of(GRAIN_BYTES));
                    for index in 0..cut.pieces {
                        let piece = cut.piece(rank, index);
                        prop_assert_eq!(piece.start, next);
                        prop_assert!(piece.len() <= piece_bytes_max);
                        next = piece.end;
                    }
                    prop_assert_eq!(cut.slice(rank).end, next);
                }
                prop_assert_eq!(next, cut.bytes);
            }
        }

        #[test]
        fn slices_differ_by_a_grain_at_most(bytes in 0usize..100_000, slices in 1usize..9) {
            let lengths = || (0..slices).map(|rank| Cut::even(bytes, slices, 4096).slice(rank).len());
            prop_assert!(lengths().max().unwrap() - lengths().min().unwrap() <= 2 * GRAIN_BYTES);
        }
    }

    #[test]
    fn a_tensor_near_the_end_of_memory_is_cut_without_overflow() {
        let cut = Cut::even(isize::MAX as usize, 7, 1 << 60);
        assert_eq!(cut.piece(6, cut.pieces - 1).end, isize::MAX as usize);
    }
}
