//! Queuing a launch of an executable graph.

use std::sync::Arc;

use super::Captured;
use super::launch::{Launch, Step};
use crate::error::CUresult;
use crate::event::{Record, State};
use crate::faults::Injected;
use crate::handle::StreamId;
use crate::machine::Machine;
use crate::memory;
use crate::nccl;
use crate::race::Clock;
use crate::report::{self, FindingKind};
use crate::stream::{self, Action, Operation};
use crate::work::Touched;

/// Queues a launch of `executable` to `stream`, which is not capturing.
pub(crate) fn launch(
    machine: &mut Machine,
    executable: usize,
    stream: StreamId,
) -> Result<(), CUresult> {
    let plan = machine.graphs.executables[executable].plan.clone();
    let keeps_priorities = machine.graphs.executables[executable].keeps_priorities;
    let device = stream::device_of(machine, stream);
    let lost = plan
        .nodes
        .iter()
        .find_map(|node| machine.devices[node.device].lost);
    if let Some(lost) = lost {
        return Err(lost);
    }
    let launch = stream::new_operation(machine, "graph launch", Some(stream), device, None);
    let end = Arc::new(Record::new(stream));
    let (mut operations, mut steps) = (Vec::new(), Vec::new());
    for node in &plan.nodes {
        let captured = node.operation.clone();
        let describe = captured.describe.clone();
        let stack = launch.stack.clone();
        let operation = stream::new_operation_at(
            machine,
            &describe,
            Some(stream),
            node.device,
            stack,
            Some(captured),
            keeps_priorities,
        );
        match step(machine, &node.what, &operation) {
            Ok(step) => steps.push(step),
            Err(code) => {
                // Nothing of this launch will run: release the pinned memory of the nodes before
                // this one.
                operations.iter().for_each(|begun: &Arc<Operation>| {
                    memory::finish(machine, begun.id, Clock::default())
                });
                return Err(code);
            }
        }
        operations.push(operation);
    }
    // Only now, when nothing can fail any more: the events count as recorded by this launch.
    for (node, step) in plan.nodes.iter().zip(&steps) {
        if let (Captured::Record(event), Step::Record(record)) = (&node.what, step) {
            machine.events.all[*event].state = State::Recorded(record.clone());
        }
    }
    for (step, operation) in steps.iter().zip(&operations) {
        if let Step::Nccl(flight) = step {
            let captured = operation.captured.as_ref();
            let stack = captured.map_or(&operation.stack, |captured| &captured.stack);
            nccl::takes_off(machine, flight, nccl::next_place(), stack);
        }
    }
    let own = (executable, &mut machine.graphs.executables[executable]);
    let replayed = Launch::new(own, operations, steps, end);
    let action = Action::Graph(Some(Box::new(replayed)));
    stream::give(machine, stream, launch, action);
    Ok(())
}

/// What a node does in the launch that `operation` belongs to. Missing memory is found here.
fn step(
    machine: &mut Machine,
    what: &Captured,
    operation: &Arc<Operation>,
) -> Result<Step, CUresult> {
    let stream = operation.stream.expect("nodes are launched in a stream");
    Ok(match what {
        Captured::Work(work) => {
            check_memory(machine, &work.known_ranges(), operation)?;
            let Injected { work, hangs, fails } =
                machine.faults.inject(operation.device, work.clone());
            machine.streams.is_to_fail |= fails;
            memory::begin(machine, operation, &work.known_ranges())?;
            if hangs { Step::Hang } else { Step::Work(work) }
        }
        Captured::Nccl(piece) => {
            let ranges = piece.ranges();
            check_memory(machine, &ranges, operation)?;
            memory::begin(machine, operation, &ranges)?;
            Step::Nccl(nccl::flight(machine, piece, stream))
        }
        Captured::Host(function) => Step::Host(*function),
        Captured::Record(_) => Step::Record(Arc::new(Record::new(stream))),
        Captured::Wait(event) => Step::Wait(match &machine.events.all[*event].state {
            State::Recorded(record) => Some(record.clone()),
            State::Never | State::Captured(..) => None,
        }),
    })
}

/// The buffers of a captured call must still be there when its graph is launched.
fn check_memory(
    machine: &mut Machine,
    ranges: &Touched,
    operation: &Operation,
) -> Result<(), CUresult> {
    let Err(memory::Violation { kind, message }) =
        memory::check_queued(machine, operation.device, ranges)
    else {
        return Ok(());
    };
    let (kind, what) = match kind {
        FindingKind::UseAfterFree => (
            FindingKind::Graph,
            "the graph is replayed after a buffer of it was freed",
        ),
        other => (
            other,
            "the graph is replayed with memory that it may not use",
        ),
    };
    let captured = operation
        .captured
        .as_ref()
        .map_or(&operation.stack, |captured| &captured.stack);
    report::finding(
        machine,
        kind,
        format!("{what}\n  {operation}\n  {message}\n  captured in {captured}"),
    );
    Err(CUresult::CUDA_ERROR_INVALID_VALUE)
}
