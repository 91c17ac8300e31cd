//! Findings, and the call stacks of the product that go with them.

mod finding;
pub mod stack;

use std::fmt;

pub use self::finding::{finding, race};
pub use self::stack::Stack;
use crate::config::OnFinding;

/// The kind of a finding. Its display is the first word of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// Two operations touch the same bytes, one of them writes, and nothing orders them.
    Race,
    /// Use after free.
    UseAfterFree,
    /// Double free.
    DoubleFree,
    /// An address outside of all allocations, or a range that leaves its allocation.
    OutOfBounds,
    /// Another device's memory, or another device's stream.
    WrongDevice,
    /// Another device's memory without enabled access.
    PeerAccess,
    /// The host touched pinned memory that a copy in flight uses.
    HostAccess,
    /// A call that a capture forbids.
    Capture,
    /// A graph was misused.
    Graph,
    /// A call that CUDA forbids at this place.
    ForbiddenCall,
    /// A handle that was destroyed or never existed.
    Handle,
    /// Device memory that nothing has written was read and used.
    Unwritten,
    /// Diverging barriers of a kernel, or a misaligned access.
    Kernel,
    /// A matmul with an algorithm that was chosen for another matmul.
    ForeignAlgorithm,
    /// Ranks of a communicator whose calls do not match.
    NcclMismatch,
    /// Calls on two communicators in opposite orders on two ranks.
    NcclOrder,
    /// Two threads inside calls on one communicator.
    NcclThreads,
    /// Memory that was not freed when the process ended.
    NeverFreed,
}

impl FindingKind {
    /// The kind of a violation that came as text: the message of a check that failed while work
    /// ran.
    pub fn of_violation(message: &str) -> Self {
        if message.contains("another allocation than") {
            Self::OutOfBounds
        } else if message.contains(", freed by ") {
            Self::UseAfterFree
        } else if message.contains("was given no access") {
            Self::WrongDevice
        } else if message.contains("divergence ") || message.contains("not a multiple of") {
            Self::Kernel
        } else {
            Self::OutOfBounds
        }
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Race => "RACE",
            Self::UseAfterFree => "USE AFTER FREE",
            Self::DoubleFree => "DOUBLE FREE",
            Self::OutOfBounds => "OUT OF BOUNDS",
            Self::WrongDevice => "WRONG DEVICE",
            Self::PeerAccess => "PEER COPY WITHOUT ACCESS",
            Self::HostAccess => "HOST ACCESS",
            Self::Capture => "CAPTURE",
            Self::Graph => "GRAPH",
            Self::ForbiddenCall => "FORBIDDEN CALL",
            Self::Handle => "DESTROYED HANDLE",
            Self::Unwritten => "NEVER WRITTEN",
            Self::Kernel => "KERNEL",
            Self::ForeignAlgorithm => "FOREIGN ALGORITHM",
            Self::NcclMismatch => "NCCL MISMATCH",
            Self::NcclOrder => "NCCL ORDER",
            Self::NcclThreads => "NCCL THREADS",
            Self::NeverFreed => "NEVER FREED",
        })
    }
}

/// One thing that was found.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What it is of.
    pub kind: FindingKind,
    /// The cause, the operations, the bytes and the call stacks.
    pub message: String,
}

/// All findings, and what to do about them.
#[derive(Debug)]
pub struct Report {
    /// In order. With [`OnFinding::Exit`] the process ends at the first.
    pub findings: Vec<Finding>,
    /// The process is ending: no call of the product is to blame for later findings.
    pub is_at_the_end: bool,
    on_finding: OnFinding,
}

/// How a process with a finding ends.
pub const EXIT_CODE: i32 = 86;

impl Report {
    /// A report with this reaction.
    pub fn new(on_finding: OnFinding) -> Self {
        Self {
            findings: Vec::new(),
            is_at_the_end: false,
            on_finding,
        }
    }

    /// Reports a finding with the caller's stack, since the caller is to blame for most findings.
    pub fn tell(&mut self, kind: FindingKind, message: &str) {
        let message = if self.is_at_the_end {
            format!("{message}\n  found at the end of the process, when what was still pending ran")
        } else {
            let caller = Stack::capture().to_string();
            // Most findings already name the call in which they occur.
            if message.contains(&caller) {
                message.to_owned()
            } else {
                format!("{message}\n  found in {caller}")
            }
        };
        if self.on_finding != OnFinding::Keep {
            eprintln!("simcuda: {kind}: {message}");
        }
        self.findings.push(Finding { kind, message });
        if self.on_finding == OnFinding::Exit {
            // SAFETY: _exit takes no pointer and does not return. A process with a finding has
            // nothing left to flush.
            unsafe { libc::_exit(EXIT_CODE) }
        }
    }
}
