//! CUDA graphs: a stream's work recorded once and launched many times.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphInstantiate_flags};

use crate::Device;
use crate::cuda::calls::CUresult;
use crate::cuda::calls::{DriverFault, Outcome, driver};
use crate::cuda::gpu::Handle;
use crate::cuda::nodes;
pub use crate::cuda::nodes::{GraphNode, NodeCounts, NodeKind, NodeWork};
use crate::cuda::queue::{Queue, is_capturing};
use crate::error::{Caller, Error, Result};
use crate::memory;
use crate::panics::{get_mut, lock};
use crate::storage::KeptMemory;
use crate::stream::Stream;
use crate::transfer::{self, CapturedRows};

/// A GPU stream's work, recorded once and launched many times with one call.
///
/// Every launch runs the operations of the capture with the same tensors and the same scalar
/// arguments. What varies is read from tensors, which [`Scalars`](crate::transfer::Scalars) fills.
/// A graph keeps the memory that it uses alive.
pub struct Graph {
    /// Locked during a launch: the driver's graphs are not for two threads at once.
    exec: Mutex<Handle<CUgraphExec>>,
    queue: Arc<Queue>,
    /// The other streams that took part. The graph uses what belongs to them (workspaces of
    /// matmuls), so its launches are ordered among their work as well.
    joined: Vec<Arc<Queue>>,
    kept: KeptForLaunches,
    counts: NodeCounts,
}

/// What the work of a capture left behind for its launches.
struct KeptForLaunches {
    /// The memory that it uses.
    memory: Vec<KeptMemory>,
    /// What each launch books in the ledger.
    booked: CapturedRows,
    nodes: Vec<GraphNode>,
}

/// Runs `body`, and returns what it launched on this thread, with the milliseconds that each node
/// took: measured between two events around it, so without the time between nodes. None for calls
/// of other libraries. Waits for all of it.
#[track_caller]
pub fn timed<E: From<Error>>(
    device: Device,
    body: impl FnOnce() -> Result<(), E>,
) -> Result<Vec<(GraphNode, Option<f32>)>, E> {
    let by = Caller::new("timed");
    let (ran, nodes) = nodes::timed(body);
    ran?;
    nodes.map_err(|fault| fault.of(by, device).into())
}

impl Graph {
    /// Captures the work that `body` gives to `stream`, and to streams that wait for its events,
    /// instead of running it. Operations that `body` calls go to `stream`.
    ///
    /// Run the same work once before: a capture cannot allocate, compile, or copy between devices.
    #[track_caller]
    pub fn capture<E: From<Error>>(
        stream: &Stream,
        body: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let by = Caller::new("capture");
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let device = stream.device();
        let Some(queue) = stream.queue() else {
            let got = format!("a stream of {device}");
            return Err(by.value("stream", "a stream of a GPU", got).into());
        };
        if is_capturing() {
            let why = "a thread can run one capture at a time";
            let help = "end that capture first";
            return Err(by.capture(device, why, help).into());
        }
        let failed = |fault: DriverFault| E::from(fault.of(by, device));
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        queue.begin_capture(id).map_err(failed)?;
        let ending = Ending { queue };
        let outcome = stream.scope(body);
        let ended = ending.end(outcome.is_ok());
        outcome?;
        let (exec, counts, joined, kept) = ended.map_err(failed)?;
        kept.memory.iter().for_each(|memory| memory.adopt(queue));
        Ok(Graph {
            exec: Mutex::new(Handle(exec)),
            queue: queue.clone(),
            joined,
            kept,
            counts,
        })
    }

    /// Gives the whole graph to the stream that it was captured on. It runs after all work that the
    /// device's current stream and the streams that took part were given before, and before all
    /// work that they are given later.
    #[track_caller]
    pub fn launch(&self) -> Result<()> {
        let by = Caller::new("graph");
        let device = self.device();
        if is_capturing() {
            let why = "a graph cannot launch another graph";
            let help = "launch the two one after the other";
            return Err(by.capture(device, why, help));
        }
        let current = Stream::current_at(device, by)?;
        let current = current.queue().filter(|it| !Arc::ptr_eq(it, &self.queue));
        let others = || self.joined.iter().chain(current);
        let exec = lock(&self.exec);
        // SAFETY: the executable is alive and locked, and `kept` holds all memory that it uses.
        let launch = || unsafe { driver!(cuGraphLaunch(exec.0, self.queue.raw())) };
        let launched = others()
            .try_for_each(|other| self.queue.wait(&other.record(false)?))
            .and_then(|()| self.queue.gpu.bind())
            .and_then(|()| launch())
            .and_then(|()| {
                if others().next().is_none() {
                    return Ok(());
                }
                let done = self.queue.record(false)?;
                others().try_for_each(|other| other.wait(&done))
            });
        launched.map_err(|fault| fault.of(by, device))?;
        transfer::book_launch(&self.kept.booked);
        Ok(())
    }

    /// What its nodes do, in the order of the calls that made them.
    pub fn nodes(&self) -> &[GraphNode] {
        &self.kept.nodes
    }

    /// How many nodes the driver counts, which includes those that libraries made.
    pub fn counts(&self) -> NodeCounts {
        self.counts
    }

    /// Streaming multiprocessors of its device.
    pub fn multiprocessors(&self) -> usize {
        self.queue.gpu.multiprocessors as usize
    }

    /// Bytes per second that the memory of its device can move at most, by its clock and width.
    pub fn bandwidth(&self) -> f64 {
        self.queue.gpu.bandwidth
    }

    /// The device that it runs on.
    pub fn device(&self) -> Device {
        self.queue.gpu.device()
    }
}

/// Ends the capture, also if its body panics.
struct Ending<'a> {
    queue: &'a Arc<Queue>,
}

type EndedCapture = (CUgraphExec, NodeCounts, Vec<Arc<Queue>>, KeptForLaunches);

impl Ending<'_> {
    /// Ends the capture and, if it is `wanted`, makes its graph ready.
    fn end(self, wanted: bool) -> Outcome<EndedCapture> {
        let ended = self.leave(wanted);
        std::mem::forget(self);
        ended
    }

    fn leave(&self, wanted: bool) -> Outcome<EndedCapture> {
        let (graph, joined) = self.queue.end_capture();
        let kept = KeptForLaunches {
            memory: KeptMemory::take(),
            booked: transfer::take_held(),
            nodes: nodes::take(),
        };
        let exec = graph.and_then(|graph| instantiate(graph, wanted));
        memory::free_deferred(self.queue.gpu.index);
        let (exec, counts) = exec?;
        Ok((exec, counts, joined, kept))
    }
}

impl Drop for Ending<'_> {
    /// Runs only after a panic.
    fn drop(&mut self) {
        drop(self.leave(false));
    }
}

const NODE_PRIORITY: u64 =
    CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0 as u64;

/// An executable of `graph` and what is in it, or null if it is not `wanted`.
fn instantiate(graph: CUgraph, wanted: bool) -> Outcome<(CUgraphExec, NodeCounts)> {
    let mut exec = ptr::null_mut();
    let made = if wanted {
        // SAFETY: the caller owns the graph; the executable is an independent copy.
        let mut with =
            |flags: u64| unsafe { driver!(cuGraphInstantiateWithFlags(&mut exec, graph, flags)) };
        // Without this flag nodes lose the priorities of their streams. Drivers before CUDA 11.7
        // lack it.
        nodes::count(graph).and_then(|counts| match with(NODE_PRIORITY) {
            Err(fault) if fault.code == CUresult::CUDA_ERROR_INVALID_VALUE => {
                with(0).map(|()| counts)
            }
            made => made.map(|()| counts),
        })
    } else {
        Ok(NodeCounts::default())
    };
    // SAFETY: as above, and nothing refers to it any more.
    let _ = unsafe { driver!(cuGraphDestroy(graph)) };
    made.map(|counts| (exec, counts))
}

impl Drop for Graph {
    fn drop(&mut self) {
        let exec = get_mut(&mut self.exec).0;
        // SAFETY: no other handle is left. The driver finishes a running launch first; the memory
        // it uses is freed after the stream has passed it (`adopt`).
        let destroy = || unsafe { driver!(cuGraphExecDestroy(exec)) };
        let _ = self.queue.gpu.bind().and_then(|()| destroy());
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.kept.memory.len();
        write!(f, "graph on {:?} over {count} buffers", self.queue)
    }
}
