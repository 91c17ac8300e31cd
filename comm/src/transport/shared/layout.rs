//! Where everything is in a segment: arithmetic on the number of ranks and the size of a piece, the
//! same in every process.
//!
//! First the board (header, causes, a page a rank), then the GPU pages, then the channels. A
//! channel has, in this order: a control page a rank; `small`, what a rank gives in one-round
//! calls; `given`, what a rank gives to each owner of a slice; `made`, what an owner made of its
//! slice; a mailbox for every pair. Most of it is never touched, and untouched memory takes no
//! space.

use std::ops::{Range, RangeInclusive};

use crate::error::{Error, Result};
use crate::identity::HOST_RANKS_MAX;

/// How many groups may work at the same time.
pub(super) const CHANNELS: usize = 12;
/// Slots of staging for each flow of pieces: one is filled while another is emptied. A power of
/// two, because slots are indexed by counters that wrap.
pub(super) const DEPTH: usize = 4;
/// The most ranks of one host.
pub(super) const RANKS_MAX: usize = HOST_RANKS_MAX;
/// Two cache lines, which processors fetch in pairs: two ranks never write within one.
pub(super) const LINE_BYTES: usize = 128;
/// Slices and pieces begin at multiples of this: whole elements of every dtype.
pub(super) const GRAIN_BYTES: usize = 64;

pub(super) const PAGE_BYTES: usize = 4096;

/// How many causes may be written at the same time, before the first is published.
pub(super) const CAUSES: usize = 16;
pub(super) const CAUSE_BYTES: usize = 2 * PAGE_BYTES;

/// What a rank shows of its GPU on one channel: `gpu_page.rs`.
pub(super) const GPU_PAGE_BYTES: usize = 17 * PAGE_BYTES;

/// The staging memory of what a rank gives, unless pieces would be too short, because every piece
/// needs synchronisation, or too long: `PIECE_BYTES`.
const GIVEN_BYTES: usize = 2 << 20;
/// 7.4 MB between two ranks take 870 µs in pieces of 16 KiB, 630 of 64, 530 of 128, 510 of 256.
const PIECE_BYTES: RangeInclusive<usize> = 2048..=256 << 10;
/// The same for the chunks of messages that a rank sends.
const MAIL_BYTES: usize = 1 << 20;
const CHUNK_BYTES: RangeInclusive<usize> = 4096..=128 << 10;
/// Up to this size one round is faster than three steps.
const SMALL_BYTES: usize = 4 << 10;

/// The sizes that determine a segment's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// How many ranks share the segment.
    pub(super) ranks: usize,
    /// The most bytes of one piece, a multiple of `GRAIN_BYTES`.
    pub(super) piece_bytes: usize,
    /// The most bytes that a rank gives in a call of one round.
    pub(super) small_bytes: usize,
    /// The most bytes of one chunk of a message.
    pub(super) chunk_bytes: usize,
}

impl Layout {
    /// The layout for `ranks` ranks of one host.
    pub(super) fn new(ranks: usize) -> Result<Layout> {
        if ranks == 0 || ranks > RANKS_MAX {
            let action = format!("share memory between {ranks} ranks of one host");
            let reason = format!("a host may have 1 to {RANKS_MAX} ranks");
            let help = "start fewer ranks on each host, with more threads each";
            return Err(Error::setup(action, reason, help));
        }
        let within = |bytes: usize, limits: RangeInclusive<usize>| {
            bytes
                .next_power_of_two()
                .clamp(*limits.start(), *limits.end())
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
        Layout {
            ranks,
            piece_bytes: 128,
            small_bytes: 64,
            chunk_bytes: 64,
        }
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
    pub(super) fn page(&self, rank: usize) -> usize {
        assert!(rank <= self.ranks);
        PAGE_BYTES + CAUSES * CAUSE_BYTES + rank * PAGE_BYTES
    }

    /// The GPU page of `rank` on a channel.
    pub(super) fn gpu_page(&self, channel: usize, rank: usize) -> usize {
        assert!(channel <= CHANNELS && rank < self.ranks);
        self.page(self.ranks) + (channel * self.ranks + rank) * GPU_PAGE_BYTES
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

    /// What a rank gives in one-round calls whose number is `slot` modulo `DEPTH`.
    pub(super) fn small(&self, channel: usize, rank: usize, slot: usize) -> usize {
        assert!(channel < CHANNELS && rank < self.ranks && slot < DEPTH);
        self.channel(channel)
            + self.small_start()
            + rank * self.small_stride()
            + slot * self.small_bytes
    }

    fn given_start(&self) -> usize {
        self.small_start() + self.ranks * self.small_stride()
    }

    /// Bytes from what a rank gives an owner to what the next rank gives the same owner.
    pub(super) fn given_stride(&self) -> usize {
        whole_pages(DEPTH * self.ranks * self.piece_bytes)
    }

    /// What `rank` gives the rank `owner`.
    pub(super) fn given(&self, channel: usize, rank: usize, slot: usize, owner: usize) -> usize {
        assert!(channel < CHANNELS && rank < self.ranks && slot < DEPTH && owner < self.ranks);
        let piece = slot * self.ranks + owner;
        self.channel(channel)
            + self.given_start()
            + rank * self.given_stride()
            + piece * self.piece_bytes
    }

    fn made_start(&self) -> usize {
        self.given_start() + self.ranks * self.given_stride()
    }

    fn made_stride(&self) -> usize {
        whole_pages(DEPTH * self.piece_bytes)
    }

    /// What `owner` shows of its slice.
    pub(super) fn made(&self, channel: usize, owner: usize, slot: usize) -> usize {
        assert!(channel < CHANNELS && owner < self.ranks && slot < DEPTH);
        let slot = slot * self.piece_bytes;
        self.channel(channel) + self.made_start() + owner * self.made_stride() + slot
    }

    fn mail_start(&self) -> usize {
        self.made_start() + self.ranks * self.made_stride()
    }

    /// Bytes of a pair's mailbox: a control page, then chunks.
    fn pair_bytes(&self) -> usize {
        PAGE_BYTES + whole_pages(DEPTH * self.chunk_bytes)
    }

    /// The control page of the mailbox from `from` to `to`.
    pub(super) fn mail(&self, channel: usize, from: usize, to: usize) -> usize {
        assert!(channel < CHANNELS && from < self.ranks && to < self.ranks);
        self.channel(channel) + self.mail_start() + (from * self.ranks + to) * self.pair_bytes()
    }

    /// A chunk in that mailbox.
    pub(super) fn chunk(&self, channel: usize, from: usize, to: usize, slot: usize) -> usize {
        assert!(slot < DEPTH);
        self.mail(channel, from, to) + PAGE_BYTES + slot * self.chunk_bytes
    }
}

fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE_BYTES)
}

/// How the bytes of a tensor are cut: a slice for every rank, and each slice into pieces that fit a
/// slot. All slices have the same number of pieces; the last may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SliceCut {
    bytes: usize,
    slices: usize,
    /// Whether slices are exactly equal, or begin at multiples of `GRAIN_BYTES`.
    equal: bool,
    piece_bytes: usize,
    /// How many pieces each slice has.
    pub(super) pieces: usize,
}

impl SliceCut {
    /// `slices` slices that begin at multiples of the grain and differ by one grain at most.
    pub(super) fn even(bytes: usize, slices: usize, piece_bytes_max: usize) -> SliceCut {
        SliceCut::new(bytes, slices, false, piece_bytes_max)
    }

    /// `slices` equal slices.
    pub(super) fn equal(bytes: usize, slices: usize, piece_bytes_max: usize) -> SliceCut {
        assert!(
            bytes.is_multiple_of(slices),
            "{bytes} bytes are not {slices} equal slices"
        );
        SliceCut::new(bytes, slices, true, piece_bytes_max)
    }

    fn new(bytes: usize, slices: usize, equal: bool, piece_bytes_max: usize) -> SliceCut {
        assert!(piece_bytes_max >= GRAIN_BYTES && piece_bytes_max.is_multiple_of(GRAIN_BYTES));
        let uncut = SliceCut {
            bytes,
            slices,
            equal,
            piece_bytes: 0,
            pieces: 0,
        };
        // The first slice is never shorter than another.
        let longest = uncut.slice(0).len();
        let pieces = longest.div_ceil(piece_bytes_max);
        // Nearly equal pieces: a short last one would need as much synchronisation as a long one.
        let piece_bytes = longest
            .div_ceil(pieces.max(1))
            .next_multiple_of(GRAIN_BYTES);
        SliceCut {
            piece_bytes,
            pieces,
            ..uncut
        }
    }

    /// The bytes of `rank`'s slice.
    pub(super) fn slice(&self, rank: usize) -> Range<usize> {
        assert!(rank < self.slices);
        if self.equal {
            let each = self.bytes / self.slices;
            return rank * each..(rank + 1) * each;
        }
        let grains = self.bytes.div_ceil(GRAIN_BYTES);
        // The first `longer` slices have one more grain. `grains * rank / slices` may overflow.
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
mod tests;
