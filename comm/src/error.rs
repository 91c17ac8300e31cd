//! The error type of this crate, and the exit code of each error.

use std::fmt;
use std::time::Duration;

pub(crate) use ddp_kernels::error::Line;
use ddp_kernels::error::Site;
use serde::{Deserialize, Serialize};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a job ended: the first error of any rank, recorded once for all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// The rank that failed.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// The exit code of every rank.
    pub exit_code: u8,
    /// The text of the error.
    pub text: String,
}

impl Cause {
    /// The end of a generation, after which the job continues: a rank was lost, or comes.
    pub(crate) fn of_generation(text: String) -> Cause {
        Cause {
            rank: 0,
            host: String::new(),
            exit_code: JOB_CONTINUES,
            text,
        }
    }

    /// Whether it ends this generation only, and not the job.
    pub(crate) fn ends_generation(&self) -> bool {
        self.exit_code == JOB_CONTINUES
    }
}

/// The exit code of a job that lost a rank, and of a rank that leaves its job.
pub(crate) const EXIT_PEER_LOST: u8 = 77;
/// Stands for an exit code where the job continues. No failure has it.
const JOB_CONTINUES: u8 = 0;

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} on {}: {}", self.rank, self.host, self.text)
    }
}

/// A setting of the program that would avoid an error. The program knows what its users type
/// ([`Options::remedy_text`](crate::Options)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Wait longer for other ranks.
    LongerTimeout,
    /// Let several ranks use one GPU, for tests.
    ShareGpus,
    /// Train on the CPU.
    TrainOnCpu,
    /// Run steps without CUDA graphs.
    NoGraphs,
    /// Continue from what was saved, or without the lost ranks.
    Continue,
}

/// Everything that can go wrong between ranks. `Debug` shows the same text as `Display`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Some ranks did not arrive at a collective in time.
    #[error("{call}: {} {}; help: {CHECK_RANKS}", RankList(missing), late(*waited, *total))]
    Timeout {
        /// The call that waited.
        call: String,
        /// The ranks that did not arrive.
        missing: Vec<usize>,
        /// For how long they showed no progress.
        waited: Duration,
        /// For how long the call waited.
        total: Duration,
    },
    /// Ranks made different calls: the program took different branches on different ranks.
    #[error("{call}: rank {peer} is at {theirs}; help: {SAME_CALLS}")]
    OutOfStep {
        /// What this rank called.
        call: String,
        /// A rank that called something else.
        peer: usize,
        /// What that rank called.
        theirs: String,
    },
    /// Another rank failed; its own message has the details.
    #[error("ended because of {0}")]
    PeerFailed(Box<Cause>),
    /// Values that must be equal on all ranks differ.
    #[error("{0}")]
    Disagree(Box<Disagreement>),
    /// A call was given an argument that it cannot take.
    #[error("{0}")]
    Argument(Box<Argument>),
    /// The ranks or their groups could not be set up.
    #[error("cannot {0}")]
    Setup(Box<Problem>),
    /// The variables of a launcher cannot be understood.
    #[error("cannot {0}")]
    Launch(Box<Problem>),
    /// A limit on memory, files or threads is too small.
    #[error("cannot {0}")]
    Limit(Box<Problem>),
    /// What was set up gives wrong results, or failed before.
    #[error("cannot {0}")]
    Broken(Box<Problem>),
    /// A call on GPUs does not complete.
    #[error("{0}")]
    Hang(Box<Problem>),
    /// NCCL returned an error.
    #[error("{0}")]
    Nccl(Box<NcclFailure>),
    /// An error of a tensor operation.
    #[error(transparent)]
    Tensor(#[from] ddp_kernels::Error),
}

/// Help for ranks that are missing.
pub(crate) const CHECK_RANKS: &str = "check whether they are stopped, swapping or stuck";
/// Help for ranks that made different calls.
pub(crate) const SAME_CALLS: &str = "all ranks must make the same calls in the same order, with \
    tensors of the same name and length: look for a condition that differs between ranks";

/// What failed, why, and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{action}: {reason}; help: {help}")]
pub struct Problem {
    /// What was tried.
    pub action: String,
    /// What went wrong.
    pub reason: String,
    /// What to do.
    pub help: String,
    /// The setting that would avoid the error.
    pub remedy: Option<Remedy>,
}

/// The error of a rank, as the other ranks get it ([`crate::Group::share_outcome`]).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct RemoteError {
    /// The rank that failed.
    pub rank: usize,
    /// The exit code of its error.
    pub exit_code: u8,
    /// The text of its error.
    pub text: String,
}

/// A value that must be equal on all ranks and is not.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "ranks disagree on {field}: rank {rank} has {theirs}, rank {reference} has {ours}; help: {help}"
)]
pub struct Disagreement {
    /// What differs.
    pub field: String,
    /// The rank that differs from most ranks.
    pub rank: usize,
    /// Its value.
    pub theirs: String,
    /// The rank it is compared with.
    pub reference: usize,
    /// The value of `reference`.
    pub ours: String,
    /// What to do.
    pub help: String,
}

/// An error that NCCL returned.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{call}: {function} returned {name}{}; help: {help}",
    Parenthesized(details)
)]
pub struct NcclFailure {
    /// The call: operation, tensor, group and source line.
    pub call: String,
    /// NCCL's function.
    pub function: &'static str,
    /// NCCL's name for the error.
    pub name: String,
    /// NCCL's own message; may be empty.
    pub details: String,
    /// What to do.
    pub help: String,
    /// The setting that would avoid the error.
    pub remedy: Option<Remedy>,
    /// 77 for errors of another rank or the network, 71 for a lack of memory, 70 otherwise.
    pub exit_code: u8,
}

/// A call was given an argument that it cannot take.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{operation}: {what}: expected {expected}, got {got} (called at {}); help: {help}",
    Line(at)
)]
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
    pub help: String,
    /// The caller's line.
    pub at: Site,
}

impl Error {
    /// The exit code of a process that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Timeout { .. } | Error::Setup(_) | Error::Hang(_) => 77,
            Error::OutOfStep { .. } | Error::Disagree(_) => 78,
            Error::PeerFailed(cause) if cause.ends_generation() => 77,
            Error::PeerFailed(cause) => cause.exit_code,
            Error::Limit(_) => 71,
            Error::Launch(_) => 2,
            Error::Nccl(failure) => failure.exit_code,
            Error::Argument(_) | Error::Tensor(_) | Error::Broken(_) => 70,
        }
    }

    /// The rank that reports this error, if all ranks have it or it happened on another rank.
    pub fn reporter(&self) -> Option<usize> {
        match self {
            Error::Disagree(disagreement) => Some(disagreement.rank),
            Error::PeerFailed(cause) if !cause.ends_generation() => Some(cause.rank),
            _ => None,
        }
    }

    /// Whether this generation of an elastic job ended, because a rank was lost or for another
    /// reason: call [`World::next_generation`] then.
    ///
    /// [`World::next_generation`]: crate::World::next_generation
    pub fn is_rank_lost(&self) -> bool {
        matches!(self, Error::PeerFailed(cause) if cause.ends_generation())
    }

    /// The setting of the program that would avoid this error.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Error::Timeout { .. } => Some(Remedy::LongerTimeout),
            Error::Setup(problem) | Error::Broken(problem) | Error::Hang(problem) => problem.remedy,
            Error::Nccl(failure) => failure.remedy,
            _ => None,
        }
    }

    /// An [`Error::Setup`]: "cannot {action}: {reason}; help: {help}".
    pub(crate) fn setup(
        action: impl Into<String>,
        reason: impl ToString,
        help: impl Into<String>,
    ) -> Error {
        Error::Setup(Problem::new(action, reason, help))
    }

    /// The [`Error::Limit`] for a thread of this name that could not be started.
    pub fn no_thread(name: &str, error: &std::io::Error) -> Error {
        let action = format!("start the thread \"{name}\"");
        let help = "raise the limits on threads (ulimit -u) and on virtual memory (ulimit -v)";
        Error::Limit(Problem::new(action, error, help))
    }

    /// The error of shared memory that the system refuses: names the limit that is too small.
    pub(crate) fn no_memory(action: String, error: &std::io::Error) -> Error {
        let limit = match error.raw_os_error() {
            Some(libc::EFBIG) => "the size of files, which counts shared memory (ulimit -f)",
            Some(libc::ENOMEM) => "virtual memory (ulimit -v)",
            Some(libc::EMFILE) => "open files (ulimit -n)",
            _ => {
                let help = "allow memfd_create (Linux 3.17 or later; seccomp), and raise the memory \
                            limit";
                return Error::setup(action, error, help);
            }
        };
        Error::Limit(Problem::new(
            action,
            error,
            format!("raise the limit on {limit}"),
        ))
    }

    /// The error of ranks that did not come in time to `action`.
    pub(crate) fn too_late(action: impl Into<String>, reason: String) -> Error {
        let help = "check whether they are stopped or still starting";
        Error::Setup(Problem::new(action, reason, help).with_remedy(Remedy::LongerTimeout))
    }

    /// The error of variables that cannot say which rank this process is.
    pub(crate) fn launch(variable: &str, expected: &str, got: impl fmt::Display) -> Error {
        let reason = format!("{variable}: expected {expected}, got {got}");
        let help = "leave these variables to the program that starts the ranks";
        Error::Launch(Problem::new("tell which rank this is", reason, help))
    }

    /// This error, which another rank of this job reports.
    pub(crate) fn reported_by_rank_0(self) -> Error {
        Error::of_peer(Cause {
            rank: 0,
            host: "this job".into(),
            exit_code: self.exit_code(),
            text: self.to_string(),
        })
    }

    /// An [`Error::PeerFailed`] of this cause.
    pub(crate) fn of_peer(cause: Cause) -> Error {
        Error::PeerFailed(Box::new(cause))
    }
}

impl Argument {
    /// The [`Error::Argument`] of an operation that was called at `at`.
    pub(crate) fn error(
        operation: impl ToString,
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
        help: impl Into<String>,
        at: Site,
    ) -> Error {
        Error::Argument(Box::new(Argument {
            operation: operation.to_string(),
            what: what.into(),
            expected: expected.into(),
            got: got.to_string(),
            help: help.into(),
            at,
        }))
    }
}

impl Problem {
    pub(crate) fn new(
        action: impl Into<String>,
        reason: impl ToString,
        help: impl Into<String>,
    ) -> Box<Problem> {
        Box::new(Problem {
            action: action.into(),
            reason: reason.to_string(),
            help: help.into(),
            remedy: None,
        })
    }

    pub(crate) fn with_remedy(mut self: Box<Problem>, remedy: Remedy) -> Box<Problem> {
        self.remedy = Some(remedy);
        self
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// ` (text)`, or nothing for an empty text.
struct Parenthesized<'a>(&'a str);

impl fmt::Display for Parenthesized<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => Ok(()),
            text => write!(f, " ({text})"),
        }
    }
}

/// `rank 3`, `ranks 1, 2 and 5`.
pub(crate) struct RankList<'a>(pub(crate) &'a [usize]);

impl fmt::Display for RankList<'_> {
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

/// What ranks did that showed no progress for `waited` of `total`.
fn late(waited: Duration, total: Duration) -> String {
    if total > waited + Duration::from_secs(10) {
        format!(
            "did not arrive within {} s, and showed no progress for {}",
            total.as_secs(),
            Seconds(waited)
        )
    } else {
        format!("did not arrive within {}", Seconds(waited))
    }
}

/// `2 s`, `0.5 s`: to the millisecond.
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s", (self.0.as_secs_f64() * 1e3).round() / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_to_the_millisecond() {
        let text = |ms: u64| Seconds(Duration::from_millis(ms)).to_string();
        assert_eq!(
            [0, 5, 500, 1500, 2000, 600_000].map(text),
            ["0 s", "0.005 s", "0.5 s", "1.5 s", "2 s", "600 s"]
        );
        let timeout = Error::Timeout {
            call: "x".into(),
            missing: vec![1, 4],
            waited: Duration::from_millis(500),
            total: Duration::from_millis(510),
        };
        let expected = "x: ranks 1 and 4 did not arrive within 0.5 s; help: ";
        assert!(timeout.to_string().starts_with(expected), "{timeout}");
    }
}
