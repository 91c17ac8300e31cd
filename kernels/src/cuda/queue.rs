//! Streams and events of the driver, and where a thread's work goes while it captures a graph.
//! `stream.rs` is what users see of them.
//!
//! A capture goes to a private stream of the driver's: while a thread captures, `Queue::raw` gives
//! it the private stream in place of the one it names, and other threads continue to use the stream
//! itself. A stream joins a capture by waiting for one of its events, and gets a private stream
//! too.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys::{self, CUevent, CUgraph, CUstream, CUstreamCaptureMode};

use super::calls::CUresult;
use super::calls::{DriverFault, Outcome, driver};
use super::devices::GPUS_MAX;
use super::gpu::Gpu;
use crate::panics::lock;

/// A stream of the driver's: work given to it runs in order.
pub(crate) struct Queue {
    pub(crate) gpu: &'static Gpu,
    stream: CUstream,
    /// 0 is the device's default stream.
    pub(crate) id: u64,
    /// Whether its work has priority.
    urgent: bool,
}

// SAFETY: any thread may use a stream handle; the driver orders work by the time of the calls.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

/// The streams that this process keeps for one device.
struct DeviceStreams {
    default: OnceLock<Arc<Queue>>,
    freeing: OnceLock<Arc<Queue>>,
    /// Private streams for captures.
    spare: Mutex<Vec<Arc<Queue>>>,
}

static KEPT: [DeviceStreams; GPUS_MAX] = [const {
    DeviceStreams {
        default: OnceLock::new(),
        freeing: OnceLock::new(),
        spare: Mutex::new(Vec::new()),
    }
}; GPUS_MAX];

impl Queue {
    /// A new stream that does not wait for CUDA's own default stream. An `urgent` one has priority.
    pub(crate) fn new(gpu: &'static Gpu, id: u64, urgent: bool) -> Outcome<Arc<Queue>> {
        gpu.bind()?;
        let (mut least, mut greatest) = (0, 0);
        let mut stream = ptr::null_mut();
        // SAFETY: the context is current, and the pointers are to local variables.
        unsafe {
            driver!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
            let priority = if urgent { greatest } else { least };
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            driver!(cuStreamCreateWithPriority(&mut stream, flags, priority))?;
        }
        Ok(Arc::new(Queue {
            gpu,
            stream,
            id,
            urgent,
        }))
    }

    /// The stream of operations for which no other was chosen. It is not CUDA's own default stream,
    /// which waits for all others.
    pub(crate) fn default_of(gpu: &'static Gpu) -> Outcome<Arc<Queue>> {
        Queue::kept(&KEPT[gpu.index].default, gpu, 0)
    }

    /// The stream that frees what several streams used, once it has waited for all of them.
    pub(crate) fn freeing_on(gpu: &'static Gpu) -> Outcome<Arc<Queue>> {
        Queue::kept(&KEPT[gpu.index].freeing, gpu, u64::MAX)
    }

    fn kept(place: &OnceLock<Arc<Queue>>, gpu: &'static Gpu, id: u64) -> Outcome<Arc<Queue>> {
        if let Some(queue) = place.get() {
            return Ok(queue.clone());
        }
        let queue = Queue::new(gpu, id, false)?;
        // If two threads come here at once, one of the two streams is dropped again.
        Ok(place.get_or_init(|| queue).clone())
    }

    /// The driver's stream for this thread's work: a private one while the thread captures this
    /// one.
    pub(crate) fn raw(&self) -> CUstream {
        if !is_capturing() {
            return self.stream;
        }
        ROUTES.with_borrow(|routes| {
            let route = routes.iter().find(|route| ptr::eq(&*route.queue, self));
            route.map_or(self.stream, |route| route.private.stream)
        })
    }

    /// The number of the capture that this thread records the stream in; 0 for none.
    pub(crate) fn capture(&self) -> u64 {
        let id = CAPTURE.get();
        let joined = id != 0
            && ROUTES.with_borrow(|routes| routes.iter().any(|route| ptr::eq(&*route.queue, self)));
        if joined { id } else { 0 }
    }

    /// Whether this thread's work on the stream goes into a graph.
    pub(crate) fn is_captured(&self) -> bool {
        self.capture() != 0
    }

    /// Marks the point after all work given to this stream so far.
    pub(crate) fn record(&self, timed: bool) -> Outcome<Mark> {
        self.gpu.bind()?;
        let mark = Mark::new(self.gpu, timed, self.capture())?;
        // SAFETY: event and stream are alive and of the same context, which is current.
        unsafe { driver!(cuEventRecord(mark.event, self.raw())) }?;
        Ok(mark)
    }

    /// Work given to this stream from now on starts after `mark`, which may be of another device.
    pub(crate) fn wait(self: &Arc<Self>, mark: &Mark) -> Outcome<()> {
        if mark.capture != 0 {
            self.join(mark.capture)?;
        }
        self.gpu.bind()?;
        // SAFETY: event and stream are alive.
        unsafe { driver!(cuStreamWaitEvent(self.raw(), mark.event, 0)) }
    }

    /// Joins the capture `id`, which must be this thread's.
    fn join(self: &Arc<Self>, id: u64) -> Outcome<()> {
        if CAPTURE.get() != id {
            return Err(DriverFault {
                function: "cuStreamWaitEvent",
                code: CUresult::CUDA_ERROR_CAPTURED_EVENT,
            });
        }
        if !self.is_captured() {
            let private = self.private()?;
            ROUTES.with_borrow_mut(|routes| {
                routes.push(Route {
                    queue: self.clone(),
                    private,
                })
            });
        }
        Ok(())
    }

    /// An unused stream with this one's priority.
    fn private(&self) -> Outcome<Arc<Queue>> {
        let mut spare = lock(&KEPT[self.gpu.index].spare);
        match spare.iter().position(|queue| queue.urgent == self.urgent) {
            Some(position) => Ok(spare.swap_remove(position)),
            None => Queue::new(self.gpu, u64::MAX, self.urgent),
        }
    }

    /// Blocks until all work given to this stream is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        if self.is_captured() {
            return Err(DriverFault {
                function: "cuStreamSynchronize",
                code: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            });
        }
        self.gpu.bind()?;
        // SAFETY: the stream is alive.
        unsafe { driver!(cuStreamSynchronize(self.stream)) }
    }

    /// Begins this thread's capture `id` of the stream; the thread must not be capturing.
    pub(crate) fn begin_capture(self: &Arc<Self>, id: u64) -> Outcome<()> {
        let private = self.private()?;
        self.gpu.bind()?;
        // Thread-local: other threads' calls do not affect the capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and unused, and its context is current.
        unsafe { driver!(cuStreamBeginCapture_v2(private.stream, mode)) }?;
        self.gpu.captures.fetch_add(1, Ordering::Relaxed);
        let queue = self.clone();
        ROUTES.set(vec![Route { queue, private }]);
        CAPTURE.set(id);
        Ok(())
    }

    /// Ends this thread's capture: the graph, and the other streams that joined it.
    pub(crate) fn end_capture(&self) -> (Outcome<CUgraph>, Vec<Arc<Queue>>) {
        CAPTURE.set(0);
        let routes = ROUTES.take();
        let mut graph = ptr::null_mut();
        let ended = self.gpu.bind().and_then(|()| {
            // SAFETY: the capture began on this stream and thread; the pointer is to a local.
            unsafe { driver!(cuStreamEndCapture(routes[0].private.stream, &mut graph)) }
        });
        self.gpu.captures.fetch_sub(1, Ordering::Relaxed);
        let mut joined = Vec::new();
        for Route { queue, private } in routes {
            // After an error the driver may have left a private stream in any state.
            if ended.is_ok() {
                lock(&KEPT[queue.gpu.index].spare).push(private);
            }
            if !ptr::eq(&*queue, self) {
                joined.push(queue);
            }
        }
        (ended.map(|()| graph), joined)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: no other handle is left; the driver finishes the stream's work first. An error
        // here was left by an earlier call, and the next call reports it again.
        let destroy = || unsafe { driver!(cuStreamDestroy_v2(self.stream)) };
        let _ = self.gpu.bind().and_then(|()| destroy());
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stream {} of cuda:{}", self.id, self.gpu.index)
    }
}

/// A stream that takes part in a capture, and the private one that its work goes to.
struct Route {
    queue: Arc<Queue>,
    private: Arc<Queue>,
}

thread_local! {
    /// The number of this thread's capture; 0 for none. The hot path reads only this.
    static CAPTURE: Cell<u64> = const { Cell::new(0) };
    /// The streams that take part in it, the captured one first.
    static ROUTES: RefCell<Vec<Route>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread is capturing a graph.
pub(crate) fn is_capturing() -> bool {
    CAPTURE.get() != 0
}

/// Calls the driver about work outside this thread's capture, which it would otherwise refuse.
fn outside_capture<R>(ask: impl FnOnce() -> Outcome<R>) -> Outcome<R> {
    if !is_capturing() {
        return ask();
    }
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
    // SAFETY: exchanges this thread's mode with that of a local variable.
    unsafe { driver!(cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
    let answer = ask();
    // SAFETY: as above; this restores the mode.
    unsafe { driver!(cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
    answer
}

/// A point in a stream's work: a recorded event of the driver's.
pub(crate) struct Mark {
    gpu: &'static Gpu,
    event: CUevent,
    pub(crate) is_timed: bool,
    /// The number of the capture it was recorded in, and so never done; 0 for none.
    capture: u64,
}

// SAFETY: any thread may use an event handle.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Mark {
    fn new(gpu: &'static Gpu, is_timed: bool, capture: u64) -> Outcome<Mark> {
        let event = if is_timed {
            let mut event = ptr::null_mut();
            let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
            // SAFETY: the caller bound the context; the pointer is to a local variable.
            unsafe { driver!(cuEventCreate(&mut event, flags)) }?;
            event
        } else {
            gpu.take_event()?
        };
        Ok(Mark {
            gpu,
            event,
            is_timed,
            capture,
        })
    }

    /// Whether all work before it is done. True on a lost device, where waiting gives the error.
    pub(crate) fn is_done(&self) -> bool {
        if self.capture != 0 {
            return false;
        }
        // SAFETY: the event is alive.
        let ask = || unsafe { driver!(cuEventQuery(self.event)) };
        let answer = self.gpu.bind().and_then(|()| outside_capture(ask));
        // A passing error says nothing about the work: host memory stays in use.
        answer.map_or_else(DriverFault::is_of_a_lost_device, |()| true)
    }

    /// Blocks until all work before it is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        if self.capture != 0 {
            return Err(DriverFault {
                function: "cuEventSynchronize",
                code: CUresult::CUDA_ERROR_CAPTURED_EVENT,
            });
        }
        self.gpu.bind()?;
        // SAFETY: the event is alive.
        outside_capture(|| unsafe { driver!(cuEventSynchronize(self.event)) })
    }

    /// Milliseconds from `earlier` on the device's clock. Both must be timed and done.
    pub(crate) fn milliseconds_since(&self, earlier: &Mark) -> Outcome<f32> {
        self.gpu.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive.
        unsafe {
            driver!(cuEventElapsedTime(
                &mut milliseconds,
                earlier.event,
                self.event
            ))
        }?;
        Ok(milliseconds)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.is_timed {
            // SAFETY: no other handle is left; the driver frees a recorded event once it is done.
            let destroy = || unsafe { driver!(cuEventDestroy_v2(self.event)) };
            let _ = self.gpu.bind().and_then(|()| destroy());
        } else {
            self.gpu.give_event_back(self.event);
        }
    }
}

impl std::fmt::Debug for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "event on cuda:{}", self.gpu.index)
    }
}
