//! How an agent and the launcher check on each other in an elastic job. An agent that has not heard
//! from the launcher for too long ends its ranks, which save nothing; the others then continue
//! without this host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::task::LAUNCHER_MAX;
use crate::error::{EXIT_PEER_LOST, Error, Result};
use crate::membership::decide::SILENCE_MARGIN;
use crate::waited::Waited;

/// How often an agent asks the launcher for a sign of life.
const ASKED_EVERY: Duration = Duration::from_millis(250);
/// How often to look whether one has come.
const PERIOD: Duration = Duration::from_millis(100);

/// An agent's right to have ranks.
pub(super) struct Lease {
    /// For how long this process has run, without the time in which it was stopped.
    now_ms: Arc<AtomicU64>,
    asked: Instant,
    /// When the question was asked that the launcher answered last, in milliseconds; until it has
    /// answered one, when it should have.
    answered_ms: Arc<AtomicU64>,
}

impl Lease {
    pub(super) fn new(silence: Duration) -> Result<Lease> {
        let lease = Lease {
            now_ms: Arc::default(),
            asked: Instant::now(),
            answered_ms: Arc::new(AtomicU64::new(LAUNCHER_MAX.as_millis() as u64)),
        };
        let (clock, answered_ms) = (Arc::clone(&lease.now_ms), Arc::clone(&lease.answered_ms));
        // On another thread, because a connection that has stalled blocks the agent.
        let watch = move || {
            let mut waited = Waited::new();
            loop {
                // Half a second more than that: this process was stopped.
                let now_ms = waited.after(SILENCE_MARGIN / 4).as_millis() as u64;
                clock.store(now_ms, Ordering::Relaxed);
                let answered_ms = answered_ms.load(Ordering::Relaxed);
                if now_ms > answered_ms.saturating_add(silence.as_millis() as u64) {
                    give_up()
                }
                std::thread::sleep(PERIOD);
            }
        };
        let thread = std::thread::Builder::new().name("silence".into());
        let thread = thread.spawn(watch);
        thread.map_err(|error| Error::no_thread("silence", &error))?;
        Ok(lease)
    }

    /// The launcher has answered the question that was asked then.
    pub(super) fn is_heard(&self, asked_ms: u64) {
        self.answered_ms.store(asked_ms, Ordering::Relaxed);
    }

    /// A question for the launcher, if it is time: when it is asked.
    pub(super) fn question(&mut self) -> Option<u64> {
        let is_time = self.asked.elapsed() >= ASKED_EVERY;
        is_time.then(|| {
            self.asked = Instant::now();
            self.now_ms.load(Ordering::Relaxed)
        })
    }
}

/// Ends this process, and with it its ranks: the kernel kills them (`Signals::prepare`).
pub(super) fn give_up() -> ! {
    std::process::exit(EXIT_PEER_LOST.into())
}
