//! When queued work runs: as late and in as adverse an order as CUDA and the schedule allow.
//!
//! There are no threads here (a communicator's thread calls `run_towards` as a host would). A host
//! call that waits has a [`Goal`] and runs pieces (the front of a stream, or a ready node of a
//! graph launch) until it is met. The queues determine which pieces may run; the policy chooses
//! among them. So the same calls with the same seed run in the same order.

mod policy;
mod run;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use crate::error::CUresult;

pub(crate) use self::policy::Random;
pub use self::policy::Scheduler;
use self::policy::{Candidate, Policy};
use self::run::HostCall;
use crate::event::Record;
use crate::handle::{OperationId, StreamId};
use crate::machine::{LockedMachine, Machine, host_actor, host_joins, threads};
use crate::memory;
use crate::nccl;
use crate::race::{Actor, Clock};
use crate::stream::{self, Action, Entry, PENDING_MAX};
use crate::work::HostFunction;

/// How long the end of the process waits for other ranks.
const PATIENCE_WITH_RANKS: Duration = Duration::from_secs(2);

/// How often to look again when there is nothing to run: the longest delay until another thread's
/// action is seen.
const IDLE: Duration = Duration::from_millis(1);

/// Waits from the start of the process that let all other threads run first.
const FIRST_WAITS: usize = 32;
static WAITS: AtomicUsize = AtomicUsize::new(0);

/// What a host call waits for: that streams reach these places.
#[derive(Clone, Debug)]
pub struct Goal {
    records: Vec<Arc<Record>>,
}

impl Goal {
    pub(crate) fn new(records: Vec<Arc<Record>>) -> Self {
        Self { records }
    }

    fn is_met(&self) -> bool {
        self.records.iter().all(|record| record.is_complete())
    }
}

/// Everything given to `stream` so far; for the null stream also all that it waits for.
pub fn goal_stream(machine: &mut Machine, stream: StreamId) -> Goal {
    let mut streams = stream::blocking_of_null(machine, stream);
    streams.push(stream);
    Goal::new(
        streams
            .into_iter()
            .map(|stream| stream::marker(machine, stream))
            .collect(),
    )
}

/// Everything given to all streams of `device` so far.
pub fn goal_device(machine: &mut Machine, device: usize) -> Goal {
    let count = machine.streams.all.len();
    let streams: Vec<StreamId> = (0..count)
        .filter(|stream| stream::device_of(machine, *stream) == device)
        .collect();
    Goal::new(
        streams
            .into_iter()
            .map(|stream| stream::marker(machine, stream))
            .collect(),
    )
}

/// Waits until all that `stream` was given has run. Releases the lock between pieces of work.
pub fn synchronize_stream(held: &mut LockedMachine, stream: StreamId) -> Result<(), CUresult> {
    let goal = goal_stream(held, stream);
    wait_for(held, &goal)
}

/// Waits until all that the streams of `device` were given has run. Releases the lock between
/// pieces.
pub fn synchronize_device(held: &mut LockedMachine, device: usize) -> Result<(), CUresult> {
    let goal = goal_device(held, device);
    wait_for(held, &goal)?;
    // A device without work can still be lost.
    held.devices[device].lost.map_or(Ok(()), Err)
}

/// Runs work until the goal is met, and orders the host after it. Blocks if the work hangs.
pub fn wait_for(held: &mut LockedMachine, goal: &Goal) -> Result<(), CUresult> {
    reach(held, goal);
    arrive(held, goal)
}

/// Runs work until the goal is met, without ordering the host: for calls that wait without a
/// promise. Returns the clock of the goal.
pub(crate) fn wait_without_promise(
    held: &mut LockedMachine,
    goal: &Goal,
) -> Result<Vec<Clock>, CUresult> {
    reach(held, goal);
    refuse_lost(held, goal)?;
    Ok(goal
        .records
        .iter()
        .filter_map(|record| Some(record.completion()?.clock.clone()))
        .collect())
}

/// For a call that may, but need not, wait for `goal`: the schedule decides. It does not wait while
/// a wait is removed on purpose, because it would replace that wait.
pub(crate) fn perhaps_wait(held: &mut LockedMachine, goal: &Goal) -> Result<(), CUresult> {
    if held.config.ignore_wait.is_none() && policy(held).waits_unobliged() {
        wait_without_promise(held, goal).map(drop)
    } else {
        Ok(())
    }
}

fn reach(held: &mut LockedMachine, goal: &Goal) {
    while !goal.is_met() || policy(held).drains() {
        match advance(held, goal) {
            Advance::Ran => held.pause(),
            Advance::Call(call) => make(call, held),
            Advance::Idle if goal.is_met() => break,
            // It hung, other ranks are missing, or another thread is calling a host function.
            Advance::Idle => nccl::idle(held, IDLE),
        }
    }
    let extra = if policy(held).drains() {
        0
    } else {
        policy(held).extra()
    };
    run_some(held, goal, extra);
}

/// Runs a little, and says whether the goal is met: CUDA_ERROR_NOT_READY if not.
pub(crate) fn query(held: &mut LockedMachine, goal: &Goal) -> Result<(), CUresult> {
    if !goal.is_met() {
        let pieces = policy(held).query();
        run_some(held, goal, pieces);
    }
    if goal.is_met() {
        arrive(held, goal)
    } else {
        Err(CUresult::CUDA_ERROR_NOT_READY)
    }
}

fn run_some(held: &mut LockedMachine, goal: &Goal, pieces: usize) {
    for _ in 0..pieces {
        match advance(held, goal) {
            Advance::Ran => {}
            Advance::Call(call) => make(call, held),
            Advance::Idle => {
                // The caller does not wait, but others may have to progress first: a repeated query
                // must succeed in the end.
                nccl::say_what_lacks(held);
                break;
            }
        }
    }
}

/// Runs work towards a place in a stream until `is_enough` or nothing can run: for a communicator's
/// background thread.
pub(crate) fn run_towards(
    held: &mut LockedMachine,
    record: Arc<Record>,
    mut is_enough: impl FnMut(&mut LockedMachine) -> bool,
) {
    let goal = Goal::new(vec![record]);
    while !goal.is_met() && !is_enough(held) {
        match advance(held, &goal) {
            Advance::Ran => held.pause(),
            Advance::Call(call) => make(call, held),
            Advance::Idle => break,
        }
    }
}

/// Runs all that can run until `is_enough`; returns whether there was anything.
pub(crate) fn run_all(
    held: &mut LockedMachine,
    mut is_enough: impl FnMut(&mut LockedMachine) -> bool,
) -> bool {
    // Everything given so far is needed, even for a schedule that runs only what is needed.
    let records = held
        .streams
        .busy
        .clone()
        .into_iter()
        .map(|stream| stream::marker(held, stream))
        .collect();
    let goal = Goal::new(records);
    let mut has_run = false;
    while !goal.is_met() && !is_enough(held) {
        match advance(held, &goal) {
            Advance::Ran => held.pause(),
            Advance::Call(call) => make(call, held),
            Advance::Idle => break,
        }
        has_run = true;
    }
    has_run
}

/// The host is ordered after all of the goal, unless one of its devices was lost.
fn arrive(held: &mut LockedMachine, goal: &Goal) -> Result<(), CUresult> {
    let host = host_actor(held);
    let completions = || goal.records.iter().filter_map(|record| record.completion());
    if completions().any(|completion| !held.race.knows(host, &completion.clock)) {
        held.without(|| threads::let_others_run(&WAITS, FIRST_WAITS));
    }
    for completion in completions() {
        held.timeline.host_ns = held.timeline.host_ns.max(completion.time_ns);
        host_joins(held, &completion.clock);
    }
    refuse_lost(held, goal)
}

fn refuse_lost(machine: &Machine, goal: &Goal) -> Result<(), CUresult> {
    let mut lost = goal
        .records
        .iter()
        .filter_map(|record| machine.devices[stream::device_of(machine, record.stream)].lost);
    lost.next().map_or(Ok(()), Err)
}

/// Runs work while queues hold more than they may. Host functions must wait: the caller keeps the
/// lock.
pub(crate) fn make_room(machine: &mut Machine) {
    while machine.streams.pending > PENDING_MAX {
        let candidates: Vec<Candidate> = runnable(machine)
            .into_iter()
            .map(|candidate| Candidate {
                is_needed: true,
                ..candidate
            })
            .collect();
        let candidates = without_host_functions(machine, candidates);
        let Some(chosen) = policy(machine).choose(&candidates) else {
            return;
        };
        run::piece(machine, chosen);
    }
}

/// "Note that this function may also return error codes from previous, asynchronous launches": the
/// schedule decides whether a planned failure shows before the host waits. Then the next call that
/// uses the device returns it, whichever it is.
pub(crate) fn perhaps_fail(machine: &mut Machine) {
    for _ in 0..policy(machine).extra().min(PENDING_MAX) {
        let candidates = runnable(machine);
        let candidates = without_host_functions(machine, candidates);
        let Some(chosen) = policy(machine).choose(&candidates) else {
            return;
        };
        run::piece(machine, chosen);
    }
}

fn without_host_functions(machine: &Machine, mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    candidates.retain(|candidate| !match (
        &machine.streams.all[candidate.stream].queue[0].action,
        candidate.node,
    ) {
        (Action::Graph(Some(launch)), Some(node)) => launch.is_host_function(node),
        (Action::Host(_), _) => true,
        _ => false,
    });
    candidates
}

/// Runs all that can still run, in the order of the schedule, without waiting for what hangs. Host
/// functions count as called, since their owner may be gone. For the end of the process.
pub(crate) fn drain(machine: &mut Machine) {
    let devices = 0..machine.devices.len();
    let goal = Goal::new(
        devices
            .flat_map(|device| goal_device(machine, device).records)
            .collect(),
    );
    let end = Instant::now() + PATIENCE_WITH_RANKS;
    loop {
        match advance(machine, &goal) {
            Advance::Ran => {}
            Advance::Call(call) => drop(run::finish_host_call(machine, &call)),
            // Other ranks may still do their part; a dead one never will.
            Advance::Idle if Instant::now() < end && nccl::await_others(machine, IDLE) => {}
            Advance::Idle => break,
        }
    }
}

/// The result of a step towards a goal.
enum Advance {
    Ran,
    /// To be called without the lock.
    Call(HostCall),
    /// Nothing that should run can run.
    Idle,
}

thread_local! {
    static HOST_FUNCTION: Cell<Option<(Actor, OperationId)>> = const { Cell::new(None) };
}

/// The host function of a stream that this thread is inside, and whose part of the order it has.
pub fn host_function() -> Option<(Actor, OperationId)> {
    HOST_FUNCTION.get()
}

/// Whether this thread is inside a host function of a stream, where CUDA permits no call.
pub fn in_host_function() -> bool {
    host_function().is_some()
}

/// Calls the function without the lock.
fn make(call: HostCall, held: &mut LockedMachine) {
    let HostFunction { function, argument } = call.function;
    held.without(|| {
        HOST_FUNCTION.set(Some((call.actor, call.operation)));
        // SAFETY: the caller of cuLaunchHostFunc vouches that `function` may be called once
        // with this argument, on any thread, when the stream reaches it; this is that moment,
        // and the lock is free.
        unsafe { function(argument as *mut std::ffi::c_void) };
        HOST_FUNCTION.set(None);
    });
    // The function may have told any host thread, invisibly, that everything before it is done.
    if let Some(known) = run::finish_host_call(held, &call) {
        host_joins(held, &known);
    }
}

fn advance(machine: &mut Machine, goal: &Goal) -> Advance {
    abandon_lost_devices(machine);
    let mut candidates = runnable(machine);
    if policy(machine).asks_what_is_needed() {
        mark_needed(machine, goal, &mut candidates);
    }
    let Some(chosen) = policy(machine).choose(&candidates) else {
        return Advance::Idle;
    };
    let call = run::piece(machine, chosen);
    if machine.streams.busy.is_empty() {
        memory::settle_unwritten(machine);
    }
    call.map_or(Advance::Ran, Advance::Call)
}

fn policy(machine: &mut Machine) -> &mut Policy {
    let (schedule, seed) = (machine.config.schedule, machine.config.seed);
    machine
        .streams
        .scheduler
        .policy
        .get_or_insert_with(|| Policy::new(schedule, seed))
}

/// A fault may lose a device at any time: its work must not block anyone.
fn abandon_lost_devices(machine: &mut Machine) {
    for device in 0..machine.devices.len() {
        if machine.devices[device].lost.is_some() {
            run::abandon(machine, device);
        }
    }
}

/// All that CUDA would allow to run now, in stream order.
fn runnable(machine: &Machine) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    for &stream in &machine.streams.busy {
        let Entry {
            sequence,
            after,
            action,
            ..
        } = &machine.streams.all[stream].queue[0];
        if !after.iter().all(|record| record.is_complete()) {
            continue;
        }
        let candidate = Candidate {
            stream,
            node: None,
            sequence: *sequence,
            is_needed: false,
        };
        match action {
            Action::Work(_) | Action::Turn(_) | Action::Host(Some(_)) | Action::Record(_) => {
                candidates.push(candidate)
            }
            Action::Wait(record) if record.is_complete() => candidates.push(candidate),
            Action::Nccl(flight) if flight.can_run() => candidates.push(candidate),
            Action::Graph(Some(launch)) => {
                candidates.extend(launch.ready().map(|node| Candidate { node, ..candidate }));
            }
            Action::Wait(_)
            | Action::Nccl(_)
            | Action::Hang
            | Action::Host(None)
            | Action::Graph(None) => {}
        }
    }
    candidates
}

/// Marks the candidates that the goal needs: those of streams that have not reached a needed
/// record.
fn mark_needed(machine: &Machine, goal: &Goal, candidates: &mut [Candidate]) {
    // Up to which sequence number each stream is needed.
    let mut needed: BTreeMap<StreamId, u64> = BTreeMap::new();
    let mut open: Vec<Arc<Record>> = goal.records.clone();
    while let Some(record) = open.pop() {
        if record.is_complete() {
            continue;
        }
        let from = needed.get(&record.stream).copied();
        if from.is_some_and(|known| known >= record.sequence()) {
            continue;
        }
        needed.insert(record.stream, record.sequence());
        let queue = &machine.streams.all[record.stream].queue;
        let fresh = queue
            .iter()
            .skip_while(|entry| from.is_some_and(|known| entry.sequence <= known));
        for entry in fresh.take_while(|entry| entry.sequence <= record.sequence()) {
            open.extend(entry.after.iter().cloned());
            match &entry.action {
                Action::Wait(record) => open.push(record.clone()),
                Action::Graph(Some(launch)) => {
                    open.extend(launch.waits().cloned());
                    launch
                        .flights()
                        .for_each(|flight| open.extend(machine.nccl.needed(flight)));
                }
                Action::Nccl(flight) => open.extend(machine.nccl.needed(flight)),
                _ => {}
            }
        }
    }
    for candidate in candidates {
        candidate.is_needed = needed
            .get(&candidate.stream)
            .is_some_and(|last| candidate.sequence <= *last);
    }
}
