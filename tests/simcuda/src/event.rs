//! Events: places in a stream that others can wait for.
//!
//! An event holds its latest `Record`. Each cuEventRecord makes a new one. A wait keeps the record
//! that was the latest when it was queued, so recording again does not change queued waits. An
//! event recorded during a capture names nodes of the graph instead and has no meaning outside of
//! it.

pub mod calls;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::handle::{CaptureId, StreamId};
use crate::race::Clock;
use crate::stream::Operation;

/// What a stream knew when it reached a record.
#[derive(Debug)]
pub(crate) struct Completion {
    pub(crate) clock: Clock,
    pub(crate) time_ns: u64,
}

/// One place in a stream.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) stream: StreamId,
    /// The sequence number of its entry: everything of its stream up to there must have run before
    /// it.
    sequence: AtomicU64,
    /// None: its device was lost before.
    completion: OnceLock<Option<Completion>>,
}

impl Record {
    pub(crate) fn new(stream: StreamId) -> Self {
        Self {
            stream,
            sequence: AtomicU64::new(0),
            completion: OnceLock::new(),
        }
    }

    pub(crate) fn queued_at(&self, sequence: u64) {
        self.sequence.store(sequence, Ordering::Relaxed);
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    /// Whether it was reached, or never will be.
    pub(crate) fn is_complete(&self) -> bool {
        self.completion.get().is_some()
    }

    /// None too for a record of a lost device, which was never reached.
    pub(crate) fn completion(&self) -> Option<&Completion> {
        self.completion.get()?.as_ref()
    }

    /// The first completion counts: a record of an abandoned queue keeps its state.
    pub(crate) fn complete(&self, completion: Completion) {
        let _ = self.completion.set(Some(completion));
    }

    /// It will never be reached: a stream that waits for it loses its device, too.
    pub(crate) fn abandon(&self) {
        let _ = self.completion.set(None);
    }
}

/// What an event currently stands for.
#[derive(Clone, Debug)]
pub(crate) enum State {
    Never,
    Recorded(Arc<Record>),
    /// Nodes of the graph that this capture is making or has made.
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
