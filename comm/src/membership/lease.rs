//! How long agents, and ranks on their hosts, work without a word from the launcher: plain data,
//! without a clock. An agent asks the launcher several times a second, and tells its ranks of each
//! answer. Whoever hears nothing for too long ends, before the launcher counts the host as lost.
//! That counts from the question: when it was asked, the launcher had not heard of it yet.

use std::time::Duration;

use super::decide::silence;
use super::heard::Heard;
use crate::error::EXIT_PEER_LOST;

/// How long a launcher may take to tell an agent what to prepare, and then to answer it once.
pub const LAUNCHER_MAX: Duration = Duration::from_secs(60);

/// The right to work, which a word from the launcher renews. Times are those of the process,
/// without the time in which it was stopped.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    silence: Duration,
    /// When the last word that was heard had been asked for.
    heard: Option<Duration>,
}

impl Lease {
    /// That of an agent. `silence`: for how long it may hear nothing.
    pub fn of_agent(silence: Duration) -> Lease {
        Lease {
            silence,
            heard: None,
        }
    }

    /// The launcher has answered what was asked at this time. Its first order counts as the answer
    /// to what the agent said at 0: the launcher has listened to it since.
    pub fn hears(&mut self, asked: Duration) {
        self.heard = self.heard.max(Some(asked));
    }

    /// How long ago the last word had been asked for.
    pub fn asked_before(&self, now: Duration) -> Duration {
        now.saturating_sub(self.heard.unwrap_or(now))
    }

    /// Whether it has heard nothing for too long.
    pub fn is_over(&self, now: Duration) -> bool {
        now > self.heard.unwrap_or(LAUNCHER_MAX) + self.silence
    }
}

/// What a rank of an elastic job looks at several times a second, whatever else it does.
#[derive(Clone, Copy, Debug)]
pub struct RankWatch {
    silence: Duration,
    /// When it ends if it hears no more; None if the launcher has started this rank.
    until: Option<Duration>,
    /// How often its agent had said that the launcher works.
    signs: u64,
}

impl RankWatch {
    /// From 0 on, in a job with this timeout. `is_of_agent`: an agent has started this rank, and
    /// not the launcher.
    pub fn new(timeout: Duration, is_of_agent: bool) -> RankWatch {
        let silence = silence(timeout);
        RankWatch {
            silence,
            until: is_of_agent.then_some(silence),
            signs: 0,
        }
    }

    /// The exit code with which this process ends at once, if it has to.
    pub fn look(&mut self, heard: &Heard, now: Duration) -> Option<u8> {
        if std::mem::replace(&mut self.signs, heard.signs) != heard.signs {
            self.until = Some(now + self.silence.saturating_sub(heard.asked_before));
        }
        // Nothing else ends a process that has not been taken in, and may be reading its data.
        let ends = heard.job_ends().filter(|_| heard.is_newcomer());
        // Without a word, the others are about to continue without this host.
        let is_over = self.until.is_some_and(|until| now > until);
        ends.or(is_over.then_some(EXIT_PEER_LOST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_has_a_minute_until_its_first_order_and_then_the_silence_of_a_host() {
        let seconds = Duration::from_secs;
        let mut lease = Lease::of_agent(seconds(5));
        assert!(!lease.is_over(seconds(65)) && lease.is_over(seconds(66)));
        lease.hears(Duration::ZERO);
        assert!(!lease.is_over(seconds(5)) && lease.is_over(seconds(6)));
        lease.hears(seconds(4));
        // What was asked before does not take it back.
        lease.hears(seconds(2));
        assert!(!lease.is_over(seconds(9)) && lease.is_over(seconds(10)));
        assert_eq!(lease.asked_before(seconds(7)), seconds(3));
    }
}
