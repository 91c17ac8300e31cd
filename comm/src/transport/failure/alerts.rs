//! News between hosts. A rank that fails tells every rank of the other hosts why; each rank's watch
//! listens. The first rank of each host also tells the other hosts' first ranks that its ranks are
//! working.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{Cause, EXIT_PEER_LOST};
use crate::transport::placement::Placement;
use crate::transport::shared::Board;
use crate::transport::tcp::{Letter, MeshChannel};
use crate::waited::wait_until;

/// How long the reason why a rank is gone may take to come on another way; the first host then
/// reports it before others do.
const LOST_GRACE: Duration = Duration::from_millis(500);
const TAG: u32 = 1;
const TAG_WORKS: u32 = 2;
/// How often a host tells that it works.
const SENT_EVERY: Duration = Duration::from_secs(1);

/// The connection to the ranks of other hosts.
#[derive(Debug)]
pub(crate) struct Alerts {
    pub(crate) channel: MeshChannel,
    pub(crate) placement: Placement,
}

/// What was told of this host's work, and when.
pub(crate) struct WorkNews {
    beats: u64,
    at: Instant,
}

impl Default for WorkNews {
    fn default() -> WorkNews {
        WorkNews {
            beats: 0,
            at: Instant::now(),
        }
    }
}

impl Alerts {
    /// This host reports if all hosts fail at the same time.
    pub(crate) fn is_on_first_host(&self) -> bool {
        self.placement.host == 0
    }

    /// Tells the other hosts why the job ends; gives up after `bound`.
    pub(crate) fn send(&self, cause: &Cause, bound: Duration) {
        let bytes = encode(cause);
        let send = |&rank: &usize| self.channel.tell(&bytes, rank, TAG);
        let mut under_way: Vec<Letter<'_>> = self.placement.elsewhere().iter().map(send).collect();
        // What is not sent by then is not reported.
        _ = wait_until(bound, || {
            under_way.retain_mut(|letter| matches!(letter.is_done(), Ok(false)));
            Ok(under_way.is_empty())
        });
    }

    /// Why the job fails, if a rank of another host is gone and gave no reason.
    pub(crate) fn lost(&self) -> Option<Cause> {
        let later = if self.is_on_first_host() {
            Duration::ZERO
        } else {
            LOST_GRACE
        };
        let (rank, host) = self.channel.lost(LOST_GRACE + later)?;
        let text = "the connection to it was lost: its process was killed, or its host or network \
            failed; help: look at that host's log (dmesg)";
        Some(Cause {
            rank,
            host,
            exit_code: EXIT_PEER_LOST,
            text: text.into(),
        })
    }

    /// The first rank of this host tells those of the others if its ranks have worked.
    pub(crate) fn tell_of_work(&self, news: &mut WorkNews, board: &Board) {
        if news.at.elapsed() < SENT_EVERY {
            return;
        }
        news.at = Instant::now();
        let before = std::mem::replace(&mut news.beats, board.all_beats());
        let leaders = self.placement.other_leaders().into_iter();
        for leader in leaders.filter(|_| before != news.beats) {
            let bytes = self.placement.host.to_le_bytes();
            drop(self.channel.tell(&bytes, leader, TAG_WORKS));
        }
    }

    /// Puts on the board which other hosts work, and a cause from another host. One thread a rank
    /// listens.
    pub(crate) fn listen(&self, board: &Board) {
        while let Some(bytes) = self.channel.take_any(TAG_WORKS) {
            if let Ok(host) = bytes.try_into() {
                let host = usize::from_le_bytes(host);
                board.host_beats(host).fetch_add(1, Ordering::Relaxed);
            }
        }
        let cause = self.channel.take_any(TAG);
        if let Some(cause) = cause.and_then(|bytes| decode(&bytes)) {
            board.fail(&cause);
        }
    }
}

fn encode(cause: &Cause) -> Vec<u8> {
    serde_json::to_vec(cause).expect("numbers and texts are JSON")
}

fn decode(bytes: &[u8]) -> Option<Cause> {
    serde_json::from_slice(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_survives_encoding() {
        let cause = Cause {
            rank: 3,
            host: "nöde".into(),
            exit_code: 77,
            text: "a \"b\"\nc".into(),
        };
        assert_eq!(decode(&encode(&cause)), Some(cause));
        assert_eq!(decode(b"[1, 2"), None);
        assert_eq!(decode(b"[1, \"x\", 300, \"y\"]"), None);
    }
}
