//! Messages between ranks of several hosts, with which `hosts.rs` moves tensors in host memory.
//!
//! Before anything moves, every rank tells every other which call it makes, so that missing ranks
//! and mismatched calls can be named. A waiting rank uses no core.

use std::io::Write;
use std::iter::repeat_n;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ddp_kernels::{DType, Tensor, panics};
use twox_hash::XxHash3_64;

use crate::collective::tree::Addend;
use crate::collective::{Call, Operation};
use crate::error::{Error, Result};
use crate::transport::patience::{Awaited, Patience};
use crate::transport::shared::Board;
use crate::transport::tcp::{Letter, MESSAGE_BYTES_MAX, MeshChannel};
use crate::waited::Pause;
use ddp_kernels::sums::add_in_order;

/// Below this a broadcast sends everything to everyone at once.
const SMALL_BYTES: usize = 64 << 10;
/// Parts begin on multiples of this: whole elements of every dtype.
const GRAIN_BYTES: usize = 64;

/// Bytes of what a rank tells about a call: numbers to compare, then its text for a message.
const HEADER_BYTES: usize = 512;
const HEADER_NUMBERS_BYTES: usize = 32;

/// The kind of a message, and its tag.
#[derive(Clone, Copy, Debug)]
enum MessageKind {
    Header,
    Data,
    PairHeader,
    PairData,
}

/// Some ranks of a channel that act together, seen from one of them. Their numbers here are
/// their positions in `members`.
#[derive(Debug)]
pub(crate) struct Members {
    channel: MeshChannel,
    board: Board,
    /// The host of each rank of the channel.
    hosts: Arc<[usize]>,
    /// Ranks of the channel, ascending.
    members: Vec<usize>,
    /// This rank's index in `members`.
    me: usize,
    /// Memory that calls use again.
    scratch: Mutex<Scratch>,
}

#[derive(Debug, Default)]
struct Scratch {
    letters: Vec<Letter<'static>>,
    bytes: Vec<u8>,
}

impl Members {
    /// All ranks of `channel`, which has no other user, each with its host. A failure on `board`
    /// ends every wait.
    pub(crate) fn new(channel: MeshChannel, board: Board, hosts: Arc<[usize]>) -> Members {
        let (me, members) = (channel.rank(), (0..channel.size()).collect());
        Members {
            channel,
            board,
            hosts,
            members,
            me,
            scratch: Mutex::default(),
        }
    }

    /// Some of the same ranks, with separate messages. None if this rank is not among them. All
    /// ranks call this in the same order.
    pub(crate) fn among(&self, members: Vec<usize>) -> Option<Members> {
        let channel = self.channel.duplicate();
        let me = members.iter().position(|&it| it == channel.rank())?;
        Some(Members {
            channel,
            board: self.board.clone(),
            hosts: Arc::clone(&self.hosts),
            members,
            me,
            scratch: Mutex::default(),
        })
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me, self.members.len());
        (1..size).map(move |step| (me + step) % size)
    }

    /// Receives from members, and sends to members. Nothing is sent where there are no bytes.
    fn exchange<'a>(
        &self,
        call: &Call<'_>,
        (kind, limit): (MessageKind, Limit),
        receives: impl IntoIterator<Item = (usize, &'a mut [u8])>,
        sends: impl IntoIterator<Item = (usize, &'a [u8])>,
    ) -> Result<()> {
        let mut letters = self.letters();
        let (tag, channel) = (kind as u32, &self.channel);
        for (peer, into) in receives.into_iter().filter(|(_, into)| !into.is_empty()) {
            letters.push(channel.receive(into, self.members[peer], tag));
        }
        for (peer, bytes) in sends.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            letters.push(channel.send(bytes, self.members[peer], tag));
        }
        self.finish(call, &mut letters, limit)?;
        panics::lock(&self.scratch).letters = emptied(letters);
        Ok(())
    }

    fn letters<'a>(&self) -> Vec<Letter<'a>> {
        emptied(std::mem::take(&mut panics::lock(&self.scratch).letters))
    }

    /// Runs `body` with memory that calls use again.
    fn with_scratch<R>(
        &self,
        count: usize,
        body: impl FnOnce(&mut [u8]) -> Result<R>,
    ) -> Result<R> {
        let mut bytes = std::mem::take(&mut panics::lock(&self.scratch).bytes);
        bytes.resize(bytes.len().max(count), 0);
        let result = body(&mut bytes[..count]);
        panics::lock(&self.scratch).bytes = bytes;
        result
    }

    /// Waits until all are done, as long as their hosts show progress.
    fn finish(&self, call: &Call<'_>, letters: &mut [Letter<'_>], limit: Limit) -> Result<()> {
        let (mut patience, mut pause) = (Patience::new(), Pause::default());
        let (mut slept, mut left) = (Duration::ZERO, letters.len());
        loop {
            let mut under_way = 0;
            for letter in letters.iter_mut() {
                under_way += usize::from(!letter.is_done()?);
            }
            if under_way == 0 {
                return Ok(());
            }
            if under_way < left {
                (pause, left) = (Pause::default(), under_way);
                if limit == Limit::WhileMoving {
                    (patience, slept) = (Patience::new(), Duration::ZERO);
                }
            }
            self.check_abort()?;
            let awaited = || {
                let ranks = letters.iter().filter_map(Letter::waits_for);
                let mut ranks: Vec<usize> = ranks.collect();
                ranks.sort_unstable();
                ranks.dedup();
                ranks.into_iter().map(|rank| self.awaited(rank)).collect()
            };
            let silent = patience.silent(slept, call.timeout, awaited);
            if !silent.is_empty() {
                return Err(call.timed_out(silent, patience.total));
            }
            let me = self.channel.rank();
            let mut ranks = letters.iter().filter_map(Letter::waits_for);
            if patience.is_time_to_tell() && (me == 0 || ranks.any(|rank| rank == 0)) {
                patience.tell(me, |rank| rank);
            }
            self.channel.advance();
            slept = pause.sleep();
        }
    }

    /// A rank that is waited for. Its host is known to work, or not.
    fn awaited(&self, rank: usize) -> Awaited {
        let beats = self.board.host_beats(self.hosts[rank]);
        let beats = beats.load(Ordering::Relaxed);
        Awaited {
            rank,
            own: beats,
            total: beats,
            // It may wait for its GPU or for others: who knows the culprit reports first.
            is_waiting: true,
            work: None,
        }
    }

    fn check_abort(&self) -> Result<()> {
        let cause = self.board.is_aborted().then(|| self.board.cause());
        cause
            .flatten()
            .map_or(Ok(()), |cause| Err(Error::of_peer(cause)))
    }

    /// Returns when all members have come to the same call.
    pub(crate) fn meet(&self, call: &Call<'_>) -> Result<()> {
        let mine = header(call);
        self.with_scratch(HEADER_BYTES * self.members.len(), |all| {
            let headers = all.chunks_exact_mut(HEADER_BYTES).enumerate();
            let receives = headers.filter(|(peer, _)| *peer != self.me);
            let sends = self.others().map(|peer| (peer, &mine[..]));
            self.exchange(call, (MessageKind::Header, Limit::Once), receives, sends)?;
            let mut headers = all.chunks_exact(HEADER_BYTES).enumerate();
            headers.try_for_each(|(peer, theirs)| match peer == self.me {
                true => Ok(()),
                false => self.compare(call, &mine, peer, theirs),
            })
        })
    }

    fn compare(&self, call: &Call<'_>, mine: &[u8], peer: usize, theirs: &[u8]) -> Result<()> {
        if theirs[..HEADER_NUMBERS_BYTES] == mine[..HEADER_NUMBERS_BYTES] {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&theirs[HEADER_NUMBERS_BYTES..])
            .trim_end_matches('\0')
            .to_string();
        Err(call.out_of_step(self.members[peer], text))
    }

    /// Sends to a member.
    pub(crate) fn send(&self, call: &Call<'_>, to: usize, bytes: &[u8]) -> Result<()> {
        self.exchange(call, DATA, [], [(to, bytes)])
    }

    /// Receives from a member, and runs `body` on what has come.
    pub(crate) fn receive(
        &self,
        call: &Call<'_>,
        (from, count): (usize, usize),
        body: impl FnOnce(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.with_scratch(count, |into| {
            self.exchange(call, DATA, [(from, &mut *into)], [])?;
            body(into)
        })
    }

    /// Copies every member's part of `bytes` to all members.
    fn share_parts(&self, call: &Call<'_>, bytes: &mut [u8]) -> Result<()> {
        let (count, me, size) = (bytes.len(), self.me, self.members.len());
        let own = self.part(count, me);
        let (before, rest) = bytes.split_at_mut(own.start);
        let (mine, after) = rest.split_at_mut(own.len());
        let cut = |mut rest, peers: Range<usize>| {
            peers.map(move |peer| {
                let all: &mut [u8] = std::mem::take(&mut rest);
                let (part, after) = all.split_at_mut(self.part(count, peer).len());
                rest = after;
                (peer, part)
            })
        };
        let receives = cut(before, 0..me).chain(cut(after, me + 1..size));
        let sends = self.others().map(|peer| (peer, &*mine));
        self.exchange(call, DATA, receives, sends)
    }

    /// `bytes` become the sum in the order of a tree. `made` is this member's partial sums, one
    /// after the other, and `given` says how many each member has.
    pub(crate) fn sum_along(
        &self,
        call: &Call<'_>,
        bytes: &mut [u8],
        made: &[u8],
        (given, order): (&[usize], &[Addend]),
        dtype: DType,
    ) -> Result<()> {
        let length = bytes.len();
        let most = given.iter().copied().max().unwrap_or(1).max(1);
        let part_bytes = MESSAGE_BYTES_MAX / most / GRAIN_BYTES * GRAIN_BYTES;
        let others = |before: usize| (0..before).filter(|&peer| peer != self.me);
        let rows_before = |member| others(member).map(|peer| given[peer]).sum::<usize>();
        self.in_parts(length, part_bytes, |range| {
            let mine = self.part(range.len(), self.me);
            let of = |row: usize, part: Range<usize>| {
                let start = row * length + range.start;
                &made[start + part.start..start + part.end]
            };
            let rows = 0..given[self.me];
            let chunk = &mut bytes[range.clone()];
            self.with_scratch(rows_before(given.len()) * mine.len(), |received| {
                let places = received.chunks_exact_mut(mine.len().max(1));
                let peers = others(given.len());
                let receives = peers
                    .flat_map(|from| repeat_n(from, given[from]))
                    .zip(places);
                let sends = self.others().flat_map(|to| {
                    let part = self.part(range.len(), to);
                    rows.clone().map(move |row| (to, of(row, part.clone())))
                });
                self.exchange(call, DATA, receives, sends)?;
                let place = |part: &Addend| {
                    if part.rank == self.me {
                        return Some(of(part.row, mine.clone()).as_ptr());
                    }
                    let start = (rows_before(part.rank) + part.row) * mine.len();
                    Some(received[start..start + mine.len()].as_ptr())
                };
                // SAFETY: each place is that of a slice as long as `mine`, and no part of `bytes`.
                unsafe { add_in_order(dtype, &mut chunk[mine.clone()], order, &place) };
                Ok(())
            })?;
            self.share_parts(call, chunk)
        })
    }

    /// Cuts `count` bytes into consecutive ranges, of at most `part_bytes` a member, and runs
    /// `body` on each.
    fn in_parts(
        &self,
        count: usize,
        part_bytes: usize,
        mut body: impl FnMut(Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let most = part_bytes * self.members.len();
        let mut starts = (0..count).step_by(most);
        starts.try_for_each(|start| body(start..count.min(start + most)))
    }

    /// A member's part of `count` bytes: all are of nearly equal length.
    fn part(&self, count: usize, member: usize) -> Range<usize> {
        let (grains, size) = (count.div_ceil(GRAIN_BYTES), self.members.len());
        let edge = |member: usize| (grains * member / size * GRAIN_BYTES).min(count);
        edge(member)..edge(member + 1)
    }

    /// `bytes` of every member become those of the member `root`.
    pub(crate) fn broadcast_bytes(
        &self,
        call: &Call<'_>,
        bytes: &mut [u8],
        root: usize,
    ) -> Result<()> {
        if bytes.len() <= SMALL_BYTES || self.members.len() == 2 {
            let mut chunks = bytes.chunks_mut(MESSAGE_BYTES_MAX);
            return chunks.try_for_each(|chunk| {
                if self.me != root {
                    return self.exchange(call, DATA, [(root, chunk)], []);
                }
                let sends = self.others().map(|peer| (peer, &*chunk));
                self.exchange(call, DATA, [], sends)
            });
        }
        // The root sends each byte once; then every member passes its part on.
        self.in_parts(bytes.len(), MESSAGE_BYTES_MAX, |range| {
            let chunk = &mut bytes[range];
            let part = |member| self.part(chunk.len(), member);
            if self.me == root {
                let sends = self.others().map(|peer| (peer, &chunk[part(peer)]));
                self.exchange(call, DATA, [], sends)?;
            } else {
                let mine = part(self.me);
                self.exchange(call, DATA, [(root, &mut chunk[mine])], [])?;
            }
            self.share_parts(call, chunk)
        })
    }

    /// Sends to or receives from the member that `call` names.
    pub(crate) fn pair(&self, call: &Call<'_>, tensor: &Tensor) -> Result<()> {
        const HEADER: (MessageKind, Limit) = (MessageKind::PairHeader, Limit::WhileMoving);
        const DATA: (MessageKind, Limit) = (MessageKind::PairData, Limit::WhileMoving);
        self.check_abort()?;
        let mine = header(call);
        match call.operation {
            Operation::Send { to } => {
                self.exchange(call, HEADER, [], [(to, &mine[..])])?;
                call.with_bytes(tensor, |bytes| {
                    let mut chunks = bytes.chunks(MESSAGE_BYTES_MAX);
                    chunks.try_for_each(|chunk| self.exchange(call, DATA, [], [(to, chunk)]))
                })
            }
            Operation::Receive { from } => {
                let mut theirs = [0; HEADER_BYTES];
                self.exchange(call, HEADER, [(from, &mut theirs[..])], [])?;
                self.compare(call, &mine, from, &theirs)?;
                call.with_bytes_mut(tensor, |bytes| {
                    let mut chunks = bytes.chunks_mut(MESSAGE_BYTES_MAX);
                    chunks.try_for_each(|into| self.exchange(call, DATA, [(from, into)], []))
                })
            }
            _ => unreachable!("only sends and receives are between two ranks"),
        }
    }

    /// How many members there are.
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }
}

/// Of the data of collectives.
const DATA: (MessageKind, Limit) = (MessageKind::Data, Limit::WhileMoving);

/// When a wait ends without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    /// The timeout has passed.
    Once,
    /// Nothing has moved during the timeout: there may be much data.
    WhileMoving,
}

/// Empties the vector and keeps its allocation (tests/no_allocation.rs).
fn emptied<'a>(mut letters: Vec<Letter<'_>>) -> Vec<Letter<'a>> {
    letters.clear();
    let none = letters.into_iter();
    none.map(|_| unreachable!("the vector is empty")).collect()
}

/// What ranks compare of a call: operation, dtype, count and number; then its text.
fn header(call: &Call<'_>) -> [u8; HEADER_BYTES] {
    let (mut bytes, mut name) = ([0; HEADER_BYTES], [0; 64]);
    let (numbers, mut text) = bytes.split_at_mut(HEADER_NUMBERS_BYTES);
    let mut rest = &mut name[..];
    // Both ends of a message make the same call.
    let written = match call.operation {
        Operation::Send { .. } | Operation::Receive { .. } => write!(rest, "message"),
        operation => write!(rest, "{operation}"),
    };
    written.expect("names of operations are short");
    let length = 64 - rest.len();
    let dtype = call.tensor.map_or(0, |tensor| 1 + tensor.dtype() as u64);
    let count = call.tensor.map_or(0, Tensor::count) as u64;
    let hash = XxHash3_64::oneshot(&name[..length]);
    let values = [hash, dtype, count, call.sequence];
    for (place, value) in numbers.chunks_exact_mut(8).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
    // A longer text is cut.
    _ = write!(text, "{call}");
    bytes
}
