//! One allocation: where it is, who made it, how it ended.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::pinned::Mapping;
use super::pool::PoolId;
use crate::handle::StreamId;
use crate::report::Stack;
use crate::work::Address;

/// Whose memory it is.
#[derive(Debug)]
pub enum Owner {
    /// Of a device, from a pool or directly.
    Device {
        /// The device.
        device: usize,
        /// The pool, if it is of one.
        pool: Option<PoolId>,
    },
    /// Pinned memory of the host.
    Host(Mapping),
}

impl Owner {
    /// The device, unless it is the host's.
    pub fn device(&self) -> Option<usize> {
        match self {
            Self::Device { device, .. } => Some(*device),
            Self::Host(_) => None,
        }
    }

    /// The pool, if it is of one.
    pub fn pool(&self) -> Option<PoolId> {
        match self {
            Self::Device { pool, .. } => *pool,
            Self::Host(_) => None,
        }
    }
}

/// Which call made or freed it.
#[derive(Clone, Debug)]
pub struct Made {
    /// The name of the call.
    pub by: &'static str,
    /// The stream in whose order it happens.
    pub stream: Option<StreamId>,
    /// Who called.
    pub stack: Stack,
}

impl Made {
    /// By the call that is being made.
    pub fn now(by: &'static str, stream: Option<StreamId>) -> Self {
        Self {
            by,
            stream,
            stack: Stack::capture(),
        }
    }
}

/// How an allocation ended.
#[derive(Clone, Debug)]
pub struct End(pub Made);

impl fmt::Display for End {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "freed by {}", self.0.by)?;
        if let Some(stream) = self.0.stream {
            write!(formatter, " (stream {stream})")?;
        }
        write!(formatter, " at {}", self.0.stack.in_line())
    }
}

/// At which time a range is checked: decides which end of an allocation counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A call that queues work: too late after the call that frees.
    Queued,
    /// The work runs: too late after the free has run.
    Runs,
}

/// What a stream does to memory of a pool when it comes to the call.
#[derive(Clone)]
pub enum Turn {
    /// The memory is there from now on.
    Allocate(Arc<Allocation>),
    /// It returns to this pool.
    Free(Arc<Allocation>, PoolId),
}

/// One allocation.
#[derive(Debug)]
pub struct Allocation {
    /// Where it is, to the byte.
    pub range: Range<Address>,
    /// Whose it is.
    pub owner: Owner,
    /// Who made it.
    pub made: Made,
    /// Set by the call that frees it.
    end: OnceLock<End>,
    /// Set when the free's turn has come.
    is_gone: AtomicBool,
}

impl Allocation {
    /// A live one.
    pub fn new(range: Range<Address>, owner: Owner, made: Made) -> Self {
        Self {
            range,
            owner,
            made,
            end: OnceLock::new(),
            is_gone: AtomicBool::new(false),
        }
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// How it ended, if a call has freed it.
    pub fn end(&self) -> Option<&End> {
        self.end.get()
    }

    /// A call frees it. The error says how it was freed before.
    pub fn begin_end(&self, end: End) -> Result<(), End> {
        match self.end.set(end) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.end.get().expect("it was set before").clone()),
        }
    }

    /// The free's turn has come.
    pub fn finish_end(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
    }

    /// Whether it has ended for someone who comes now.
    pub fn has_ended(&self, moment: Moment) -> bool {
        match moment {
            Moment::Queued => self.end.get().is_some(),
            Moment::Runs => self.is_gone.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Display for Allocation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "the {}-byte allocation made by {}",
            self.bytes(),
            self.made.by
        )?;
        if let Some(device) = self.owner.device() {
            write!(formatter, " on device {device}")?;
        }
        if let Some(stream) = self.made.stream {
            write!(formatter, " (stream {stream})")?;
        }
        write!(formatter, " at {}", self.made.stack.in_line())
    }
}
