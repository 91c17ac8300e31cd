//! The error type of this crate, the exit code of each error, and the settings that messages name.
//!
//! Texts name settings by `SettingName`, which programs may spell as flags.

use std::fmt;

use ddp_kernels::files::FileError;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns an error with the text of `format!`: `bail!(Usage, "…")` as `Error::Usage`, `bail!("…")`
/// as a `String`, or as `Error::Data` where the function returns an `Error`.
#[doc(hidden)]
#[macro_export]
macro_rules! bail {
    ($kind:ident, $($text:tt)+) => {
        return Err($crate::error::Error::$kind(format!($($text)+)))
    };
    ($($text:tt)+) => {
        return Err(format!($($text)+).into())
    };
}

/// The same, unless a condition holds.
#[doc(hidden)]
#[macro_export]
macro_rules! ensure {
    ($holds:expr, $($error:tt)+) => {
        if $holds {
        } else {
            $crate::bail!($($error)+);
        }
    };
}

pub use {bail, ensure};

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
    #[error(transparent)]
    Io(#[from] FileError),
    /// Too little memory on a device, or a limit of this process (ulimit) that is too small.
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
            Error::Io(_) => 74,
            Error::Outside { exit_code, .. } | Error::Remote { exit_code, .. } => *exit_code,
        }
    }
}

/// A text without a kind is an error in the data.
impl From<String> for Error {
    fn from(text: String) -> Error {
        Error::Data(text)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The settings that messages about data name.
pub mod setting {
    ddp_kernels::setting_names! {
        DATA "data" LABELS "labels" VAL_DATA "val-data" VAL_LABELS "val-labels" VAL_SPLIT "val-split"
        STRATIFY "stratify"
        TASK "task" DROP "drop" CATEGORICAL "categorical" MISSING "missing" NORMALIZE "normalize"
        SEED "seed" CACHE_DIR "cache-dir" DATA_ON_DEVICE "data-on-device" BATCH_SIZE "batch-size"
        DROP_LAST "drop-last" OUT "out" MODEL "model" INIT_FROM "init-from" LOSS_ON "loss-on"
        CONTEXT "context" PACKING "packing"
        TOKENIZER "tokenizer" END_TOKEN "end-token" FIELD "field" LOSSY "lossy"
    }
}
