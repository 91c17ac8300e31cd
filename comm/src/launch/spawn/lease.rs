//! How an agent and the launcher check on each other in an elastic job. An agent that has not heard
//! from the launcher for too long ends its ranks, which save nothing; the others then continue
//! without this host.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::background::Background;
use crate::error::{EXIT_PEER_LOST, Result};
use crate::membership::decide::SILENCE_MARGIN;
use crate::membership::lease::Lease;
use crate::waited::Waited;

/// How often an agent asks the launcher for a sign of life.
const ASKED_EVERY: Duration = Duration::from_millis(250);
/// How often to look whether one has come.
const PERIOD: Duration = Duration::from_millis(100);

/// An agent's right to have ranks.
pub(super) struct AgentLease {
    shared: Arc<Mutex<WatchedLease>>,
    asked: Instant,
    /// Ends this process when it is over.
    _thread: Background,
}

struct WatchedLease {
    lease: Lease,
    /// For how long this process has run, without the time in which it was stopped.
    now: Duration,
}

fn lock(shared: &Mutex<WatchedLease>) -> MutexGuard<'_, WatchedLease> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AgentLease {
    pub(super) fn new(silence: Duration) -> Result<AgentLease> {
        let (lease, now) = (Lease::of_agent(silence), Duration::ZERO);
        let shared = Arc::new(Mutex::new(WatchedLease { lease, now }));
        let watched = Arc::clone(&shared);
        // On another thread, because a connection that has stalled blocks the agent.
        let thread = Background::start("silence", move |cancelled| {
            let mut waited = Waited::new();
            while !cancelled.within(PERIOD) {
                let mut it = lock(&watched);
                // Half a second more than that: this process was stopped.
                it.now = waited.after(SILENCE_MARGIN / 4);
                if it.lease.is_over(it.now) {
                    give_up()
                }
            }
        })?;
        Ok(AgentLease {
            shared,
            asked: Instant::now(),
            _thread: thread,
        })
    }

    /// The launcher has answered the question that was asked then. Returns how long ago the last
    /// of those was asked.
    pub(super) fn is_heard(&self, asked_ms: u64) -> Duration {
        let mut it = lock(&self.shared);
        it.lease.hears(Duration::from_millis(asked_ms));
        it.lease.asked_before(it.now)
    }

    /// A question for the launcher, if it is time: when it is asked.
    pub(super) fn question(&mut self) -> Option<u64> {
        let is_time = self.asked.elapsed() >= ASKED_EVERY;
        is_time.then(|| {
            self.asked = Instant::now();
            lock(&self.shared).now.as_millis() as u64
        })
    }
}

/// Ends this process, and with it its ranks: the kernel kills them (`Signals::prepare`).
pub(super) fn give_up() -> ! {
    std::process::exit(EXIT_PEER_LOST.into())
}
