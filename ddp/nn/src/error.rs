//! The error type of this crate, and the exit code of each error.
//!
//! Texts name settings in backquotes (`devices-per-rank`), and a program replaces these by its
//! flags.

use std::fmt;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with a model. `Debug` shows the same text as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid options.
    #[error("{0}")]
    Usage(String),
    /// A model that cannot be built or run as described.
    #[error("{layer}: expected {expected}, got {got}; help: {help}")]
    Model {
        /// The layer's name in the model.
        layer: String,
        /// What was expected.
        expected: String,
        /// What was given.
        got: String,
        /// How to fix it.
        help: String,
    },
    /// An error that a callback returned.
    #[error("{source}")]
    Outside {
        /// The callback's error.
        source: Box<dyn std::error::Error + Send + Sync>,
        /// The exit code of a process that ends with it.
        exit_code: u8,
    },
    /// An error of a tensor operation.
    #[error(transparent)]
    Tensor(#[from] ddp_kernels::Error),
}

impl Error {
    /// A model that cannot be built or run as described: see [`Error::Model`].
    pub fn model(
        layer: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
        help: impl Into<String>,
    ) -> Error {
        Error::Model {
            layer: layer.into(),
            expected: expected.into(),
            got: got.into(),
            help: help.into(),
        }
    }

    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) | Error::Model { .. } => 2,
            Error::Tensor(ddp_kernels::Error::OutOfMemory(_)) => 71,
            Error::Tensor(_) => 70,
            Error::Outside { exit_code, .. } => *exit_code,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
