//! What ranks run, and the constants that launcher, job and agents share.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use super::place::JobPlace;

/// The version that launcher and agents must share.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How often to look at the clock. Signals, orders and news, and the end of a rank
/// wake this process earlier.
pub(super) const PERIOD: Duration = Duration::from_millis(20);

/// What every rank runs.
#[derive(Clone, Debug)]
pub struct RankCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The argument that makes it an agent, which calls [`serve`](super::serve).
    pub agent: &'static str,
    /// How an elastic job deals with lost ranks. None for other jobs.
    pub losses: Option<Losses>,
    /// Where agents connect to, if something else starts them.
    pub place: Option<JobPlace>,
}

/// How an elastic job deals with lost ranks.
#[derive(Clone, Copy, Debug)]
pub struct Losses {
    /// With fewer ranks it saves and ends.
    pub min_ranks: usize,
    /// How many lost ranks are started again.
    pub restarts: u32,
}
