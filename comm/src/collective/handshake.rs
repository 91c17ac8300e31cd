//! Checks once, before the first step, that all ranks run the same program with the same
//! configuration, data and shapes.
//!
//! Ranks exchange one hash of all fields, and the values only if the hashes differ. Every rank then
//! compares all values in the same way, so that all end with the same error.

use std::collections::BTreeMap;

use twox_hash::XxHash3_128;

use crate::collective::group::Group;
use crate::error::{Disagreement, Error, Result};

/// What a difference in a field means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The job must not run: [`Error::Disagree`], exit code 78.
    MustMatch,
    /// The job may run, but rank 0 warns.
    Warn,
}

/// One value that ranks compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name in messages: "the configuration", "the data set".
    pub name: String,
    /// This rank's value. If it has several lines, they are compared one by one.
    pub value: String,
    /// What a difference means.
    pub severity: Severity,
    /// What to do about a difference: a sentence.
    pub help: String,
}

impl Field {
    /// A field that must be equal on all ranks.
    pub fn must_match(
        name: impl Into<String>,
        value: impl ToString,
        help: impl Into<String>,
    ) -> Field {
        Field {
            name: name.into(),
            value: value.to_string(),
            severity: Severity::MustMatch,
            help: help.into(),
        }
    }

    /// A field whose difference causes a warning.
    pub fn warn(name: impl Into<String>, value: impl ToString, help: impl Into<String>) -> Field {
        Field {
            severity: Severity::Warn,
            ..Field::must_match(name, value, help)
        }
    }
}

/// Compares `fields` on all ranks of `group`. [`Error::Disagree`], the same on all of them, names
/// the first field that differs, the rank and both values.
#[track_caller]
pub(crate) fn handshake(group: &Group, fields: &[Field]) -> Result<()> {
    let encoded = encode(fields);
    let hashes = group.all_gather_bytes(&XxHash3_128::oneshot(&encoded).to_le_bytes())?;
    if hashes.iter().all(|hash| *hash == hashes[0]) {
        return Ok(());
    }
    let of_ranks = group.all_gather_bytes(&encoded)?;
    let of_ranks: Vec<FieldValues> = of_ranks.iter().map(|bytes| decode(bytes)).collect();
    for warning in compare(&of_ranks, fields)? {
        if group.rank() == 0 {
            tracing::warn!("{warning}");
        }
    }
    Ok(())
}

impl Group {
    /// Compares `fields` on all ranks, as [`World::handshake`](crate::World::handshake) does: the
    /// host waits for all ranks, whatever the group is for.
    #[track_caller]
    pub fn handshake(&self, fields: &[Field]) -> Result<()> {
        handshake(self, fields)
    }
}

/// Names and values of one rank's fields, in its order.
type FieldValues = Vec<(String, String)>;

fn encode(fields: &[Field]) -> Vec<u8> {
    let pairs = fields.iter().map(|field| (&field.name, &field.value));
    serde_json::to_vec(&Vec::from_iter(pairs)).expect("texts are JSON")
}

/// What `encode` wrote; empty if another version of this program wrote something else.
fn decode(bytes: &[u8]) -> FieldValues {
    serde_json::from_slice(bytes).unwrap_or_default()
}

/// The first difference that must not be, or the warnings for those that may. `fields` are this
/// rank's, for their severity and help.
fn compare(of_ranks: &[FieldValues], fields: &[Field]) -> Result<Vec<String>> {
    let names = |values: &FieldValues| {
        let names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    };
    let names: Vec<String> = of_ranks.iter().map(names).collect();
    if let Some((rank, reference)) = odd_one_out(&names) {
        return Err(Error::Disagree(Box::new(Disagreement {
            field: "what to compare".into(),
            rank,
            theirs: shown(&names[rank]),
            reference,
            ours: shown(&names[reference]),
            help: "start the same program on all ranks".into(),
        })));
    }
    let mut warnings = Vec::new();
    for (index, field) in fields.iter().enumerate() {
        let values = of_ranks.iter().map(|values| values[index].1.as_str());
        let values: Vec<&str> = values.collect();
        let Some((rank, reference)) = odd_one_out(&values) else {
            continue;
        };
        let (theirs, ours) = difference(values[rank], values[reference]);
        let disagreement = Disagreement {
            field: field.name.clone(),
            rank,
            theirs,
            reference,
            ours,
            help: field.help.clone(),
        };
        match field.severity {
            Severity::MustMatch => return Err(Error::Disagree(Box::new(disagreement))),
            Severity::Warn => warnings.push(disagreement.to_string()),
        }
    }
    Ok(warnings)
}

/// The first rank whose value is not that of most ranks, and the first rank with that value. On a
/// tie the lowest rank has it.
fn odd_one_out<T: Ord>(values: &[T]) -> Option<(usize, usize)> {
    let mut holders: BTreeMap<&T, Vec<usize>> = BTreeMap::new();
    for (rank, value) in values.iter().enumerate() {
        holders.entry(value).or_default().push(rank);
    }
    let most = holders
        .into_values()
        .max_by_key(|ranks| (ranks.len(), std::cmp::Reverse(ranks[0])))?;
    let odd = (0..values.len()).find(|rank| !most.contains(rank))?;
    Some((odd, most[0]))
}

/// The part of each value that shows how they differ.
fn difference(theirs: &str, ours: &str) -> (String, String) {
    if !theirs.contains('\n') && !ours.contains('\n') {
        return (excerpt(theirs, ours), excerpt(ours, theirs));
    }
    let their_lines: Vec<&str> = theirs.lines().collect();
    let our_lines: Vec<&str> = ours.lines().collect();
    let count = their_lines.len().max(our_lines.len());
    let differs = |&index: &usize| their_lines.get(index) != our_lines.get(index);
    let Some(index) = (0..count).find(differs) else {
        return ("other line ends".into(), "these line ends".into());
    };
    let line = |lines: &[&str]| {
        lines
            .get(index)
            .copied()
            .unwrap_or("no such line")
            .to_string()
    };
    let (theirs, ours) = (line(&their_lines), line(&our_lines));
    // A key that only one of them has shifts all lines after it: report the missing key.
    let key = |line: &str| line.split_once('=').map(|(key, _)| key.trim().to_string());
    let missing = |line: &str, lines: &[&str]| {
        let wanted = key(line)?;
        let has = lines.iter().any(|line| key(line).as_ref() == Some(&wanted));
        (!has).then(|| format!("no {wanted}"))
    };
    if let Some(missing) = missing(&theirs, &our_lines) {
        return (excerpt(&theirs, &ours), missing);
    }
    if let Some(missing) = missing(&ours, &their_lines) {
        return (missing, excerpt(&ours, &theirs));
    }
    (excerpt(&theirs, &ours), excerpt(&ours, &theirs))
}

const SHOWN_CHARACTERS: usize = 120;

/// `value`, or if it is long the part of it in which it first differs from `other`.
fn excerpt(value: &str, other: &str) -> String {
    let count = value.chars().count();
    if count <= SHOWN_CHARACTERS {
        return shown(value);
    }
    let both = value.chars().zip(other.chars());
    let same = both.take_while(|(a, b)| a == b).count();
    let first = same.saturating_sub(SHOWN_CHARACTERS / 4);
    let part: String = value.chars().skip(first).take(SHOWN_CHARACTERS).collect();
    let ellipsis = |is_cut: bool| if is_cut { "…" } else { "" };
    let (before, after) = (
        ellipsis(first > 0),
        ellipsis(first + SHOWN_CHARACTERS < count),
    );
    format!("{before}{part}{after}")
}

fn shown(value: &str) -> String {
    if value.is_empty() { "nothing" } else { value }.into()
}

#[cfg(test)]
mod tests;
