//! Hints: patterns in the ledger that waste time; and the ledger as a table and as JSON.

use std::fmt;

use serde_json::{Value, json};

use super::ledger::{Ledger, Phase, TransferKind, readable_bytes};
use crate::Device;
use crate::error::{Line, Site};

/// From this count on a line counts as being in a loop.
const LOOP_COUNT_MIN: u64 = 8;

/// A pattern that wastes time, with its lines and the fix.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Hint {
    /// Data left a device and came back to it unchanged.
    PingPong {
        /// The device it left and returned to.
        home: Device,
        /// The line that moved it away.
        left_at: Site,
        /// The line that moved it back.
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
        /// The device it went to.
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
    /// Copies from unpinned host memory in the training step: they cannot overlap computing.
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
            Hint::PingPong {
                left_at,
                returned_at,
                count,
                ..
            } => ("ping-pong", count, vec![left_at, returned_at]),
            Hint::MadeOnlyToMove {
                made_at,
                moved_at,
                count,
                ..
            } => ("made only to be moved", count, vec![made_at, moved_at]),
            Hint::ScalarReadsInStep { at, count } => ("scalar reads in the step", count, vec![at]),
            Hint::PageableInStep { at, count, .. } => {
                ("pageable copies in the step", count, vec![at])
            }
        };
        let lines: Vec<String> = lines.iter().map(|site| Line(site).to_string()).collect();
        json!({ "pattern": pattern, "count": count, "lines": lines, "text": self.to_string() })
    }
}

/// `once`, `2 times` …
fn times(count: u64) -> String {
    match count {
        1 => "once".to_string(),
        _ => format!("{count} times"),
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hint::PingPong {
                home,
                left_at,
                returned_at,
                count,
            } => {
                let (left, returned, times) = (Line(left_at), Line(returned_at), times(*count));
                write!(
                    f,
                    "ping-pong: data left {home} at {left} and came back to it unchanged at \
                     {returned}, {times}; help: keep it on {home}"
                )
            }
            Hint::MadeOnlyToMove {
                made_at,
                moved_at,
                target,
                count,
            } => {
                let (made, moved, times) = (Line(made_at), Line(moved_at), times(*count));
                write!(
                    f,
                    "made only to be moved: made at {made}, moved to {target} at {moved} before \
                     anything used it, {times}; help: pass Device::{target:?} to the constructor"
                )
            }
            Hint::ScalarReadsInStep { at, count } => write!(
                f,
                "scalar reads in the step: item() at {} ran {count} times; on a GPU each one waits \
                 for all work before it; help: read only at log steps",
                Line(at)
            ),
            Hint::PageableInStep { at, count, bytes } => write!(
                f,
                "pageable copies in the step: {count} copies, {}, at {} from unpinned host memory, \
                 which cannot overlap computing; help: copy from pinned memory",
                readable_bytes(*bytes),
                Line(at)
            ),
        }
    }
}

impl Ledger {
    /// The patterns that waste time, each with its lines and the fix.
    pub fn hints(&self) -> Vec<Hint> {
        let mut hints = Vec::new();
        for (key, sums) in self.sorted() {
            if let Some(left_at) = sums.came_by {
                hints.push(Hint::PingPong {
                    home: key.target,
                    left_at,
                    returned_at: key.site,
                    count: sums.returned_count,
                });
            }
            if let Some(made_at) = sums.made_at {
                hints.push(Hint::MadeOnlyToMove {
                    made_at,
                    moved_at: key.site,
                    target: key.target,
                    count: sums.made_only_to_move_count,
                });
            }
            let at = key.site;
            let in_step = key.phase == Phase::Step;
            if in_step && key.kind == TransferKind::ScalarRead && sums.count >= LOOP_COUNT_MIN {
                let count = sums.count;
                hints.push(Hint::ScalarReadsInStep { at, count });
            }
            if in_step && sums.pageable_count >= LOOP_COUNT_MIN {
                let (count, bytes) = (sums.pageable_count, sums.bytes);
                hints.push(Hint::PageableInStep { at, count, bytes });
            }
        }
        hints
    }

    /// The whole ledger: `{"rows": [...], "crossed": {"count", "bytes"}, "hints": [...]}`.
    pub fn to_json(&self) -> Value {
        let (count, bytes) = self.crossed();
        let rows = self.rows();
        let rows = rows.iter().map(|row| {
            json!({
                "phase": row.phase.to_string(),
                "kind": row.kind.to_string(),
                "from": row.source.to_string(),
                "to": row.target_name(),
                "count": row.count,
                "bytes": row.bytes,
                "implicit": row.implicit,
                "announced": row.announced,
                "at": row.place().to_string(),
            })
        });
        let rows: Vec<Value> = rows.collect();
        let hints: Vec<Value> = self.hints().iter().map(Hint::to_json).collect();
        json!({ "rows": rows, "crossed": { "count": count, "bytes": bytes }, "hints": hints })
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        if rows.is_empty() {
            return writeln!(f, "no transfers");
        }
        writeln!(
            f,
            "{:<11}{:<18}{:<9}{:<9}{:>9}{:>12}  line",
            "phase", "kind", "from", "to", "count", "bytes"
        )?;
        for row in &rows {
            let note = match row.announced {
                _ if row.implicit => " (moved by policy)".to_string(),
                Some(reason) => format!(" (announced: {reason})"),
                None => String::new(),
            };
            writeln!(
                f,
                "{:<11}{:<18}{:<9}{:<9}{:>9}{:>12}  {}{note}",
                row.phase,
                row.kind,
                row.source,
                row.target_name(),
                row.count,
                readable_bytes(row.bytes),
                row.place()
            )?;
        }
        for hint in self.hints() {
            writeln!(f, "hint: {hint}")?;
        }
        Ok(())
    }
}
