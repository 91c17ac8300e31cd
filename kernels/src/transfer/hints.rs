//! Hints: patterns in the ledger that waste time; and the ledger as a table and as JSON.

use std::fmt;

use serde_json::{Value, json};

use super::ledger::{Ledger, Phase, TransferKind, readable_bytes};
use crate::error::{Line, Site};

/// From this count on a line counts as being in a loop.
const LOOP_COUNT_MIN: u64 = 8;

/// A pattern that wastes time. `Display` says what it is, where, how often, and the fix.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Hint {
    /// `ping-pong`, `made only to be moved`, `scalar reads in the step` or `pageable copies in the
    /// step`.
    pub pattern: &'static str,
    /// How often.
    pub count: u64,
    /// The lines of its calls, the first one first, as `src/train.rs:12`.
    pub lines: Vec<String>,
    text: String,
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.pattern, self.text)
    }
}

/// `once`, `2 times` …
fn times(count: u64) -> String {
    match count {
        1 => "once".to_string(),
        _ => format!("{count} times"),
    }
}

impl Ledger {
    /// The patterns that waste time, each with its lines and the fix.
    pub fn hints(&self) -> Vec<Hint> {
        let mut hints = Vec::new();
        for (key, sums) in self.sorted() {
            let (target, at) = (key.target, Line(key.site).to_string());
            let mut hint = |pattern, count, before: Option<Site>, text| {
                let before = before.map(|site| Line(site).to_string());
                let lines = before.into_iter().chain([at.clone()]).collect();
                hints.push(Hint {
                    pattern,
                    count,
                    lines,
                    text,
                });
            };
            if let Some(left_at) = sums.came_by {
                let (left, count) = (Line(left_at), sums.returned_count);
                let text = format!(
                    "data left {target} at {left} and came back to it unchanged at {at}, {}; help: \
                     keep it on {target}",
                    times(count)
                );
                hint("ping-pong", count, Some(left_at), text);
            }
            if let Some(made_at) = sums.made_at {
                let (made, count) = (Line(made_at), sums.made_only_to_move_count);
                let text = format!(
                    "made at {made}, moved to {target} at {at} before anything used it, {}; help: \
                     pass Device::{target:?} to the constructor",
                    times(count)
                );
                hint("made only to be moved", count, Some(made_at), text);
            }
            let in_step = key.phase == Phase::Step;
            let count = sums.count;
            if in_step && key.kind == TransferKind::ScalarRead && count >= LOOP_COUNT_MIN {
                let text = format!(
                    "item() at {at} ran {count} times; on a GPU each one waits for all work before \
                     it; help: read only at log steps"
                );
                hint("scalar reads in the step", count, None, text);
            }
            let count = sums.pageable_count;
            if in_step && count >= LOOP_COUNT_MIN {
                let text = format!(
                    "{count} copies, {}, at {at} from unpinned host memory, which cannot overlap \
                     computing; help: copy from pinned memory",
                    readable_bytes(sums.bytes)
                );
                hint("pageable copies in the step", count, None, text);
            }
        }
        hints
    }

    /// The whole ledger: `{"rows": [...], "crossed": {"count", "bytes"}, "hints": [...]}`.
    pub fn to_json(&self) -> Value {
        let (count, bytes) = self.crossed();
        let rows = self.rows().into_iter().map(|row| {
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
        let hints = self.hints().into_iter().map(|hint| {
            let text = hint.to_string();
            json!({ "pattern": hint.pattern, "count": hint.count, "lines": hint.lines, "text": text })
        });
        let (rows, hints): (Vec<_>, Vec<_>) = (rows.collect(), hints.collect());
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
