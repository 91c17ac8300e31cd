//! What goes wrong: a text that cannot be run, and a kernel that does what the ISA forbids.

use std::fmt;
use std::ops::Range;

use crate::moment::Other;

/// Why a text is not run: the line of the PTX and the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// From 1; 0 for the whole text.
    pub line: u32,
    /// What was found there.
    pub message: String,
}

impl Refusal {
    pub(crate) fn at(line: u32, message: impl Into<String>) -> Refusal {
        Refusal {
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} of the PTX: {}", self.line, self.message)
    }
}

/// Kinds of mistakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An access outside of every allocation or variable, or outside of what its pointer may reach.
    OutOfBounds,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// Two threads touch the same bytes, one of them writes, and nothing orders them.
    Race,
    /// Threads miss each other at a barrier.
    Barrier,
    /// Threads of a warp miss each other at an instruction that needs all of them.
    Warp,
    /// A copy to shared memory was touched before its thread waited for it.
    Copy,
    /// A register or shared memory of a `wgmma` was touched before it was waited for.
    Flight,
    /// A `wgmma` without the `wgmma.fence` or `fence.proxy.async` that it needs.
    Fence,
    /// A load through the read-only path of bytes that the launch writes.
    ReadOnly,
    /// A read of global memory that nothing wrote.
    NeverWritten,
    /// `trap`, a division by zero, a kernel that does not end, or a matrix descriptor that is not
    /// simulated.
    Stopped,
}

/// A mistake of a kernel and where it happened.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What it is.
    pub kind: Kind,
    /// The kernel.
    pub kernel: String,
    /// The line of the PTX, from 1.
    pub line: u32,
    /// The source line of that instruction, where the PTX names it: `attention.cu:12`.
    pub source: Option<String>,
    /// The block's index.
    pub block: [u32; 3],
    /// The thread's index in its block.
    pub thread: [u32; 3],
    /// What happened.
    pub message: String,
    /// The bytes of global memory that it is about, and what the thread did there: `read`, `wrote`.
    pub access: Option<Box<(Range<u64>, &'static str)>>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([x, y, z], [i, j, k]) = (self.block, self.thread);
        write!(
            f,
            "{:?}: kernel {}, line {} of its PTX",
            self.kind, self.kernel, self.line
        )?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        write!(
            f,
            ", block ({x}, {y}, {z}), thread ({i}, {j}, {k}): {}",
            self.message
        )
    }
}

/// A mistake of one lane, before its place is known in words.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) lane: u32,
    pub(crate) message: String,
    pub(crate) detail: Option<Box<Detail>>,
}

/// What a fault is about, for those that need more words.
#[derive(Debug)]
pub(crate) struct Detail {
    /// Of global memory.
    pub(crate) bytes: Option<Range<u64>>,
    pub(crate) does: &'static str,
    /// Who else touched it.
    pub(crate) other: Option<Other>,
}

impl Fault {
    pub(crate) fn new(kind: Kind, lane: u32, message: impl Into<String>) -> Fault {
        Fault {
            kind,
            lane,
            message: message.into(),
            detail: None,
        }
    }
}
