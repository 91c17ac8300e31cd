//! An agent's part in a job that continues without lost ranks: the roster of its host, whose state
//! it exchanges with the launcher, and the end of its ranks when it has lost the launcher. The
//! others then continue without this host, so its ranks save nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::task::{LAUNCHER_MAX, SILENCE_MARGIN, Seating};
use crate::error::{EXIT_PEER_LOST, Error, Result};
use crate::roster::Roster;
use crate::roster::across::PageState;
use crate::waited::Waited;

/// How often an agent asks the launcher for a sign of life.
const ASKED_EVERY: Duration = Duration::from_millis(250);
/// How often to look whether one has come.
const PERIOD: Duration = Duration::from_millis(100);

/// The ranks of a host, seen from its agent.
pub(super) struct Seats {
    pub(super) roster: Arc<Roster>,
    /// For how long this process has run, without the time in which it was stopped.
    now_ms: Arc<AtomicU64>,
    told: PageState,
    asked: Instant,
    /// When the question was asked that the launcher answered last, in milliseconds; until it has
    /// answered one, when it should have.
    answered_ms: Arc<AtomicU64>,
}

impl Seats {
    pub(super) fn new(seating: &Seating) -> Result<Seats> {
        let roster = Roster::of_host(seating.own, &seating.hosts, seating.min_ranks)?;
        let seats = Seats {
            roster: Arc::new(roster),
            now_ms: Arc::default(),
            told: PageState::default(),
            asked: Instant::now(),
            answered_ms: Arc::new(AtomicU64::new(LAUNCHER_MAX.as_millis() as u64)),
        };
        let (roster, answered_ms) = (Arc::clone(&seats.roster), Arc::clone(&seats.answered_ms));
        let (clock, silence_ms) = (
            Arc::clone(&seats.now_ms),
            seating.silence.as_millis() as u64,
        );
        // On another thread, because a connection that has stalled blocks the agent.
        let watch = move || {
            let mut waited = Waited::new();
            loop {
                // Half a second more than that: this process was stopped.
                let now_ms = waited.after(SILENCE_MARGIN / 4).as_millis() as u64;
                clock.store(now_ms, Ordering::Relaxed);
                roster.show_agent();
                let answered_ms = answered_ms.load(Ordering::Relaxed);
                if now_ms > answered_ms.saturating_add(silence_ms) {
                    give_up(&roster)
                }
                std::thread::sleep(PERIOD);
            }
        };
        let thread = std::thread::Builder::new().name("silence".into());
        let thread = thread.spawn(watch);
        thread.map_err(|error| Error::no_thread("silence", &error))?;
        Ok(seats)
    }

    /// The launcher has answered the question that was asked then.
    pub(super) fn is_heard(&self, asked_ms: u64) {
        self.answered_ms.store(asked_ms, Ordering::Relaxed);
    }

    /// What the roster says, if that is new.
    pub(super) fn news(&mut self) -> Option<PageState> {
        let state = self.roster.state();
        let is_new = state != self.told;
        is_new.then(|| self.told.clone_from(&state));
        is_new.then_some(state)
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

/// Ends this host's ranks at once, and this process.
pub(super) fn give_up(roster: &Roster) -> ! {
    roster.end(EXIT_PEER_LOST);
    roster.kill_all();
    std::process::exit(EXIT_PEER_LOST.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_shows_that_it_works_and_tells_what_is_new_once() {
        let seating = Seating {
            hosts: vec![0, 1],
            own: 1,
            min_ranks: 1,
            silence: Duration::from_secs(600),
        };
        let mut seats = Seats::new(&seating).unwrap();
        assert!(seats.news().is_some() && seats.news().is_none());
        seats.roster.take(1, 70);
        assert!(seats.news().is_some() && seats.news().is_none());
        let began = Instant::now();
        for sign in [0, seats.roster.agent() + 1] {
            while seats.roster.agent() <= sign {
                assert!(began.elapsed() < Duration::from_secs(60));
                std::thread::sleep(PERIOD / 10);
            }
        }
    }
}
