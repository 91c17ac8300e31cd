//! The error type of this crate.
//!
//! Every message has one form: what failed, which operand, what was expected, what was got, the
//! caller's line, then `; help:` and the fix. Other crates follow it and use [`Help`] for its end.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) use crate::message::{Caller, human_bytes};
pub use crate::message::{Help, Line, Site};
use crate::{DType, Device, Shape};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in tensors, transfers and operations. Where a caller only needs to
/// know which kind of error it is, the rest is its message.
///
/// `Debug` shows the same text as `Display`, because `unwrap` and `main` print `Debug`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operands live on different devices and the policy forbids moving them.
    #[error("{0}")]
    DeviceMismatch(String),

    /// An unannounced transfer inside a scope that forbids transfers.
    #[error("{0}")]
    ForbiddenTransfer(String),

    /// The operation is not implemented for this dtype on this device.
    #[error("{0}")]
    NoVersion(String),

    /// An operand has the wrong shape, dtype, layout or device.
    #[error("{0}")]
    Operand(String),

    /// Two operands of one operation overlap in memory and at least one is written.
    #[error("{0}")]
    Overlap(String),

    /// Another operation, a copy in flight or a borrowed slice is using the same memory.
    #[error("{0}")]
    Busy(String),

    /// A number, index or argument is out of range.
    #[error("{0}")]
    Value(String),

    /// A device has no memory left.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),

    /// Text that does not name a device.
    #[error("unknown device {text:?}: {why}; supported: cpu, cuda, cuda:N, auto")]
    UnknownDevice {
        /// What was given.
        text: String,
        /// Why it was refused.
        why: String,
    },

    /// A device that this machine does not have or this process cannot use.
    #[error("{op}: {device} is not available ({}): {why}", Line(at))]
    DeviceAbsent {
        /// The operation.
        op: &'static str,
        /// The device asked for.
        device: Device,
        /// Why not, and the fix.
        why: String,
        /// The caller's line.
        at: Site,
    },

    /// A call into the CUDA driver or one of its libraries failed.
    #[error("{0}")]
    Cuda(String),

    /// A kernel could not be compiled or loaded for this GPU.
    #[error("{0}")]
    Kernel(String),

    /// Work that a CUDA graph cannot contain, given during a capture.
    #[error("{0}")]
    Capture(String),

    /// A file that does not have the format it claims.
    #[error("{path:?}: not a usable {format} file: {problem}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The format expected.
        format: &'static str,
        /// What is wrong with it.
        problem: String,
    },

    /// The operating system refused to read or write.
    #[error("{path:?}: {doing}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The same error, with the place of the operation before it.
    #[must_use]
    pub fn within(mut self, place: impl fmt::Display) -> Error {
        use Error::{Cuda, DeviceMismatch, NoVersion, Operand, Value};
        if let Cuda(text) | DeviceMismatch(text) | NoVersion(text) | Operand(text) | Value(text) =
            &mut self
        {
            *text = format!("{place}: {text}");
        }
        self
    }

    /// An argument out of range, at the caller's line.
    #[track_caller]
    pub(crate) fn value(
        op: &'static str,
        what: impl fmt::Display,
        expected: impl fmt::Display,
        got: impl fmt::Display,
    ) -> Error {
        Caller::new(op).value(what, expected, got)
    }
}

impl Caller {
    /// An argument out of range.
    pub(crate) fn value(
        self,
        what: impl fmt::Display,
        expected: impl fmt::Display,
        got: impl fmt::Display,
    ) -> Error {
        let (op, line) = (self.op, Line(self.at));
        Error::Value(format!(
            "{op}: {what}: expected {expected}, got {got} ({line})"
        ))
    }

    /// An operand that does not fit the operation.
    pub(crate) fn operand(
        self,
        operand: impl fmt::Display,
        expected: impl fmt::Display,
        help: impl AsRef<str>,
    ) -> Error {
        let (op, line, help) = (self.op, Line(self.at), Help(help.as_ref()));
        Error::Operand(format!(
            "{op}: {operand}: expected {expected} ({line}){help}"
        ))
    }

    /// An operand that is written and shares its memory with another one.
    pub(crate) fn overlap(self, first: impl fmt::Display, second: impl fmt::Display) -> Error {
        let (op, line) = (self.op, Line(self.at));
        Error::Overlap(format!(
            "{op}: {first} and {second} share memory, and one of them is written ({line}); help: \
             give {op} tensors that do not overlap, for example one from empty_like()"
        ))
    }

    /// Work that a graph cannot contain.
    pub(crate) fn capture(self, device: Device, why: impl fmt::Display, help: &str) -> Error {
        let (op, line, help) = (self.op, Line(self.at), Help(help));
        Error::Capture(format!(
            "{op}: a graph is being captured on {device} ({line}): {why}{help}"
        ))
    }

    /// A device that cannot be used.
    pub(crate) fn absent(self, device: Device, why: String) -> Error {
        let Caller { op, at } = self;
        Error::DeviceAbsent {
            op,
            device,
            why,
            at,
        }
    }

    /// A call of `function` that failed with the error `name`, described by `meaning`.
    pub(crate) fn cuda(
        self,
        device: Device,
        function: &str,
        [name, meaning]: [&str; 2],
        help: &str,
    ) -> Error {
        let (op, line, help) = (self.op, Line(self.at), Help(help));
        Error::Cuda(format!(
            "{op}: {function} on {device} failed: {name} ({meaning}) ({line}){help}"
        ))
    }
}

/// What a tensor is, without its contents: `"w" f32[1000, 1000] on cuda:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, if it has one.
    pub name: Option<Arc<str>>,
    /// Its dtype.
    pub dtype: DType,
    /// Its shape.
    pub shape: Shape,
    /// The device it lives on.
    pub device: Device,
}

impl TensorInfo {
    /// Of a tensor without a name.
    pub(crate) fn new(dtype: DType, shape: Shape, device: Device) -> TensorInfo {
        TensorInfo {
            name: None,
            dtype,
            shape,
            device,
        }
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name:?} ")?;
        }
        write!(f, "{}{} on {}", self.dtype, self.shape, self.device)
    }
}

/// A live tensor, as an out-of-memory error and `memory::largest_live` list it.
#[derive(Clone, Debug)]
pub struct LiveTensor {
    /// The tensor.
    pub tensor: TensorInfo,
    /// The bytes it holds.
    pub bytes: usize,
    /// The line that made it.
    pub made_at: Site,
}

impl fmt::Display for LiveTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, line) = (human_bytes(self.bytes), Line(self.made_at));
        write!(f, "{bytes} {} made at {line}", self.tensor)
    }
}

/// An allocation that did not fit.
#[derive(Debug)]
pub struct OutOfMemory {
    /// The device that is full.
    pub device: Device,
    /// The tensor that was to be made.
    pub wanted: TensorInfo,
    /// The bytes asked for.
    pub asked_bytes: usize,
    /// The bytes free on the device.
    pub free_bytes: usize,
    /// The most bytes that may be used there.
    pub limit_bytes: usize,
    /// The bytes that live tensors hold there.
    pub allocated_bytes: usize,
    /// The bytes taken from the system there, for live tensors and for reuse.
    pub reserved_bytes: usize,
    /// The largest live tensors there.
    pub largest: Vec<LiveTensor>,
    /// The caller's line.
    pub at: Site,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_host = self.device == Device::Cpu;
        write!(
            f,
            "out of memory on {}{}: {} asks for {} ({}), free {} of {}; live tensors hold {}, \
             reserved {}",
            self.device,
            if is_host { " (host memory)" } else { "" },
            self.wanted,
            human_bytes(self.asked_bytes),
            Line(self.at),
            human_bytes(self.free_bytes),
            human_bytes(self.limit_bytes),
            human_bytes(self.allocated_bytes),
            human_bytes(self.reserved_bytes),
        )?;
        if !self.largest.is_empty() {
            let list: Vec<String> = self.largest.iter().map(ToString::to_string).collect();
            write!(f, ". Largest: {}", list.join("; "))?;
        }
        let limit = if is_host {
            ", or raise the limit on virtual memory (ulimit -v)"
        } else {
            ""
        };
        write!(
            f,
            "; help: use a smaller model or batch, drop the largest tensors, place some on another \
             device{limit}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_small_enough_to_return_by_value() {
        assert!(std::mem::size_of::<Error>() <= 128);
    }
}
