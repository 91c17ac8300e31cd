//! Patterns in the ledger that cost time for nothing, found from its sums alone.

use std::fmt;

use serde_json::{Value, json};

use super::ledger::{Key, Kind, Sums};
use super::policy::Phase;
use crate::Device;
use crate::error::{Place, Site, human_bytes};

/// From how many times on a line counts as being in a loop.
const LOOP_COUNT_MIN: u64 = 8;

/// A pattern, with its lines and the way out.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Hint {
    /// Data left a device and came back to it unchanged.
    PingPong {
        /// The device it left and returned to.
        home: Device,
        /// The line by which it left.
        left_at: Site,
        /// The line by which it returned.
        returned_at: Site,
        /// How often.
        count: u64,
    },
    /// A tensor was made on one device and moved before anything used it.
    MadeOnlyToMove {
        /// The line that made it.
        made_at: Site,
        /// The line that moved it.
        moved_at: Site,
        /// Where it went.
        target: Device,
        /// How often.
        count: u64,
    },
    /// `item` inside the training step.
    ScalarReadsInStep {
        /// The line.
        at: Site,
        /// How often.
        count: u64,
    },
    /// Copies from ordinary host memory in a hot loop: they cannot overlap computing.
    PageableInStep {
        /// The line.
        at: Site,
        /// How often.
        count: u64,
        /// Bytes in all.
        bytes: u64,
    },
}

impl Hint {
    /// The hint as an object: `pattern`, `count`, `lines`, `text`.
    pub fn to_json(&self) -> Value {
        let (pattern, count, lines) = match self {
            Hint::PingPong { left_at, returned_at, count, .. } => ("ping-pong", count, vec![left_at, returned_at]),
            Hint::MadeOnlyToMove { made_at, moved_at, count, .. } => {
                ("made only to be moved", count, vec![made_at, moved_at])
            }
            Hint::ScalarReadsInStep { at, count } => ("scalar reads in the step", count, vec![at]),
            Hint::PageableInStep { at, count, .. } => ("pageable copies in the step", count, vec![at]),
        };
        let lines: Vec<String> = lines.into_iter().map(|site| Place(site).to_string()).collect();
        json!({ "pattern": pattern, "count": count, "lines": lines, "text": self.to_string() })
    }
}

/// `once`, `2 times` …
struct Times(u64);

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 1 { f.write_str("once") } else { write!(f, "{} times", self.0) }
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hint::PingPong { home, left_at, returned_at, count } => write!(
                f,
                "ping-pong: data left {home} at {} and came back to it unchanged at {}, {}. Keep it on {home}.",
                Place(left_at),
                Place(returned_at),
                Times(*count)
            ),
            Hint::MadeOnlyToMove { made_at, moved_at, target, count } => write!(
                f,
                "made only to be moved: made at {}, moved to {target} at {} before anything used it, {}. \
                 Make it there: pass Device::{target:?} to the constructor.",
                Place(made_at),
                Place(moved_at),
                Times(*count)
            ),
            Hint::ScalarReadsInStep { at, count } => write!(
                f,
                "scalar reads in the step: item() at {} ran {count} times; on a GPU each one waits for everything \
                 before it. Read at log steps alone.",
                Place(at)
            ),
            Hint::PageableInStep { at, count, bytes } => write!(
                f,
                "pageable copies in the step: {count} copies, {}, at {} from ordinary host memory, which cannot \
                 overlap computing. Copy from pinned memory.",
                human_bytes(usize::try_from(*bytes).unwrap_or(usize::MAX)),
                Place(at)
            ),
        }
    }
}

/// Finds the patterns in a sorted ledger.
pub(crate) fn find(rows: &[(Key, Sums)]) -> Vec<Hint> {
    let mut hints = Vec::new();
    for (key, sums) in rows {
        if let Some(left_at) = sums.came_by {
            hints.push(Hint::PingPong { home: key.target, left_at, returned_at: key.site, count: sums.returned_count });
        }
        if let Some(made_at) = sums.made_at {
            hints.push(Hint::MadeOnlyToMove {
                made_at,
                moved_at: key.site,
                target: key.target,
                count: sums.made_only_to_move_count,
            });
        }
        let in_step = key.phase == Phase::Step;
        if in_step && key.kind == Kind::ScalarRead && sums.count >= LOOP_COUNT_MIN {
            hints.push(Hint::ScalarReadsInStep { at: key.site, count: sums.count });
        }
        if in_step && sums.pageable_count >= LOOP_COUNT_MIN {
            hints.push(Hint::PageableInStep { at: key.site, count: sums.pageable_count, bytes: sums.bytes });
        }
    }
    hints
}
