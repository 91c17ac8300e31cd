//! Streams: first-in first-out queues of a device, their entries, and the order that the null
//! stream adds.
//!
//! A stream is an actor of the race detector. An entry keeps the clock of the host call that queued
//! it and joins that clock to the stream's when its turn comes. Queuing never runs anything (see
//! [`crate::scheduler`]), except that a machine with more than [`PENDING_MAX`] pending pieces
//! blocks, as a real queue would.

pub mod calls;
mod enqueue;
mod null;
mod operations;
mod queue;
#[cfg(test)]
pub(crate) mod tests;
mod waits;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

pub(crate) use self::enqueue::{
    check_current, check_usable, enqueue, enqueue_host, enqueue_turn, give,
};
pub(crate) use self::null::{blocking_of_null, legacy_of, resolve};
pub use self::operations::Operation;
pub(crate) use self::queue::{
    actor_of, complete_record, device_of, is_capturing, is_wait_ignored, marker, new_operation,
    new_operation_at, note, operation, pop,
};
use crate::event::Record;
use crate::graph::StreamCapture;
use crate::graph::launch::Launch;
use crate::handle::StreamId;
use crate::memory::Turn;
use crate::nccl::Flight;
use crate::race::{Actor, Clock};
use crate::scheduler::Scheduler;
use crate::work::{HostFunction, Work};

/// How many pieces may be pending before a call waits for room.
pub const PENDING_MAX: usize = 4096;

/// An entry of a queue.
pub(crate) enum Action {
    Work(Arc<dyn Work>),
    Turn(Turn),
    /// None while it is being called without the lock.
    Host(Option<HostFunction>),
    Record(Arc<Record>),
    Wait(Arc<Record>),
    /// None only while one of its nodes runs.
    Graph(Option<Box<Launch>>),
    /// It stays at the front until the other ranks have done their part.
    Nccl(Arc<Flight>),
    /// A launch that never ends.
    Hang,
}

/// One place in a queue.
pub(crate) struct Entry {
    /// Its place among all entries of all streams.
    pub(crate) sequence: u64,
    pub(crate) operation: Arc<Operation>,
    /// What the host knew when it queued this.
    pub(crate) host: Clock,
    /// The simulated time up to which the host had waited.
    pub(crate) host_ns: u64,
    /// What the null stream's rules put before this.
    pub(crate) after: Vec<Arc<Record>>,
    pub(crate) action: Action,
}

/// Which kind of stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The null stream: in order with every blocking stream of its device.
    Legacy,
    /// In order with the null stream.
    Blocking,
    /// Created with CU_STREAM_NON_BLOCKING.
    Free,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) order: Order,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) actor: Actor,
    pub(crate) queue: VecDeque<Entry>,
    /// How many entries it was ever given, without markers.
    pub(crate) given: u64,
    /// The record after everything up to `given`, if any.
    marker: Option<(u64, Arc<Record>)>,
    /// How far the null stream is ordered after this one, and this one after the null stream.
    null_is_behind: u64,
    is_behind_null: u64,
    /// The simulated time of its last completion.
    pub(crate) time_ns: u64,
    pub(crate) capture: Option<StreamCapture>,
    /// Who destroyed it. Its entries still run.
    pub(crate) destroyed: Option<Arc<Operation>>,
    retired: bool,
}

/// All streams of the machine.
#[derive(Default)]
pub struct Streams {
    pub(crate) all: Vec<Stream>,
    /// The null stream of a device, once it was used.
    legacy: HashMap<usize, StreamId>,
    per_thread: HashMap<(ThreadId, usize), StreamId>,
    /// Those that have something in them.
    pub(crate) busy: BTreeSet<StreamId>,
    pub(crate) pending: usize,
    /// Something that was queued fails when it runs.
    pub(crate) is_to_fail: bool,
    pub(crate) scheduler: Scheduler,
    next_sequence: u64,
    operations: operations::Operations,
    waits: waits::Waits,
}
