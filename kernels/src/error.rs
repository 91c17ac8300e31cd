//! The one error type of this crate. A message about tensors names the operation, the operand with its dtype, shape and
//! device, what was expected, what was got, the caller's source line, and the way out; one about a file names the file.

use std::fmt;
use std::panic::Location;
use std::path::PathBuf;
use std::sync::Arc;

use crate::{DType, Device, Shape};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A place in the caller's source.
pub type Site = &'static Location<'static>;

/// Everything that can go wrong in tensors, transfers and operations. `Debug` shows the same text as `Display`, since that
/// is what `unwrap` and a `main` that returns an error print.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Operands live on different devices and the policy is to refuse.
    #[error("{0}")]
    DeviceMismatch(Box<DeviceMismatch>),
    /// A transfer that was not announced, inside a scope that forbids them.
    #[error("{0}")]
    ForbiddenTransfer(Box<ForbiddenTransfer>),
    /// The operation exists, but not for this dtype on this device.
    #[error("{0}")]
    NoVersion(Box<NoVersion>),
    /// An operand does not fit the operation: shape, dtype, layout.
    #[error("{op}: {operand}: expected {expected} ({}). {hint}", Place(at))]
    Operand {
        /// The operation.
        op: &'static str,
        /// The operand at fault.
        operand: Box<OperandInfo>,
        /// What would have been right.
        expected: String,
        /// What to do.
        hint: String,
        /// The caller's line.
        at: Site,
    },
    /// Two operands of one operation overlap in memory and at least one is written.
    #[error(
        "{op}: {first} and {second} share memory, and one of them is written ({}). Give {op} tensors that do not \
             overlap: empty_like makes one.",
        Place(at)
    )]
    Overlap {
        /// The operation.
        op: &'static str,
        /// The operand that is written.
        first: Box<OperandInfo>,
        /// The operand that shares its memory.
        second: Box<OperandInfo>,
        /// The caller's line.
        at: Site,
    },
    /// Something else (another thread, a copy in flight, a slice lent out) is using the same memory right now.
    #[error("{op}: {operand} is being {} by {other_op} ({}), which has not finished ({}). Let {other_op} finish \
             before starting {op}.",
            if *other_writes { "written" } else { "read" }, Place(other_at), Place(at))]
    Busy {
        /// The operation that was refused.
        op: &'static str,
        /// The operand in use.
        operand: Box<OperandInfo>,
        /// The operation using it.
        other_op: &'static str,
        /// Whether that one writes.
        other_writes: bool,
        /// Where that one was called.
        other_at: Site,
        /// The caller's line.
        at: Site,
    },
    /// A number, index or argument outside what is allowed.
    #[error("{op}: {what}: expected {expected}, got {got} ({})", Place(at))]
    Value {
        /// The operation.
        op: &'static str,
        /// Which argument or element.
        what: String,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
        /// The caller's line.
        at: Site,
    },
    /// No memory left on one device.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// A device name that means nothing here.
    #[error("unknown device {text:?}: {why}. Supported: cpu, cuda, cuda:N, auto")]
    UnknownDevice {
        /// What was given.
        text: String,
        /// Why it was refused.
        why: String,
    },
    /// A device that this machine, or this release, does not have.
    #[error("{op}: {device} is not available ({}): {why}", Place(at))]
    DeviceAbsent {
        /// The operation.
        op: &'static str,
        /// The device asked for.
        device: Device,
        /// Why not, and what to do.
        why: String,
        /// The caller's line.
        at: Site,
    },
    /// The CUDA driver, or one of its libraries, refused a call.
    #[error("{0}")]
    Cuda(Box<CudaFailure>),
    /// A kernel of ours could not be compiled or loaded for this GPU.
    #[error("{op}: {source_name} cannot be compiled for {device} ({}): {problem}", Place(at))]
    Kernel {
        /// The operation.
        op: &'static str,
        /// The `.cu` file.
        source_name: &'static str,
        /// The device.
        device: Device,
        /// What is missing or what the compiler said, and the way out.
        problem: String,
        /// The caller's line.
        at: Site,
    },
    /// Something that a graph being captured cannot contain.
    #[error("{op}: not while a graph is captured on {device} ({}): {why}", Place(at))]
    Capture {
        /// The operation.
        op: &'static str,
        /// The device.
        device: Device,
        /// Why, and what to do.
        why: String,
        /// The caller's line.
        at: Site,
    },
    /// A file that is not what it claims to be.
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
    /// An argument outside what is allowed, at the caller's line.
    #[track_caller]
    pub(crate) fn value(
        op: &'static str,
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> Error {
        Error::Value { op, what: what.into(), expected: expected.into(), got: got.to_string(), at: Location::caller() }
    }
}

/// A source place as `file:line`.
pub(crate) struct Place<'a>(pub(crate) &'a Location<'static>);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0.file(), self.0.line())
    }
}

/// What a tensor is, apart from its contents: `"w" f32[1000, 1000] on cuda:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, if it was given one.
    pub name: Option<Arc<str>>,
    /// Its dtype.
    pub dtype: DType,
    /// Its shape.
    pub shape: Shape,
    /// Where it lives.
    pub device: Device,
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name:?} ")?;
        }
        write!(f, "{}{} on {}", self.dtype, self.shape, self.device)
    }
}

/// A tensor in its role in an operation: `mat2 "w" f32[1000, 1000] on cuda:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandInfo {
    /// What the operation calls it.
    pub role: &'static str,
    /// What it is.
    pub tensor: TensorInfo,
}

impl fmt::Display for OperandInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.tensor)
    }
}

/// Joins items as prose: `a`, `a and b`, `a, b and c`.
fn joined(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [one] => one.clone(),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}

/// A call that CUDA refused.
#[derive(Debug)]
pub struct CudaFailure {
    /// The operation.
    pub op: &'static str,
    /// The device.
    pub device: Device,
    /// The function that was called.
    pub function: &'static str,
    /// CUDA's name for what is wrong.
    pub name: String,
    /// CUDA's words for it.
    pub meaning: String,
    /// What to do, where we know.
    pub hint: &'static str,
    /// The caller's line.
    pub at: Site,
}

impl fmt::Display for CudaFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CudaFailure { op, device, function, name, meaning, hint, at } = self;
        write!(f, "{op}: {function} on {device} said {name} ({meaning}) ({})", Place(at))?;
        if hint.is_empty() { Ok(()) } else { write!(f, ". {hint}") }
    }
}

/// The operands of one operation live on different devices.
#[derive(Debug)]
pub struct DeviceMismatch {
    /// The operation.
    pub op: &'static str,
    /// Every operand, in the operation's order.
    pub operands: Vec<OperandInfo>,
    /// The caller's line.
    pub at: Site,
}

impl fmt::Display for DeviceMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list: Vec<String> = self.operands.iter().map(ToString::to_string).collect();
        write!(f, "{}: operands are on different devices: {} ({}). ", self.op, list.join(", "), Place(self.at))?;
        // One way out for each device in play, the one with the fewest moves first.
        let mut ways: Vec<(usize, String)> = Vec::new();
        for target in self.operands.iter().map(|o| o.tensor.device) {
            let movers: Vec<String> =
                self.operands.iter().filter(|o| o.tensor.device != target).map(|o| o.role.to_string()).collect();
            let way = format!("{} with .to(Device::{target:?})", joined(&movers));
            if !ways.iter().any(|(_, known)| *known == way) {
                ways.push((movers.len(), way));
            }
        }
        ways.sort_by_key(|(moves, _)| *moves);
        let ways: Vec<String> = ways.into_iter().map(|(_, way)| way).collect();
        write!(f, "Move {}.", ways.join(", or "))
    }
}

/// A transfer inside a scope that forbids those not announced.
#[derive(Debug)]
pub struct ForbiddenTransfer {
    /// The transferring call: `to`, `copy_from`, `item` …
    pub op: &'static str,
    /// The tensor that would have crossed.
    pub tensor: TensorInfo,
    /// Where it would have gone.
    pub target: Device,
    /// How many bytes.
    pub bytes: usize,
    /// Where the forbidding scope begins.
    pub scope: Site,
    /// The caller's line.
    pub at: Site,
}

impl fmt::Display for ForbiddenTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} would cross to {} ({} bytes, {}), but transfers are forbidden since {}. Move it before that \
             scope, or wrap the call in transfer::announced(\"why\", || …).",
            self.op,
            self.tensor,
            self.target,
            self.bytes,
            Place(self.at),
            Place(self.scope)
        )
    }
}

/// No version of an operation for an operand's dtype on its device.
#[derive(Debug)]
pub struct NoVersion {
    /// The operation.
    pub op: &'static str,
    /// The operand that has no version.
    pub operand: OperandInfo,
    /// Where the operation would run: the operand's device, or where the policy would bring it.
    pub device: Device,
    /// What there is instead.
    pub supported: String,
    /// What to do.
    pub way_out: String,
    /// The caller's line.
    pub at: Site,
}

impl fmt::Display for NoVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OperandInfo { role, tensor } = &self.operand;
        write!(
            f,
            "{}: there is no version for {} on {}: {role} {tensor} ({}). {} has {}, and never runs elsewhere by itself. \
             {}",
            self.op,
            tensor.dtype,
            self.device,
            Place(self.at),
            self.op,
            self.supported,
            self.way_out
        )
    }
}

/// A live tensor, as an out-of-memory error and `memory::largest_live` list it.
#[derive(Clone, Debug)]
pub struct LiveTensor {
    /// What it is.
    pub tensor: TensorInfo,
    /// The bytes it holds.
    pub bytes: usize,
    /// Where it was made.
    pub made_at: Site,
}

impl fmt::Display for LiveTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} made at {}", human_bytes(self.bytes), self.tensor, Place(self.made_at))
    }
}

/// An allocation that did not fit.
#[derive(Debug)]
pub struct OutOfMemory {
    /// Where there was no room.
    pub device: Device,
    /// What was to be made.
    pub wanted: TensorInfo,
    /// The bytes asked for.
    pub asked_bytes: usize,
    /// The bytes free there.
    pub free_bytes: usize,
    /// The most that may be used there.
    pub limit_bytes: usize,
    /// The bytes live tensors hold there.
    pub allocated_bytes: usize,
    /// The bytes taken from the system there: those of live tensors and those kept for reuse.
    pub reserved_bytes: usize,
    /// The largest live tensors there.
    pub largest: Vec<LiveTensor>,
    /// The caller's line.
    pub at: Site,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.device == Device::Cpu { " (host memory)" } else { "" };
        write!(
            f,
            "out of memory on {}{side}: {} asks for {} ({}), free {} of {}; live tensors hold {}, reserved {}. ",
            self.device,
            self.wanted,
            human_bytes(self.asked_bytes),
            Place(self.at),
            human_bytes(self.free_bytes),
            human_bytes(self.limit_bytes),
            human_bytes(self.allocated_bytes),
            human_bytes(self.reserved_bytes),
        )?;
        if !self.largest.is_empty() {
            let list: Vec<String> = self.largest.iter().map(ToString::to_string).collect();
            write!(f, "Largest: {}. ", list.join("; "))?;
        }
        write!(f, "Try a smaller batch, drop the largest tensors, or place some of them on another device.")
    }
}

/// Bytes for people: `512 B`, `4.0 KiB`, `1.5 GiB`.
pub(crate) fn human_bytes(bytes: usize) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_well() {
        let shown: Vec<String> = [0, 1023, 1024, 1536, 3 << 30, usize::MAX].map(human_bytes).into();
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "3.0 GiB", "16.0 EiB"]);
    }

    #[test]
    fn an_error_is_small_enough_to_return_by_value() {
        assert!(std::mem::size_of::<Error>() <= 128, "{}", std::mem::size_of::<Error>());
    }
}
