//! News between hosts. A rank that fails tells every rank of the other hosts why; each rank's watch
//! listens. The first rank of each host also tells the other hosts' first ranks that its ranks are
//! working.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{Cause, EXIT_PEER_LOST};
use crate::transport::messages::{Comm, MESSAGE_BYTES_MAX, Request};
use crate::transport::shared::Board;
use crate::waited::wait_until;

/// How long the reason why a rank is gone may take to come on another way; the first host then
/// reports it before others do.
const LOST_GRACE: Duration = Duration::from_millis(500);
const TAG: u8 = 1;
const TAG_WORKS: u8 = 2;
/// How often a host tells that it works.
const SENT_EVERY: Duration = Duration::from_secs(1);

/// The connection to the ranks of other hosts.
#[derive(Debug)]
pub(crate) struct Alerts {
    pub(crate) comm: Comm,
    pub(crate) others: Vec<usize>,
    /// This host reports if all hosts fail at the same time.
    pub(crate) is_on_first_host: bool,
    /// This host's number.
    pub(crate) host: usize,
    /// The first rank of each other host; empty unless this is the first rank of its host.
    pub(crate) leaders: Vec<usize>,
}

/// What was told of this host's work.
pub(crate) struct WorkNews {
    beats: u64,
    at: Instant,
    /// Messages under way, each with its receiver.
    under_way: Vec<(usize, Request<'static>)>,
}

impl Default for WorkNews {
    fn default() -> WorkNews {
        WorkNews {
            beats: 0,
            at: Instant::now(),
            under_way: Vec::new(),
        }
    }
}

impl Alerts {
    /// Tells the other hosts why the job ends; gives up after `bound`.
    pub(crate) fn send(&self, cause: &Cause, bound: Duration) {
        let bytes = encode(cause);
        let send = |&rank: &usize| self.comm.tell(&bytes, rank, TAG).ok();
        let mut under_way: Vec<Request<'_>> = self.others.iter().filter_map(send).collect();
        // What is not sent by then is not reported.
        _ = wait_until(bound, || {
            under_way.retain_mut(|request| matches!(request.is_done(), Ok(false)));
            Ok(under_way.is_empty())
        });
    }

    /// Why the job fails, if a rank of another host is gone and gave no reason.
    pub(crate) fn lost(&self) -> Option<Cause> {
        let later = if self.is_on_first_host {
            Duration::ZERO
        } else {
            LOST_GRACE
        };
        let (rank, host) = self.comm.lost(LOST_GRACE + later)?;
        let text = "the connection to it was lost: its process was killed, or its host or network \
            failed; help: look at that host's log (dmesg)";
        Some(Cause {
            rank,
            host,
            exit_code: EXIT_PEER_LOST,
            text: text.into(),
        })
    }

    /// Whether ending this process must end MPI.
    #[cfg(feature = "mpi")]
    pub(crate) fn is_of_mpi(&self) -> bool {
        matches!(self.comm, Comm::Mpi(_))
    }

    /// Tells the other hosts if ranks of this host have worked.
    pub(crate) fn tell_of_work(&self, news: &mut WorkNews, board: &Board) {
        if self.leaders.is_empty() || news.at.elapsed() < SENT_EVERY {
            return;
        }
        news.at = Instant::now();
        let before = std::mem::replace(&mut news.beats, board.all_beats());
        let under_way = &mut news.under_way;
        under_way.retain_mut(|(_, request)| matches!(request.is_done(), Ok(false)));
        if before == news.beats {
            return;
        }
        for &leader in &self.leaders {
            if under_way.iter().all(|(receiver, _)| *receiver != leader) {
                let bytes = self.host.to_le_bytes();
                let sent = self.comm.tell(&bytes, leader, TAG_WORKS).ok();
                under_way.extend(sent.map(|request| (leader, request)));
            }
        }
    }

    /// Puts on the board which other hosts work, and a cause from another host. One thread a rank
    /// listens.
    pub(crate) fn listen(&self, board: &Board) {
        while let Ok(Some((from, length))) = self.comm.arrived(TAG_WORKS) {
            let Some(bytes) = self.receive(length, from, TAG_WORKS) else {
                break;
            };
            if let Ok(host) = bytes.try_into() {
                let host = usize::from_le_bytes(host);
                board.host_beats(host).fetch_add(1, Ordering::Relaxed);
            }
        }
        let Ok(Some((from, length))) = self.comm.arrived(TAG) else {
            return;
        };
        let bytes = self.receive(length, from, TAG);
        if let Some(cause) = bytes.and_then(|bytes| decode(&bytes)) {
            board.fail(&cause);
        }
    }

    /// A message that has come.
    fn receive(&self, length: usize, from: usize, tag: u8) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length.min(MESSAGE_BYTES_MAX)];
        let mut request = self.comm.receive(&mut bytes, from, tag).ok()?;
        let has_come = matches!(request.is_done_within(Duration::from_secs(1)), Ok(true));
        drop(request);
        has_come.then_some(bytes)
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
