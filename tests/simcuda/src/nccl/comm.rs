//! A communicator, and the pieces of work that are called on it.
//!
//! A piece is the calls of a group, or one call. Its turn in a stream or in a graph launch is a
//! flight. A flight is not done when it has run: it enters its calls, does what it can, and stays
//! at the front of its stream until the other ranks have done their part. Flights of one
//! communicator follow each other in call order, on whatever streams.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::refusal::Refusal;
use super::segment::Segment;
use super::transfer::{Call, CallKind, Collective, Endpoint, Exchange, Next};
use crate::event::Record;
use crate::faults::Struck;
use crate::handle::{CaptureId, EventId, StreamId};
use crate::report::Stack;
use crate::work::Touched;

/// A rank's end of a communicator.
pub struct Comm {
    pub(super) rank: usize,
    pub(super) device: usize,
    pub(super) segment: Segment,
    /// The seed of the order of sums, if NVLink switches add.
    pub(super) nvls: Option<u64>,
    /// Ranks of this process.
    pub(super) siblings: Vec<usize>,
    pub(super) is_aborted: AtomicBool,
    pub(super) is_finalized: AtomicBool,
    /// It is over: its thread ends.
    pub(super) is_closed: AtomicBool,
    pub(super) async_error: AtomicI32,
    /// Device memory of its connections.
    pub(super) buffer_bytes: AtomicU64,
    pub(super) books: Mutex<Books>,
}

/// A collective that was made.
pub(super) struct Made {
    pub(super) number: u64,
    pub(super) place: u64,
    pub(super) call: Call,
    pub(super) stack: Stack,
}

/// What was queued.
#[derive(Default)]
pub(super) struct Books {
    /// Unfinished pieces, in call order.
    pub(super) flights: VecDeque<Arc<Flight>>,
    /// The end of the latest.
    pub(super) last: Option<Arc<Record>>,
    /// The latest that was captured, or the event's record after it.
    pub(super) captured: Option<(CaptureId, usize)>,
    /// With SIMCUDA_NCCL_EVENTS, since the first capture: what orders graphs and eager calls.
    pub(super) serial: Option<EventId>,
    /// The latest collectives.
    pub(super) made: VecDeque<Made>,
    /// How many pieces have begun with collectives (None), or with sends or receives of a rank.
    pub(super) groups: HashMap<Option<usize>, u64>,
}

impl Comm {
    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }

    /// How many ranks are of this process.
    pub(super) fn ranks_here(&self) -> usize {
        self.siblings.len()
    }

    /// How many ends of a send are of this process.
    pub(super) fn parties_here(&self, (from, to, _): &(u64, u64, u64)) -> usize {
        [from, to]
            .into_iter()
            .filter(|rank| self.siblings.contains(&(**rank as usize - 1)))
            .count()
    }

    /// Whether a rank is of this process.
    pub(super) fn is_here(&self, rank: usize) -> bool {
        self.siblings.contains(&rank)
    }

    /// A piece is queued after the previous one.
    pub(super) fn takes_off(&self, flight: &Arc<Flight>) {
        let mut books = self.books();
        if let Some(previous) = books.last.replace(flight.end.clone()) {
            flight.follows(previous);
        }
        books.flights.push_back(flight.clone());
        drop(books);
        if self.segment.is_wanted(self.rank) {
            self.segment.call(self.rank);
        }
    }

    /// The piece with this end is over.
    pub(super) fn leave(&self, end: &Arc<Record>) {
        self.books()
            .flights
            .retain(|flight| !Arc::ptr_eq(&flight.end, end));
        self.want(&[]);
    }

    /// Publishes which ranks of other processes it waits for.
    pub(super) fn want(&self, lacks: &[usize]) {
        let own = self.segment.member(self.rank);
        for rank in 0..self.segment.ranks() {
            let wants = u32::from(lacks.contains(&rank) && !self.is_here(rank));
            if own.wants[rank].swap(wants, Ordering::SeqCst) < wants {
                self.segment.call(rank);
            }
        }
    }

    /// The oldest piece that is not over.
    pub(super) fn oldest(&self) -> Option<Arc<Flight>> {
        self.books().flights.front().cloned()
    }

    /// The node that the next one of this capture must follow; remembers this one instead.
    pub(super) fn captured(&self, capture: CaptureId) -> Option<usize> {
        self.books()
            .captured
            .filter(|(of, _)| *of == capture)
            .map(|(_, node)| node)
    }

    pub(super) fn set_captured(&self, capture: CaptureId, node: usize) {
        self.books().captured = Some((capture, node));
    }

    /// Why nothing more can be called.
    pub(super) fn check_usable(&self) -> Result<(), Refusal> {
        if self.is_aborted() || self.is_finalized.load(Ordering::Relaxed) {
            return Err(Refusal::argument(
                "the communicator was finalized or aborted",
            ));
        }
        match self.async_error.load(Ordering::SeqCst) {
            0 => Ok(()),
            error => Err(Refusal::new(
                error,
                "the communicator has an asynchronous error (ncclCommGetAsyncError)",
            )),
        }
    }

    pub(super) fn describe(&self) -> String {
        format!(
            "the communicator of rank {} of {} on device {}",
            self.rank,
            self.segment.ranks(),
            self.device
        )
    }
}

/// What is called together.
pub(crate) struct Piece {
    pub(super) comm: Arc<Comm>,
    pub(super) calls: Vec<Call>,
}

impl Piece {
    pub(crate) fn describe(&self) -> String {
        let place = format!(
            "as rank {} of {}",
            self.comm.rank,
            self.comm.segment.ranks()
        );
        match &self.calls[..] {
            [call] => format!("{}, {place}", call.describe()),
            calls => {
                let calls: Vec<String> = calls.iter().map(Call::describe).collect();
                format!(
                    "ncclGroup of {} calls ({}), {place}",
                    calls.len(),
                    calls.join("; ")
                )
            }
        }
    }

    /// All that it touches.
    pub(crate) fn ranges(&self) -> Touched {
        let mut all = Touched::default();
        for call in &self.calls {
            let Touched { reads, writes, .. } =
                call.touched(self.comm.rank, self.comm.segment.ranks());
            all.reads.extend(reads);
            all.writes.extend(writes);
        }
        all
    }

    /// How many bytes its calls move, as they count them.
    pub(crate) fn bytes(&self) -> u64 {
        self.calls.iter().map(Call::bytes).sum()
    }

    /// Whether it is of this communicator.
    pub(super) fn is_of(&self, comm: &Comm) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.comm), comm)
    }

    pub(super) fn duration_ns(&self) -> u64 {
        self.calls
            .iter()
            .map(|call| call.duration_ns(self.comm.segment.ranks()))
            .sum()
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its turn has not come.
    #[default]
    Queued,
    Begun,
    /// Planned fault: it never enters its calls.
    Hung,
    Over,
}

/// The calls it has entered, in the order of each channel.
#[derive(Default)]
pub(super) struct State {
    pub(super) phase: Phase,
    /// The planned fault of its queuing.
    pub(super) struck: Option<Struck>,
    pub(super) begin_ns: u64,
    /// The call that it began for.
    pub(super) begun_by: Option<Stack>,
    /// Planned fault: it begins no earlier.
    pub(super) not_before: Option<Instant>,
    pub(super) extra_ns: u64,
    /// Call and bit.
    pub(super) flips: Vec<(usize, Option<u64>)>,
    pub(super) collectives: Lane<Collective>,
    /// One for each peer and direction.
    pub(super) exchanges: Vec<Lane<Exchange>>,
    /// The meetings of ranks of this process that it took part in.
    pub(super) met: Vec<Meeting>,
    pub(super) is_mismatch_told: bool,
}

/// Calls that follow one another.
#[derive(Default)]
pub(super) struct Lane<T> {
    pub(super) calls: Vec<usize>,
    pub(super) at: usize,
    /// As [`Endpoint::group`].
    pub(super) group: u64,
    pub(super) progress: T,
}

/// What identifies a meeting: a collective by its number, a send by its pair and number.
pub(super) type Meeting = (u64, u64, u64);

/// One turn of a piece.
pub(crate) struct Flight {
    pub(crate) piece: Arc<Piece>,
    /// The piece of its communicator before it.
    pub(super) previous: OnceLock<Arc<Record>>,
    /// Where its stream has come to when it is over.
    pub(crate) end: Arc<Record>,
    pub(super) state: Mutex<State>,
}

impl Flight {
    /// A turn of `piece` in `stream`.
    pub(super) fn new(piece: Arc<Piece>, stream: StreamId, struck: Option<Struck>) -> Arc<Self> {
        let phase = if struck == Some(Struck::Hang) {
            Phase::Hung
        } else {
            Phase::Queued
        };
        let mut state = State {
            struck,
            phase,
            ..State::default()
        };
        let mut channels: Vec<CallKind> = Vec::new();
        for (index, call) in piece.calls.iter().enumerate() {
            if call.is_collective() {
                state.collectives.calls.push(index);
                continue;
            }
            let channel = channels
                .iter()
                .position(|kind| *kind == call.kind)
                .unwrap_or_else(|| {
                    channels.push(call.kind);
                    state.exchanges.push(Lane::default());
                    channels.len() - 1
                });
            state.exchanges[channel].calls.push(index);
        }
        let end = Arc::new(Record::new(stream));
        Arc::new(Self {
            piece,
            previous: OnceLock::new(),
            end,
            state: Mutex::new(state),
        })
    }

    /// It follows `previous` in its communicator.
    pub(super) fn follows(&self, previous: Arc<Record>) {
        let _ = self.previous.set(previous);
    }

    /// What it waits for of its own process.
    pub(crate) fn previous(&self) -> Option<&Arc<Record>> {
        self.previous.get()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn comm(&self) -> &Arc<Comm> {
        &self.piece.comm
    }

    pub(super) fn place(&self, group: u64) -> Endpoint<'_> {
        Endpoint {
            segment: &self.comm().segment,
            rank: self.comm().rank,
            nvls: self.comm().nvls,
            group,
        }
    }

    /// It begins: numbers the groups of its calls.
    pub(super) fn count_groups(&self, state: &mut State) {
        let mut books = self.comm().books();
        let mut next = |key: Option<usize>| {
            let count = books.groups.entry(key).or_default();
            *count += 1;
            *count
        };
        if !state.collectives.calls.is_empty() {
            state.collectives.group = next(None);
        }
        let mut of_peers = HashMap::new();
        for lane in &mut state.exchanges {
            let peer = self.piece.calls[lane.calls[0]].peer();
            lane.group = *of_peers.entry(peer).or_insert_with(|| next(peer));
        }
    }

    /// Whether running it would make progress.
    pub(crate) fn can_run(&self) -> bool {
        let state = self.state();
        match state.phase {
            Phase::Over => false,
            _ if self.comm().is_aborted() => true,
            Phase::Hung => false,
            Phase::Queued => {
                self.previous
                    .get()
                    .is_none_or(|previous| previous.is_complete())
                    && state.not_before.is_none_or(|time| Instant::now() >= time)
            }
            Phase::Begun => match self.next(&state) {
                Next::Go | Next::Over => true,
                Next::Lacks(_) => false,
                Next::Mismatch(_) => !state.is_mismatch_told,
            },
        }
    }

    /// Whether it has entered its calls and is not done.
    pub(super) fn is_underway(&self) -> bool {
        self.state().phase == Phase::Begun
    }

    /// Whether it will never continue by itself.
    pub(crate) fn is_stuck(&self) -> bool {
        let state = self.state();
        let is_mismatch =
            || state.phase == Phase::Begun && matches!(self.next(&state), Next::Mismatch(_));
        !self.comm().is_aborted() && (state.phase == Phase::Hung || is_mismatch())
    }

    /// The ranks it is waiting for.
    pub(super) fn lacks(&self) -> Vec<usize> {
        let state = self.state();
        if state.phase != Phase::Begun || self.comm().is_aborted() {
            return Vec::new();
        }
        let mut all = Vec::new();
        for next in self.nexts(&state) {
            if let Next::Lacks(ranks) = next {
                all.extend(ranks);
            }
        }
        all
    }

    fn nexts<'a>(&'a self, state: &'a State) -> impl Iterator<Item = Next> + 'a {
        let calls = &self.piece.calls;
        let own = &state.collectives;
        let collective = own
            .calls
            .get(own.at)
            .map(|call| own.progress.next(self.place(own.group), &calls[*call]));
        let exchanges = state.exchanges.iter().filter_map(move |lane| {
            lane.calls
                .get(lane.at)
                .map(|call| lane.progress.next(self.place(lane.group), &calls[*call]))
        });
        collective.into_iter().chain(exchanges)
    }

    /// What can be done of all its calls.
    pub(super) fn next(&self, state: &State) -> Next {
        let mut waits = Next::Over;
        for next in self.nexts(state) {
            match next {
                // A finished call makes room for the next.
                Next::Go | Next::Over => return Next::Go,
                Next::Mismatch(rank) => waits = Next::Mismatch(rank),
                Next::Lacks(ranks) if waits == Next::Over => waits = Next::Lacks(ranks),
                Next::Lacks(_) => {}
            }
        }
        waits
    }

    /// Its device is lost, or its launch was given up: it never ends.
    pub(crate) fn abandon(&self) {
        self.state().phase = Phase::Over;
        self.end.abandon();
        self.comm().leave(&self.end);
    }
}
