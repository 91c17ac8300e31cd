//! How an agent and the launcher check on each other in an elastic job. An agent that has not heard
//! from the launcher for too long ends its ranks, which save nothing; the others then continue
//! without this host.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ddp_kernels::panics;

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
    /// Questions that are not answered yet, with their time.
    asked: VecDeque<(u64, Instant)>,
    /// When the last question, and the last one that was answered, was asked.
    last: [Instant; 2],
    /// Ends this process when it is over.
    _thread: Background,
}

struct WatchedLease {
    lease: Lease,
    /// For how long this process has run, without the time in which it was stopped.
    now: Duration,
}

fn lock(shared: &Mutex<WatchedLease>) -> MutexGuard<'_, WatchedLease> {
    panics::lock(shared)
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
            asked: VecDeque::new(),
            last: [Instant::now(); 2],
            _thread: thread,
        })
    }

    /// The launcher has answered the question that was asked then. Returns how long ago that was,
    /// with the time in which this process was stopped.
    pub(super) fn is_heard(&mut self, asked_ms: u64) -> Duration {
        let asked = Duration::from_millis(asked_ms);
        lock(&self.shared).lease.hears(asked);
        while let Some((_, at)) = self.asked.pop_front_if(|(ms, _)| *ms <= asked_ms) {
            self.last[1] = at;
        }
        self.last[1].elapsed()
    }

    /// A question for the launcher, if it is time: when it is asked.
    pub(super) fn question(&mut self) -> Option<u64> {
        let is_time = self.last[0].elapsed() >= ASKED_EVERY;
        is_time.then(|| {
            self.last[0] = Instant::now();
            let asked_ms = lock(&self.shared).now.as_millis() as u64;
            self.asked.push_back((asked_ms, self.last[0]));
            asked_ms
        })
    }
}

/// Ends this process, and with it its ranks: the kernel kills them (`Signals::prepare`).
pub(super) fn give_up() -> ! {
    std::process::exit(EXIT_PEER_LOST.into())
}
