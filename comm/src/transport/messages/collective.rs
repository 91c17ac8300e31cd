//! Tensors in host memory between ranks of several hosts, for `hosts.rs`.
//!
//! Before anything moves, every rank tells every other which call it makes, so that missing ranks
//! and mismatched calls can be named. A waiting rank uses no core.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ddp_kernels::{DType, Tensor};
use twox_hash::XxHash3_64;

use super::comm::{Comm, MESSAGE_BYTES_MAX, Request};
use crate::collective::tree::Addend;
use crate::collective::{Call, Operation};
use crate::error::{Error, Result};
use crate::transport::patience::{Awaited, Patience};
use crate::transport::shared::Board;
use crate::waited::Pause;
use ddp_kernels::sums::add_in_order;

/// Below this a broadcast sends everything to everyone at once.
const SMALL_BYTES: usize = 64 << 10;
/// Parts begin on multiples of this: whole elements of every dtype.
const GRAIN_BYTES: usize = 64;

/// Bytes of what a rank tells about a call: numbers to compare, then its text for a message.
const HEADER_BYTES: usize = 512;
const HEADER_NUMBERS_BYTES: usize = 32;

/// The kind of a message; added to the first tag.
#[derive(Clone, Copy, Debug)]
enum MessageKind {
    Header,
    Data,
    PairHeader,
    PairData,
}

/// Kinds of messages. There are two sets of members, each with its own tags.
const TAGS: u8 = 4;

/// Some ranks of a communicator that act together, seen from one of them. Their numbers here are
/// their positions in `members`.
#[derive(Debug)]
pub(crate) struct Members {
    comm: Arc<Comm>,
    board: Board,
    /// The host of each rank in the communicator.
    hosts: Arc<[usize]>,
    /// Ranks in the communicator, ascending.
    members: Vec<usize>,
    /// This rank's index in `members`.
    me: usize,
    first_tag: u8,
}

impl Members {
    /// All ranks of `comm`, which has no other user, each with its host. A failure on `board` ends
    /// every wait.
    pub(crate) fn new(comm: Comm, board: Board, hosts: Arc<[usize]>) -> Members {
        let (me, members) = (comm.rank(), (0..comm.size()).collect());
        Members {
            comm: Arc::new(comm),
            board,
            hosts,
            members,
            me,
            first_tag: 0,
        }
    }

    /// Some of the same ranks, with separate messages. None if this rank is not among them.
    pub(crate) fn among(&self, members: Vec<usize>) -> Option<Members> {
        let me = members.iter().position(|&rank| rank == self.comm.rank())?;
        let (comm, board) = (Arc::clone(&self.comm), self.board.clone());
        Some(Members {
            comm,
            board,
            hosts: Arc::clone(&self.hosts),
            members,
            me,
            first_tag: TAGS,
        })
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me, self.members.len());
        (1..size).map(move |step| (me + step) % size)
    }

    /// Starts to send to the member `to`.
    fn post(&self, bytes: Arc<[u8]>, to: usize, kind: MessageKind) -> Result<Flight> {
        let request = self
            .comm
            .send(bytes, self.members[to], self.first_tag + kind as u8)?;
        Ok(Flight { request, peer: to })
    }

    /// Starts to receive from the member `from`.
    fn expect(&self, count: usize, from: usize, kind: MessageKind) -> Result<Flight> {
        let request = self
            .comm
            .receive(count, self.members[from], self.first_tag + kind as u8)?;
        Ok(Flight {
            request,
            peer: from,
        })
    }

    /// Waits until all are done, as long as their hosts show progress.
    fn finish(&self, call: &Call<'_>, flights: &mut [Flight], limit: Limit) -> Result<()> {
        let (mut patience, mut pause) = (Patience::new(), Pause::default());
        let (mut slept, mut left) = (Duration::ZERO, flights.len());
        loop {
            let mut under_way = Vec::with_capacity(left);
            for flight in &mut *flights {
                if !flight.request.is_done()? {
                    under_way.push(self.members[flight.peer]);
                }
            }
            if under_way.is_empty() {
                return Ok(());
            }
            if under_way.len() < left {
                (pause, left) = (Pause::default(), under_way.len());
                if limit == Limit::WhileMoving {
                    (patience, slept) = (Patience::new(), Duration::ZERO);
                }
            }
            self.check_abort()?;
            under_way.sort_unstable();
            under_way.dedup();
            let awaited = || under_way.iter().map(|&rank| self.awaited(rank)).collect();
            let silent = patience.silent(slept, call.timeout, awaited);
            if !silent.is_empty() {
                return Err(call.timed_out(silent, patience.total));
            }
            let me = self.comm.rank();
            if patience.is_time_to_tell() && (me == 0 || under_way.contains(&0)) {
                patience.tell(me, |rank| rank);
            }
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
        let mut flights = Vec::new();
        for peer in self.others() {
            flights.push(self.expect(HEADER_BYTES, peer, MessageKind::Header)?);
        }
        let receives = flights.len();
        for peer in self.others() {
            flights.push(self.post(Arc::clone(&mine), peer, MessageKind::Header)?);
        }
        self.finish(call, &mut flights[..receives], Limit::Once)?;
        self.finish(call, &mut flights[receives..], Limit::Once)?;
        flights.truncate(receives);
        flights.sort_by_key(|flight| flight.peer);
        flights
            .into_iter()
            .try_for_each(|flight| self.compare(call, &mine, flight))
    }

    fn compare(&self, call: &Call<'_>, mine: &[u8], theirs: Flight) -> Result<()> {
        let (peer, theirs) = (self.members[theirs.peer], theirs.request.into_bytes());
        if theirs[..HEADER_NUMBERS_BYTES] == mine[..HEADER_NUMBERS_BYTES] {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&theirs[HEADER_NUMBERS_BYTES..])
            .trim_end_matches('\0')
            .to_string();
        Err(call.out_of_step(peer, text))
    }

    /// Sends to and receives from members. Returns what is received, in the order of `receives`.
    pub(crate) fn exchange(
        &self,
        call: &Call<'_>,
        sends: &[(usize, Arc<[u8]>)],
        receives: &[(usize, usize)],
    ) -> Result<Vec<Vec<u8>>> {
        let mut flights = Vec::with_capacity(sends.len() + receives.len());
        for &(peer, count) in receives {
            flights.push(self.expect(count, peer, MessageKind::Data)?);
        }
        for (peer, bytes) in sends {
            flights.push(self.post(Arc::clone(bytes), *peer, MessageKind::Data)?);
        }
        self.finish(call, &mut flights, Limit::WhileMoving)?;
        flights.truncate(receives.len());
        Ok(flights
            .into_iter()
            .map(|flight| flight.request.into_bytes())
            .collect())
    }

    /// Copies every member's part of `bytes` to all members.
    fn share_parts(&self, call: &Call<'_>, bytes: &mut [u8], parts: &[Range<usize>]) -> Result<()> {
        let peers: Vec<usize> = self.others().collect();
        let mine: Arc<[u8]> = Arc::from(&bytes[parts[self.me].clone()]);
        let sends: Vec<(usize, Arc<[u8]>)> = peers
            .iter()
            .map(|&peer| (peer, Arc::clone(&mine)))
            .collect();
        let receives: Vec<(usize, usize)> = peers
            .iter()
            .map(|&peer| (peer, parts[peer].len()))
            .collect();
        for (peer, part) in peers
            .into_iter()
            .zip(self.exchange(call, &sends, &receives)?)
        {
            bytes[parts[peer].clone()].copy_from_slice(&part);
        }
        Ok(())
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
        let (length, peers) = (bytes.len(), self.others().collect::<Vec<usize>>());
        let most = given.iter().copied().max().unwrap_or(1).max(1);
        let part_bytes = MESSAGE_BYTES_MAX / most / GRAIN_BYTES * GRAIN_BYTES;
        self.in_parts(length, part_bytes, |range, parts| {
            let of = |row: usize, part: &Range<usize>| {
                let start = row * length + range.start;
                &made[start + part.start..start + part.end]
            };
            // All partial sums in one message: of several to one member, either may be taken first.
            let rows = |part| {
                let rows = (0..given[self.me]).map(|row| of(row, part));
                Arc::from(rows.collect::<Vec<_>>().concat())
            };
            let mine = parts[self.me].clone();
            let sends: Vec<_> = peers.iter().map(|&to| (to, rows(&parts[to]))).collect();
            let receives = peers.iter().map(|&from| (from, given[from] * mine.len()));
            let received = self.exchange(call, &sends, &receives.collect::<Vec<_>>())?;
            let place = |part: &Addend| {
                let Some(from) = peers.iter().position(|&peer| peer == part.rank) else {
                    return Some(of(part.row, &mine).as_ptr());
                };
                let start = part.row * mine.len();
                Some(received[from][start..start + mine.len()].as_ptr())
            };
            let chunk = &mut bytes[range.clone()];
            // SAFETY: each place is that of a slice as long as `mine`, and no part of `bytes`.
            unsafe { add_in_order(dtype, &mut chunk[mine.clone()], order, &place) };
            self.share_parts(call, chunk, &parts)
        })
    }

    /// Cuts `count` bytes into consecutive ranges, and each range into one part a member, of about
    /// equal size and at most `part_bytes`. Runs `body` on each range and its parts.
    fn in_parts(
        &self,
        count: usize,
        part_bytes: usize,
        mut body: impl FnMut(Range<usize>, Vec<Range<usize>>) -> Result<()>,
    ) -> Result<()> {
        let size = self.members.len();
        for start in (0..count).step_by(part_bytes * size) {
            let range = start..count.min(start + part_bytes * size);
            body(range.clone(), cut(range.len(), size))?;
        }
        Ok(())
    }

    /// `bytes` of every member become those of the member `root`.
    pub(crate) fn broadcast_bytes(
        &self,
        call: &Call<'_>,
        bytes: &mut [u8],
        root: usize,
    ) -> Result<()> {
        if bytes.len() <= SMALL_BYTES || self.members.len() == 2 {
            for chunk in bytes.chunks_mut(MESSAGE_BYTES_MAX) {
                if self.me == root {
                    let all: Arc<[u8]> = Arc::from(&*chunk);
                    let sends: Vec<_> =
                        self.others().map(|peer| (peer, Arc::clone(&all))).collect();
                    self.exchange(call, &sends, &[])?;
                } else {
                    chunk.copy_from_slice(&self.exchange(call, &[], &[(root, chunk.len())])?[0]);
                }
            }
            return Ok(());
        }
        // The root sends each byte once; then every member passes its part on.
        self.in_parts(bytes.len(), MESSAGE_BYTES_MAX, |range, parts| {
            let chunk = &mut bytes[range];
            if self.me == root {
                let sends: Vec<(usize, Arc<[u8]>)> = self
                    .others()
                    .map(|peer| (peer, Arc::from(&chunk[parts[peer].clone()])))
                    .collect();
                self.exchange(call, &sends, &[])?;
            } else {
                let mine = parts[self.me].clone();
                let part = self.exchange(call, &[], &[(root, mine.len())])?;
                chunk[mine].copy_from_slice(&part[0]);
            }
            self.share_parts(call, chunk, &parts)
        })
    }

    /// Sends to or receives from the member that `call` names.
    pub(crate) fn pair(&self, call: &Call<'_>, tensor: &Tensor) -> Result<()> {
        self.check_abort()?;
        match call.operation {
            Operation::Send { to } => {
                let own = self.post(header(call), to, MessageKind::PairHeader)?;
                self.finish(call, &mut [own], Limit::WhileMoving)?;
                call.with_bytes(tensor, |bytes| {
                    bytes.chunks(MESSAGE_BYTES_MAX).try_for_each(|chunk| {
                        let chunk = self.post(Arc::from(chunk), to, MessageKind::PairData)?;
                        self.finish(call, &mut [chunk], Limit::WhileMoving)
                    })
                })
            }
            Operation::Receive { from } => {
                let mut theirs = [self.expect(HEADER_BYTES, from, MessageKind::PairHeader)?];
                self.finish(call, &mut theirs, Limit::WhileMoving)?;
                let [theirs] = theirs;
                self.compare(call, &header(call), theirs)?;
                call.with_bytes_mut(tensor, |bytes| {
                    bytes.chunks_mut(MESSAGE_BYTES_MAX).try_for_each(|into| {
                        let mut chunk = [self.expect(into.len(), from, MessageKind::PairData)?];
                        self.finish(call, &mut chunk, Limit::WhileMoving)?;
                        let [chunk] = chunk;
                        into.copy_from_slice(&chunk.request.into_bytes());
                        Ok(())
                    })
                })
            }
            _ => unreachable!("only sends and receives are between two ranks"),
        }
    }

    /// What connects them: "mpi", "tcp".
    pub(crate) fn network(&self) -> &'static str {
        self.comm.name()
    }

    /// How many members there are.
    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }
}

/// When a wait ends without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    /// The timeout has passed.
    Once,
    /// Nothing has moved during the timeout: there may be much data.
    WhileMoving,
}

/// A message under way, to or from a member.
struct Flight {
    request: Request,
    peer: usize,
}

/// `count` bytes in nearly equal parts.
fn cut(count: usize, parts: usize) -> Vec<Range<usize>> {
    let grains = count.div_ceil(GRAIN_BYTES);
    let edge = |part: usize| (grains * part / parts * GRAIN_BYTES).min(count);
    (0..parts).map(|part| edge(part)..edge(part + 1)).collect()
}

/// What ranks compare of a call: operation, dtype, count and number; then its text.
fn header(call: &Call<'_>) -> Arc<[u8]> {
    let operation = match call.operation {
        // Both ends of a message make the same call.
        Operation::Send { .. } | Operation::Receive { .. } => "message".to_string(),
        operation => operation.to_string(),
    };
    let dtype = call.tensor.map_or(0, |tensor| 1 + tensor.dtype() as u64);
    let count = call.tensor.map_or(0, Tensor::count) as u64;
    let numbers = [
        XxHash3_64::oneshot(operation.as_bytes()),
        dtype,
        count,
        call.sequence,
    ];
    let mut bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let text = call.to_string();
    bytes.extend_from_slice(
        &text.as_bytes()[..text.floor_char_boundary(HEADER_BYTES - HEADER_NUMBERS_BYTES)],
    );
    bytes.resize(HEADER_BYTES, 0);
    bytes.into()
}
