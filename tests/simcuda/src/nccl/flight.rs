//! A piece of NCCL work: the calls of a group, or one call, in a stream or a graph launch.
//!
//! It is not done when it has run: it enters its calls, does what it can, and stays at the front of
//! its stream until the other ranks have done their part. For the race detector its accesses happen
//! when it begins; when it ends, it is ordered after the beginnings of all ranks of this process.
//! Pieces of one communicator follow each other in call order, on whatever streams.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::Comm;
use super::transfer::{self, Call, Collective, Exchange, Kind, Next, Place};
use crate::event::{Completion, Record};
use crate::faults::{NcclEffect, Struck};
use crate::machine::Machine;
use crate::memory::{Moment, POISON};
use crate::race::Clock;
use crate::stream::{Operation, StreamId};
use crate::timeline::Part;
use crate::work::{Failure, Touched};
use crate::{memory, report};

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

    fn duration_ns(&self) -> u64 {
        self.calls
            .iter()
            .map(|call| call.duration_ns(self.comm.segment.ranks()))
            .sum()
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Phase {
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
struct State {
    phase: Phase,
    /// The planned fault of its queuing.
    struck: Option<Struck>,
    begin_ns: u64,
    /// Planned fault: it begins no earlier.
    not_before: Option<Instant>,
    extra_ns: u64,
    /// Call and bit.
    flips: Vec<(usize, Option<u64>)>,
    collectives: Lane<Collective>,
    /// One for each peer and direction.
    exchanges: Vec<Lane<Exchange>>,
    /// The meetings of ranks of this process that it took part in.
    met: Vec<Meeting>,
    is_mismatch_told: bool,
}

/// Calls that follow one another.
#[derive(Default)]
struct Lane<T> {
    calls: Vec<usize>,
    at: usize,
    progress: T,
}

/// What identifies a meeting: a collective by its number, a send by its pair and number.
type Meeting = (u64, u64, u64);

/// One turn of a piece.
pub(crate) struct Flight {
    pub(crate) piece: Arc<Piece>,
    /// The piece of its communicator before it.
    previous: OnceLock<Arc<Record>>,
    /// Where its stream has come to when it is over.
    pub(crate) end: Arc<Record>,
    state: Mutex<State>,
}

/// What came of running it.
pub(crate) enum Ran {
    /// It continues when other ranks have done their part.
    Waits,
    /// At this simulated time.
    Over(u64),
    /// Its device shall be lost.
    Failed(Failure),
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
        let mut channels: Vec<Kind> = Vec::new();
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn comm(&self) -> &Arc<Comm> {
        &self.piece.comm
    }

    fn place(&self) -> Place<'_> {
        Place {
            segment: &self.comm().segment,
            rank: self.comm().rank,
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
        let place = self.place();
        let mut all = Vec::new();
        for next in self.nexts(&state, place) {
            if let Next::Lacks(ranks) = next {
                all.extend(ranks);
            }
        }
        all
    }

    fn nexts<'a>(&'a self, state: &'a State, place: Place<'a>) -> impl Iterator<Item = Next> + 'a {
        let calls = &self.piece.calls;
        let own = &state.collectives;
        let collective = own
            .calls
            .get(own.at)
            .map(|call| own.progress.next(place, &calls[*call]));
        let exchanges = state.exchanges.iter().filter_map(move |lane| {
            lane.calls
                .get(lane.at)
                .map(|call| lane.progress.next(place, &calls[*call]))
        });
        collective.into_iter().chain(exchanges)
    }

    /// What can be done of all its calls.
    fn next(&self, state: &State) -> Next {
        let mut waits = Next::Over;
        for next in self.nexts(state, self.place()) {
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

    /// Runs it as far as possible. `clock` is what its stream knows, `begin_ns` its earliest time.
    pub(crate) fn run(
        &self,
        machine: &mut Machine,
        actor: usize,
        operation: &Operation,
        begin_ns: u64,
    ) -> Ran {
        let mut state = self.state();
        if self.comm().is_aborted() {
            return self.give_up(machine, state, operation, begin_ns);
        }
        if state.phase == Phase::Queued {
            if let Some(Completion { clock, .. }) = self
                .previous
                .get()
                .and_then(|previous| previous.completion())
            {
                machine.race.join(actor, clock);
            }
            match self.begin(machine, &mut state, operation, begin_ns) {
                Ok(true) => {}
                Ok(false) => return Ran::Waits,
                Err(failure) => return Ran::Failed(failure),
            }
            if let Some(race) = machine
                .race
                .access(actor, operation.id, &self.piece.ranges())
            {
                report::race(machine, &race);
            }
        }
        if state.phase != Phase::Begun {
            return Ran::Waits;
        }
        let clock = machine.race.snapshot(actor);
        self.progress(machine, &mut state, operation, &clock);
        match self.next(&state) {
            Next::Over => self.finish(machine, state, actor, operation),
            Next::Mismatch(rank) if !state.is_mismatch_told => {
                state.is_mismatch_told = true;
                self.tell_mismatch(machine, &state, operation, rank);
                Ran::Waits
            }
            _ => Ran::Waits,
        }
    }

    /// Its turn has come: applies planned faults. False: it does not begin, or not yet.
    fn begin(
        &self,
        machine: &mut Machine,
        state: &mut State,
        operation: &Operation,
        begin_ns: u64,
    ) -> Result<bool, Failure> {
        let comm = self.comm();
        if state.not_before.is_none() {
            if let Some(Struck::Code(code)) = state.struck {
                let message = format!("{}: fails by the plan of faults", operation.describe);
                return Err(Failure {
                    code: code as i32,
                    message,
                });
            }
            for call in 0..self.piece.calls.len() {
                match machine.faults.strike_nccl(comm.device) {
                    None => {}
                    Some(NcclEffect::Hang) => state.phase = Phase::Hung,
                    Some(NcclEffect::AsyncError(code)) => {
                        comm.async_error.store(code, Ordering::SeqCst);
                        state.phase = Phase::Hung;
                    }
                    Some(NcclEffect::Lost) => {
                        let code =
                            cudarc::driver::sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE as i32;
                        let message = format!(
                            "{}: its device is lost by the plan of faults",
                            operation.describe
                        );
                        return Err(Failure { code, message });
                    }
                    Some(NcclEffect::Slow(time_ns)) => {
                        state.not_before = Some(Instant::now() + Duration::from_nanos(time_ns));
                        state.extra_ns += time_ns;
                    }
                    Some(NcclEffect::Flip(bit)) => state.flips.push((call, bit)),
                }
            }
            if state.struck == Some(Struck::Flip) {
                state.flips.push((0, None));
            }
            if state.phase == Phase::Hung || state.not_before.is_some() {
                return Ok(false);
            }
        }
        if let Some(failure) =
            crate::scheduler::freed_meanwhile(machine, operation, &self.piece.ranges())
        {
            return Err(failure);
        }
        state.begin_ns = begin_ns;
        state.phase = Phase::Begun;
        Ok(true)
    }

    /// Does what can be done, and wakes the others.
    fn progress(
        &self,
        machine: &mut Machine,
        state: &mut State,
        operation: &Operation,
        clock: &Clock,
    ) {
        let place = self.place();
        let calls = &self.piece.calls;
        let checks = machine.config.nccl_check;
        let begin_ns = state.begin_ns;
        let mut came = Vec::new();
        let mut has_moved = true;
        let mut is_news = false;
        while has_moved {
            has_moved = false;
            let lane = &mut state.collectives;
            if let Some(&call) = lane.calls.get(lane.at) {
                let text = || {
                    checks.then(|| {
                        format!(
                            "{}\n    called by {}",
                            calls[call].describe(),
                            operation.stack.in_line()
                        )
                    })
                };
                let was_number = lane.progress.number();
                has_moved |= step(lane, |progress| match progress.next(place, &calls[call]) {
                    Next::Go => {
                        progress.go(place, &calls[call], &machine.memory, &text);
                        Some(false)
                    }
                    Next::Over => Some(true),
                    _ => None,
                });
                came.extend(
                    lane.progress
                        .number()
                        .filter(|_| was_number.is_none())
                        .map(|number| (0, 0, number)),
                );
            }
            for lane in &mut state.exchanges {
                let Some(&call) = lane.calls.get(lane.at) else {
                    continue;
                };
                let was_number = lane.progress.number();
                has_moved |= step(lane, |progress| match progress.next(place, &calls[call]) {
                    Next::Go => {
                        progress.go(place, &calls[call], &machine.memory);
                        Some(false)
                    }
                    Next::Over => Some(true),
                    _ => None,
                });
                let (from, to) = match calls[call].kind {
                    Kind::Send(peer) => (place.rank, peer),
                    Kind::Receive(peer) => (peer, place.rank),
                    _ => unreachable!("collectives have a lane of their own"),
                };
                let number = lane.progress.number().filter(|_| was_number.is_none());
                came.extend(number.map(|number| (1 + from as u64, 1 + to as u64, number)));
            }
            is_news |= has_moved;
        }
        for meeting in came {
            machine.nccl.come(
                place.segment.nonce,
                meeting,
                place.rank,
                clock.clone(),
                begin_ns,
            );
            state.met.push(meeting);
        }
        if is_news {
            place.segment.ring_bell();
        }
    }

    /// All its calls are over.
    fn finish(
        &self,
        machine: &mut Machine,
        mut state: MutexGuard<'_, State>,
        actor: usize,
        operation: &Operation,
    ) -> Ran {
        let comm = self.comm();
        let mut start_ns = state.begin_ns;
        for meeting in std::mem::take(&mut state.met) {
            let parties = if meeting.0 == 0 {
                comm.ranks_here()
            } else {
                comm.parties_here(&meeting)
            };
            for (clock, time_ns) in machine.nccl.leave(comm.segment.nonce, meeting, parties) {
                machine.race.join(actor, &clock);
                start_ns = start_ns.max(time_ns);
            }
        }
        for (call, bit) in std::mem::take(&mut state.flips) {
            flip(machine, &self.piece.calls[call], bit, comm);
        }
        state.phase = Phase::Over;
        let slowdown = machine.faults.slowdown(comm.device);
        let time_ns = self
            .piece
            .duration_ns()
            .saturating_mul(slowdown)
            .saturating_add(state.extra_ns);
        drop(state);
        let end_ns = start_ns.saturating_add(time_ns);
        if machine.timeline.is_listed() {
            machine.timeline.list(
                operation,
                Part::Nccl,
                (start_ns, end_ns),
                self.piece.bytes(),
            );
        }
        self.end(machine, actor, operation, end_ns);
        Ran::Over(end_ns)
    }

    /// Done: waiters learn what its stream knows.
    fn end(&self, machine: &mut Machine, actor: usize, operation: &Operation, end_ns: u64) {
        let clock = machine.race.snapshot(actor);
        memory::finish(machine, operation.id, clock.clone());
        self.end.complete(Completion {
            clock,
            time_ns: end_ns,
        });
        self.comm().leave(&self.end);
    }

    /// The communicator was aborted: its outputs are filled with NaN.
    fn give_up(
        &self,
        machine: &mut Machine,
        mut state: MutexGuard<'_, State>,
        operation: &Operation,
        begin_ns: u64,
    ) -> Ran {
        for range in self.piece.ranges().writes {
            if machine
                .memory
                .violation(self.comm().device, &range, Moment::Runs)
                .is_none()
            {
                let to = crate::work::Memory::host_pointer(&machine.memory, range.start);
                // SAFETY: the range lies in a live allocation, which was asked for just now, and
                // nothing else runs.
                unsafe { std::ptr::write_bytes(to, POISON, (range.end - range.start) as usize) };
            }
        }
        state.phase = Phase::Over;
        drop(state);
        memory::finish(machine, operation.id, Clock::default());
        self.end.complete(Completion {
            clock: Clock::default(),
            time_ns: begin_ns,
        });
        self.comm().leave(&self.end);
        Ran::Over(begin_ns)
    }

    /// Its device is lost, or its launch was given up: it never ends.
    pub(crate) fn abandon(&self) {
        self.state().phase = Phase::Over;
        self.end.abandon();
        self.comm().leave(&self.end);
    }

    fn tell_mismatch(
        &self,
        machine: &mut Machine,
        state: &State,
        operation: &Operation,
        rank: usize,
    ) {
        let place = self.place();
        let comm = self.comm();
        let own = state
            .collectives
            .calls
            .get(state.collectives.at)
            .map(|call| self.piece.calls[*call].describe());
        let number = state.collectives.progress.number();
        let theirs = match number {
            Some(number) => {
                let text = comm.segment.member(rank).text((number % 2) as usize);
                let words = transfer::describe_words(&transfer::called(place, rank, number));
                if text.is_empty() { words } else { text }
            }
            None => "a send or a receive of another size or type".to_owned(),
        };
        let message = format!(
            "two ranks call different things: this hangs until the communicator is aborted\n  rank {} calls: {}, {}\n    called by {}\n  rank \
             {rank} calls: {theirs}",
            comm.rank,
            own.unwrap_or_else(|| operation.describe.to_string()),
            number.map_or_else(
                || "between two ranks".to_owned(),
                |number| format!("collective {}", number + 1)
            ),
            operation.stack,
        );
        if machine.config.nccl_check {
            report::finding(machine, report::Kind::NcclMismatch, message);
        } else if machine.config.trace {
            eprintln!("simcuda: note: {message}");
        }
    }
}

/// One step of a lane: `act` says whether the front call is done, or None if it cannot continue.
/// Returns whether anything moved.
fn step<T: Default>(lane: &mut Lane<T>, act: impl FnOnce(&mut T) -> Option<bool>) -> bool {
    match act(&mut lane.progress) {
        None => false,
        Some(false) => true,
        Some(true) => {
            lane.at += 1;
            lane.progress = T::default();
            true
        }
    }
}

/// Inverts one bit of a call's result: the middle one by default.
fn flip(machine: &Machine, call: &Call, bit: Option<u64>, comm: &Comm) {
    let Some(range) = call
        .touched(comm.rank, comm.segment.ranks())
        .writes
        .into_iter()
        .next()
    else {
        return;
    };
    let bits = (range.end - range.start) * 8;
    let bit = bit.map_or(bits / 2 + 4, |bit| bit) % bits;
    let to = crate::work::Memory::host_pointer(&machine.memory, range.start + bit / 8);
    // SAFETY: the call has just written the range, and nothing else runs at the same time.
    unsafe { *to ^= 1 << (bit % 8) };
}
