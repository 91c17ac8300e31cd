//! The error type of this crate, and the exit code of each error.
//!
//! Texts name settings by `SettingName`; the program spells these as flags.

use std::fmt;
use std::path::Path;

use ddp_comm::RemoteError;
use ddp_kernels::files::FileError;
use ddp_kernels::setting::SettingName;

use crate::shown::{shown, shown_lines};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in training. `Debug` shows the same text as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid settings.
    #[error("{0}")]
    Usage(String),
    /// A setting with an invalid value.
    #[error("{} {text}", SettingName(.setting))]
    Setting {
        /// Its name.
        setting: String,
        /// Its value, what was expected and what helps.
        text: String,
    },
    /// Data that cannot be trained on.
    #[error("{0}")]
    Data(String),
    /// A file or folder that cannot be read or written.
    #[error(transparent)]
    Io(#[from] FileError),
    /// An intact file of another version of this program.
    #[error("{0}")]
    OtherVersion(String),
    /// A limit of this process (ulimit) that is too small.
    #[error("{0}")]
    Limit(String),
    /// The loss or the model is not finite.
    #[error("{0}")]
    NonFinite(String),
    /// The run was asked to stop, has saved, and can be resumed.
    #[error("{0}")]
    Stopped(String),
    /// `doctor` has found a problem that prevents training.
    #[error("{0}")]
    Unhealthy(String),
    /// Two runs that were compared are not the same.
    #[error("{0}")]
    Parted(String),
    /// A run is not as its log claims.
    #[error("{0}")]
    NotAsClaimed(String),
    /// Whether a run is as its log claims cannot be told here.
    #[error("{0}")]
    Untold(String),
    /// An error that happened on another rank.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// A bug in this program.
    #[error("{0}. This is a bug in ddp: please report it.")]
    Internal(String),
    /// An error between ranks.
    #[error(transparent)]
    Comm(#[from] ddp_comm::Error),
    /// An error of a tensor operation.
    #[error(transparent)]
    Tensor(#[from] ddp_kernels::Error),
}

impl From<ddp_nn::Error> for Error {
    fn from(error: ddp_nn::Error) -> Error {
        match error {
            ddp_nn::Error::Usage(text) => Error::Usage(text),
            ddp_nn::Error::Setting { setting, text } => Error::Setting { setting, text },
            ddp_nn::Error::Outside { source, .. } => from_outside(source),
            ddp_nn::Error::Tensor(error) => Error::Tensor(error),
            other => Error::Internal(other.to_string()),
        }
    }
}

impl From<ddp_data::Error> for Error {
    fn from(error: ddp_data::Error) -> Error {
        match error {
            ddp_data::Error::Usage(text) => Error::Usage(text),
            ddp_data::Error::Data(text) => Error::Data(text),
            ddp_data::Error::Limit(text) => Error::Limit(text),
            ddp_data::Error::Io(error) => Error::Io(error),
            ddp_data::Error::Remote {
                rank,
                text,
                exit_code,
            } => Error::remote(rank, text, exit_code),
            ddp_data::Error::Internal(text) => Error::Internal(text),
            ddp_data::Error::Outside { source, .. } => from_outside(source),
            ddp_data::Error::Tensor(error) => Error::Tensor(error),
            other => Error::Internal(other.to_string()),
        }
    }
}

/// The error that a callback of this crate gave to a library.
fn from_outside(source: Box<dyn std::error::Error + Send + Sync>) -> Error {
    let own = source.downcast::<Error>().map(|error| *error);
    let own = own.or_else(|other| other.downcast().map(|error| Error::Comm(*error)));
    own.unwrap_or_else(|other| Error::Internal(other.to_string()))
}

impl From<Error> for ddp_nn::Error {
    fn from(error: Error) -> ddp_nn::Error {
        ddp_nn::Error::Outside {
            exit_code: error.exit_code(),
            source: Box::new(error),
        }
    }
}

impl From<Error> for ddp_data::Error {
    fn from(error: Error) -> ddp_data::Error {
        ddp_data::Error::Outside {
            exit_code: error.exit_code(),
            source: Box::new(error),
        }
    }
}

/// The exit codes of `verify`, besides 0.
const EXIT_NOT_AS_CLAIMED: u8 = 3;
const EXIT_UNTOLD: u8 = 4;

/// The exit code of a run that was asked to stop, and can be resumed.
pub(crate) const EXIT_STOPPED: u8 = 75;

impl Error {
    /// An error that rank `rank` reports.
    pub(crate) fn remote(rank: usize, text: String, exit_code: u8) -> Error {
        Error::Remote(RemoteError {
            rank,
            exit_code,
            text,
        })
    }

    /// The error of a file or folder that the system refused, with this help.
    pub fn io(
        action: &'static str,
        path: impl AsRef<Path>,
        help: impl Into<String>,
    ) -> impl FnOnce(std::io::Error) -> Error {
        let (path, help) = (path.as_ref().to_path_buf(), help.into());
        move |source| {
            FileError {
                action,
                path,
                source,
                help,
            }
            .into()
        }
    }

    /// `text`, which is this error's and what a program adds, with control characters escaped:
    /// names from data and files may contain them.
    pub fn escaped(&self, text: &str) -> String {
        match self {
            Error::Data(_)
            | Error::OtherVersion(_)
            | Error::Remote { .. }
            | Error::Io(_)
            | Error::Stopped(_) => {
                // Lines that describe columns are indented, so that none can pose as a message.
                let lines: Vec<_> = text.split("\n  ").map(shown).collect();
                lines.join("\n  ")
            }
            // Lists of flags, ranks and tensors have several lines: all but the first are indented.
            _ => {
                let text = shown_lines(text).replace('\n', "\n  ");
                text.replace("\n  \n", "\n\n")
            }
        }
    }

    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) | Error::Setting { .. } => 2,
            Error::Parted(_) => 1,
            Error::NotAsClaimed(_) => EXIT_NOT_AS_CLAIMED,
            Error::Untold(_) => EXIT_UNTOLD,
            Error::Data(_) | Error::OtherVersion(_) => 65,
            Error::Limit(_) => 71,
            Error::Tensor(ddp_kernels::Error::OutOfMemory(_)) => 71,
            Error::Comm(ddp_comm::Error::Tensor(ddp_kernels::Error::OutOfMemory(_))) => 71,
            Error::Internal(_) | Error::Tensor(_) => 70,
            Error::Io(_) => 74,
            Error::Remote(error) => error.exit_code,
            Error::Unhealthy(_) => 69,
            Error::Stopped(_) => EXIT_STOPPED,
            Error::NonFinite(_) => 76,
            Error::Comm(error) => error.exit_code(),
        }
    }

    /// The error between ranks that it contains, if any.
    pub(crate) fn of_ranks(&self) -> Option<&ddp_comm::Error> {
        match self {
            Error::Comm(error) => Some(error),
            _ => None,
        }
    }

    /// Whether a rank was lost that a call waited for, in a job that continues without it.
    pub fn is_rank_lost(&self) -> bool {
        self.of_ranks().is_some_and(|error| error.is_rank_lost())
    }

    /// The rank that reports this error, if all ranks have it or it happened on another rank.
    pub fn reporter(&self) -> Option<usize> {
        match self {
            Error::Remote(error) => Some(error.rank),
            // All ranks have it.
            Error::Stopped(_) | Error::NotAsClaimed(_) | Error::Untold(_) => Some(0),
            Error::Comm(error) => error.reporter(),
            _ => None,
        }
    }
}

impl ddp_comm::HasExitCode for Error {
    fn exit_code(&self) -> u8 {
        Error::exit_code(self)
    }

    fn reporter(&self) -> Option<usize> {
        Error::reporter(self)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
