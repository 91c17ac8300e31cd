//! Streams and events as the driver has them. `stream.rs` is what users see of them.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{self, CUevent, CUstream};

use super::capture;
use super::fault::{Outcome, driver};
use super::gpu::Gpu;

/// A stream of the driver's: work given to it runs in order.
pub(crate) struct Queue {
    pub(crate) gpu: &'static Gpu,
    pub(crate) stream: CUstream,
    /// 0 is the device's default stream.
    pub(crate) id: u64,
    /// Whether what is given to it goes into a graph just now.
    captured: AtomicBool,
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
        Ok(Arc::new(Queue { gpu, stream, id, captured: AtomicBool::new(false) }))
    }

    /// Whether what is given to it goes into a graph just now.
    pub(crate) fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Relaxed)
    }

    pub(super) fn set_captured(&self, captured: bool) {
        self.captured.store(captured, Ordering::Relaxed);
    }

    /// Marks the point after all work given to this stream so far.
    pub(crate) fn record(&self, timed: bool) -> Outcome<Mark> {
        self.gpu.bind()?;
        let mark = Mark::new(self.gpu, timed, self.is_captured())?;
        // SAFETY: event and stream are alive and of the same context, which is current.
        unsafe { driver!(cuEventRecord(mark.event, self.stream)) }?;
        Ok(mark)
    }

    /// Work given to this stream from now on starts after `mark`, which may be of another device.
    pub(crate) fn wait(self: &Arc<Self>, mark: &Mark) -> Outcome<()> {
        self.gpu.bind()?;
        // SAFETY: event and stream are alive.
        unsafe { driver!(cuStreamWaitEvent(self.stream, mark.event, 0)) }?;
        if mark.captured && !self.is_captured() {
            capture::join(self);
        }
        Ok(())
    }

    /// Blocks until all work given to this stream is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
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
    /// Recorded in a graph: it is a place in that, and never done.
    captured: bool,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Mark {
    fn new(gpu: &'static Gpu, timed: bool, captured: bool) -> Outcome<Mark> {
        if !timed {
            return Ok(Mark { gpu, event: gpu.take_event()?, timed, captured });
        }
        let mut event = ptr::null_mut();
        // SAFETY: the caller bound the context; the pointer is to a variable of ours.
        unsafe { driver!(cuEventCreate(&mut event, sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32)) }?;
        Ok(Mark { gpu, event, timed, captured })
    }

    /// Whether all work before it is done. What cannot be known (a lost device, a capture) counts as not done.
    pub(crate) fn is_done(&self) -> bool {
        // A thread that captures may not ask the driver: that would end the capture.
        if self.captured || capture::is_capturing() {
            return false;
        }
        // SAFETY: the event is alive.
        self.gpu.bind().and_then(|()| unsafe { driver!(cuEventQuery(self.event)) }).is_ok()
    }

    /// Blocks until all work before it is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        self.gpu.bind()?;
        // SAFETY: the event is alive.
        unsafe { driver!(cuEventSynchronize(self.event)) }
    }

    /// Milliseconds from `earlier`, by the device's clock. Both must have been recorded with timing and be done.
    pub(crate) fn milliseconds_since(&self, earlier: &Mark) -> Outcome<f32> {
        self.gpu.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive, and the pointer is to a variable of ours.
        unsafe { driver!(cuEventElapsedTime_v2(&mut milliseconds, earlier.event, self.event)) }?;
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
