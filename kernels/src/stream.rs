//! Streams, events and timers: explicit, as on the GPU. Work given to a stream runs in order; work of two streams runs in any
//! order but where an event says otherwise (or where a stream first meets a tensor: `memory/gpu.rs`). On the CPU work is done when the call that starts it returns, so a stream is in
//! order by itself, an event is a moment in time, and waiting returns at once.

use std::cell::RefCell;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Device;
use crate::cuda::capture::Executable;
use crate::cuda::queue::{Mark, Queue};
use crate::cuda::{Gpu, capture};
use crate::error::{Error, Result, Site};

/// An ordered queue of work on one device.
#[derive(Clone, Debug)]
pub struct Stream {
    device: Device,
    /// 0 is the device's default stream.
    id: u64,
    /// The driver's stream; none where the host does the work.
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
        Stream::made(device, false, Location::caller())
    }

    /// A new stream whose work goes first where the device could run that of several: for what others will wait for.
    #[track_caller]
    pub fn urgent(device: Device) -> Result<Stream> {
        Stream::made(device, true, Location::caller())
    }

    fn made(device: Device, urgent: bool, at: Site) -> Result<Stream> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        device.check_usable("stream", at)?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let queue = match gpu_of(device, "stream", at)? {
            None => None,
            Some(gpu) => Some(Queue::new(gpu, id, urgent).map_err(|fault| fault.of("stream", device, at))?),
        };
        Ok(Stream { device, id, queue })
    }

    /// The stream that operations on `device` run on when no other was chosen.
    #[track_caller]
    pub fn default_of(device: Device) -> Result<Stream> {
        Stream::default_at(device, "stream", Location::caller())
    }

    fn default_at(device: Device, op: &'static str, at: Site) -> Result<Stream> {
        device.check_usable(op, at)?;
        let queue = match gpu_of(device, op, at)? {
            None => None,
            Some(gpu) => Some(gpu.default_queue().map_err(|fault| fault.of(op, device, at))?),
        };
        Ok(Stream { device, id: 0, queue })
    }

    /// The stream that operations on `device` called from this thread run on.
    #[track_caller]
    pub fn current(device: Device) -> Result<Stream> {
        Stream::current_at(device, "stream", Location::caller())
    }

    pub(crate) fn current_at(device: Device, op: &'static str, at: Site) -> Result<Stream> {
        let chosen = CHOSEN.with_borrow(|chosen| chosen.iter().rev().find(|s| s.device == device).cloned());
        match chosen {
            Some(stream) => Ok(stream),
            None => Stream::default_at(device, op, at),
        }
    }

    /// Runs `body` with operations on this stream's device going to this stream.
    ///
    /// Work of two streams is ordered by events alone: what one writes and the other reads needs `record` on the one and `wait` on the other, each
    /// time. A stream's very FIRST use of a tensor waits by itself for everything that the stream on which the tensor was made was given so
    /// far, so that a tensor just made can be used anywhere; the second use does not. Dropping a tensor is always safe.
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

    /// The driver's stream, on a GPU.
    pub(crate) fn queue(&self) -> Option<&Arc<Queue>> {
        self.queue.as_ref()
    }

    /// Marks the point after all work given to this stream so far.
    #[track_caller]
    pub fn record(&self) -> Result<Event> {
        self.record_at(false, Location::caller())
    }

    /// As `record`, for an event whose time will be asked for: `Event::since`. On a GPU it costs a little more.
    #[track_caller]
    pub fn record_timed(&self) -> Result<Event> {
        self.record_at(true, Location::caller())
    }

    fn record_at(&self, timed: bool, at: Site) -> Result<Event> {
        let mark = match &self.queue {
            None => None,
            Some(queue) => {
                let mark = queue.record(timed).map_err(|fault| fault.of("record", self.device, at))?;
                Some(Arc::new(mark))
            }
        };
        Ok(Event { device: self.device, at: Instant::now(), mark })
    }

    /// Work given to this stream from now on starts after `event`, which may be of another device.
    #[track_caller]
    pub fn wait(&self, event: &Event) -> Result<()> {
        let at = Location::caller();
        match (&self.queue, &event.mark) {
            (Some(queue), Some(mark)) => queue.wait(mark).map_err(|fault| fault.of("wait", self.device, at)),
            // The host's next work starts when its calls are made: that is what has to wait.
            (None, Some(_)) => event.synchronize(),
            // Host work is done when its call returns: an event recorded is an event passed.
            (_, None) => Ok(()),
        }
    }

    /// Blocks until all work given to this stream is done.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let at = Location::caller();
        let Some(queue) = &self.queue else { return Ok(()) };
        queue.synchronize().map_err(|fault| fault.of("synchronize", self.device, at))
    }
}

/// The GPU behind a device; none where the host does the work.
fn gpu_of(device: Device, op: &'static str, at: Site) -> Result<Option<&'static Gpu>> {
    match device {
        Device::Cuda(index) if device.is_accelerator() => Gpu::get(index, op, at).map(Some),
        _ => Ok(None),
    }
}

thread_local! {
    static CHOSEN: RefCell<Vec<Stream>> = const { RefCell::new(Vec::new()) };
}

/// A point in a stream's work.
#[derive(Clone, Debug)]
pub struct Event {
    device: Device,
    at: Instant,
    /// The driver's event; none where the host does the work.
    mark: Option<Arc<Mark>>,
}

impl Event {
    /// A point in a GPU's work.
    pub(crate) fn of(mark: Mark, device: Device) -> Event {
        Event { device, at: Instant::now(), mark: Some(Arc::new(mark)) }
    }

    /// The device whose stream recorded it.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether all work before it is done. On a device that is lost nothing is done any more, and this says true: waiting says what happened.
    pub fn is_done(&self) -> bool {
        self.mark.as_ref().is_none_or(|mark| mark.is_done())
    }

    /// Blocks until all work before it is done.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let at = Location::caller();
        let Some(mark) = &self.mark else { return Ok(()) };
        mark.synchronize().map_err(|fault| fault.of("synchronize", self.device, at))
    }

    /// The time the device took from `earlier` to this event; zero if `earlier` is the later one. Both must have been recorded
    /// by `record_timed`; waits for them.
    #[track_caller]
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        if self.device != earlier.device {
            let expected = format!("one on {}: devices have clocks of their own", self.device);
            return Err(Error::value("since", "earlier", expected, format!("one on {}", earlier.device)));
        }
        let (Some(mark), Some(earlier_mark)) = (&self.mark, &earlier.mark) else {
            return Ok(self.at.saturating_duration_since(earlier.at));
        };
        if !mark.is_timed() || !earlier_mark.is_timed() {
            return Err(Error::value("since", "event", "one recorded with record_timed()", "one without timing"));
        }
        let at = Location::caller();
        let milliseconds = earlier_mark
            .synchronize()
            .and_then(|()| mark.synchronize())
            .and_then(|()| mark.milliseconds_since(earlier_mark))
            .map_err(|fault| fault.of("since", self.device, at))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

/// Work of a GPU's stream, recorded once and launched many times, with one call for all of it.
///
/// The operations are those of the capture: the same tensors, the same numbers among the arguments. What varies from launch to
/// launch is read from tensors, which [`Scalars`](crate::transfer::Scalars) fills. A graph keeps the memory it uses alive.
#[derive(Debug)]
pub struct Graph {
    executable: Executable,
    device: Device,
}

impl Graph {
    /// Captures what `body` gives to `stream`, and to streams that wait for events of it, instead of running it. Operations called
    /// by `body` go to `stream`. Run the same once before: a graph allocates nothing, compiles nothing, and copies nothing
    /// between devices.
    #[track_caller]
    pub fn capture<E: From<Error>>(stream: &Stream, body: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let at = Location::caller();
        let Some(queue) = &stream.queue else {
            let got = format!("one on {}", stream.device);
            return Err(Error::value("capture", "stream", "a stream of a GPU: graphs are CUDA's", got).into());
        };
        let executable = capture::capture(queue, at, || stream.scope(body))?;
        Ok(Graph { executable, device: stream.device })
    }

    /// Gives all of it to the stream that it was captured on, as one piece of work: after what the device's current stream was given so far,
    /// and before what it is given next, like an operation called here.
    #[track_caller]
    pub fn launch(&self) -> Result<()> {
        self.executable.launch(Location::caller())
    }

    /// The device that it runs on.
    pub fn device(&self) -> Device {
        self.device
    }
}

/// Blocks until all work on `device` is done.
#[track_caller]
pub fn synchronize(device: Device) -> Result<()> {
    let at = Location::caller();
    device.check_usable("synchronize", at)?;
    match gpu_of(device, "synchronize", at)? {
        None => Ok(()),
        Some(gpu) => gpu.synchronize().map_err(|fault| fault.of("synchronize", device, at)),
    }
}

/// A stopwatch that cannot measure a launch instead of the work: it waits for the device before it reads the time.
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
        Ok(Timer { device, started: Instant::now() })
    }

    /// Waits for the device to finish and reads the time since `start`.
    #[track_caller]
    pub fn elapsed(&self) -> Result<Duration> {
        synchronize(self.device)?;
        Ok(self.started.elapsed())
    }
}
