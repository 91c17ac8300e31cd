//! How long agents, and ranks on their hosts, work without a word from the launcher: plain data,
//! without a clock. An agent asks the launcher several times a second, and tells its ranks of each
//! answer. Whoever hears nothing for too long ends, before the launcher counts the host as lost.
//! That time begins with the question, since the launcher has heard nothing later for sure.

use std::time::Duration;

use super::client::Heard;
use super::decide::silence;
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
    /// For how long it had been stopped then.
    stopped: Duration,
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
            stopped: Duration::ZERO,
        }
    }

    /// The exit code with which this process ends at once, if it has to. It has run for `now`, and
    /// `stopped` beside that.
    pub fn look(&mut self, heard: &Heard, now: Duration, stopped: Duration) -> Option<u8> {
        if std::mem::replace(&mut self.signs, heard.signs) != heard.signs {
            // The agent counts the time in which it was stopped. If this process was stopped, too,
            // the whole job may have been suspended.
            let own = stopped.saturating_sub(std::mem::replace(&mut self.stopped, stopped));
            let asked_before = heard.asked_before.saturating_sub(own);
            let until = now + self.silence.saturating_sub(asked_before);
            // Also of questions that were asked before such a time.
            self.until = self.until.max(Some(until));
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
    }

    /// After how many seconds a rank ends that has heard one sign, 1 s after its start, of a
    /// question that was asked so long before, and has been stopped for so long.
    fn ends_after(asked_before: u64, stopped: u64) -> u64 {
        let seconds = Duration::from_secs;
        let mut heard = Heard::default();
        let mut watch = RankWatch::new(seconds(5), true);
        let mut look = |heard: &Heard, now| watch.look(heard, seconds(now), seconds(stopped));
        assert_eq!(look(&heard, 0), None);
        (heard.signs, heard.asked_before) = (1, seconds(asked_before));
        (1..)
            .find(|&now| look(&heard, now) == Some(EXIT_PEER_LOST))
            .expect("it ends")
    }

    #[test]
    fn a_rank_counts_from_the_question_with_the_time_in_which_its_agent_was_stopped() {
        assert_eq!(ends_after(0, 0), 7);
        // As without the sign: 5 s from the start.
        assert_eq!([ends_after(2, 0), ends_after(60, 0)], [6, 6]);
        // The whole job was suspended.
        assert_eq!(ends_after(600, 600), 7);
    }
}
