//! Captures: streams that record calls in a graph, and what CUDA forbids meanwhile.
//!
//! A capture begins in one stream; others join it by waiting for an event recorded in it. Each
//! member knows its tail: the nodes that its next node depends on. An error invalidates the
//! capture: every use of its streams then fails with 901 until cuStreamEndCapture ends it, which
//! also fails with 901.

mod forbidden;

use std::collections::BTreeSet;
use std::thread;

use cudarc::driver::sys::CUstreamCaptureMode;

use self::forbidden::{invalidate, valid};
use super::{Capture, Captured, Graph, Node, StreamCapture};
use crate::error::CUresult;
use crate::handle::{CaptureId, GraphId, OperationId, StreamId};
use crate::machine::Machine;
use crate::report::Stack;
use crate::stream::{self, Order};

pub(crate) use self::forbidden::{
    check_device_not_capturing, check_implicit, check_not_capturing, exchange_mode, forbid,
    is_implicit, unsupported,
};

/// Begins a capture in `stream`.
pub(crate) fn begin(
    machine: &mut Machine,
    stream: StreamId,
    mode: CUstreamCaptureMode,
) -> Result<(), CUresult> {
    let own = &machine.streams.all[stream];
    if own.order == Order::Legacy {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if own.capture.is_some() {
        return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
    }
    if let Some(lost) = machine.devices[own.device].lost {
        return Err(lost);
    }
    let graphs = &mut machine.graphs;
    graphs.graphs.push(Graph {
        is_being_captured: true,
        ..Graph::default()
    });
    graphs.captures.begun += 1;
    let id = graphs.captures.begun;
    let capture = Capture {
        origin: stream,
        mode,
        thread: thread::current().id(),
        begun: Stack::capture(),
        members: BTreeSet::from([stream]),
        graph: graphs.graphs.len() - 1,
        invalid: None,
    };
    graphs.captures.ongoing.insert(id, capture);
    machine.streams.all[stream].capture = Some(StreamCapture {
        capture: id,
        tail: Vec::new(),
        told: Vec::new(),
    });
    Ok(())
}

/// Ends the capture that began in `stream`, and returns its graph.
pub(crate) fn end(machine: &mut Machine, stream: StreamId) -> Result<GraphId, CUresult> {
    let Some(own) = &machine.streams.all[stream].capture else {
        return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
    };
    let (id, tail) = (own.capture, own.tail.clone());
    let capture = &machine.graphs.captures.ongoing[&id];
    if capture.origin != stream {
        invalidate(
            machine,
            id,
            "cuStreamEndCapture in a stream that did not begin it",
        );
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED
        && capture.thread != thread::current().id()
    {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    let graph = capture.graph;
    let is_joined = is_joined(&machine.graphs.graphs[graph].nodes, &tail);
    let capture = machine
        .graphs
        .captures
        .ongoing
        .remove(&id)
        .expect("it was there just now");
    for member in capture.members {
        machine.streams.all[member].capture = None;
    }
    machine.graphs.graphs[graph].is_being_captured = false;
    let failure = if capture.invalid.is_some() {
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    } else if !is_joined {
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    } else {
        return Ok(graph);
    };
    machine.graphs.graphs[graph].nodes.clear();
    Err(failure)
}

/// Whether every node that streams captured is in `tail` or before it.
fn is_joined(nodes: &[Node], tail: &[usize]) -> bool {
    let mut reached = vec![false; nodes.len()];
    let mut open: Vec<usize> = tail.to_vec();
    while let Some(node) = open.pop() {
        if !std::mem::replace(&mut reached[node], true) {
            open.extend(&nodes[node].dependencies);
        }
    }
    let mut all = reached.into_iter().zip(nodes);
    all.all(|(reached, node)| reached || node.is_internal)
}

/// Adds a node after everything that `stream` has captured so far.
pub(crate) fn add(
    machine: &mut Machine,
    stream: StreamId,
    describe: &str,
    what: Captured,
) -> Result<OperationId, CUresult> {
    let id = valid(machine, stream)?;
    let device = stream::device_of(machine, stream);
    let operation = stream::new_operation(machine, describe, Some(stream), device, None);
    let name = operation.id;
    let graph = machine.graphs.captures.ongoing[&id].graph;
    let nodes = &mut machine.graphs.graphs[graph].nodes;
    let own = machine.streams.all[stream]
        .capture
        .as_mut()
        .expect("it is capturing");
    let dependencies = std::mem::replace(&mut own.tail, vec![nodes.len()]);
    nodes.push(Node {
        what,
        device,
        operation,
        dependencies,
        after: None,
        is_internal: false,
    });
    Ok(name)
}

/// Adds a node of a library's own to the capture that `stream` takes part in.
pub(crate) fn add_internal(
    machine: &mut Machine,
    stream: StreamId,
    describe: &str,
    what: Captured,
    dependencies: Vec<usize>,
) -> Result<usize, CUresult> {
    let id = valid(machine, stream)?;
    let device = stream::device_of(machine, stream);
    let operation = stream::new_operation(machine, describe, Some(stream), device, None);
    let graph = machine.graphs.captures.ongoing[&id].graph;
    let nodes = &mut machine.graphs.graphs[graph].nodes;
    nodes.push(Node {
        what,
        device,
        operation,
        dependencies,
        after: None,
        is_internal: true,
    });
    Ok(nodes.len() - 1)
}

/// A node of the capture of `stream` runs after another, which no program may rely on.
pub(crate) fn run_after(machine: &mut Machine, stream: StreamId, node: usize, earlier: usize) {
    let own = machine.streams.all[stream].capture.as_ref();
    let own = own.expect("it is capturing");
    let graph = machine.graphs.captures.ongoing[&own.capture].graph;
    machine.graphs.graphs[graph].nodes[node].after = Some(earlier);
}

/// The capture that a stream takes part in.
pub(crate) fn of(machine: &Machine, stream: StreamId) -> Option<CaptureId> {
    machine.streams.all[stream]
        .capture
        .as_ref()
        .map(|own| own.capture)
}

/// The next node of `stream` depends on these earlier nodes too.
pub(crate) fn follow(machine: &mut Machine, stream: StreamId, nodes: &[usize]) {
    let tail = &mut machine.streams.all[stream]
        .capture
        .as_mut()
        .expect("it is capturing")
        .tail;
    tail.extend(nodes);
    tail.sort_unstable();
    tail.dedup();
}

/// What an event recorded now in `stream` stands for.
pub(crate) fn place(
    machine: &Machine,
    stream: StreamId,
) -> Result<(CaptureId, Vec<usize>), CUresult> {
    let id = valid(machine, stream)?;
    let own = machine.streams.all[stream]
        .capture
        .as_ref()
        .expect("it is capturing");
    Ok((id, own.tail.clone()))
}

/// `stream` waits for an event recorded in a capture, and joins the capture if it is in none. With
/// `ignored` it joins without depending on the event.
pub(crate) fn wait(
    machine: &mut Machine,
    stream: StreamId,
    of: CaptureId,
    nodes: &[usize],
    ignored: bool,
) -> Result<(), CUresult> {
    let Some(capture) = machine.graphs.captures.ongoing.get(&of) else {
        return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
    };
    if capture.invalid.is_some() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    if machine.streams.all[stream].order == Order::Legacy {
        invalidate(machine, of, "the null stream waited for one of its events");
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    let nodes = if ignored { &[] } else { nodes };
    if machine.streams.all[stream].capture.is_none() {
        let joins = StreamCapture {
            capture: of,
            tail: nodes.to_vec(),
            told: Vec::new(),
        };
        machine.streams.all[stream].capture = Some(joins);
        machine
            .graphs
            .captures
            .ongoing
            .get_mut(&of)
            .expect("it is ongoing")
            .members
            .insert(stream);
        return Ok(());
    }
    let own = valid(machine, stream)?;
    if own != of {
        for id in [own, of] {
            invalidate(machine, id, "a wait that would have merged two captures");
        }
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    follow(machine, stream, nodes);
    Ok(())
}

/// A capturing stream was told to wait for something outside of its capture: breaks the capture and
/// returns the code.
pub(crate) fn isolation(machine: &mut Machine, stream: StreamId) -> CUresult {
    match valid(machine, stream) {
        Err(code) => code,
        Ok(id) => {
            invalidate(
                machine,
                id,
                "a wait for an event that was not recorded in it",
            );
            CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        }
    }
}

/// The host queried or waited for an event of a capture.
pub(crate) fn captured_event(machine: &mut Machine, of: CaptureId) -> CUresult {
    if machine.graphs.captures.ongoing.contains_key(&of) {
        invalidate(
            machine,
            of,
            "a query or a synchronisation of one of its events",
        );
    }
    CUresult::CUDA_ERROR_CAPTURED_EVENT
}

/// A destroyed stream leaves its capture, and so breaks it.
pub(crate) fn leave(machine: &mut Machine, stream: StreamId) {
    let Some(own) = machine.streams.all[stream].capture.take() else {
        return;
    };
    invalidate(
        machine,
        own.capture,
        "cuStreamDestroy of one of its streams",
    );
    let Some(capture) = machine.graphs.captures.ongoing.get_mut(&own.capture) else {
        return;
    };
    capture.members.remove(&stream);
    // No stream is left to end it.
    if capture.origin == stream {
        let capture = machine
            .graphs
            .captures
            .ongoing
            .remove(&own.capture)
            .expect("it was there just now");
        for member in capture.members {
            machine.streams.all[member].capture = None;
        }
        let graph = &mut machine.graphs.graphs[capture.graph];
        graph.nodes.clear();
        graph.is_being_captured = false;
    }
}
