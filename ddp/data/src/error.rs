//! The error type of this crate, and the exit code of each error.
//!
//! Texts name settings in backquotes (`labels`), and a program replaces these by its flags.

use std::fmt;
use std::path::PathBuf;

use ddp_kernels::files::FileError;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The settings that texts name.
pub const SETTINGS: [&str; 15] = [
    "data",
    "labels",
    "val-data",
    "val-labels",
    "val-split",
    "task",
    "drop",
    "categorical",
    "missing",
    "normalize",
    "cache-dir",
    "data-on-device",
    "batch-size",
    "drop-last",
    "out",
];

/// Everything that can go wrong with data. `Debug` shows the same text as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Settings that contradict each other or make no sense.
    #[error("{0}")]
    Usage(String),
    /// Data that cannot be trained on.
    #[error("{0}")]
    Data(String),
    /// A file or folder that cannot be read or written.
    #[error("cannot {action} {}: {source}; help: {help}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
        /// What to do.
        help: String,
    },
    /// A limit of this process (ulimit) that is too small.
    #[error("{0}")]
    Limit(String),
    /// An error in this program.
    #[error("{0}; help: this is an error in ddp: please report it")]
    Internal(String),
    /// An error that happened on another rank.
    #[error("{text}")]
    Remote {
        /// That rank.
        rank: usize,
        /// Its text.
        text: String,
        /// Its exit code.
        exit_code: u8,
    },
    /// An error of a callback.
    #[error("{source}")]
    Outside {
        /// What failed.
        source: Box<dyn std::error::Error + Send + Sync>,
        /// Its exit code.
        exit_code: u8,
    },
    /// An error of a tensor operation.
    #[error(transparent)]
    Tensor(#[from] ddp_kernels::Error),
}

impl Error {
    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Data(_) => 65,
            Error::Limit(_) | Error::Tensor(ddp_kernels::Error::OutOfMemory(_)) => 71,
            Error::Internal(_) | Error::Tensor(_) => 70,
            Error::Io { .. } => 74,
            Error::Outside { exit_code, .. } | Error::Remote { exit_code, .. } => *exit_code,
        }
    }
}

impl From<FileError> for Error {
    fn from(error: FileError) -> Error {
        let FileError {
            action,
            path,
            source,
            help,
        } = error;
        Error::Io {
            action,
            path,
            source,
            help,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
