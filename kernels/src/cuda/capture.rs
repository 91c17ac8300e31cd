//! Graphs: a stream's work recorded once and launched many times. `stream::Graph` is what users see of it.
//!
//! While a thread captures, this file knows which streams take part and which memory is used: the graph keeps that memory
//! alive, and a launch enters it like any operation, so that neither a dropped tensor nor a copy in flight can meet a replay.

use std::cell::RefCell;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphExec, CUstreamCaptureMode};

use super::fault::{Outcome, driver};
use super::queue::Queue;
use crate::error::{Error, Result, Site};
use crate::memory;
use crate::storage::Storage;

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// A capture under way on this thread.
struct Recording {
    /// The stream it began on, then those that joined by waiting for events of it.
    queues: Vec<Arc<Queue>>,
    uses: Vec<Use>,
}

/// Memory that a graph reads or writes.
struct Use {
    storage: Arc<Storage>,
    range: Range<usize>,
    writes: bool,
}

impl Use {
    fn new(storage: &Arc<Storage>, range: Range<usize>, writes: bool) -> Use {
        storage.count_graph(true);
        Use { storage: storage.clone(), range, writes }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.storage.count_graph(false);
    }
}

/// Whether this thread is capturing.
pub(crate) fn is_capturing() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// A stream joins the capture of this thread.
pub(super) fn join(queue: &Arc<Queue>) {
    RECORDING.with_borrow_mut(|recording| {
        if let Some(recording) = recording {
            queue.set_captured(true);
            recording.queues.push(queue.clone());
        }
    });
}

/// Remembers memory that the captured work uses.
pub(crate) fn keep(storage: &Arc<Storage>, range: Range<usize>, writes: bool) {
    RECORDING.with_borrow_mut(|recording| {
        let Some(recording) = recording else { return };
        // The same operand of the next operation, mostly.
        let known = recording.uses.iter_mut().rev().take(8).find(|known| {
            Arc::ptr_eq(&known.storage, storage) && known.range.start <= range.start && range.end <= known.range.end
        });
        match known {
            Some(known) => known.writes |= writes,
            None => recording.uses.push(Use::new(storage, range, writes)),
        }
    });
}

/// A graph ready to be launched.
pub(crate) struct Executable {
    exec: CUgraphExec,
    queue: Arc<Queue>,
    uses: Vec<Use>,
}

// SAFETY: an executable graph may be launched from any thread; launches of one graph are ordered by the driver.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

/// Captures what `body` gives to `queue` (and to streams that join it) instead of running it.
pub(crate) fn capture<E: From<Error>>(
    queue: &Arc<Queue>,
    at: Site,
    body: impl FnOnce() -> Result<(), E>,
) -> Result<Executable, E> {
    let device = queue.gpu.device();
    let failed = |fault: super::fault::Fault| E::from(fault.of("capture", device, at));
    if is_capturing() || queue.is_captured() {
        let why = "one capture at a time".to_string();
        return Err(Error::Capture { op: "capture", device, why, at }.into());
    }
    // Thread-local: what other threads do to other streams meanwhile is their own business.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is alive and its context current.
    let begun = queue.gpu.bind().and_then(|()| unsafe { driver!(cuStreamBeginCapture_v2(queue.stream, mode)) });
    begun.map_err(failed)?;
    queue.set_captured(true);
    RECORDING.set(Some(Recording { queues: vec![queue.clone()], uses: Vec::new() }));
    let mut ending = Ending { queue };
    let outcome = body();
    let (ended, uses) = ending.end();
    std::mem::forget(ending);
    outcome?;
    let exec = ended.map_err(failed)?;
    for used in &uses {
        used.storage.block().adopt(queue);
    }
    Ok(Executable { exec, queue: queue.clone(), uses: merged(uses) })
}

/// Ends the capture, also when its body panics.
struct Ending<'a> {
    queue: &'a Arc<Queue>,
}

impl Ending<'_> {
    /// Leaves the capture and makes its graph ready.
    fn end(&mut self) -> (Outcome<CUgraphExec>, Vec<Use>) {
        let mut graph = ptr::null_mut();
        // SAFETY: the capture began on this stream, on this thread; the pointer is to a variable of ours.
        let ended = unsafe { driver!(cuStreamEndCapture(self.queue.stream, &mut graph)) };
        let recording = RECORDING.take();
        let (queues, uses) = recording.map_or_else(Default::default, |recording| (recording.queues, recording.uses));
        for queue in &queues {
            queue.set_captured(false);
        }
        memory::free_deferred(self.queue.gpu.index);
        let exec = ended.and_then(|()| {
            let mut exec = ptr::null_mut();
            // SAFETY: a graph was made, which nobody else has; the executable is a copy of its own.
            let made = unsafe { driver!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)) };
            made.map(|()| exec)
        });
        if !graph.is_null() {
            // SAFETY: as above, and nothing refers to it any more.
            let _ = unsafe { driver!(cuGraphDestroy(graph)) };
        }
        (exec, uses)
    }
}

impl Drop for Ending<'_> {
    /// Reached by a panic alone.
    fn drop(&mut self) {
        if let (Ok(exec), _) = self.end() {
            // SAFETY: it was never launched.
            let _ = unsafe { driver!(cuGraphExecDestroy(exec)) };
        }
    }
}

/// One use a stretch of each storage: written where any use of it writes, so that a launch does not stand in its own way.
fn merged(mut uses: Vec<Use>) -> Vec<Use> {
    uses.sort_by_key(|used| (used.storage.id(), used.range.start));
    let mut merged: Vec<Use> = Vec::new();
    for used in uses {
        match merged.last_mut() {
            Some(last) if Arc::ptr_eq(&last.storage, &used.storage) && used.range.start <= last.range.end => {
                last.range.end = last.range.end.max(used.range.end);
                last.writes |= used.writes;
            }
            _ => merged.push(used),
        }
    }
    merged
}

impl Executable {
    /// Gives the whole graph to the stream it was captured on.
    pub(crate) fn launch(&self, at: Site) -> Result<()> {
        let device = self.queue.gpu.device();
        let mut entered = Vec::with_capacity(self.uses.len());
        for used in &self.uses {
            let borrow =
                used.storage.enter(used.range.clone(), used.writes, "graph", at).map_err(|other| Error::Busy {
                    op: "graph",
                    operand: Box::new(used.storage.as_operand("memory of the graph")),
                    other_op: other.op,
                    other_writes: other.writes,
                    other_at: other.at,
                    at,
                })?;
            entered.push(borrow);
        }
        // SAFETY: the executable is alive, and so is all memory that its work uses: `uses` holds it.
        let launched =
            self.queue.gpu.bind().and_then(|()| unsafe { driver!(cuGraphLaunch(self.exec, self.queue.stream)) });
        launched.map_err(|fault| fault.of("graph", device, at))
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle. A launch that still runs is finished by the driver before it lets go; the memory it
        // uses is freed after the stream has passed it (`adopt`).
        let _ = self.queue.gpu.bind().and_then(|()| unsafe { driver!(cuGraphExecDestroy(self.exec)) });
    }
}

impl std::fmt::Debug for Executable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "graph on {:?} over {} stretches of memory", self.queue, self.uses.len())
    }
}
