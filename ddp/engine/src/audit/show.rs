//! The audit as text of at most 20 lines: a title, a table and notes. The metrics log has
//! everything.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use ddp_kernels::transfer::{TransferKind, readable_bytes};

use super::ledger::{Amount, KINDS, OTHER_PHASES};
use super::{Audit, Difference, PerStep, RankedHint};
use crate::shown::table;
use crate::units::plural;

/// The most lines of each kind. Ranks with the same amounts are one line.
const RANK_LINES_MAX: usize = 6;
const DIFFERENCES_MAX: usize = 4;
const HINTS_MAX: usize = 4;
/// The most pieces of a list in a line.
const PIECES_MAX: usize = 4;

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title())?;
        for line in table(&self.table(), 2) {
            write!(f, "\n  {line}")?;
        }
        for note in self.notes() {
            write!(f, "\n  {note}")?;
        }
        Ok(())
    }
}

impl Audit {
    /// Whether there is more to say than that one process on the CPU moved nothing.
    pub(crate) fn is_worth_a_line(&self) -> bool {
        self.ranks.len() > 1
            || self.ranks.iter().any(|rank| {
                !rank.per_step.is_empty() || rank.devices.iter().any(|device| device != "cpu")
            })
    }

    /// What moved in a step, over how many; of several ranks, what the table shows.
    pub fn title(&self) -> String {
        let on = Some(" on simulated GPUs").filter(|_| self.simulated);
        let on = on.unwrap_or_default();
        let steps = format!("{}{on}", plural(self.steps, "step"));
        match &self.ranks[..] {
            [own] if own.per_step.is_empty() => {
                format!("placement: nothing crossed between devices in {steps}")
            }
            [own] => format!(
                "placement, per step, mean of {steps}: {}",
                parts(&own.per_step)
            ),
            _ if self.columns().is_empty() => {
                format!("placement: no rank moved anything in {steps}")
            }
            _ => format!("placement, per rank and step, mean of {steps}:"),
        }
    }

    /// The kinds of transfers in steps.
    fn columns(&self) -> Vec<TransferKind> {
        let has = |kind: &TransferKind| {
            let mut ranks = self.ranks.iter();
            ranks.any(|rank| rank.per_step.contains_key(&kind.to_string()))
        };
        KINDS.into_iter().filter(has).collect()
    }

    /// The cells of each set of ranks that move the same.
    fn sets_of_ranks(&self) -> Vec<(Vec<String>, Vec<usize>)> {
        let columns = self.columns();
        alike(self.ranks.iter().enumerate().map(|(index, rank)| {
            let cells = columns.iter().map(|kind| {
                let amount = rank.per_step.get(&kind.to_string());
                amount.map_or("-".to_string(), |amount| cell(*kind, *amount))
            });
            (cells.collect(), index)
        }))
    }

    /// Headings, and a row for each set of ranks that move the same. Empty for one rank, and if
    /// nothing moved.
    pub fn table(&self) -> Vec<Vec<String>> {
        let columns = self.columns();
        if self.ranks.len() == 1 || columns.is_empty() {
            return Vec::new();
        }
        let mut rows = vec![vec!["rank".to_string(), "on".to_string()]];
        rows[0].extend(columns.iter().map(TransferKind::to_string));
        for (cells, ranks) in self.sets_of_ranks().into_iter().take(RANK_LINES_MAX) {
            let devices = ranks.iter().flat_map(|rank| &self.ranks[*rank].devices);
            rows.push([vec![pieces(&ranks), short_names(devices)], cells].concat());
        }
        rows
    }

    /// What else there is to say: other phases, differences between ranks, hints.
    pub fn notes(&self) -> Vec<String> {
        let (mut notes, is_alone) = (Vec::new(), self.ranks.len() == 1);
        let more = self.sets_of_ranks().into_iter().skip(RANK_LINES_MAX);
        let more: usize = more.map(|(_, ranks)| ranks.len()).sum();
        if more > 0 {
            let more = plural(more as u64, "rank");
            notes.push(format!("and {more}, in the metrics log"));
        }
        let phases = OTHER_PHASES.iter().filter_map(|phase| {
            let parts = self.moved_in(&phase.to_string());
            (!parts.is_empty()).then(|| format!("{phase} {parts}"))
        });
        let phases = phases.collect::<Vec<_>>().join("; ");
        if !phases.is_empty() {
            let of = if is_alone { "" } else { " and all ranks" };
            notes.push(format!("outside steps, over the run{of}: {phases}"));
        }
        if self.differences.is_empty() && !is_alone && !self.columns().is_empty() {
            notes.push("no differences between ranks in a step".to_string());
        }
        let differences = self.differences.iter();
        let differences =
            differences.map(|it| format!("moved unequally: {}", self.difference_text(it)));
        notes.extend(limited(differences, DIFFERENCES_MAX, "differences"));
        let hint = |RankedHint { ranks, text, .. }: &RankedHint| {
            if is_alone {
                return format!("hint: {text}");
            }
            format!("hint, {}: {text}", ranks_text(ranks))
        };
        notes.extend(limited(self.hints.iter().map(hint), HINTS_MAX, "hints"));
        notes
    }

    /// What all ranks moved in a phase of the run.
    fn moved_in(&self, phase: &str) -> String {
        let mut sums: BTreeMap<String, PerStep> = BTreeMap::new();
        let of_ranks = self.ranks.iter().filter_map(|rank| rank.phases.get(phase));
        for (kind, amount) in of_ranks.flatten() {
            let sum = sums.entry(kind.clone()).or_default();
            sum.count += amount.count as f64;
            sum.bytes += amount.bytes as f64;
        }
        parts(&sums)
    }

    /// `device to host at src/step.rs:12: rank 1 4.0 KiB a step, ranks 0, 2 and 3 none`
    fn difference_text(&self, difference: &Difference) -> String {
        let a_step = |of_run: u64| of_run as f64 / self.steps.max(1) as f64;
        let differs_in_bytes = difference.size().0 > 0;
        let text = |amount: Amount| match amount.count {
            0 => "none".to_string(),
            _ if differs_in_bytes => format!("{} a step", readable(a_step(amount.bytes))),
            _ => format!("{} times a step", tenths(a_step(amount.count))),
        };
        let amounts = difference.amounts.iter().enumerate();
        let known = amounts.map(|(rank, amount)| (text(*amount), rank));
        let mut sets = alike(known);
        sets.sort_by_key(|(_, ranks)| {
            let amount = difference.amounts[ranks[0]];
            Reverse((amount.bytes, amount.count))
        });
        let text = |(text, ranks): &(String, Vec<usize>)| format!("{} {text}", ranks_text(ranks));
        let mut texts: Vec<String> = sets.iter().map(text).collect();
        if let [_, middle @ .., _] = &sets[..]
            && middle.len() > 1
        {
            let ranks: usize = middle.iter().map(|(_, ranks)| ranks.len()).sum();
            let between = format!("{} between", plural(ranks as u64, "rank"));
            texts.splice(1..texts.len() - 1, [between]);
        }
        let Difference { kind, at, .. } = difference;
        let moved = Some(", moved by policy").filter(|_| difference.implicit);
        let moved = moved.unwrap_or_default();
        format!("{kind} at {at}{moved}: {}", texts.join(", "))
    }
}

/// The distinct values, each with the ranks that have it.
fn alike<T: PartialEq>(of_ranks: impl Iterator<Item = (T, usize)>) -> Vec<(T, Vec<usize>)> {
    let mut sets: Vec<(T, Vec<usize>)> = Vec::new();
    for (value, rank) in of_ranks {
        match sets.iter_mut().find(|(known, _)| *known == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => sets.push((value, vec![rank])),
        }
    }
    sets
}

/// `4.0 KiB host to device and 3 scalar reads`: all kinds that have an amount.
fn parts(amounts: &BTreeMap<String, PerStep>) -> String {
    let part = |kind: TransferKind| {
        let cell = cell(kind, *amounts.get(&kind.to_string())?);
        let is_several = kind == TransferKind::ScalarRead && cell != "1";
        let ending = if is_several { "s" } else { "" };
        Some(format!("{cell} {kind}{ending}"))
    };
    list(&KINDS.into_iter().filter_map(part).collect::<Vec<_>>())
}

/// Bytes, or the number of scalar reads, which are slow however little they read.
fn cell(kind: TransferKind, amount: PerStep) -> String {
    match kind {
        _ if amount.count == 0.0 => "-".to_string(),
        TransferKind::ScalarRead => tenths(amount.count),
        _ => readable(amount.bytes),
    }
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
    match ranks {
        [only] => format!("rank {only}"),
        _ => format!("ranks {}", pieces(ranks)),
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
    let left = runs.iter().skip(PIECES_MAX);
    let left: usize = left.map(|(first, last)| last - first + 1).sum();
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

/// Devices without the names of models.
fn short_names<'a>(devices: impl Iterator<Item = &'a String>) -> String {
    let names = devices.map(|device| device.split_whitespace().next().unwrap_or(device));
    let names = alike(names.zip(0..)).into_iter();
    let names: Vec<&str> = names.map(|(name, _)| name).collect();
    match &names[..] {
        [first, .., last] if names.len() > PIECES_MAX => format!("{first} … {last}"),
        _ => names.join(", "),
    }
}

/// The first lines, and how many more there are.
fn limited(lines: impl Iterator<Item = String>, most: usize, name: &str) -> Vec<String> {
    let mut lines: Vec<String> = lines.collect();
    let left = lines.len().saturating_sub(most);
    lines.truncate(most);
    if left > 0 {
        lines.push(format!("and {left} more {name}, in the metrics log"));
    }
    lines
}
