//! What ranks run, and what launcher, job and agents agree on.

use std::ffi::{OsString, c_int};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::place::Place;

/// The version that launcher and agents must share.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How long ranks have to end after another has failed: only a stopped one needs more than one.
pub(super) const ENDING: Duration = Duration::from_secs(3);
/// The exit code of ranks that were asked to stop and saved.
pub(super) const EXIT_STOPPED: u8 = 75;
/// After which silence launcher and agent count each other as lost: the timeout within these
/// bounds. The launcher waits longer by the margin: when the others continue, a host's ranks have
/// ended.
const SILENCE: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(20)];
pub(super) const SILENCE_MARGIN: Duration = Duration::from_secs(1);
/// How long a launcher may take to tell an agent what to prepare, and then to answer it once.
pub(super) const LAUNCHER_MAX: Duration = Duration::from_secs(60);
/// How often to look at the clock and the roster. Signals, orders and news, and the end of a rank
/// wake this process earlier.
pub(super) const PERIOD: Duration = Duration::from_millis(20);

/// What every rank runs.
#[derive(Clone, Debug)]
pub struct Task {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The argument with which it is an agent and calls [`serve`](super::serve).
    pub agent: &'static str,
    /// In a job that continues without lost ranks: how.
    pub losses: Option<Losses>,
    /// Where other hosts come to, if variables and not this launcher start their agents.
    pub place: Option<Place>,
}

/// How a job continues without lost ranks.
#[derive(Clone, Copy, Debug)]
pub struct Losses {
    /// With fewer ranks it saves and ends.
    pub min_ranks: usize,
    /// How many lost ranks are started again.
    pub restarts: u32,
}

/// How a host's agent takes part in such a job.
#[derive(Clone, Deserialize, Serialize)]
pub(super) struct Seating {
    /// The host of each seat, and this one.
    pub(super) hosts: Vec<usize>,
    pub(super) own: usize,
    pub(super) min_ranks: usize,
    /// An agent that has not heard of the launcher for so long ends its ranks.
    pub(super) silence: Duration,
}

/// How long hosts of a job that continues without lost ranks may be silent.
pub(crate) fn silence(timeout: Duration) -> Duration {
    timeout.clamp(SILENCE[0], SILENCE[1])
}

/// The exit code that shells give to the end by a signal.
pub(super) fn of_signal(signal: c_int) -> u8 {
    128 + signal as u8
}
