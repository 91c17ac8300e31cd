//! Streams, events and timers.
//!
//! Work given to a stream runs in order. Work of two streams runs in any order, except where an
//! event orders it or where a stream first uses a tensor (see `memory/gpu.rs`). On the CPU work is
//! done when its call returns: an event is a moment in time, and waiting returns at once.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Device;
use crate::cuda::Gpu;
use crate::cuda::queue::{Mark, Queue};
use crate::error::{Caller, Result};

/// An ordered queue of work on one device.
#[derive(Clone, Debug)]
pub struct Stream {
    device: Device,
    /// 0 is the device's default stream.
    id: u64,
    /// The driver's stream; None on the CPU.
    queue: Option<Arc<Queue>>,
}

impl PartialEq for Stream {
    fn eq(&self, other: &Stream) -> bool {
        self.device == other.device && self.id == other.id
    }
}

impl Eq for Stream {}

impl Stream {
    /// A new stream on `device`.
    #[track_caller]
    pub fn new(device: Device) -> Result<Stream> {
        Stream::make(device, false, Caller::new("stream"))
    }

    /// A new stream whose work has priority over that of other streams.
    #[track_caller]
    pub fn urgent(device: Device) -> Result<Stream> {
        Stream::make(device, true, Caller::new("stream"))
    }

    fn make(device: Device, urgent: bool, by: Caller) -> Result<Stream> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let queue = gpu_of(device, by)?
            .map(|gpu| Queue::new(gpu, id, urgent))
            .transpose();
        let queue = queue.map_err(|fault| fault.of(by, device))?;
        Ok(Stream { device, id, queue })
    }

    /// The stream that operations on `device` use when no other was chosen.
    #[track_caller]
    pub fn default_of(device: Device) -> Result<Stream> {
        Stream::default_at(device, Caller::new("stream"))
    }

    fn default_at(device: Device, by: Caller) -> Result<Stream> {
        let queue = gpu_of(device, by)?.map(Queue::default_of).transpose();
        let (id, queue) = (0, queue.map_err(|fault| fault.of(by, device))?);
        Ok(Stream { device, id, queue })
    }

    /// The stream that operations on `device` called from this thread use.
    #[track_caller]
    pub fn current(device: Device) -> Result<Stream> {
        Stream::current_at(device, Caller::new("stream"))
    }

    pub(crate) fn current_at(device: Device, by: Caller) -> Result<Stream> {
        let chosen =
            CHOSEN.with_borrow(|chosen| chosen.iter().rev().find(|s| s.device == device).cloned());
        match chosen {
            Some(stream) => Ok(stream),
            None => Stream::default_at(device, by),
        }
    }

    /// The driver's stream for operations on a GPU called from this thread.
    pub(crate) fn current_queue(device: Device, by: Caller) -> Result<Arc<Queue>> {
        let stream = Stream::current_at(device, by)?;
        Ok(stream.queue.expect("a GPU's stream has a queue"))
    }

    /// Runs `body` with operations on this stream's device going to this stream.
    ///
    /// Only events order the work of two streams: what one writes and the other reads needs
    /// `record` on the one and `wait` on the other, each time. There is one exception: a stream's
    /// FIRST use of a tensor waits for everything that the tensor's own stream was given so far, so
    /// a new tensor can be used anywhere. Dropping a tensor is always safe.
    pub fn scope<R>(&self, body: impl FnOnce() -> R) -> R {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                CHOSEN.with_borrow_mut(Vec::pop);
            }
        }
        CHOSEN.with_borrow_mut(|chosen| chosen.push(self.clone()));
        let _leave = Leave;
        body()
    }

    /// The device whose work this stream orders.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The driver's stream; None on the CPU.
    pub(crate) fn queue(&self) -> Option<&Arc<Queue>> {
        self.queue.as_ref()
    }

    /// Marks the point after all work given to this stream so far.
    #[track_caller]
    pub fn record(&self) -> Result<Event> {
        self.record_at(false, Caller::new("record"))
    }

    /// As `record`, for `Event::since`. On a GPU it costs a little more.
    #[track_caller]
    pub fn record_timed(&self) -> Result<Event> {
        self.record_at(true, Caller::new("record"))
    }

    fn record_at(&self, timed: bool, by: Caller) -> Result<Event> {
        let mark = self.queue.as_ref().map(|queue| queue.record(timed));
        let mark = mark
            .transpose()
            .map_err(|fault| fault.of(by, self.device))?;
        Ok(Event {
            device: self.device,
            at: Instant::now(),
            mark: mark.map(Arc::new),
        })
    }

    /// Work given to this stream from now on starts after `event`, which may be of another device.
    #[track_caller]
    pub fn wait(&self, event: &Event) -> Result<()> {
        let by = Caller::new("wait");
        match (&self.queue, &event.mark) {
            (Some(queue), Some(mark)) => {
                queue.wait(mark).map_err(|fault| fault.of(by, self.device))
            }
            // The CPU runs its work in the calling thread: that has to wait.
            (None, Some(_)) => event.synchronize(),
            // An event of the CPU has passed when it is recorded.
            (_, None) => Ok(()),
        }
    }

    /// Blocks until all work given to this stream is done.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let by = Caller::new("synchronize");
        let done = self.queue.as_ref().map_or(Ok(()), |it| it.synchronize());
        done.map_err(|fault| fault.of(by, self.device))
    }
}

/// The GPU of a device; None for the CPU.
pub(crate) fn gpu_of(device: Device, by: Caller) -> Result<Option<&'static Gpu>> {
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(index) => Gpu::get(index, by).map(Some),
    }
}

thread_local! {
    /// The streams chosen by the scopes that this thread is in.
    static CHOSEN: RefCell<Vec<Stream>> = const { RefCell::new(Vec::new()) };
}

/// A point in a stream's work.
#[derive(Clone, Debug)]
pub struct Event {
    device: Device,
    at: Instant,
    /// The driver's event; None on the CPU.
    mark: Option<Arc<Mark>>,
}

impl Event {
    /// A point in a GPU's work.
    pub(crate) fn of(mark: Mark, device: Device) -> Event {
        Event {
            device,
            at: Instant::now(),
            mark: Some(Arc::new(mark)),
        }
    }

    /// The device whose stream recorded it.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether all work before it is done. True on a lost device, where waiting gives the error.
    pub fn is_done(&self) -> bool {
        self.mark.as_ref().is_none_or(|mark| mark.is_done())
    }

    /// Blocks until all work before it is done.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let by = Caller::new("synchronize");
        let done = self.mark.as_ref().map_or(Ok(()), |it| it.synchronize());
        done.map_err(|fault| fault.of(by, self.device))
    }

    /// The device's time from `earlier` to this event; zero if `earlier` is the later one. Waits
    /// for both, which must come from `record_timed`.
    #[track_caller]
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        let by = Caller::new("since");
        if self.device != earlier.device {
            let (expected, got) = (self.device, earlier.device);
            let expected = format!("an event of {expected}: each device has its own clock");
            return Err(by.value("earlier", expected, got));
        }
        let (Some(mark), Some(earlier_mark)) = (&self.mark, &earlier.mark) else {
            return Ok(self.at.saturating_duration_since(earlier.at));
        };
        if !mark.is_timed || !earlier_mark.is_timed {
            let expected = "one recorded with record_timed()";
            return Err(by.value("event", expected, "one without timing"));
        }
        let milliseconds = earlier_mark
            .synchronize()
            .and_then(|()| mark.synchronize())
            .and_then(|()| mark.milliseconds_since(earlier_mark))
            .map_err(|fault| fault.of(by, self.device))?;
        Ok(Duration::from_secs_f64(
            f64::from(milliseconds.max(0.0)) / 1e3,
        ))
    }
}

/// Blocks until all work on `device` is done.
#[track_caller]
pub fn synchronize(device: Device) -> Result<()> {
    let by = Caller::new("synchronize");
    match gpu_of(device, by)? {
        None => Ok(()),
        Some(gpu) => gpu.synchronize().map_err(|fault| fault.of(by, device)),
    }
}

/// A stopwatch that measures the work and not only its launch: it waits for the device before it
/// reads the time.
#[derive(Debug)]
pub struct Timer {
    device: Device,
    started: Instant,
}

impl Timer {
    /// Waits for `device` to be idle and starts.
    #[track_caller]
    pub fn start(device: Device) -> Result<Timer> {
        synchronize(device)?;
        let started = Instant::now();
        Ok(Timer { device, started })
    }

    /// Waits for the device to finish and reads the time since `start`.
    #[track_caller]
    pub fn elapsed(&self) -> Result<Duration> {
        synchronize(self.device)?;
        Ok(self.started.elapsed())
    }
}
