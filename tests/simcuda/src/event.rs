//! Events: places in a stream that others can wait for.
//!
//! An event holds its latest `Record`. Each cuEventRecord makes a new one, and who waits keeps the record that was the
//! latest when it asked, so that recording again changes nothing for waits that already stand in a queue. Recorded in a
//! capture, an event names nodes of the graph instead, and means nothing outside of it.

pub mod calls;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUevent, CUresult};

use crate::graph::capture::CaptureId;
use crate::machine::Machine;
use crate::race::Clock;
use crate::report;
use crate::stream::{HandleKind, Operation, StreamId, decode};

/// Events are numbered in the order of their creation; numbers are not used again.
pub(crate) type EventId = usize;

/// What a stream knew when it came to a record.
#[derive(Debug)]
pub(crate) struct Completion {
    pub(crate) clock: Clock,
    pub(crate) time_ns: u64,
}

/// One place in a stream.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) stream: StreamId,
    /// The sequence number of its entry: what must have run before it is everything of its stream up to there.
    sequence: AtomicU64,
    completion: OnceLock<Completion>,
}

impl Record {
    pub(crate) fn new(stream: StreamId) -> Self {
        Self { stream, sequence: AtomicU64::new(0), completion: OnceLock::new() }
    }

    pub(crate) fn queued_at(&self, sequence: u64) {
        self.sequence.store(sequence, Ordering::Relaxed);
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.completion.get().is_some()
    }

    pub(crate) fn completion(&self) -> Option<&Completion> {
        self.completion.get()
    }

    /// The first completion counts: a record of an abandoned queue stays as it is.
    pub(crate) fn complete(&self, completion: Completion) {
        let _ = self.completion.set(completion);
    }

    /// It will never be reached: whoever waits shall go on, ordered behind nothing.
    pub(crate) fn abandon(&self) {
        self.complete(Completion { clock: Clock::default(), time_ns: 0 });
    }
}

/// What an event stands for at present.
#[derive(Clone, Debug)]
pub(crate) enum State {
    Never,
    Recorded(Arc<Record>),
    /// Nodes of the graph that this capture makes, or made.
    Captured(CaptureId, Vec<usize>),
}

pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) has_timing: bool,
    pub(crate) state: State,
    pub(crate) destroyed: Option<Arc<Operation>>,
}

/// All events of the machine.
#[derive(Default)]
pub struct Events {
    pub(crate) all: Vec<Event>,
}

/// The event that a handle stands for; one that was destroyed is a finding.
pub(crate) fn resolve(machine: &mut Machine, handle: CUevent) -> Result<EventId, CUresult> {
    let event = decode(HandleKind::Event, handle)
        .filter(|event| *event < machine.events.all.len())
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    if let Some(destroyer) = machine.events.all[event].destroyed.clone() {
        let message = format!("event {event} is used after it was destroyed\n  destroyed in {}", destroyer.stack);
        report::finding(machine, report::Kind::Handle, message);
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(event)
}
