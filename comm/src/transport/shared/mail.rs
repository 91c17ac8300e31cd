//! Send and receive: a mailbox for every ordered pair of ranks. Messages are cut into chunks of
//! limited size, and each mailbox has its own counters.
//!
//! The sender writes chunk k into slot k modulo `DEPTH` after the receiver has counted `taken` past
//! k - DEPTH, and counts `sent` past k. The receiver reads it after that, and counts `taken` past
//! k. So of any write and any other access to the same byte one happens before the other. The first
//! chunk of a message has its signature, whose words may be relaxed for the same reason.

use std::sync::atomic::{AtomicU64, Ordering};

use super::activity::Signature;
use super::channel::Channel;
use super::layout::{DEPTH, LINE_BYTES, SliceCut};
use super::stream::copy_out;
use crate::collective::Call;
use crate::error::Result;

/// A mailbox's control page: the two counters, and the signature of a message in its first slot.
const SENT_AT: usize = 0;
const TAKEN_AT: usize = LINE_BYTES;
const SIGNATURES_AT: usize = 2 * LINE_BYTES;
const SIGNATURE_BYTES: usize = 64;

/// The mailbox from `from` to `to`, seen from one of them.
pub(super) struct Mailbox<'a> {
    pub(super) channel: &'a Channel,
    pub(super) call: &'a Call<'a>,
    pub(super) from: usize,
    pub(super) to: usize,
    /// The number of the first chunk.
    pub(super) first: u32,
}

impl Mailbox<'_> {
    fn control(&self) -> usize {
        self.channel
            .segment
            .layout()
            .mail(self.channel.index, self.from, self.to)
    }

    fn number(&self, chunk: usize) -> u32 {
        self.first.wrapping_add(chunk as u32)
    }

    /// How a message is cut into chunks, and how many: at least one, to show that it came.
    fn chunks(&self, bytes: usize) -> (SliceCut, usize) {
        let cut = SliceCut::even(bytes, 1, self.channel.segment.layout().chunk_bytes);
        (cut, cut.pieces.max(1))
    }

    fn wait(&self, at: usize, target: u32, peer: usize) -> Result<()> {
        self.channel.pause();
        let at = self.control() + at;
        if self.channel.counter_of(at).reached(target) {
            return Ok(());
        }
        self.channel
            .wait_at(self.call, at, target, peer, || vec![peer])
    }

    fn count(&self, at: usize, value: u32) {
        self.channel.pause();
        self.channel.counter_of(self.control() + at).raise(value);
    }

    /// Where a chunk is, and the signature of the message that begins with it.
    fn chunk(&self, chunk: usize, bytes: usize) -> (*mut u8, [&AtomicU64; 2]) {
        let (segment, slot) = (&self.channel.segment, self.number(chunk) as usize % DEPTH);
        assert!(bytes <= segment.layout().chunk_bytes);
        let at_signature = self.control() + SIGNATURES_AT + slot * SIGNATURE_BYTES;
        let at = segment
            .layout()
            .chunk(self.channel.index, self.from, self.to, slot);
        (
            segment.pointer(at, bytes),
            [
                segment.u64_at(at_signature),
                segment.u64_at(at_signature + 8),
            ],
        )
    }

    /// Sends a message. Returns the number of the chunk after its last.
    pub(super) fn send(&self, bytes: &[u8]) -> Result<u32> {
        let (cut, chunks) = self.chunks(bytes.len());
        for chunk in 0..chunks {
            let source = if cut.pieces == 0 {
                bytes
            } else {
                &bytes[cut.piece(0, chunk)]
            };
            self.wait(
                TAKEN_AT,
                self.number(chunk)
                    .wrapping_add(1)
                    .wrapping_sub(DEPTH as u32),
                self.to,
            )?;
            let (target, signature) = self.chunk(chunk, source.len());
            let own = Signature::of(self.call);
            signature[0].store(own.operation, Ordering::Relaxed);
            signature[1].store(own.count, Ordering::Relaxed);
            // SAFETY: `pointer` checked the bounds. Only this rank writes there, and the receiver
            // has counted what was there as taken (see the top of this file).
            unsafe { copy_out(target, source) };
            self.count(SENT_AT, self.number(chunk + 1));
        }
        Ok(self.number(chunks))
    }

    /// Receives a message of the same length and dtype. Returns the number of the chunk after its
    /// last.
    pub(super) fn receive(&self, bytes: &mut [u8]) -> Result<u32> {
        let (cut, chunks) = self.chunks(bytes.len());
        for chunk in 0..chunks {
            let target = if cut.pieces == 0 {
                &mut bytes[..0]
            } else {
                &mut bytes[cut.piece(0, chunk)]
            };
            self.wait(SENT_AT, self.number(chunk + 1), self.from)?;
            let (source, signature) = self.chunk(chunk, target.len());
            let theirs = Signature {
                operation: signature[0].load(Ordering::Relaxed),
                count: signature[1].load(Ordering::Relaxed),
            };
            if chunk == 0 && !theirs.is_for(self.to, self.call) {
                let sender = self.channel.global(self.from);
                return Err(self.call.out_of_step(sender, theirs.to_string()));
            }
            // SAFETY: `pointer` checked the bounds. The sender wrote this before it counted it as
            // sent, and writes there again only after this rank has counted it as taken.
            unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
            self.count(TAKEN_AT, self.number(chunk + 1));
        }
        Ok(self.number(chunks))
    }
}
