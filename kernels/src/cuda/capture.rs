//! Graphs: a stream's work recorded once and launched many times. `stream::Graph` is what users see of it.
//!
//! A capture goes to a stream of the driver's that nobody else has: while a thread captures, `Queue::raw` gives it that one in
//! place of the stream it names, and other threads go on using the stream itself. Streams join by waiting for an event of the
//! capture, and get one of their own in the same way. The graph keeps alive whatever memory its work uses.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUgraphExec, CUresult, CUstream, CUstreamCaptureMode};

use super::fault::{Fault, Outcome, driver};
use super::gpu::Handle;
use super::queue::Queue;
use crate::error::{Error, Result, Site};
use crate::memory;
use crate::storage::Storage;
use crate::stream::Stream;
use crate::transfer::{self, Held};

thread_local! {
    /// Whether there is a recording: what the hot path looks at.
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// A capture under way on this thread.
struct Recording {
    id: u64,
    routes: Vec<Route>,
    kept: Vec<Kept>,
    booked: Held,
}

/// A stream that takes part, and the one that its work goes to meanwhile.
struct Route {
    queue: Arc<Queue>,
    private: Arc<Queue>,
}

/// Memory that a graph uses.
struct Kept(Arc<Storage>);

impl Kept {
    fn new(storage: &Arc<Storage>) -> Kept {
        storage.count_graph(true);
        Kept(storage.clone())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.count_graph(false);
    }
}

/// Whether this thread is capturing.
pub(crate) fn is_capturing() -> bool {
    CAPTURING.get()
}

/// The capture that this thread records `queue` in, by number; 0 for none.
pub(super) fn of(queue: &Queue) -> u64 {
    if !CAPTURING.get() {
        return 0;
    }
    RECORDING.with_borrow(|recording| {
        let recording = recording.as_ref().filter(|recording| recording.private_of(queue).is_some());
        recording.map_or(0, |recording| recording.id)
    })
}

/// Where the work that this thread gives to `queue` goes while it captures, if not to the stream itself.
pub(super) fn private_of(queue: &Queue) -> Option<CUstream> {
    RECORDING.with_borrow(|recording| recording.as_ref()?.private_of(queue))
}

impl Recording {
    fn private_of(&self, queue: &Queue) -> Option<CUstream> {
        self.routes.iter().find(|route| ptr::eq(&*route.queue, queue)).map(|route| route.private.own())
    }
}

/// Before `queue` waits for an event of the capture `id`: it joins that, which must be this thread's.
pub(super) fn join(queue: &Arc<Queue>, id: u64) -> Outcome<()> {
    let ours = RECORDING.with_borrow(|recording| recording.as_ref().is_some_and(|recording| recording.id == id));
    if !ours {
        return Err(Fault { function: "cuStreamWaitEvent", code: CUresult::CUDA_ERROR_CAPTURED_EVENT });
    }
    if of(queue) == id {
        return Ok(());
    }
    let private = queue.gpu.take_capture_queue(queue.urgent)?;
    RECORDING.with_borrow_mut(|recording| {
        let recording = recording.as_mut().expect("looked at above");
        recording.routes.push(Route { queue: queue.clone(), private });
    });
    Ok(())
}

/// Asks the driver something about what lies outside the capture of this thread, which it would else take for a part of it.
pub(super) fn outside<R>(ask: impl FnOnce() -> Outcome<R>) -> Outcome<R> {
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: exchanges this thread's mode with that of a variable of ours.
    unsafe { driver!(cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
    let answer = ask();
    // SAFETY: as above; now the mode is what it was.
    unsafe { driver!(cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
    answer
}

/// Remembers memory that the captured work uses.
pub(crate) fn keep(storage: &Arc<Storage>) {
    RECORDING.with_borrow_mut(|recording| {
        let Some(recording) = recording else { return };
        if !recording.kept.iter().rev().any(|kept| Arc::ptr_eq(&kept.0, storage)) {
            recording.kept.push(Kept::new(storage));
        }
    });
}

/// Lets `hold` write down what this thread's capture is to book at each launch; false if this thread captures nothing.
pub(crate) fn hold(hold: impl FnOnce(&mut Held)) -> bool {
    if !CAPTURING.get() {
        return false;
    }
    RECORDING.with_borrow_mut(|recording| {
        hold(&mut recording.as_mut().expect("there is one while CAPTURING").booked);
    });
    true
}

/// A graph ready to be launched.
pub(crate) struct Executable {
    /// Locked while it is launched: the driver's graphs are not for two threads at once.
    exec: Mutex<Handle<CUgraphExec>>,
    queue: Arc<Queue>,
    /// The other streams that took part. The graph uses what belongs to them (workspaces of products), so its launches are ordered among
    /// their work as well.
    joined: Vec<Arc<Queue>>,
    kept: Vec<Kept>,
    /// What each launch books in the ledger.
    booked: Held,
}

/// Captures what `body` gives to `queue` (and to streams that join it) instead of running it.
pub(crate) fn capture<E: From<Error>>(
    queue: &Arc<Queue>,
    at: Site,
    body: impl FnOnce() -> Result<(), E>,
) -> Result<Executable, E> {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    let device = queue.gpu.device();
    let failed = |fault: Fault| E::from(fault.of("capture", device, at));
    if is_capturing() {
        let why = "one capture at a time on a thread".to_string();
        return Err(Error::Capture { op: "capture", device, why, at }.into());
    }
    let private = queue.gpu.take_capture_queue(queue.urgent).map_err(failed)?;
    // Thread-local: what other threads do meanwhile is their own business.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is alive, nobody else has it, and its context is current.
    let begun = queue.gpu.bind().and_then(|()| unsafe { driver!(cuStreamBeginCapture_v2(private.own(), mode)) });
    begun.map_err(failed)?;
    queue.gpu.count_capture(true);
    let routes = vec![Route { queue: queue.clone(), private }];
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    RECORDING.set(Some(Recording { id, routes, kept: Vec::new(), booked: Held::default() }));
    CAPTURING.set(true);
    let ending = Ending { queue };
    let outcome = body();
    let Ended { exec, joined, kept, booked } = ending.end(outcome.is_ok());
    outcome?;
    let exec = exec.map_err(failed)?;
    for kept in &kept {
        kept.0.block().adopt(queue);
    }
    Ok(Executable { exec: Mutex::new(Handle(exec)), queue: queue.clone(), joined, kept, booked })
}

/// What a capture leaves.
struct Ended {
    exec: Outcome<CUgraphExec>,
    joined: Vec<Arc<Queue>>,
    kept: Vec<Kept>,
    booked: Held,
}

/// Ends the capture, also when its body panics.
struct Ending<'a> {
    queue: &'a Arc<Queue>,
}

impl Ending<'_> {
    /// Leaves the capture; makes its graph ready if it is `wanted`.
    fn end(self, wanted: bool) -> Ended {
        let ended = self.leave(wanted);
        std::mem::forget(self);
        ended
    }

    fn leave(&self, wanted: bool) -> Ended {
        let gpu = self.queue.gpu;
        CAPTURING.set(false);
        let Recording { routes, kept, booked, .. } = RECORDING.take().expect("it began when the capture did");
        let mut graph = ptr::null_mut();
        let ended = gpu.bind().and_then(|()| {
            // SAFETY: the capture began on this stream, on this thread; the pointer is to a variable of ours.
            unsafe { driver!(cuStreamEndCapture(routes[0].private.own(), &mut graph)) }
        });
        gpu.count_capture(false);
        let exec = ended.and_then(|()| {
            let mut exec = ptr::null_mut();
            if wanted {
                // SAFETY: a graph was made, which nobody else has; the executable is a copy of its own.
                unsafe { driver!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)) }?;
            }
            Ok(exec)
        });
        if !graph.is_null() {
            // SAFETY: as above, and nothing refers to it any more.
            let _ = unsafe { driver!(cuGraphDestroy(graph)) };
        }
        let mut joined = Vec::new();
        for Route { queue, private } in routes {
            // One that was not joined back is in a state that only the driver knows: it is not used again.
            if exec.is_ok() {
                queue.gpu.give_capture_queue_back(private);
            }
            if !Arc::ptr_eq(&queue, self.queue) {
                joined.push(queue);
            }
        }
        memory::free_deferred(gpu.index);
        Ended { exec, joined, kept, booked }
    }
}

impl Drop for Ending<'_> {
    /// Reached by a panic alone.
    fn drop(&mut self) {
        drop(self.leave(false));
    }
}

impl Executable {
    /// Gives the whole graph to the stream that it was captured on. It comes after what the device's current stream and the streams
    /// that took part were given so far, and before what they will be.
    pub(crate) fn launch(&self, at: Site) -> Result<()> {
        let gpu = self.queue.gpu;
        let device = gpu.device();
        if is_capturing() {
            let why = "a graph cannot launch another. Launch the two one after the other".to_string();
            return Err(Error::Capture { op: "graph", device, why, at });
        }
        let current = Stream::current_at(device, "graph", at)?;
        let current = current.queue().filter(|current| !Arc::ptr_eq(current, &self.queue));
        let others = || self.joined.iter().chain(current);
        let exec = self.exec.lock().unwrap_or_else(PoisonError::into_inner);
        let launched = others()
            .try_for_each(|other| self.queue.wait(&other.record(false)?))
            .and_then(|()| gpu.bind())
            // SAFETY: the executable is alive and ours alone while it is locked, and so is all memory that its work uses: `kept` holds it.
            .and_then(|()| unsafe { driver!(cuGraphLaunch(exec.0, self.queue.raw())) })
            .and_then(|()| match others().next() {
                None => Ok(()),
                Some(_) => {
                    let done = self.queue.record(false)?;
                    others().try_for_each(|other| other.wait(&done))
                }
            });
        launched.map_err(|fault| fault.of("graph", device, at))?;
        transfer::book_launch(&self.booked);
        Ok(())
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        let exec = self.exec.get_mut().unwrap_or_else(PoisonError::into_inner).0;
        // SAFETY: nobody else has the handle. A launch that still runs is finished by the driver before it lets go; the memory it
        // uses is freed after the stream has passed it (`adopt`).
        let _ = self.queue.gpu.bind().and_then(|()| unsafe { driver!(cuGraphExecDestroy(exec)) });
    }
}

impl std::fmt::Debug for Executable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "graph on {:?} over {} pieces of memory", self.queue, self.kept.len())
    }
}
