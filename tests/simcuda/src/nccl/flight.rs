//! Running a flight. For the race detector its accesses happen when it begins; when it ends, it is
//! ordered after the beginnings of all ranks of this process.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use super::comm::{Comm, Flight, Lane, Phase, Piece, State};
use super::launch_order;
use super::transfer::{self, Call, CallKind, Next};
use crate::error::CUresult;
use crate::event::Completion;
use crate::faults::{NcclEffect, Struck};
use crate::handle::StreamId;
use crate::machine::Machine;
use crate::memory::{self, POISON};
use crate::race::Clock;
use crate::report::{self, FindingKind, Stack};
use crate::stream::Operation;
use crate::timeline::Part;
use crate::work::{Failure, Memory, Reads};

/// As f32 and as bf16 0.75.
const FINITE_GARBAGE: u8 = 0x3f;

/// What came of running it.
pub(crate) enum Ran {
    /// It continues when other ranks have done their part.
    Waits,
    /// At this simulated time.
    Over(u64),
    /// Its device shall be lost.
    Failed(Failure),
}

/// A turn of a captured piece, for a launch in `stream` that may still fail. After an abort it ends
/// at once, without a result: the graph keeps what its kernels need.
pub(crate) fn flight(machine: &mut Machine, piece: &Arc<Piece>, stream: StreamId) -> Arc<Flight> {
    let struck = machine.faults.strike_queued_nccl(piece.comm.device);
    Flight::new(piece.clone(), stream, struck)
}

/// A turn that is certain: it is the next one of its communicator.
pub(crate) fn takes_off(machine: &mut Machine, flight: &Arc<Flight>, place: u64, stack: &Stack) {
    flight.piece.comm.takes_off(flight);
    launch_order::note(machine, flight, place, stack);
}

impl Flight {
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
            return self.give_up(machine, state, actor, operation, begin_ns);
        }
        if state.phase == Phase::Queued {
            match self.begin(machine, &mut state, operation, begin_ns) {
                Ok(true) => {}
                Ok(false) => return Ran::Waits,
                Err(failure) => return Ran::Failed(failure),
            }
            let ranges = self.piece.ranges();
            if let Some(race) = machine.race.access(actor, operation.id, &ranges) {
                report::race(machine, &race);
            }
            memory::follow_contents(machine, operation, Reads::Used, &ranges);
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
                return Err(Failure { code, message });
            }
            for (index, call) in self.piece.calls.iter().enumerate() {
                match machine.faults.strike_nccl(call.name, comm.device) {
                    None => {}
                    Some(NcclEffect::Hang) => state.phase = Phase::Hung,
                    Some(NcclEffect::AsyncError(code)) => {
                        comm.async_error.store(code, Ordering::SeqCst);
                        state.phase = Phase::Hung;
                    }
                    Some(NcclEffect::Lost) => {
                        let code = CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE;
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
                    Some(NcclEffect::Flip(bit)) => state.flips.push((index, bit)),
                }
            }
            if state.struck == Some(Struck::Flip) {
                state.flips.push((0, None));
            }
            if state.phase == Phase::Hung || state.not_before.is_some() {
                return Ok(false);
            }
        }
        if let Some(failure) = memory::freed_meanwhile(machine, operation, &self.piece.ranges()) {
            return Err(failure);
        }
        state.begin_ns = begin_ns;
        state.begun_by = Some(operation.stack.clone());
        state.phase = Phase::Begun;
        self.count_groups(state);
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
        let calls = &self.piece.calls;
        let with_stacks = machine.config.nccl_stacks;
        let begin_ns = state.begin_ns;
        let mut came = Vec::new();
        let mut has_moved = true;
        let mut is_news = false;
        while has_moved {
            has_moved = false;
            let lane = &mut state.collectives;
            let place = self.place(lane.group);
            if let Some(&call) = lane.calls.get(lane.at) {
                let text = || {
                    with_stacks.then(|| {
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
                let place = self.place(lane.group);
                has_moved |= step(lane, |progress| match progress.next(place, &calls[call]) {
                    Next::Go => {
                        progress.go(place, &calls[call], &machine.memory);
                        Some(false)
                    }
                    Next::Over => Some(true),
                    _ => None,
                });
                let (from, to) = match calls[call].kind {
                    CallKind::Send(peer) => (place.rank, peer),
                    CallKind::Receive(peer) => (peer, place.rank),
                    _ => unreachable!("collectives have a lane of their own"),
                };
                let number = lane.progress.number().filter(|_| was_number.is_none());
                came.extend(number.map(|number| (1 + from as u64, 1 + to as u64, number)));
            }
            is_news |= has_moved;
        }
        let Comm { segment, rank, .. } = &**self.comm();
        for meeting in came {
            machine
                .nccl
                .come(segment.nonce, meeting, *rank, clock.clone(), begin_ns);
            state.met.push(meeting);
        }
        if is_news {
            segment.ring_bell();
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

    /// The communicator was aborted: its outputs are filled with garbage, also where it has not
    /// begun. With every other seed the garbage is finite, so that no check for NaN finds it.
    fn give_up(
        &self,
        machine: &mut Machine,
        mut state: MutexGuard<'_, State>,
        actor: usize,
        operation: &Operation,
        begin_ns: u64,
    ) -> Ran {
        let ranges = self.piece.ranges();
        if let Some(failure) = memory::freed_meanwhile(machine, operation, &ranges) {
            return Ran::Failed(failure);
        }
        if state.phase != Phase::Begun {
            if let Some(race) = machine.race.access(actor, operation.id, &ranges) {
                report::race(machine, &race);
            }
            memory::follow_contents(machine, operation, Reads::Used, &ranges);
        }
        let garbage = [POISON, FINITE_GARBAGE][machine.config.seed as usize % 2];
        for range in ranges.writes {
            let to = machine.memory.host_pointer(range.start);
            // SAFETY: the range lies in live memory, which was asked for just now, and nothing else
            // runs.
            unsafe { std::ptr::write_bytes(to, garbage, (range.end - range.start) as usize) };
        }
        state.phase = Phase::Over;
        drop(state);
        self.end(machine, actor, operation, begin_ns);
        Ran::Over(begin_ns)
    }

    fn tell_mismatch(
        &self,
        machine: &mut Machine,
        state: &State,
        operation: &Operation,
        rank: usize,
    ) {
        let place = self.place(state.collectives.group);
        let comm = self.comm();
        let own = state
            .collectives
            .calls
            .get(state.collectives.at)
            .map(|call| &self.piece.calls[*call]);
        let number = state.collectives.progress.number();
        let mut is_of_groups = false;
        let theirs = match number {
            Some(number) => {
                let text = comm.segment.member(rank).text((number % 2) as usize);
                let called = transfer::called(place, rank, number);
                is_of_groups = own.is_some_and(|own| own.differs_in_group(place.group, &called));
                let words = transfer::describe_words(&called);
                match machine.nccl.stack_of(comm, rank, number) {
                    Some(stack) => format!("{words}\n    called by {stack}"),
                    None if text.is_empty() => words,
                    None => text,
                }
            }
            None => "a send or a receive of another size or type, or in another group".to_owned(),
        };
        let cause = if is_of_groups {
            "two ranks group the same calls differently: not all calls of a group need to progress, so this can hang"
        } else {
            "two ranks call different things: this hangs"
        };
        let message = format!(
            "{cause} until the communicator is aborted\n  rank {} calls: {}, {}\n    called by {}\n  rank \
             {rank} calls: {theirs}\n  help: the same calls in the same order and groups on all ranks, with the same count, type, operation and root",
            comm.rank,
            own.map_or_else(|| operation.describe.to_string(), Call::describe),
            number.map_or_else(
                || "between two ranks".to_owned(),
                |number| format!("collective {}", number + 1)
            ),
            operation.stack,
        );
        if machine.config.nccl_check {
            report::finding(machine, FindingKind::NcclMismatch, message);
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
    let to = machine.memory.host_pointer(range.start + bit / 8);
    // SAFETY: the call has just written the range, and nothing else runs at the same time.
    unsafe { *to ^= 1 << (bit % 8) };
}
