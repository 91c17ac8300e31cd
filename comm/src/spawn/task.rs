//! What ranks run, and what launcher, job and agents agree on.

use std::ffi::{OsString, c_int};
use std::path::PathBuf;
use std::time::Duration;

/// The version that launcher and agents must share.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How long ranks have to end after another has failed: only a stopped one needs more than one.
pub(super) const ENDING: Duration = Duration::from_secs(3);
/// The exit code of ranks that were asked to stop and saved.
pub(super) const EXIT_STOPPED: u8 = 75;
/// How often to look at the clock. Signals and the end of a rank wake this process earlier.
pub(super) const PERIOD: Duration = Duration::from_millis(200);

/// What every rank runs.
pub struct Task {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The argument with which it is an agent and calls [`serve`](super::serve).
    pub agent: &'static str,
}

/// The exit code that shells give to the end by a signal.
pub(super) fn of_signal(signal: c_int) -> u8 {
    128 + signal as u8
}
