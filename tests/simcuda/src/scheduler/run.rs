//! Running one piece: joins its clocks, checks and runs it, tells the race detector what it
//! touched, and passes its clock to waiters.

use std::sync::Arc;

use super::policy::Candidate;
use crate::error::CUresult;
use crate::event::Completion;
use crate::graph::launch::{Launch, Step};
use crate::handle::{OperationId, StreamId};
use crate::machine::{Machine, lose_device};
use crate::memory;
use crate::nccl::Ran;
use crate::race::{Actor, Clock};
use crate::report::{self, FindingKind};
use crate::stream::{self, Action, Operation};
use crate::timeline::{self, Part};
use crate::work::{Failure, HostFunction, Touched, Work};

/// Duration of a host function on the simulated clock.
const HOST_FUNCTION_NS: u64 = 1_000;

/// A host function whose turn has come.
pub(crate) struct HostCall {
    pub(crate) stream: StreamId,
    pub(crate) node: Option<usize>,
    pub(crate) function: HostFunction,
    /// Of the stream or the node.
    pub(crate) actor: Actor,
    pub(crate) operation: OperationId,
}

/// Runs the chosen piece. A host function is returned instead, to be called without the lock.
pub(super) fn piece(machine: &mut Machine, chosen: Candidate) -> Option<HostCall> {
    match chosen.node {
        None => front(machine, chosen.stream),
        Some(node) => graph_node(machine, chosen.stream, node),
    }
}

/// Runs the front of a stream.
fn front(machine: &mut Machine, stream: StreamId) -> Option<HostCall> {
    let actor = stream::actor_of(machine, stream);
    let own = &mut machine.streams.all[stream];
    let entry = own
        .queue
        .front_mut()
        .expect("only streams with something in them are chosen");
    own.time_ns = own.time_ns.max(entry.host_ns);
    machine.race.join(actor, &std::mem::take(&mut entry.host));
    for record in std::mem::take(&mut entry.after) {
        if let Some(Completion { clock, time_ns }) = record.completion() {
            machine.race.join(actor, clock);
            own.time_ns = own.time_ns.max(*time_ns);
        }
    }
    let operation = entry.operation.clone();
    let mut call = None;
    match &mut entry.action {
        Action::Work(work) => {
            let (work, begin_ns) = (work.clone(), own.time_ns);
            note(machine, &operation);
            if let Some(end_ns) = run_work(machine, actor, &operation, &work, begin_ns) {
                machine.streams.all[stream].time_ns = end_ns;
                stream::pop(machine, stream);
            }
        }
        Action::Turn(turn) => {
            let turn = turn.clone();
            note(machine, &operation);
            memory::take_turn(machine, turn, actor, operation.id);
            stream::pop(machine, stream);
        }
        Action::Host(function) => {
            call = function.take().map(|function| HostCall {
                stream,
                node: None,
                function,
                actor,
                operation: operation.id,
            });
            note(machine, &operation);
        }
        Action::Record(record) => {
            let record = record.clone();
            stream::complete_record(machine, stream, &record);
            stream::pop(machine, stream);
        }
        Action::Wait(record) => match record.completion() {
            Some(Completion { clock, time_ns }) => {
                machine.race.join(actor, clock);
                own.time_ns = own.time_ns.max(*time_ns);
                stream::pop(machine, stream);
            }
            None => {
                let lost = record.stream;
                fail_after(machine, &operation, lost);
            }
        },
        Action::Graph(Some(launch)) => {
            launch.begin(machine.race.snapshot(actor), own.time_ns);
            finish_launch_if_over(machine, stream);
        }
        Action::Nccl(flight) => {
            let (flight, begin_ns) = (flight.clone(), own.time_ns);
            note(machine, &operation);
            match flight.run(machine, actor, &operation, begin_ns) {
                Ran::Waits => {}
                Ran::Over(end_ns) => {
                    machine.streams.all[stream].time_ns = end_ns;
                    stream::pop(machine, stream);
                }
                Ran::Failed(failure) => {
                    tell_failure(machine, &operation, &failure);
                    fail(machine, operation.device, &failure);
                }
            }
        }
        Action::Graph(None) | Action::Hang => unreachable!("neither is ever chosen"),
    }
    call
}

/// Runs a node of the graph launch at the front of a stream.
fn graph_node(machine: &mut Machine, stream: StreamId, node: usize) -> Option<HostCall> {
    let mut launch = take_launch(machine, stream);
    let (actor, known, begin_ns) = launch.take(node);
    for clock in &known {
        machine.race.join(actor, clock);
    }
    let operation = launch.operations[node].clone();
    let mut end_ns = begin_ns;
    match launch.steps[node].clone() {
        Step::Work(work) => {
            note(machine, &operation);
            match run_work(machine, actor, &operation, &work, begin_ns) {
                Some(time_ns) => end_ns = time_ns,
                None => {
                    // The device's streams are empty now; this launch is the last of them.
                    abandon_launch(machine, &launch);
                    return None;
                }
            }
        }
        Step::Host(function) => {
            note(machine, &operation);
            put_launch(machine, stream, launch);
            return Some(HostCall {
                stream,
                node: Some(node),
                function,
                actor,
                operation: operation.id,
            });
        }
        Step::Record(record) => {
            let clock = machine.race.snapshot(actor);
            record.complete(Completion {
                clock,
                time_ns: begin_ns,
            });
        }
        Step::Wait(None) => {}
        Step::Wait(Some(record)) => match record.completion() {
            Some(Completion { clock, time_ns }) => {
                if !launch.is_internal(node) {
                    machine.race.join(actor, clock);
                }
                end_ns = end_ns.max(*time_ns);
            }
            None => {
                fail_after(machine, &operation, record.stream);
                abandon_launch(machine, &launch);
                return None;
            }
        },
        Step::Nccl(flight) => {
            note(machine, &operation);
            match flight.run(machine, actor, &operation, begin_ns) {
                Ran::Waits => {
                    launch.put_back(node);
                    put_launch(machine, stream, launch);
                    return None;
                }
                Ran::Over(time_ns) => end_ns = time_ns,
                Ran::Failed(failure) => {
                    tell_failure(machine, &operation, &failure);
                    fail(machine, operation.device, &failure);
                    abandon_launch(machine, &launch);
                    return None;
                }
            }
        }
        Step::Hang => unreachable!("nodes that hang are never chosen"),
    }
    launch.finish(node, machine.race.snapshot(actor), end_ns);
    put_launch(machine, stream, launch);
    finish_launch_if_over(machine, stream);
    None
}

/// A host function has returned. Returns what was known when it was called; None if its device was
/// lost meanwhile.
pub(super) fn finish_host_call(machine: &mut Machine, call: &HostCall) -> Option<Clock> {
    match (
        &mut machine.streams.all[call.stream].queue.front_mut()?.action,
        call.node,
    ) {
        (Action::Host(None), None) => {
            let known = machine
                .race
                .snapshot(stream::actor_of(machine, call.stream));
            machine.streams.all[call.stream].time_ns += HOST_FUNCTION_NS;
            stream::pop(machine, call.stream);
            Some(known)
        }
        (Action::Graph(Some(_)), Some(node)) => {
            let mut launch = take_launch(machine, call.stream);
            // Its actor joined the node's predecessors when it was handed out; the time is queried
            // again.
            let (actor, _, begin_ns) = launch.take(node);
            let known = machine.race.snapshot(actor);
            launch.finish(node, known.clone(), begin_ns + HOST_FUNCTION_NS);
            put_launch(machine, call.stream, launch);
            finish_launch_if_over(machine, call.stream);
            Some(known)
        }
        _ => None,
    }
}

fn take_launch(machine: &mut Machine, stream: StreamId) -> Box<Launch> {
    match machine.streams.all[stream]
        .queue
        .front_mut()
        .map(|entry| &mut entry.action)
    {
        Some(Action::Graph(launch)) => launch.take().expect("one node at a time"),
        _ => unreachable!("a launch stays in front until it is over"),
    }
}

fn put_launch(machine: &mut Machine, stream: StreamId, launch: Box<Launch>) {
    match machine.streams.all[stream]
        .queue
        .front_mut()
        .map(|entry| &mut entry.action)
    {
        Some(Action::Graph(place)) => *place = Some(launch),
        _ => unreachable!("a launch stays in front until it is over"),
    }
}

/// After its last node, a launch gives the stream what the last nodes knew, and leaves the queue.
fn finish_launch_if_over(machine: &mut Machine, stream: StreamId) {
    let launch = take_launch(machine, stream);
    if !launch.is_over() {
        put_launch(machine, stream, launch);
        return;
    }
    let actor = stream::actor_of(machine, stream);
    let (clocks, end_ns) = launch.results();
    for clock in &clocks {
        machine.race.join(actor, clock);
    }
    let own = &mut machine.streams.all[stream];
    own.time_ns = own.time_ns.max(end_ns);
    let time_ns = own.time_ns;
    let clock = machine.race.snapshot(actor);
    launch.complete(clock, time_ns);
    stream::pop(machine, stream);
    launch_ended(machine, launch.executable);
}

fn launch_ended(machine: &mut Machine, executable: usize) {
    machine.graphs.executables[executable].pending -= 1;
    let Machine { graphs, race, .. } = machine;
    graphs.retire_if_over(executable, race);
}

/// Drops everything of a lost device: waits on it must end and report the loss.
pub(super) fn abandon(machine: &mut Machine, device: usize) {
    let ids: Vec<StreamId> = machine
        .streams
        .busy
        .iter()
        .copied()
        .filter(|id| stream::device_of(machine, *id) == device)
        .collect();
    for stream in ids {
        while let Some(entry) = stream::pop(machine, stream) {
            match entry.action {
                Action::Record(record) => record.abandon(),
                Action::Graph(Some(launch)) => abandon_launch(machine, &launch),
                Action::Nccl(flight) => {
                    flight.abandon();
                    memory::finish(machine, entry.operation.id, Clock::default());
                }
                Action::Work(_) | Action::Hang => {
                    memory::finish(machine, entry.operation.id, Clock::default())
                }
                Action::Turn(_) | Action::Host(_) | Action::Wait(_) | Action::Graph(None) => {}
            }
        }
    }
}

/// A launch of a lost device ends without running: release the pinned memory of its nodes.
fn abandon_launch(machine: &mut Machine, launch: &Launch) {
    launch.abandon();
    for operation in &launch.operations {
        memory::finish(machine, operation.id, Clock::default());
    }
    launch_ended(machine, launch.executable);
}

/// Runs work as `actor`, not before `begin_ns` of simulated time; returns its end, or None if it
/// failed and its device is lost.
fn run_work(
    machine: &mut Machine,
    actor: Actor,
    operation: &Operation,
    work: &Arc<dyn Work>,
    begin_ns: u64,
) -> Option<u64> {
    let known = work.known_ranges();
    let mut touched = Touched::default();
    let outcome = match memory::freed_meanwhile(machine, operation, &known) {
        Some(failure) => Err(failure),
        None => work.run(operation.device, &machine.memory, &mut touched),
    };
    // Failed work has touched memory, too.
    if let Some(race) = machine.race.access(actor, operation.id, &touched) {
        report::race(machine, &race);
    }
    memory::follow_contents(machine, operation, work.reads(), &touched);
    if [&known.reads, &known.writes, &known.atomics]
        .into_iter()
        .any(|ranges| !ranges.is_empty())
    {
        let clock = machine.race.snapshot(actor);
        memory::finish(machine, operation.id, clock);
    }
    match outcome {
        Ok(()) => {
            let (part, duration_ns) = (Part::of(&operation.describe), work.duration_ns());
            let start_ns = if work.fills_device() {
                machine
                    .timeline
                    .begin(operation.device, part, begin_ns, duration_ns)
            } else {
                begin_ns
            };
            let end_ns = start_ns.saturating_add(duration_ns);
            if machine.timeline.is_listed() {
                machine.timeline.list(
                    operation,
                    part,
                    (start_ns, end_ns),
                    timeline::moved_bytes(&touched),
                );
            }
            Some(end_ns)
        }
        Err(failure) => {
            tell_failure(machine, operation, &failure);
            fail(machine, operation.device, &failure);
            None
        }
    }
}

/// The program's mistakes are findings: memory that a kernel or copy may not access, races or
/// diverging barriers of a kernel's threads. Other failures are planned, or requested by the kernel
/// (trap, assertion).
fn tell_failure(machine: &mut Machine, operation: &Operation, failure: &Failure) {
    let Failure { code, message } = failure;
    if message.ends_with("by the plan of faults") {
        return;
    }
    let mistakes = [
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    ];
    let is_race = message.contains("race inside kernel ");
    if is_race || message.contains("divergence ") || mistakes.iter().any(|mistake| mistake == code)
    {
        let kind = if is_race {
            FindingKind::Race
        } else {
            FindingKind::of_violation(message)
        };
        report::finding(
            machine,
            kind,
            format!("{operation}\n  {message}\n  {}", operation.origin()),
        );
    }
}

fn fail(machine: &mut Machine, device: usize, failure: &Failure) {
    lose_device(machine, device, failure.code, &failure.message);
    abandon(machine, device);
}

/// Work that waits for a lost device can never be ordered, so its own device is lost, too: CUDA
/// says of such errors that "any further CUDA work will return the same error".
fn fail_after(machine: &mut Machine, operation: &Operation, lost: StreamId) {
    let lost = stream::device_of(machine, lost);
    let failure = Failure {
        code: machine.devices[lost]
            .lost
            .expect("only lost devices abandon records"),
        message: format!("{operation}: waits for work of device {lost}, which is lost"),
    };
    fail(machine, operation.device, &failure);
}

fn note(machine: &mut Machine, operation: &Operation) {
    if machine.config.trace {
        eprintln!("simcuda: runs {operation}");
    }
    #[cfg(test)]
    machine
        .streams
        .scheduler
        .ran
        .push(operation.describe.clone());
}
