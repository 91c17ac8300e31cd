//! Collectives over MPI: for tensors in host memory, between ranks of several hosts.
//!
//! Before anything moves, every rank tells every other what it calls, so that missing ranks and
//! different calls are known by name. Reduction goes in parts to one rank each, which adds them in
//! rank order and returns the result: the same bits on every rank and in every run. A waiting rank
//! uses no core.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ddp_kernels::{DType, Tensor};
use xxhash_rust::xxh3::xxh3_64;

use super::library::{Comm, MESSAGE_BYTES_MAX, Pause, Request};
use crate::collective::{Call, HostCollective, Operation, Reduce};
use crate::error::{Cause, Error, Result};
use crate::shared::Board;
use crate::sums::{self, Sources};
use crate::waited::Waited;

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
const TAGS: c_int = 4;

/// Some ranks of a communicator that act together, seen from one of them. Their numbers here are
/// their positions in `members`.
#[derive(Debug)]
pub(crate) struct Mpi {
    comm: Arc<Comm>,
    board: Board,
    /// Ranks in the communicator, ascending.
    members: Vec<usize>,
    /// This rank's index in `members`.
    me: usize,
    first_tag: c_int,
    /// Locked by the call that runs. After an error: why there can be no more calls.
    broken: Mutex<Option<Cause>>,
}

impl Mpi {
    /// All ranks of `comm`, which has no other user. A failure on `board` ends every wait.
    pub(crate) fn new(comm: Comm, board: Board) -> Mpi {
        let (me, members) = (comm.rank(), (0..comm.size()).collect());
        Mpi {
            comm: Arc::new(comm),
            board,
            members,
            me,
            first_tag: 0,
            broken: Mutex::new(None),
        }
    }

    /// Some of the same ranks, with separate messages. None if this rank is not among them.
    pub(crate) fn among(&self, members: Vec<usize>) -> Option<Mpi> {
        let me = members.iter().position(|&rank| rank == self.comm.rank())?;
        let (comm, board) = (Arc::clone(&self.comm), self.board.clone());
        Some(Mpi {
            comm,
            board,
            members,
            me,
            first_tag: TAGS,
            broken: Mutex::new(None),
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
            .send(bytes, self.members[to], self.first_tag + kind as c_int)?;
        Ok(Flight { request, peer: to })
    }

    /// Starts to receive from the member `from`.
    fn expect(&self, count: usize, from: usize, kind: MessageKind) -> Result<Flight> {
        let request =
            self.comm
                .receive(count, self.members[from], self.first_tag + kind as c_int)?;
        Ok(Flight {
            request,
            peer: from,
        })
    }

    /// Waits until all are done, up to the call's timeout.
    fn finish(&self, call: &Call<'_>, flights: &mut [Flight], patience: Patience) -> Result<()> {
        let mut under_way: Vec<&mut Flight> = flights.iter_mut().collect();
        let (mut waited, mut pause) = (Waited::new(), Pause::default());
        let mut slept = Duration::ZERO;
        loop {
            let before = under_way.len();
            let mut still = Vec::with_capacity(before);
            for flight in under_way {
                if !flight.request.is_done()? {
                    still.push(flight);
                }
            }
            under_way = still;
            if under_way.is_empty() {
                return Ok(());
            }
            if under_way.len() < before {
                pause = Pause::default();
                if patience == Patience::WhileMoving {
                    (waited, slept) = (Waited::new(), Duration::ZERO);
                }
            }
            self.check_abort()?;
            if waited.after(slept) >= call.timeout {
                let mut missing: Vec<usize> = under_way
                    .iter()
                    .map(|flight| self.members[flight.peer])
                    .collect();
                missing.sort_unstable();
                missing.dedup();
                return Err(Error::Timeout {
                    call: call.to_string(),
                    missing,
                    waited: call.timeout,
                });
            }
            slept = pause.sleep();
        }
    }

    fn check_abort(&self) -> Result<()> {
        let cause = self.board.is_aborted().then(|| self.board.cause());
        cause
            .flatten()
            .map_or(Ok(()), |cause| Err(Error::of_peer(cause)))
    }

    /// Runs one call at a time. After an error there are no more: its messages may still arrive.
    fn run<R>(&self, call: &Call<'_>, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let failed = |text: String, exit_code: u8| Cause {
            rank: self.members[self.me],
            host: "this host".into(),
            exit_code,
            text: format!("group {} cannot be used after {text}", call.group),
        };
        let panicked =
            |_| Error::PeerFailed(Box::new(failed("a panic in one of its calls".into(), 70)));
        let mut broken = self.broken.lock().map_err(panicked)?;
        if let Some(cause) = &*broken {
            return Err(Error::PeerFailed(Box::new(cause.clone())));
        }
        self.check_abort()?;
        let result = body();
        if let Err(error) = &result {
            *broken = Some(failed(format!("an error: {error}"), error.exit_code()));
        }
        result
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
        self.finish(call, &mut flights[..receives], Patience::Once)?;
        self.finish(call, &mut flights[receives..], Patience::Once)?;
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
        Err(Error::OutOfStep {
            call: call.to_string(),
            peer,
            theirs: text,
        })
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
        self.finish(call, &mut flights, Patience::WhileMoving)?;
        flights.truncate(receives.len());
        Ok(flights
            .into_iter()
            .map(|flight| flight.request.into_bytes())
            .collect())
    }

    /// Every member's part of `bytes` becomes the reduction over all members. `parts` do not
    /// overlap.
    fn reduce_parts(
        &self,
        call: &Call<'_>,
        bytes: &mut [u8],
        parts: &[Range<usize>],
        (dtype, reduce): (DType, Reduce),
    ) -> Result<()> {
        let mine = parts[self.me].clone();
        let peers: Vec<usize> = self.others().collect();
        let sends: Vec<(usize, Arc<[u8]>)> = peers
            .iter()
            .map(|&peer| (peer, Arc::from(&bytes[parts[peer].clone()])))
            .collect();
        let receives: Vec<(usize, usize)> = peers.iter().map(|&peer| (peer, mine.len())).collect();
        let received = self.exchange(call, &sends, &receives)?;
        let mut all = vec![0u8; mine.len() * self.members.len()];
        for (peer, part) in peers.into_iter().zip(received) {
            all[peer * mine.len()..][..mine.len()].copy_from_slice(&part);
        }
        let sources = Sources {
            first: all.as_ptr(),
            stride_bytes: mine.len(),
            ranks: self.members.len(),
            mine: self.me,
        };
        // SAFETY: `all` has a part of this length for every member, is ours alone, and outlives the
        // call.
        unsafe { sums::reduce(dtype, reduce, &mut bytes[mine], sources) };
        Ok(())
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

    /// Runs `body` for one range of `count` bytes after the other, each cut into a part for every
    /// member that fits a message.
    fn in_parts(
        &self,
        count: usize,
        mut body: impl FnMut(Range<usize>, Vec<Range<usize>>) -> Result<()>,
    ) -> Result<()> {
        let size = self.members.len();
        for start in (0..count).step_by(MESSAGE_BYTES_MAX * size) {
            let range = start..count.min(start + MESSAGE_BYTES_MAX * size);
            body(range.clone(), cut(range.len(), size))?;
        }
        Ok(())
    }

    /// Runs `body` for one range of every member's slice of `bytes` after the other.
    fn in_slices(
        &self,
        bytes: &mut [u8],
        mut body: impl FnMut(&mut [u8], &[Range<usize>]) -> Result<()>,
    ) -> Result<()> {
        let size = self.members.len();
        let each = bytes.len() / size;
        for start in (0..each).step_by(MESSAGE_BYTES_MAX) {
            let end = each.min(start + MESSAGE_BYTES_MAX);
            let parts: Vec<Range<usize>> = (0..size)
                .map(|rank| rank * each + start..rank * each + end)
                .collect();
            body(bytes, &parts)?;
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
        self.in_parts(bytes.len(), |range, parts| {
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
}

/// When a wait ends without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
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
    let numbers = [xxh3_64(operation.as_bytes()), dtype, count, call.sequence];
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

impl HostCollective for Mpi {
    fn transport(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.me
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn all_reduce(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        self.run(call, || {
            self.meet(call)?;
            call.with_bytes_mut(tensor, |bytes| {
                self.in_parts(bytes.len(), |range, parts| {
                    let chunk = &mut bytes[range];
                    self.reduce_parts(call, chunk, &parts, (tensor.dtype(), reduce))?;
                    self.share_parts(call, chunk, &parts)
                })
            })
        })
    }

    fn reduce_scatter(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        self.run(call, || {
            self.meet(call)?;
            call.with_bytes_mut(tensor, |bytes| {
                self.in_slices(bytes, |bytes, parts| {
                    self.reduce_parts(call, bytes, parts, (tensor.dtype(), reduce))
                })
            })
        })
    }

    fn all_gather(&self, call: &Call<'_>, tensor: &Tensor) -> Result<()> {
        self.run(call, || {
            self.meet(call)?;
            call.with_bytes_mut(tensor, |bytes| {
                self.in_slices(bytes, |bytes, parts| self.share_parts(call, bytes, parts))
            })
        })
    }

    fn broadcast(&self, call: &Call<'_>, tensor: &Tensor, root: usize) -> Result<()> {
        self.run(call, || {
            self.meet(call)?;
            call.with_bytes_mut(tensor, |bytes| self.broadcast_bytes(call, bytes, root))
        })
    }

    fn send(&self, call: &Call<'_>, tensor: &Tensor, to: usize) -> Result<()> {
        self.run(call, || {
            let mut flights = vec![self.post(header(call), to, MessageKind::PairHeader)?];
            self.finish(call, &mut flights, Patience::WhileMoving)?;
            call.with_bytes(tensor, |bytes| {
                for chunk in bytes.chunks(MESSAGE_BYTES_MAX) {
                    let mut flights = [self.post(Arc::from(chunk), to, MessageKind::PairData)?];
                    self.finish(call, &mut flights, Patience::WhileMoving)?;
                }
                Ok(())
            })
        })
    }

    fn receive(&self, call: &Call<'_>, tensor: &Tensor, from: usize) -> Result<()> {
        self.run(call, || {
            let mut flights = [self.expect(HEADER_BYTES, from, MessageKind::PairHeader)?];
            self.finish(call, &mut flights, Patience::WhileMoving)?;
            let [theirs] = flights;
            self.compare(call, &header(call), theirs)?;
            call.with_bytes_mut(tensor, |bytes| {
                for chunk in bytes.chunks_mut(MESSAGE_BYTES_MAX) {
                    let mut flights = [self.expect(chunk.len(), from, MessageKind::PairData)?];
                    self.finish(call, &mut flights, Patience::WhileMoving)?;
                    let [flight] = flights;
                    chunk.copy_from_slice(&flight.request.into_bytes());
                }
                Ok(())
            })
        })
    }

    fn barrier(&self, call: &Call<'_>) -> Result<()> {
        self.run(call, || self.meet(call))
    }
}
