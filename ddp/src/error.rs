//! The one error type of this crate, and the exit code each error means.

use std::fmt;
use std::path::PathBuf;

use crate::shown::{shown, shown_lines};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in training. `Debug` shows the same text as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Flags or a configuration that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A model that cannot be built as described.
    #[error("{layer}: expected {expected}, got {got}. {way_out}")]
    Model {
        /// The layer, by its name in the model.
        layer: String,
        /// What would have been right.
        expected: String,
        /// What was given.
        got: String,
        /// What to do.
        way_out: String,
    },
    /// Data that cannot be trained on.
    #[error("{0}")]
    Data(String),
    /// A file or folder that cannot be read or written.
    #[error("cannot {action} {}: {source}. {way_out}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
        /// What to do.
        way_out: String,
    },
    /// The loss is not a number any more.
    #[error("{0}")]
    NonFinite(String),
    /// The run was asked to stop, has saved what it had, and can go on.
    #[error("{0}")]
    Stopped(String),
    /// `doctor` has found something that has to be mended.
    #[error("{0}")]
    Unhealthy(String),
    /// A mistake of this program.
    #[error("{0}. This is a mistake in ddp: please report it.")]
    Internal(String),
    /// An error between ranks.
    #[error(transparent)]
    Comm(#[from] ddp_comm::Error),
    /// An error of a tensor operation.
    #[error(transparent)]
    Tensor(#[from] ddp_kernels::Error),
}

impl Error {
    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) | Error::Model { .. } => 2,
            Error::Data(_) => 65,
            Error::Tensor(error) | Error::Comm(ddp_comm::Error::Tensor(error)) if is_out_of_memory(error) => 71,
            Error::Internal(_) | Error::Tensor(_) => 70,
            Error::Io { .. } => 74,
            Error::Unhealthy(_) => 69,
            Error::Stopped(_) => 75,
            Error::NonFinite(_) => 76,
            Error::Comm(error) => error.exit_code(),
        }
    }
}

/// An error as a terminal may have it: `ddp-train` ends with it. What data and files bring along (names, paths) stays on its line, and
/// none of it drives the terminal.
#[derive(Debug)]
pub struct Told(pub Error);

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        match &self.0 {
            Error::Data(_) | Error::Io { .. } | Error::Model { .. } | Error::Stopped(_) => f.write_str(&shown(&text)),
            // Lists of flags, ranks, tensors have lines of their own, none of which begins as the first does.
            _ => f.write_str(&shown_lines(&text).replace('\n', "\n  ").replace("\n  \n", "\n\n")),
        }
    }
}

impl From<ddp_comm::Error> for Told {
    fn from(error: ddp_comm::Error) -> Told {
        Told(error.into())
    }
}

impl ddp_comm::Failure for Told {
    fn exit_code(&self) -> u8 {
        self.0.exit_code()
    }
}

fn is_out_of_memory(error: &ddp_kernels::Error) -> bool {
    matches!(error, ddp_kernels::Error::OutOfMemory(_))
}

impl ddp_comm::Failure for Error {
    fn exit_code(&self) -> u8 {
        Error::exit_code(self)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
