//! Collectives between ranks of one host, through memory that they share. Waiting uses no core:
//! after a short spin a rank sleeps on a futex, and every 50 ms checks for an abort and its
//! deadline.
//!
//! `segment.rs` is the memory, `layout.rs` its layout, `board.rs` the job's page (what each rank
//! does, why the job ends), `channel.rs` one group's counters and how ranks wait for each other. On
//! these: `round.rs` for small tensors, `slices.rs` for large ones, `mail.rs` for pairs.
//!
//! Why sharing memory with other processes is sound here: control words are only used as atomics.
//! The rest is read and written through raw pointers, between counters that say when; each of the
//! three files begins with who may touch which bytes when. Nothing read from shared memory is used
//! as an index or a length unchecked. A rank that breaks the rules (another program with this
//! memory open) can change values, but not crash this process.
//!
//! Sums add in rank order, each element by one rank or by all in the same way, so every rank and
//! every run gets the same bits.
//!
//! x86 orders stores, and loads, by itself; ARM does not. So each file with atomics argues in its
//! head why its orders of memory are enough by the language's rules, which hold on both. Tests on
//! x86, also under qemu, cannot show that an order is missing.

mod activity;
mod board;
mod channel;
mod delays;
pub(crate) mod futex;
mod gpu_page;
mod layout;
mod mail;
mod mapping;
mod round;
mod segment;
mod slices;
mod stream;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Mutex;

use ddp_kernels::panics;
use ddp_kernels::{DType, Tensor};

pub(crate) use self::activity::Signature;
pub(crate) use self::board::Board;
use self::channel::{Channel, Count, NumberedCall, StepOrder};
pub(crate) use self::delays::Delays;
pub(crate) use self::gpu_page::{COLLECTIVES, GpuPages, JOINED, LANES, LaneMarks, Marks, PAIRS};
use self::layout::{GRAIN_BYTES, SliceCut};
use self::mail::Mailbox;
use self::round::Round;
pub(crate) use self::segment::Segment;
use self::slices::{SliceTerms, Staged};
use crate::collective::{Call, Collective, Operation, Sum};
use crate::error::Result;

/// How many groups may use a segment: channels are numbered from 0.
pub(crate) const CHANNELS: usize = layout::CHANNELS;

/// A group of all ranks of one host, seen from one of them.
pub(crate) struct Shared {
    channel: Channel,
    state: Mutex<ChannelState>,
}

/// What one call at a time may change.
#[derive(Debug)]
struct ChannelState {
    /// The number of the next call. Wraps, as do the others.
    number: u32,
    /// The number of the next piece.
    piece: u32,
    /// The number of the next chunk to each rank, and from each.
    sent: Vec<u32>,
    received: Vec<u32>,
}

impl Shared {
    /// Joins the group on `channel` of a segment as `local_rank`. `ranks` are the global ranks of
    /// the local ones, for messages. `is_roomy`: ranks have a core each to wait actively on. A rank
    /// joins a channel once.
    pub(crate) fn new(
        segment: Segment,
        channel: usize,
        local_rank: usize,
        ranks: Vec<usize>,
        is_roomy: bool,
        delays: Option<Delays>,
    ) -> Result<Shared> {
        let size = ranks.len();
        let channel = Channel::new(segment, channel, local_rank, ranks, is_roomy, delays)?;
        let state = ChannelState {
            number: channel.value(Count::Arrived),
            piece: channel.value(Count::Made),
            sent: vec![0; size],
            received: vec![0; size],
        };
        Ok(Shared {
            channel,
            state: Mutex::new(state),
        })
    }

    /// Runs one call at a time, recorded on the board.
    fn run(
        &self,
        call: &Call<'_>,
        body: impl FnOnce(&mut ChannelState) -> Result<()>,
    ) -> Result<()> {
        // `Group` makes no calls after a panic.
        let mut state = panics::lock(&self.state);
        self.channel.check_abort()?;
        let Channel {
            board, me, index, ..
        } = &self.channel;
        board.enter(*me, *index, call);
        self.channel.begin();
        self.channel.pause();
        let result = body(&mut state);
        board.exit(*me, *index);
        result
    }

    /// Runs a collective, in which all ranks take part. `body` returns the number of its pieces.
    fn collect(
        &self,
        call: &Call<'_>,
        operation: Operation,
        body: impl FnOnce(&NumberedCall<'_>, u32) -> Result<usize>,
    ) -> Result<()> {
        self.run(call, |state| {
            let order = match operation {
                Operation::Broadcast { root } => StepOrder::FromRoot {
                    root,
                    first: state.piece,
                },
                Operation::AllReduce(_)
                | Operation::ReduceScatter(_)
                | Operation::AllGather
                | Operation::Send { .. }
                | Operation::Receive { .. }
                | Operation::Barrier => StepOrder::Alike,
            };
            let turn = NumberedCall {
                call,
                number: state.number,
                order,
            };
            let pieces = body(&turn, state.piece)?;
            state.number = state.number.wrapping_add(1);
            state.piece = state.piece.wrapping_add(pieces as u32);
            Ok(())
        })
    }

    /// Whether one round moves this many bytes of each rank.
    fn is_small(&self, bytes: usize) -> bool {
        bytes <= self.channel.segment.layout().small_bytes
    }

    fn round<'a>(&'a self, turn: &'a NumberedCall<'a>) -> Round<'a> {
        Round {
            channel: &self.channel,
            turn,
        }
    }

    fn slices<'a>(&'a self, turn: &'a NumberedCall<'a>, cut: SliceCut, first: u32) -> Staged<'a> {
        self.channel.arrive(turn);
        Staged {
            channel: &self.channel,
            turn,
            cut,
            first,
        }
    }

    /// Makes `call`, or a part of it: `operation`, in local ranks, on `tensor`.
    pub(crate) fn part(
        &self,
        call: &Call<'_>,
        operation: Operation,
        tensor: &Tensor,
    ) -> Result<()> {
        let (me, dtype) = (self.channel.me, tensor.dtype());
        match operation {
            // Partial sums of a rank alone are still to be added.
            Operation::AllReduce(_) | Operation::ReduceScatter(_)
                if self.size() == 1 && matches!(call.sum, Sum::Transport) =>
            {
                Ok(())
            }
            Operation::Broadcast { root } if root == me => call.with_bytes(tensor, |bytes| {
                self.collect(call, operation, |turn, first| self.give(turn, first, bytes))
            }),
            Operation::Send { to } => call.with_bytes(tensor, |bytes| {
                self.run(call, |state| {
                    state.sent[to] = self.mailbox(call, me, to, state.sent[to]).send(bytes)?;
                    Ok(())
                })
            }),
            Operation::Receive { from } => call.with_bytes_mut(tensor, |bytes| {
                self.run(call, |state| {
                    let mailbox = self.mailbox(call, from, me, state.received[from]);
                    state.received[from] = mailbox.receive(bytes)?;
                    Ok(())
                })
            }),
            Operation::AllReduce(_)
            | Operation::ReduceScatter(_)
            | Operation::AllGather
            | Operation::Broadcast { .. }
            | Operation::Barrier => call.with_bytes_mut(tensor, |bytes| {
                let mut exchange = |rows: &[u8]| {
                    self.collect(call, operation, |turn, first| {
                        self.exchange(turn, first, operation, (bytes, rows), dtype)
                    })
                };
                match call.sum {
                    Sum::Transport => exchange(&[]),
                    Sum::Tree(partials) => call.with_bytes(partials.rows, exchange),
                }
            }),
        }
    }

    /// Returns when all ranks of this host have arrived.
    pub(crate) fn barrier(&self, call: &Call<'_>) -> Result<()> {
        self.collect(call, Operation::Barrier, |turn, _| {
            self.round(turn).exchange(&[])?;
            Ok(0)
        })
    }

    /// The root's part of a broadcast. Returns how many pieces moved.
    fn give(&self, turn: &NumberedCall<'_>, first: u32, bytes: &[u8]) -> Result<usize> {
        if self.is_small(bytes.len()) {
            self.round(turn).exchange(bytes)?;
            return Ok(0);
        }
        let cut = SliceCut::even(bytes.len(), 1, self.channel.segment.layout().piece_bytes);
        self.slices(turn, cut, first).broadcast(bytes)?;
        Ok(cut.pieces)
    }

    /// What a collective does with `bytes`, or with these and rows of partial sums. Returns how
    /// many pieces moved.
    fn exchange(
        &self,
        turn: &NumberedCall<'_>,
        first: u32,
        operation: Operation,
        (bytes, rows): (&mut [u8], &[u8]),
        dtype: DType,
    ) -> Result<usize> {
        let size = self.size();
        let (places, is_along_tree) = match turn.call.sum {
            Sum::Transport => (1, false),
            Sum::Tree(partials) => (partials.places(), true),
        };
        let piece_bytes = self.channel.segment.layout().piece_bytes;
        // A slot holds a piece of each partial sum that a rank gives.
        let piece_bytes = piece_bytes / places / GRAIN_BYTES * GRAIN_BYTES;
        let cut = match operation {
            Operation::AllReduce(_) => SliceCut::even(bytes.len(), size, piece_bytes),
            Operation::Broadcast { .. } => SliceCut::even(bytes.len(), 1, piece_bytes),
            Operation::ReduceScatter(_) | Operation::AllGather => {
                SliceCut::equal(bytes.len(), size, piece_bytes)
            }
            Operation::Send { .. } | Operation::Receive { .. } | Operation::Barrier => {
                unreachable!("a {operation} needs no slices")
            }
        };
        let moved = if operation == Operation::AllGather {
            cut.slice(0).len()
        } else {
            bytes.len()
        };
        if self.is_small(moved) && !is_along_tree {
            self.exchange_at_once(turn, operation, &cut, bytes, dtype)?;
            return Ok(0);
        }
        let slices = self.slices(turn, cut, first);
        let terms = |reduce| SliceTerms {
            reduce,
            sum: turn.call.sum,
            rows,
            place_bytes: piece_bytes,
        };
        match operation {
            Operation::AllReduce(reduce) => slices.reduce(bytes, dtype, terms(reduce), false)?,
            Operation::ReduceScatter(reduce) => slices.reduce(bytes, dtype, terms(reduce), true)?,
            Operation::Broadcast { root } => slices.receive_broadcast(bytes, root)?,
            Operation::AllGather => slices.all_gather(bytes)?,
            Operation::Send { .. } | Operation::Receive { .. } | Operation::Barrier => {}
        }
        Ok(cut.pieces)
    }

    /// The same in one round.
    fn exchange_at_once(
        &self,
        turn: &NumberedCall<'_>,
        operation: Operation,
        cut: &SliceCut,
        bytes: &mut [u8],
        dtype: DType,
    ) -> Result<()> {
        let round = self.round(turn);
        let mine = || cut.slice(self.channel.me);
        let reduced = |bytes: &mut [u8], range: Range<usize>, reduce| -> Result<()> {
            round.exchange(bytes)?;
            let offset = range.start;
            round.reduce(&mut bytes[range], offset, dtype, reduce);
            Ok(())
        };
        match operation {
            Operation::AllReduce(reduce) => reduced(bytes, 0..bytes.len(), reduce)?,
            Operation::ReduceScatter(reduce) => reduced(bytes, mine(), reduce)?,
            Operation::Broadcast { root } => {
                round.exchange(&[])?;
                round.take(root, bytes);
            }
            Operation::AllGather => {
                round.exchange(&bytes[mine()])?;
                let others = self.channel.others();
                others.for_each(|rank| round.take(rank, &mut bytes[cut.slice(rank)]));
            }
            Operation::Send { .. } | Operation::Receive { .. } | Operation::Barrier => {
                unreachable!("a {operation} exchanges nothing with all")
            }
        }
        Ok(())
    }

    fn mailbox<'a>(
        &'a self,
        call: &'a Call<'a>,
        from: usize,
        to: usize,
        first: u32,
    ) -> Mailbox<'a> {
        Mailbox {
            channel: &self.channel,
            call,
            from,
            to,
            first,
        }
    }
}

impl Collective for Shared {
    fn check_ranks(&self) -> Result<()> {
        self.channel.check_abort()
    }

    fn transport(&self) -> &'static str {
        "shared memory"
    }

    fn rank(&self) -> usize {
        self.channel.me
    }

    fn size(&self) -> usize {
        self.channel.size()
    }

    fn run(&self, calls: &[Call<'_>]) -> Result<()> {
        calls.iter().try_for_each(|call| match call.tensor {
            Some(tensor) => self.part(call, call.operation, tensor),
            None => self.barrier(call),
        })
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} of {} on channel {}",
            self.channel.me,
            self.size(),
            self.channel.index
        )
    }
}
