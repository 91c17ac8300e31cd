//! Send and receive: a mailbox for every ordered pair of ranks, with letters of limited size and counters of its own.
//!
//! The sender writes letter k into slot k modulo `DEPTH` after the receiver has counted `taken` past k - DEPTH, and counts
//! `sent` past k; the receiver reads it after that, and counts `taken` past k. So of any write and any other access to the
//! same byte one happens before the other. The first letter of a message says what it is.

use std::sync::atomic::{AtomicU64, Ordering};

use super::activity::Asked;
use super::channel::Channel;
use super::layout::{Cut, DEPTH, LINE_BYTES};
use super::stream::copy_out;
use crate::collective::Call;
use crate::error::Result;

/// In a mailbox's control page: the two counters, and what the message in each slot is, if it begins there.
const SENT_AT: usize = 0;
const TAKEN_AT: usize = LINE_BYTES;
const SAID_AT: usize = 2 * LINE_BYTES;
const SAID_BYTES: usize = 64;

/// The mailbox in which `from` writes to `to`, seen from one of them.
pub(super) struct Mail<'a> {
    pub(super) channel: &'a Channel,
    pub(super) call: &'a Call<'a>,
    pub(super) from: usize,
    pub(super) to: usize,
    /// The number of the first letter.
    pub(super) first: u32,
}

impl Mail<'_> {
    fn control(&self) -> usize {
        self.channel.segment.layout().mail(self.channel.index, self.from, self.to)
    }

    fn number(&self, letter: usize) -> u32 {
        self.first.wrapping_add(letter as u32)
    }

    /// The letters of a message of so many bytes: one at least, to say that it came.
    fn letters(&self, bytes: usize) -> (Cut, usize) {
        let cut = Cut::even(bytes, 1, self.channel.segment.layout().chunk_bytes);
        (cut, cut.pieces.max(1))
    }

    fn wait(&self, at: usize, target: u32, peer: usize) -> Result<()> {
        self.channel.pause();
        let at = self.control() + at;
        if self.channel.counter_of(at).reached(target) {
            return Ok(());
        }
        self.channel.wait_at(self.call, at, target, peer, || vec![peer])
    }

    fn count(&self, at: usize, value: u32) {
        self.channel.pause();
        self.channel.counter_of(self.control() + at).raise(value);
    }

    /// Where a letter lies, and what is said of the message that begins with it.
    fn letter(&self, letter: usize, bytes: usize) -> (*mut u8, [&AtomicU64; 2]) {
        let (segment, slot) = (&self.channel.segment, self.number(letter) as usize % DEPTH);
        assert!(bytes <= segment.layout().chunk_bytes);
        let said = self.control() + SAID_AT + slot * SAID_BYTES;
        let at = segment.layout().letter(self.channel.index, self.from, self.to, slot);
        (segment.pointer(at, bytes), [segment.u64_at(said), segment.u64_at(said + 8)])
    }

    /// Sends a message. The number of the letter after its last.
    pub(super) fn send(&self, bytes: &[u8]) -> Result<u32> {
        let (cut, letters) = self.letters(bytes.len());
        for letter in 0..letters {
            let source = if cut.pieces == 0 { bytes } else { &bytes[cut.piece(0, letter)] };
            self.wait(TAKEN_AT, self.number(letter).wrapping_add(1).wrapping_sub(DEPTH as u32), self.to)?;
            let (target, said) = self.letter(letter, source.len());
            let asked = Asked::of(self.call);
            said[0].store(asked.operation, Ordering::Relaxed);
            said[1].store(asked.count, Ordering::Relaxed);
            // SAFETY: `pointer` checked the bounds; only this rank writes there, and the receiver has said that it is
            // done with what lay there (see the top of this file).
            unsafe { copy_out(target, source) };
            self.count(SENT_AT, self.number(letter + 1));
        }
        Ok(self.number(letters))
    }

    /// Receives a message that must be just as long and of the same dtype. The number of the letter after its last.
    pub(super) fn receive(&self, bytes: &mut [u8]) -> Result<u32> {
        let (cut, letters) = self.letters(bytes.len());
        for letter in 0..letters {
            let target = if cut.pieces == 0 { &mut bytes[..0] } else { &mut bytes[cut.piece(0, letter)] };
            self.wait(SENT_AT, self.number(letter + 1), self.from)?;
            let (source, said) = self.letter(letter, target.len());
            let theirs = Asked { operation: said[0].load(Ordering::Relaxed), count: said[1].load(Ordering::Relaxed) };
            if letter == 0 && !theirs.is_for(self.to, self.call) {
                return Err(self.channel.other_message(self.call, self.from, theirs));
            }
            // SAFETY: `pointer` checked the bounds; the sender wrote this before it counted it sent, and writes there
            // again only after this rank has counted it taken.
            unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
            self.count(TAKEN_AT, self.number(letter + 1));
        }
        Ok(self.number(letters))
    }
}
