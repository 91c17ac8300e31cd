//! How long a rank waits for others: as long as they show signs of progress
//! (`ddp_kernels::heartbeat`). A rank that shows none for the timeout is missing.

use std::time::Duration;

use ddp_kernels::heartbeat::{self, Work};

use crate::launcher;
use crate::say::print_line;
use crate::waited::Waited;

/// Shorter waits are not tracked, and allocate nothing.
const TRACKED_MIN: Duration = Duration::from_millis(200);
/// Grace for a rank that is itself waiting: it knows the culprit and should report first.
const GRACE_OF_WAITING: Duration = Duration::from_secs(1);
/// When a wait is first reported to the user, and how often from then on.
const FIRST_LOGGED: Duration = Duration::from_secs(5);
const LOGGED_EVERY: Duration = Duration::from_secs(60);

/// A rank that is waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(crate) rank: usize,
    /// A number that changes when the rank works.
    pub(crate) own: u64,
    /// A number that changes when it works, or sees that ranks work for which it waits.
    pub(crate) total: u64,
    pub(crate) is_waiting: bool,
    pub(crate) work: Option<Work>,
}

/// One wait.
#[derive(Debug)]
pub(crate) struct Patience {
    waited: Waited,
    /// For how long it has lasted.
    pub(crate) total: Duration,
    /// The last sign of each rank that is waited for, and when it came.
    signs: Vec<(Awaited, Duration)>,
    tells_at: Duration,
}

impl Patience {
    /// A wait that begins now.
    pub(crate) fn new() -> Patience {
        Patience {
            waited: Waited::new(),
            total: Duration::ZERO,
            signs: Vec::new(),
            tells_at: FIRST_LOGGED,
        }
    }

    /// Those of `awaited` that have shown no progress for `limit`. `slept` is the sleep that was
    /// asked for since the last look.
    pub(crate) fn silent(
        &mut self,
        slept: Duration,
        limit: Duration,
        awaited: impl FnOnce() -> Vec<Awaited>,
    ) -> Vec<usize> {
        self.total = self.waited.after(slept);
        if self.total < TRACKED_MIN.min(limit) {
            return Vec::new();
        }
        let began = if self.signs.is_empty() {
            Duration::ZERO
        } else {
            self.total
        };
        let (mut silent, mut has_seen) = (Vec::new(), false);
        let awaited = awaited();
        self.signs
            .retain(|(last, _)| awaited.iter().any(|now| now.rank == last.rank));
        for now in awaited {
            let known = self
                .signs
                .iter()
                .position(|(last, _)| last.rank == now.rank);
            let known = known.unwrap_or_else(|| {
                self.signs.push((now, began));
                self.signs.len() - 1
            });
            let (last, since) = &mut self.signs[known];
            has_seen |= last.own != now.own;
            if last.total != now.total {
                *since = self.total;
            }
            *last = now;
            let grace = if now.is_waiting {
                GRACE_OF_WAITING
            } else {
                Duration::ZERO
            };
            if self.total - *since >= limit.saturating_add(grace) {
                silent.push(now.rank);
            }
        }
        if has_seen {
            // Ranks that wait for this one wait on, too.
            heartbeat::see();
        }
        silent
    }

    /// Whether the user should be told now what is waited for.
    pub(crate) fn is_time_to_tell(&mut self) -> bool {
        let is_time = self.total >= self.tells_at;
        if is_time {
            self.tells_at = self.total + LOGGED_EVERY;
        }
        is_time
    }

    /// Tells the user what this rank, `me`, waits for. `name` gives global ranks.
    pub(crate) fn tell(&self, me: usize, name: impl Fn(usize) -> usize) {
        let of = |(awaited, _): &(Awaited, Duration)| {
            let rank = launcher::job_rank(name(awaited.rank));
            match awaited.work {
                Some(work) => format!("rank {rank}, which {work}"),
                None => format!("rank {rank}"),
            }
        };
        let ranks: Vec<String> = self.signs.iter().map(of).collect();
        let waits = self.total.as_secs();
        let text = format!("waiting for {}: {waits} s so far", ranks.join(", and "));
        if me == 0 {
            tracing::info!("{text}");
        } else {
            // Other ranks log errors only, and rank 0, which is missing, cannot report.
            print_line(&format!("rank {}: {text}\n", launcher::job_rank(me)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn awaited(rank: usize, own: u64, seen: u64) -> Awaited {
        Awaited {
            rank,
            own,
            total: own + seen,
            is_waiting: false,
            work: None,
        }
    }

    /// Looks after each 50 ms at ranks 1 and 2, whose signs `signs` gives. When it gives up, and on
    /// whom.
    fn gives_up(limit_ms: u64, signs: impl Fn(u64) -> [Awaited; 2]) -> Option<(u64, Vec<usize>)> {
        let (mut patience, slice) = (Patience::new(), Duration::from_millis(50));
        (1..1000).map(|look| 50 * look).find_map(|now_ms| {
            patience.waited.pretend(slice);
            let limit = Duration::from_millis(limit_ms);
            let silent = patience.silent(Duration::ZERO, limit, || signs(now_ms).to_vec());
            (!silent.is_empty()).then_some((now_ms, silent))
        })
    }

    #[test]
    fn a_rank_that_shows_progress_is_waited_for_and_a_silent_one_is_named() {
        let close = |got: Option<(u64, Vec<usize>)>, at_ms: u64, ranks: &[usize]| {
            let (now_ms, silent) = got.expect("it gives up");
            assert!((at_ms..at_ms + 100).contains(&now_ms), "{now_ms} ms");
            assert_eq!(silent, ranks);
        };
        // Neither ever shows a sign.
        close(
            gives_up(1000, |_| [awaited(1, 0, 0), awaited(2, 0, 0)]),
            1000,
            &[1, 2],
        );
        // Rank 1 works for 20 s, and rank 2 has stopped at 5 s: it is not hidden by the other.
        let signs = |now_ms: u64| {
            let two = now_ms.min(5000);
            [awaited(1, now_ms.min(20_000), 0), awaited(2, two, 0)]
        };
        close(gives_up(1000, signs), 6000, &[2]);
        // A rank that waits for one that works counts as working.
        let signs = |now_ms: u64| [awaited(1, 0, now_ms.min(3000)), awaited(2, now_ms, 0)];
        close(gives_up(1000, signs), 4000, &[1]);
        // Of a rank that waits itself, the rank that it waits for is named, if it says so in time.
        let waits = |now_ms: u64| {
            let rank = awaited(1, 0, 0);
            [
                Awaited {
                    is_waiting: true,
                    ..rank
                },
                awaited(2, now_ms, 0),
            ]
        };
        close(gives_up(1000, waits), 2000, &[1]);
    }
}
