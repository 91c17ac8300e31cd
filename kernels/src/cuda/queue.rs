//! Streams and events as the driver has them. `stream.rs` is what users see of them.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};

use super::calls;
use super::capture;
use super::fault::{Fault, Outcome, driver, outcome};
use super::gpu::Gpu;

/// A stream of the driver's: work given to it runs in order.
pub(crate) struct Queue {
    pub(crate) gpu: &'static Gpu,
    stream: CUstream,
    /// 0 is the device's default stream.
    pub(crate) id: u64,
    /// Whether its work goes first.
    pub(super) urgent: bool,
}

// SAFETY: a stream handle may be used from any thread; the driver orders what is given to it by the time of the calls.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Queue {
    /// A new stream, which does not wait for CUDA's own default stream. An `urgent` one goes first where both could.
    pub(crate) fn new(gpu: &'static Gpu, id: u64, urgent: bool) -> Outcome<Arc<Queue>> {
        gpu.bind()?;
        let (mut least, mut greatest) = (0, 0);
        let mut stream = ptr::null_mut();
        // SAFETY: the context is current, and the pointers are to variables of ours.
        unsafe {
            driver!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest))?;
            let priority = if urgent { greatest } else { least };
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            driver!(cuStreamCreateWithPriority(&mut stream, flags, priority))?;
        }
        Ok(Arc::new(Queue { gpu, stream, id, urgent }))
    }

    /// The driver's stream that work of this thread goes to: while the thread captures this one, a stream of the capture's.
    pub(crate) fn raw(&self) -> CUstream {
        if capture::is_capturing() { capture::private_of(self).unwrap_or(self.stream) } else { self.stream }
    }

    /// The driver's stream itself.
    pub(super) fn own(&self) -> CUstream {
        self.stream
    }

    /// Whether what this thread gives to it goes into a graph just now.
    pub(crate) fn is_captured(&self) -> bool {
        capture::of(self) != 0
    }

    /// Marks the point after all work given to this stream so far.
    pub(crate) fn record(&self, timed: bool) -> Outcome<Mark> {
        self.gpu.bind()?;
        let mark = Mark::new(self.gpu, timed, capture::of(self))?;
        // SAFETY: event and stream are alive and of the same context, which is current.
        unsafe { driver!(cuEventRecord(mark.event, self.raw())) }?;
        Ok(mark)
    }

    /// Work given to this stream from now on starts after `mark`, which may be of another device.
    pub(crate) fn wait(self: &Arc<Self>, mark: &Mark) -> Outcome<()> {
        if mark.capture != 0 {
            capture::join(self, mark.capture)?;
        }
        self.gpu.bind()?;
        // SAFETY: event and stream are alive.
        unsafe { driver!(cuStreamWaitEvent(self.raw(), mark.event, 0)) }
    }

    /// Blocks until all work given to this stream is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        if self.is_captured() {
            return Err(Fault {
                function: "cuStreamSynchronize",
                code: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            });
        }
        self.gpu.bind()?;
        // SAFETY: the stream is alive.
        unsafe { driver!(cuStreamSynchronize(self.stream)) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle. The driver finishes what the stream was given before it lets go of it. An error here is one that
        // an earlier call left behind, and the next call says it again.
        let _ = self.gpu.bind().and_then(|()| unsafe { driver!(cuStreamDestroy_v2(self.stream)) });
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stream {} of cuda:{}", self.id, self.gpu.index)
    }
}

/// A point in a stream's work: an event of the driver's, recorded.
pub(crate) struct Mark {
    gpu: &'static Gpu,
    event: CUevent,
    timed: bool,
    /// The capture it was recorded in, by number: it is a place in that graph, and never done. 0 for none.
    capture: u64,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Mark {
    fn new(gpu: &'static Gpu, timed: bool, capture: u64) -> Outcome<Mark> {
        if !timed {
            return Ok(Mark { gpu, event: gpu.take_event()?, timed, capture });
        }
        let mut event = ptr::null_mut();
        // SAFETY: the caller bound the context; the pointer is to a variable of ours.
        unsafe { driver!(cuEventCreate(&mut event, sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32)) }?;
        Ok(Mark { gpu, event, timed, capture })
    }

    /// Whether all work before it is done. On a device that is lost nothing is done any more: what waits there says so.
    pub(crate) fn is_done(&self) -> bool {
        if self.capture != 0 {
            return false;
        }
        // SAFETY: the event is alive.
        let ask = || unsafe { driver!(cuEventQuery(self.event)) };
        let answer = self.gpu.bind().and_then(|()| if capture::is_capturing() { capture::outside(ask) } else { ask() });
        // An error that passes says nothing about the copy: host memory is not given back for one.
        answer.map_or_else(Fault::is_of_a_lost_device, |()| true)
    }

    /// Blocks until all work before it is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        if self.capture != 0 {
            return Err(Fault { function: "cuEventSynchronize", code: CUresult::CUDA_ERROR_CAPTURED_EVENT });
        }
        self.gpu.bind()?;
        // SAFETY: the event is alive.
        let wait = || unsafe { driver!(cuEventSynchronize(self.event)) };
        if capture::is_capturing() { capture::outside(wait) } else { wait() }
    }

    /// Milliseconds from `earlier`, by the device's clock. Both must have been recorded with timing and be done.
    pub(crate) fn milliseconds_since(&self, earlier: &Mark) -> Outcome<f32> {
        self.gpu.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive, and the pointer is to a variable of ours.
        unsafe { outcome("cuEventElapsedTime", calls::elapsed_ms(&mut milliseconds, earlier.event, self.event)) }?;
        Ok(milliseconds)
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.timed
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.timed {
            // SAFETY: nobody else has the handle; the driver lets go of a recorded event once it is done.
            let _ = self.gpu.bind().and_then(|()| unsafe { driver!(cuEventDestroy_v2(self.event)) });
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
