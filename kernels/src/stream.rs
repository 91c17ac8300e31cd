//! Streams, events and timers. On the CPU work is done when the call that starts it returns, so a stream is in
//! order by itself, an event is a moment in time, and waiting returns at once; the types are those a GPU needs.

use std::cell::RefCell;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Device;
use crate::error::Result;

/// An ordered queue of work on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stream {
    device: Device,
    /// 0 is the device's default stream.
    id: u64,
}

impl Stream {
    /// A new stream on `device`.
    #[track_caller]
    pub fn new(device: Device) -> Result<Stream> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        device.check_usable("stream", Location::caller())?;
        Ok(Stream { device, id: NEXT_ID.fetch_add(1, Ordering::Relaxed) })
    }

    /// The stream that operations on `device` run on when no other was chosen.
    #[track_caller]
    pub fn default_of(device: Device) -> Result<Stream> {
        device.check_usable("stream", Location::caller())?;
        Ok(Stream { device, id: 0 })
    }

    /// The stream that operations on `device` called from this thread run on.
    #[track_caller]
    pub fn current(device: Device) -> Result<Stream> {
        let chosen = CHOSEN.with_borrow(|chosen| chosen.iter().rev().find(|s| s.device == device).cloned());
        match chosen {
            Some(stream) => Ok(stream),
            None => Stream::default_of(device),
        }
    }

    /// Runs `body` with operations on this stream's device going to this stream.
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

    /// Marks the point after all work given to this stream so far.
    pub fn record(&self) -> Result<Event> {
        Ok(Event { device: self.device, at: Instant::now() })
    }

    /// Work given to this stream from now on starts after `event`.
    pub fn wait(&self, _event: &Event) -> Result<()> {
        // Host work is done when its call returns: an event recorded is an event passed.
        Ok(())
    }

    /// Blocks until all work given to this stream is done.
    pub fn synchronize(&self) -> Result<()> {
        Ok(())
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
}

impl Event {
    /// The device whose stream recorded it.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether all work before it is done.
    pub fn is_done(&self) -> bool {
        true
    }

    /// Blocks until all work before it is done.
    pub fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// The time the device took from `earlier` to this event; zero if `earlier` is the later one.
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        Ok(self.at.saturating_duration_since(earlier.at))
    }
}

/// Blocks until all work on `device` is done.
#[track_caller]
pub fn synchronize(device: Device) -> Result<()> {
    device.check_usable("synchronize", Location::caller())
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
