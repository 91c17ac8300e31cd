//! The one error type of this crate, and the exit code each error means (`Error::exit_code`).

use std::fmt;
use std::panic::Location;
use std::time::Duration;

use ddp_kernels::error::Site;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a job ended: what the rank that failed first said. Written down once for all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The rank that failed.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// The exit code that all ranks end with.
    pub exit_code: u8,
    /// Its error.
    pub text: String,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} on {}: {}", self.rank, self.host, self.text)
    }
}

/// Everything that can go wrong between ranks. `Debug` shows the same text as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Some ranks did not come to a collective in time.
    #[error(
        "{call}: {} did not arrive within {}. See whether they are stopped, swapping or stuck; --timeout-s sets how long \
         to wait.",
        Ranks(missing), Seconds(*waited)
    )]
    Timeout {
        /// The call that waited.
        call: String,
        /// The ranks that did not arrive.
        missing: Vec<usize>,
        /// For how long.
        waited: Duration,
    },
    /// Ranks made different calls: the program took different turns on different ranks.
    #[error(
        "{call}: rank {peer} is at {theirs}. All ranks must make the same calls in the same order: look for a \
         condition that differs between ranks."
    )]
    OutOfStep {
        /// What this rank called.
        call: String,
        /// A rank that called something else.
        peer: usize,
        /// What it called.
        theirs: String,
    },
    /// Another rank failed. Its message is the one to read.
    #[error("ended because of {0}")]
    PeerFailed(Box<Cause>),
    /// Ranks that should be the same differ.
    #[error("{0}")]
    Disagree(Box<Disagreement>),
    /// A collective was given something it cannot take.
    #[error("{0}")]
    Argument(Box<Argument>),
    /// The ranks of this job could not be brought together.
    #[error("cannot {action}: {reason}. {way_out}")]
    Setup {
        /// What was tried.
        action: String,
        /// What went wrong.
        reason: String,
        /// What to do.
        way_out: String,
    },
    /// What was set up does not work: its results are wrong, or it failed before.
    #[error("cannot {action}: {reason}. {way_out}")]
    Broken {
        /// What was tried.
        action: String,
        /// What is wrong.
        reason: String,
        /// What to do.
        way_out: String,
    },
    /// NCCL refused a call, or failed in one.
    #[error("{0}")]
    Nccl(Box<NcclFailure>),
    /// An error of a tensor operation.
    #[error(transparent)]
    Tensor(#[from] ddp_kernels::Error),
}

/// Ranks that should be the same differ.
#[derive(Clone, Debug, thiserror::Error)]
#[error("ranks disagree on {field}: rank {rank} has {theirs}, rank {reference} has {ours}. {way_out}")]
pub struct Disagreement {
    /// What differs.
    pub field: String,
    /// The rank that differs.
    pub rank: usize,
    /// Its value.
    pub theirs: String,
    /// The rank it was compared with.
    pub reference: usize,
    /// That one's value.
    pub ours: String,
    /// What to do.
    pub way_out: String,
}

/// A call that NCCL refused, or failed in.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call}: {function} said {name}{}. {way_out}", Words(words))]
pub struct NcclFailure {
    /// What was being done: operation, tensor, group and source line.
    pub call: String,
    /// The function of NCCL's.
    pub function: &'static str,
    /// NCCL's name for what is wrong.
    pub name: String,
    /// NCCL's own words, if it has any.
    pub words: String,
    /// What to do.
    pub way_out: String,
    /// 77 where the cause lies with another rank or what is between (ncclSystemError, ncclRemoteError, ncclTimeout), 71 where memory ran out, 70
    /// for the rest: a call that was wrong, a GPU that failed, a fault in NCCL, a container without shared memory.
    pub exit_code: u8,
}

/// ` (so and so)`, or nothing.
struct Words<'a>(&'a str);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ({})", self.0) }
    }
}

/// A collective was given something it cannot take.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{operation}: {what}: expected {expected}, got {got} (called at {}). {way_out}", Line(at))]
pub struct Argument {
    /// The operation.
    pub operation: String,
    /// The argument.
    pub what: String,
    /// What would have been right.
    pub expected: String,
    /// What was given.
    pub got: String,
    /// What to do.
    pub way_out: String,
    /// The caller's line.
    pub at: Site,
}

impl Error {
    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Timeout { .. } => 77,
            Error::OutOfStep { .. } | Error::Disagree(_) => 78,
            Error::PeerFailed(cause) => cause.exit_code,
            Error::Nccl(failure) => failure.exit_code,
            Error::Argument(_) | Error::Tensor(_) | Error::Broken { .. } => 70,
            Error::Setup { .. } => 77,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `rank 3`, `ranks 1, 2 and 5`.
pub(crate) struct Ranks<'a>(pub(crate) &'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("no rank"),
            [rank] => write!(f, "rank {rank}"),
            [first, middle @ .., last] => {
                write!(f, "ranks {first}")?;
                middle.iter().try_for_each(|rank| write!(f, ", {rank}"))?;
                write!(f, " and {last}")
            }
        }
    }
}

/// `2 s`, `0.5 s`: to the millisecond.
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s", (self.0.as_secs_f64() * 1e3).round() / 1e3)
    }
}

/// `step.rs:12`, a place in the caller's source.
pub(crate) struct Line<'a>(pub(crate) &'a Location<'a>);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0.file(), self.0.line())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_as_they_are() {
        let told = |ms: u64| Seconds(Duration::from_millis(ms)).to_string();
        assert_eq!([0, 5, 500, 1500, 2000, 600_000].map(told), ["0 s", "0.005 s", "0.5 s", "1.5 s", "2 s", "600 s"]);
        let timeout = Error::Timeout { call: "x".into(), missing: vec![1, 4], waited: Duration::from_millis(500) };
        assert!(timeout.to_string().starts_with("x: ranks 1 and 4 did not arrive within 0.5 s. "), "{timeout}");
    }
}
