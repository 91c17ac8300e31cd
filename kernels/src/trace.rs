//! Records when a process does what, as spans on lanes: for a timeline of training steps.
//!
//! Recording is off until `start`. While it is off, each call loads one flag and runs its work.
//! Spans of a GPU's work are measured with events of its stream, so they show when the work ran and
//! not when it was launched. Work that is being captured in a graph is not recorded. A process
//! records one trace at a time, in memory that `start` allocates.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::panics::lock;
use crate::stream::{Event, Stream};
use crate::{Device, named};

named! {
    /// What a span belongs to: one row of a timeline, from the top to the bottom.
    #[derive(PartialOrd, Ord)]
    #[allow(missing_docs)]
    pub enum Lane {
        Step = "steps",
        Captured = "captured steps",
        Data = "data",
        Forward = "forward",
        Backward = "backward",
        Waiting = "waiting",
        Reductions = "reductions",
        Optimizer = "optimizer",
        Copies = "copies",
        Saving = "saving",
        Evaluation = "evaluation",
    }
}

/// What a span shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The lane.
    pub lane: Lane,
    /// What is done.
    pub name: &'static str,
    /// Which of several it is, such as the index of a bucket.
    pub index: Option<usize>,
}

impl Label {
    /// Work that is not one of several.
    pub const fn new(lane: Lane, name: &'static str) -> Label {
        Label {
            lane,
            name,
            index: None,
        }
    }

    /// The same, number `index` of several.
    pub const fn at(self, index: usize) -> Label {
        Label {
            index: Some(index),
            ..self
        }
    }
}

/// A piece of work. Times are since `start` was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// What it shows.
    pub label: Label,
    /// The step in which it was begun.
    pub step: u64,
    /// When it began.
    pub begin: Duration,
    /// When it ended.
    pub end: Duration,
}

/// What was recorded.
#[derive(Debug, Default)]
pub struct Recorded {
    /// All spans, in the order in which they ended; those of GPUs last.
    pub spans: Vec<Span>,
    /// How many more there would be if the memory had been larger.
    pub missed: u64,
    /// How far times of GPUs may be off from those of the host.
    pub device_bound: Duration,
}

#[derive(Debug)]
struct Recorder {
    began: Instant,
    spans: Vec<Span>,
    /// Of GPUs: the step, and events before and after the work.
    of_devices: Vec<(Label, u64, [Event; 2])>,
    missed: u64,
    /// A point in each GPU's work, and the same point on the host's clock.
    anchors: Vec<(Event, Duration)>,
    device_bound: Duration,
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static STEP: AtomicU64 = AtomicU64::new(0);
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

/// Starts to record at most `spans_max` spans, of this process and of work on `devices`. Returns
/// when this was: time zero of all spans. Waits for the devices.
#[track_caller]
pub fn start(devices: &[Device], spans_max: usize) -> Result<Instant> {
    let began = Instant::now();
    let (mut anchors, mut device_bound) = (Vec::new(), Duration::ZERO);
    for device in devices.iter().filter(|device| device.is_accelerator()) {
        let stream = Stream::current(*device)?;
        // The first event of a kind may take longer.
        stream.record_timed()?.synchronize()?;
        let before = began.elapsed();
        let event = stream.record_timed()?;
        event.synchronize()?;
        let after = began.elapsed();
        device_bound = device_bound.max(after - before);
        anchors.push((event, after));
    }
    let of_devices = if anchors.is_empty() { 0 } else { spans_max };
    *lock(&RECORDER) = Some(Recorder {
        began,
        spans: Vec::with_capacity(spans_max),
        of_devices: Vec::with_capacity(of_devices),
        missed: 0,
        anchors,
        device_bound,
    });
    IS_ON.store(true, Ordering::Relaxed);
    Ok(began)
}

/// Spans that begin from now on belong to step `step`.
pub fn begin_step(step: u64) {
    STEP.store(step, Ordering::Relaxed);
}

/// Stops recording, waits for the recorded work of GPUs, and returns everything.
pub fn stop() -> Result<Recorded> {
    IS_ON.store(false, Ordering::Relaxed);
    let Some(recorder) = lock(&RECORDER).take() else {
        return Ok(Recorded::default());
    };
    let mut spans = recorder.spans;
    for (label, step, events) in recorder.of_devices {
        let device = events[0].device();
        let Some((anchor, at)) = recorder
            .anchors
            .iter()
            .find(|(event, _)| event.device() == device)
        else {
            continue;
        };
        let [begin, end] = [events[0].since(anchor)?, events[1].since(anchor)?];
        spans.push(Span {
            label,
            step,
            begin: *at + begin,
            end: *at + end,
        });
    }
    Ok(Recorded {
        spans,
        missed: recorder.missed,
        device_bound: recorder.device_bound,
    })
}

/// Runs `work` and records when, on the host's clock.
#[inline]
pub fn record<R>(label: Label, work: impl FnOnce() -> R) -> R {
    if !IS_ON.load(Ordering::Relaxed) {
        return work();
    }
    let (step, began) = (STEP.load(Ordering::Relaxed), Instant::now());
    let result = work();
    let ended = Instant::now();
    keep(|recorder| {
        let since = |at: Instant| at.saturating_duration_since(recorder.began);
        let span = Span {
            label,
            step,
            begin: since(began),
            end: since(ended),
        };
        push(&mut recorder.spans, span)
    });
    result
}

/// Runs `work`, which gives work to the current stream of `device`, and records when that runs.
#[inline]
pub fn record_on<R>(device: Device, label: Label, work: impl FnOnce() -> R) -> R {
    if !IS_ON.load(Ordering::Relaxed) {
        return work();
    }
    match Stream::current(device) {
        Ok(stream) => record_stream(&stream, label, work),
        // The work will meet the same error.
        Err(_) => work(),
    }
}

/// As `record_on`, for work given to `stream`.
#[inline]
pub fn record_stream<R>(stream: &Stream, label: Label, work: impl FnOnce() -> R) -> R {
    if !IS_ON.load(Ordering::Relaxed) {
        return work();
    }
    if !stream.device().is_accelerator() {
        return record(label, work);
    }
    if crate::cuda::queue::is_capturing() {
        return work();
    }
    let (step, begin) = (STEP.load(Ordering::Relaxed), stream.record_timed());
    let result = work();
    // An event that cannot be recorded is one that the work failed for too.
    if let (Ok(begin), Ok(end)) = (begin, stream.record_timed()) {
        keep(|recorder| push(&mut recorder.of_devices, (label, step, [begin, end])));
    }
    result
}

/// Lets `push` add a span, unless recording has stopped. False from it counts as missed.
fn keep(push: impl FnOnce(&mut Recorder) -> bool) {
    if let Some(recorder) = &mut *lock(&RECORDER)
        && !push(recorder)
    {
        recorder.missed += 1;
    }
}

/// Adds to a list if that needs no allocation.
fn push<T>(list: &mut Vec<T>, item: T) -> bool {
    let has_room = list.len() < list.capacity();
    if has_room {
        list.push(item);
    }
    has_room
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because a process has one recorder.
    #[test]
    fn spans_are_recorded_between_start_and_stop_and_no_more_than_there_is_room_for() {
        const WORK: Label = Label::new(Lane::Forward, "work");
        let number = record(WORK, || 7);
        assert_eq!((number, stop().unwrap().spans.len()), (7, 0));

        start(&[Device::Cpu], 2).unwrap();
        begin_step(5);
        let outer = Label::new(Lane::Step, "outer");
        record(outer, || record_on(Device::Cpu, WORK.at(3), || ()));
        record(WORK, || ());
        let recorded = stop().unwrap();
        assert_eq!(recorded.missed, 1);
        let [inner, outside] = recorded.spans[..] else {
            panic!("{recorded:?}")
        };
        assert_eq!((inner.label, outside.label), (WORK.at(3), outer));
        assert_eq!(inner.step, 5);
        assert!(outside.begin <= inner.begin && inner.begin <= inner.end);
        assert!(inner.end <= outside.end);

        record(WORK, || ());
        assert_eq!(stop().unwrap().spans.len(), 0);
    }
}
