//! The audit as text: a table of at most 20 lines. The record has everything.

use std::collections::BTreeMap;
use std::fmt;

use ddp_kernels::transfer::{TransferKind, readable_bytes};

use super::ledger::{Amount, KINDS, OTHER_PHASES};
use super::{Audit, Difference, PerStep, RankSums, RankedHint};

/// The most lines of each kind. Ranks with the same amounts are one line.
const RANK_LINES_MAX: usize = 6;
const DIFFERENCES_MAX: usize = 4;
const HINTS_MAX: usize = 4;
/// The most pieces of a list in a line.
const PIECES_MAX: usize = 4;
/// Blanks between columns.
const GAP: usize = 2;

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = if self.ranks.len() == 1 {
            self.of_one()
        } else {
            self.of_several()
        };
        f.write_str(&lines.join("\n"))
    }
}

impl Audit {
    /// Whether there is more to say than that one process on the CPU moved nothing.
    pub(crate) fn is_worth_a_line(&self) -> bool {
        let is_alone = |rank: &RankSums| {
            let is_on_cpu = rank.devices.iter().all(|device| device == "cpu");
            is_on_cpu && rank.per_step.is_empty()
        };
        self.ranks.len() > 1 || !self.ranks.iter().all(is_alone)
    }

    fn of_one(&self) -> Vec<String> {
        let steps = self.steps_text();
        let own = &self.ranks[0];
        let parts: Vec<String> = kinds_of(&own.per_step)
            .map(|(kind, amount)| part(kind, &cell(kind, *amount)))
            .collect();
        let title = if parts.is_empty() {
            format!("placement: nothing crossed between devices in {steps}")
        } else {
            format!("placement, per step, mean of {steps}: {}", list(&parts))
        };
        let mut lines = vec![title];
        lines.extend(self.beside_steps());
        lines.extend(self.shown_hints());
        lines
    }

    fn of_several(&self) -> Vec<String> {
        let columns: Vec<TransferKind> = KINDS
            .into_iter()
            .filter(|kind| self.is_in_steps(*kind))
            .collect();
        let mut lines = Vec::new();
        if columns.is_empty() {
            lines.push(format!(
                "placement: no rank moved anything in {}",
                self.steps_text()
            ));
        } else {
            lines.push(format!(
                "placement, per rank and step, mean of {}:",
                self.steps_text()
            ));
            lines.extend(self.table(&columns));
        }
        lines.extend(self.beside_steps());
        if self.differences.is_empty() && !columns.is_empty() {
            lines.push("  no differences between ranks in a step".to_string());
        }
        let shown = self
            .differences
            .iter()
            .map(|difference| format!("  difference: {}", self.difference_text(difference)));
        lines.extend(limited(shown.collect(), DIFFERENCES_MAX, "differences"));
        lines.extend(self.shown_hints());
        lines
    }

    /// `785 steps`, `785 steps on simulated GPUs`
    fn steps_text(&self) -> String {
        let on = if self.simulated {
            " on simulated GPUs"
        } else {
            ""
        };
        format!("{}{on}", plural(self.steps, "step"))
    }

    fn is_in_steps(&self, kind: TransferKind) -> bool {
        self.ranks
            .iter()
            .any(|rank| rank.per_step.contains_key(&kind.to_string()))
    }

    /// Headings, and a line for each set of ranks that move the same.
    fn table(&self, columns: &[TransferKind]) -> Vec<String> {
        let mut alike: Vec<(Vec<&RankSums>, Vec<String>)> = Vec::new();
        for rank in &self.ranks {
            let none = PerStep {
                count: 0.0,
                bytes: 0.0,
            };
            let amount = |kind: &TransferKind| {
                rank.per_step
                    .get(&kind.to_string())
                    .copied()
                    .unwrap_or(none)
            };
            let cells: Vec<String> = columns
                .iter()
                .map(|kind| cell(*kind, amount(kind)))
                .collect();
            match alike.iter_mut().find(|(_, known)| *known == cells) {
                Some((ranks, _)) => ranks.push(rank),
                None => alike.push((vec![rank], cells)),
            }
        }
        let ranks_left: usize = alike
            .iter()
            .skip(RANK_LINES_MAX)
            .map(|(ranks, _)| ranks.len())
            .sum();
        let mut rows = vec![["rank".to_string(), "on".to_string()].to_vec()];
        rows[0].extend(columns.iter().map(TransferKind::to_string));
        for (ranks, cells) in alike.into_iter().take(RANK_LINES_MAX) {
            let numbers: Vec<usize> = ranks.iter().map(|rank| rank.rank).collect();
            rows.push([vec![pieces(&numbers), devices(&ranks)], cells].concat());
        }
        let mut lines = aligned(&rows);
        if ranks_left > 0 {
            lines.push(format!(
                "  and {}, in the record",
                plural(ranks_left as u64, "rank")
            ));
        }
        lines
    }

    /// What all ranks moved in other phases, if anything.
    fn beside_steps(&self) -> Option<String> {
        let of_phase = |phase: String| {
            let mut sums: BTreeMap<String, Amount> = BTreeMap::new();
            let kinds = self
                .ranks
                .iter()
                .filter_map(|rank| rank.phases.get(&phase))
                .flatten();
            kinds.for_each(|(kind, amount)| sums.entry(kind.clone()).or_default().add(*amount));
            let whole = |(kind, amount): (TransferKind, &Amount)| {
                let amount = PerStep {
                    count: amount.count as f64,
                    bytes: amount.bytes as f64,
                };
                part(kind, &cell(kind, amount))
            };
            let parts: Vec<String> = kinds_of(&sums).map(whole).collect();
            (!parts.is_empty()).then(|| format!("{phase} {}", list(&parts)))
        };
        let phases: Vec<String> = OTHER_PHASES
            .iter()
            .filter_map(|phase| of_phase(phase.to_string()))
            .collect();
        let over = if self.ranks.len() == 1 {
            "the run"
        } else {
            "the run and all ranks"
        };
        (!phases.is_empty()).then(|| format!("  outside steps, over {over}: {}", phases.join("; ")))
    }

    /// `device to host at src/step.rs:12: rank 1 4.0 KiB a step, ranks 0, 2 and 3 none`
    fn difference_text(&self, difference: &Difference) -> String {
        let in_bytes = difference.differs_in_bytes();
        let amount_text = |amount: &Amount| {
            let a_step = |of_run: u64| of_run as f64 / self.steps.max(1) as f64;
            match amount.count {
                0 => "none".to_string(),
                _ if in_bytes => format!("{} a step", readable(a_step(amount.bytes))),
                _ => format!("{} times a step", tenths(a_step(amount.count))),
            }
        };
        let mut alike: Vec<(String, Amount, Vec<usize>)> = Vec::new();
        for (rank, amount) in difference.amounts.iter().enumerate() {
            let Some(amount) = amount else { continue };
            let text = amount_text(amount);
            match alike.iter_mut().find(|(known, ..)| *known == text) {
                Some((.., ranks)) => ranks.push(rank),
                None => alike.push((text, *amount, vec![rank])),
            }
        }
        alike.sort_by_key(|(_, amount, _)| std::cmp::Reverse((amount.bytes, amount.count)));
        let middle = if alike.len() > 3 {
            alike
                .drain(1..alike.len() - 1)
                .map(|(.., ranks)| ranks.len())
                .sum()
        } else {
            0
        };
        let mut parts: Vec<String> = alike
            .iter()
            .map(|(text, _, ranks)| format!("{} {text}", ranks_text(ranks)))
            .collect();
        if middle > 0 {
            parts.insert(1, format!("{} between", plural(middle as u64, "rank")));
        }
        let moved = if difference.implicit {
            ", moved by policy"
        } else {
            ""
        };
        format!(
            "{} at {}{moved}: {}",
            difference.kind,
            difference.at,
            parts.join(", ")
        )
    }

    fn shown_hints(&self) -> Vec<String> {
        let line = |RankedHint { ranks, text, .. }: &RankedHint| match self.ranks.len() {
            1 => format!("  hint: {text}"),
            _ => format!("  hint, {}: {text}", ranks_text(ranks)),
        };
        limited(self.hints.iter().map(line).collect(), HINTS_MAX, "hints")
    }
}

impl Difference {
    fn differs_in_bytes(&self) -> bool {
        let mut known = self.amounts.iter().flatten().map(|amount| amount.bytes);
        let first = known.next();
        known.any(|bytes| Some(bytes) != first)
    }
}

/// The kinds with an amount, in the order in which they are printed.
fn kinds_of<T>(amounts: &BTreeMap<String, T>) -> impl Iterator<Item = (TransferKind, &T)> {
    KINDS
        .into_iter()
        .filter_map(|kind| Some((kind, amounts.get(&kind.to_string())?)))
}

/// Bytes, or the number of scalar reads, which are slow however little they read.
fn cell(kind: TransferKind, amount: PerStep) -> String {
    match kind {
        _ if amount.count == 0.0 => "-".to_string(),
        TransferKind::ScalarRead => tenths(amount.count),
        _ => readable(amount.bytes),
    }
}

/// `4.0 KiB host to device`, `3 scalar reads`
fn part(kind: TransferKind, cell: &str) -> String {
    let ending = if kind == TransferKind::ScalarRead && cell != "1" {
        "s"
    } else {
        ""
    };
    format!("{cell} {kind}{ending}")
}

fn readable(bytes: f64) -> String {
    match bytes {
        0.0 => "0 B".to_string(),
        _ if bytes < 1.0 => "<1 B".to_string(),
        _ => readable_bytes(bytes.round() as u64),
    }
}

/// A count, to a tenth if it is not whole.
fn tenths(count: f64) -> String {
    match (count * 10.0).round() / 10.0 {
        0.0 => "<0.1".to_string(),
        rounded => rounded.to_string(),
    }
}

fn plural(count: u64, name: &str) -> String {
    if count == 1 {
        format!("1 {name}")
    } else {
        format!("{count} {name}s")
    }
}

/// `a`, `a and b`, `a, b and c`
fn list(parts: &[String]) -> String {
    match parts {
        [] => String::new(),
        [only] => only.clone(),
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
    }
}

/// `rank 1`, `ranks 0, 2 and 3`
fn ranks_text(ranks: &[usize]) -> String {
    if let [only] = ranks {
        format!("rank {only}")
    } else {
        format!("ranks {}", pieces(ranks))
    }
}

/// `0`, `0 and 2`, `0, 2 to 5 and 7`: numbers in rising order.
fn pieces(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let left: usize = runs
        .iter()
        .skip(PIECES_MAX)
        .map(|(first, last)| last - first + 1)
        .sum();
    let mut parts: Vec<String> = Vec::new();
    for &(first, last) in runs.iter().take(PIECES_MAX) {
        match last - first {
            0 => parts.push(first.to_string()),
            1 => parts.extend([first.to_string(), last.to_string()]),
            _ => parts.push(format!("{first} to {last}")),
        }
    }
    if left > 0 {
        parts.push(format!("{left} more"));
    }
    list(&parts)
}

/// The devices of these ranks, without the names of models.
fn devices(ranks: &[&RankSums]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for device in ranks.iter().flat_map(|rank| &rank.devices) {
        let name = device.split_whitespace().next().unwrap_or(device);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match &names[..] {
        [first, .., last] if names.len() > PIECES_MAX => format!("{first} … {last}"),
        _ => names.join(", "),
    }
}

/// Columns of equal width: the first two aligned left, the others right.
fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells =
            row.iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, width))| match column {
                    0 | 1 => format!("{:GAP$}{cell:<width$}", ""),
                    _ => format!("{:GAP$}{cell:>width$}", ""),
                });
        cells.collect::<String>().trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

/// The first lines, and how many more there are.
fn limited(mut lines: Vec<String>, most: usize, name: &str) -> Vec<String> {
    let left = lines.len().saturating_sub(most);
    lines.truncate(most);
    if left > 0 {
        lines.push(format!("  and {left} more {name}, in the record"));
    }
    lines
}
