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

mod activity;
mod board;
mod channel;
mod delays;
mod futex;
mod gpu_page;
mod layout;
mod mail;
mod round;
mod segment;
mod slices;
mod stream;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Mutex;

use ddp_kernels::{DType, Tensor};

pub(crate) use self::activity::Signature;
pub(crate) use self::board::Board;
use self::channel::{Channel, Count, StepOrder, Turn};
pub(crate) use self::delays::Delays;
pub(crate) use self::gpu_page::{COLLECTIVES, GpuPages, LANES, LaneMarks, Marks, PAIRS};
use self::layout::Cut;
use self::mail::Mailbox;
use self::round::Round;
pub(crate) use self::segment::Segment;
use self::slices::Slices;
use crate::collective::{Call, HostCollective, Operation, Reduce};
use crate::error::{Cause, Error, Result};

/// How many groups may use a segment: channels are numbered from 0.
pub(crate) const CHANNELS: usize = layout::CHANNELS;

/// A group of all ranks of one host, seen from one of them.
pub(crate) struct Shared {
    channel: Channel,
    /// This rank's global rank, for messages.
    rank: usize,
    state: Mutex<State>,
}

/// What one call at a time may change.
#[derive(Debug)]
struct State {
    /// The number of the next call. Wraps, as do the others.
    number: u32,
    /// The number of the next piece.
    piece: u32,
    /// The number of the next chunk to each rank, and from each.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// Why the channel cannot be used any more.
    broken: Option<Cause>,
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
        let (rank, size) = (ranks[local_rank], ranks.len());
        let channel = Channel::new(segment, channel, local_rank, ranks, is_roomy, delays)?;
        let state = State {
            number: channel.value(Count::Arrived),
            piece: channel.value(Count::Made),
            sent: vec![0; size],
            received: vec![0; size],
            broken: None,
        };
        Ok(Shared {
            channel,
            rank,
            state: Mutex::new(state),
        })
    }

    /// Runs one call at a time, recorded on the board. After an error there are no more.
    fn run(&self, call: &Call<'_>, body: impl FnOnce(&mut State) -> Result<()>) -> Result<()> {
        // After a panic in a call the counters are invalid.
        let mut state = self.state.lock().map_err(|_| self.unusable(call, None))?;
        if let Some(cause) = &state.broken {
            return Err(self.unusable(call, Some(cause)));
        }
        self.channel.check_abort()?;
        let Channel {
            board, me, index, ..
        } = &self.channel;
        board.enter(*me, *index, call);
        self.channel.begin();
        self.channel.pause();
        let result = body(&mut state);
        board.exit(*me, *index);
        if let Err(error) = &result {
            let text = format!(
                "group {} cannot be used after an error: {error}",
                call.group
            );
            let (rank, host) = (self.rank, "this host".to_string());
            state.broken = Some(Cause {
                rank,
                host,
                exit_code: error.exit_code(),
                text,
            });
        }
        result
    }

    fn unusable(&self, call: &Call<'_>, cause: Option<&Cause>) -> Error {
        let panicked = || {
            let text = format!(
                "group {} cannot be used after a panic in one of its calls",
                call.group
            );
            Cause {
                rank: self.rank,
                host: "this host".to_string(),
                exit_code: 70,
                text,
            }
        };
        Error::PeerFailed(Box::new(cause.cloned().unwrap_or_else(panicked)))
    }

    /// Runs a collective, in which all ranks take part. `body` returns the number of its pieces.
    fn collect(
        &self,
        call: &Call<'_>,
        body: impl FnOnce(&Turn<'_>, u32) -> Result<usize>,
    ) -> Result<()> {
        self.run(call, |state| {
            let order = match call.operation {
                Operation::Broadcast { root } => StepOrder::FromRoot {
                    root,
                    first: state.piece,
                },
                _ => StepOrder::Alike,
            };
            let turn = Turn {
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

    /// Whether one round moves so many bytes of each rank.
    fn is_small(&self, bytes: usize) -> bool {
        bytes <= self.channel.segment.layout().small_bytes
    }

    fn slices<'a>(&'a self, turn: &'a Turn<'a>, cut: Cut, first: u32) -> Slices<'a> {
        self.channel.arrive(turn);
        Slices {
            channel: &self.channel,
            turn,
            cut,
            first,
        }
    }

    fn piece_bytes(&self) -> usize {
        self.channel.segment.layout().piece_bytes
    }

    fn all_reduce_bytes(
        &self,
        call: &Call<'_>,
        bytes: &mut [u8],
        dtype: DType,
        reduce: Reduce,
    ) -> Result<()> {
        self.collect(call, |turn, first| {
            if self.is_small(bytes.len()) {
                let round = Round {
                    channel: &self.channel,
                    turn,
                };
                round.exchange(bytes)?;
                round.reduce(bytes, 0, dtype, reduce);
                return Ok(0);
            }
            let cut = Cut::even(bytes.len(), self.channel.size(), self.piece_bytes());
            self.slices(turn, cut, first)
                .all_reduce(bytes, dtype, reduce)?;
            Ok(cut.pieces)
        })
    }

    fn reduce_scatter_bytes(
        &self,
        call: &Call<'_>,
        bytes: &mut [u8],
        dtype: DType,
        reduce: Reduce,
    ) -> Result<()> {
        self.collect(call, |turn, first| {
            let cut = Cut::equal(bytes.len(), self.channel.size(), self.piece_bytes());
            if self.is_small(bytes.len()) {
                let (round, mine) = (
                    Round {
                        channel: &self.channel,
                        turn,
                    },
                    cut.slice(self.channel.me),
                );
                round.exchange(bytes)?;
                round.reduce(&mut bytes[mine.clone()], mine.start, dtype, reduce);
                return Ok(0);
            }
            self.slices(turn, cut, first)
                .reduce_scatter(bytes, dtype, reduce)?;
            Ok(cut.pieces)
        })
    }

    fn all_gather_bytes(&self, call: &Call<'_>, bytes: &mut [u8]) -> Result<()> {
        self.collect(call, |turn, first| {
            let cut = Cut::equal(bytes.len(), self.channel.size(), self.piece_bytes());
            if self.is_small(cut.slice(0).len()) {
                let round = Round {
                    channel: &self.channel,
                    turn,
                };
                round.exchange(&bytes[cut.slice(self.channel.me)])?;
                self.channel
                    .others()
                    .for_each(|rank| round.take(rank, &mut bytes[cut.slice(rank)]));
                return Ok(0);
            }
            self.slices(turn, cut, first).all_gather(bytes)?;
            Ok(cut.pieces)
        })
    }

    fn broadcast_from(&self, call: &Call<'_>, bytes: &[u8]) -> Result<()> {
        self.collect(call, |turn, first| {
            if self.is_small(bytes.len()) {
                Round {
                    channel: &self.channel,
                    turn,
                }
                .exchange(bytes)?;
                return Ok(0);
            }
            let cut = Cut::even(bytes.len(), 1, self.piece_bytes());
            self.slices(turn, cut, first).broadcast(bytes)?;
            Ok(cut.pieces)
        })
    }

    fn broadcast_to(&self, call: &Call<'_>, bytes: &mut [u8], root: usize) -> Result<()> {
        self.collect(call, |turn, first| {
            if self.is_small(bytes.len()) {
                let round = Round {
                    channel: &self.channel,
                    turn,
                };
                round.exchange(&[])?;
                round.take(root, bytes);
                return Ok(0);
            }
            let cut = Cut::even(bytes.len(), 1, self.piece_bytes());
            self.slices(turn, cut, first)
                .receive_broadcast(bytes, root)?;
            Ok(cut.pieces)
        })
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

impl HostCollective for Shared {
    fn transport(&self) -> &'static str {
        "shared memory"
    }

    fn rank(&self) -> usize {
        self.channel.me
    }

    fn size(&self) -> usize {
        self.channel.size()
    }

    fn all_reduce(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        call.with_bytes_mut(tensor, |bytes| {
            self.all_reduce_bytes(call, bytes, tensor.dtype(), reduce)
        })
    }

    fn reduce_scatter(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        call.with_bytes_mut(tensor, |bytes| {
            self.reduce_scatter_bytes(call, bytes, tensor.dtype(), reduce)
        })
    }

    fn all_gather(&self, call: &Call<'_>, tensor: &Tensor) -> Result<()> {
        call.with_bytes_mut(tensor, |bytes| self.all_gather_bytes(call, bytes))
    }

    fn broadcast(&self, call: &Call<'_>, tensor: &Tensor, root: usize) -> Result<()> {
        if root == self.channel.me {
            call.with_bytes(tensor, |bytes| self.broadcast_from(call, bytes))
        } else {
            call.with_bytes_mut(tensor, |bytes| self.broadcast_to(call, bytes, root))
        }
    }

    fn send(&self, call: &Call<'_>, tensor: &Tensor, to: usize) -> Result<()> {
        call.with_bytes(tensor, |bytes| {
            self.run(call, |state| {
                state.sent[to] = self
                    .mailbox(call, self.channel.me, to, state.sent[to])
                    .send(bytes)?;
                Ok(())
            })
        })
    }

    fn receive(&self, call: &Call<'_>, tensor: &Tensor, from: usize) -> Result<()> {
        call.with_bytes_mut(tensor, |bytes| {
            self.run(call, |state| {
                state.received[from] = self
                    .mailbox(call, from, self.channel.me, state.received[from])
                    .receive(bytes)?;
                Ok(())
            })
        })
    }

    fn barrier(&self, call: &Call<'_>) -> Result<()> {
        self.collect(call, |turn, _| {
            Round {
                channel: &self.channel,
                turn,
            }
            .exchange(&[])?;
            Ok(0)
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
