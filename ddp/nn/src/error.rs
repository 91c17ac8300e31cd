//! The error type of this crate, and the exit code of each error.
//!
//! Texts name settings by `SettingName`, which programs may spell as flags.

use std::fmt;

use ddp_kernels::setting::SettingName;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with a model. `Debug` shows the same text as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid options.
    #[error("{0}")]
    Usage(String),
    /// A setting of a model family with a value that it cannot have.
    #[error("{} {text}", SettingName(.setting))]
    Setting {
        /// Its name.
        setting: String,
        /// Its value, what was expected and what helps.
        text: String,
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
    /// A model that cannot be built or run as described, by the name of its layer.
    pub fn model(
        layer: impl fmt::Display,
        expected: impl fmt::Display,
        got: impl fmt::Display,
        help: impl fmt::Display,
    ) -> Error {
        Error::Usage(format!(
            "{layer}: expected {expected}, got {got}; help: {help}"
        ))
    }

    /// The same error, with the place of the operation before it.
    pub(crate) fn within(self, place: impl fmt::Display) -> Error {
        match self {
            Error::Usage(text) => Error::Usage(format!("{place}: {text}")),
            Error::Tensor(error) => Error::Tensor(error.within(place)),
            other => other,
        }
    }

    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) | Error::Setting { .. } => 2,
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

ddp_kernels::setting_names! {
    RECOMPUTE "recompute" WIDTH "width" HEADS "heads" IMAGE "image" DEVICES_PER_RANK "devices-per-rank"
}
