//! Are all ranks the same program with the same configuration, data and shapes? Asked once, before the first step.
//!
//! Ranks exchange one hash of all fields; only where hashes differ do the values follow. Every rank then compares all of
//! them by the same pure function, so that all end with the same error.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Disagreement, Error, Result};
use crate::world::World;

/// What a difference in a field means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The job must not run: [`Error::Disagree`], exit code 78.
    MustMatch,
    /// The job may run: rank 0 warns.
    Warn,
}

/// One thing that ranks compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// What it is, as the message calls it: "the configuration", "the data set".
    pub name: String,
    /// This rank's value. One of several lines is compared line by line, and a message shows the first that differs.
    pub value: String,
    /// What a difference means.
    pub kind: Kind,
    /// What to do about a difference: a sentence.
    pub way_out: String,
}

impl Field {
    /// A field that must be equal on all ranks.
    pub fn must_match(name: impl Into<String>, value: impl ToString, way_out: impl Into<String>) -> Field {
        Field { name: name.into(), value: value.to_string(), kind: Kind::MustMatch, way_out: way_out.into() }
    }

    /// A field whose difference deserves a warning.
    pub fn warn(name: impl Into<String>, value: impl ToString, way_out: impl Into<String>) -> Field {
        Field { name: name.into(), value: value.to_string(), kind: Kind::Warn, way_out: way_out.into() }
    }
}

impl World {
    /// Compares `fields` on all ranks: [`Error::Disagree`], the same on all of them, names the first that differs, the rank
    /// and both values. Every rank calls this at the same place.
    #[track_caller]
    pub fn handshake(&self, fields: &[Field]) -> Result<()> {
        let encoded = encode(fields);
        let hashes = self.all_gather_bytes(&xxh3_128(&encoded).to_le_bytes())?;
        if hashes.iter().all(|hash| *hash == hashes[0]) {
            return Ok(());
        }
        let of_ranks: Vec<Named> = self.all_gather_bytes(&encoded)?.iter().map(|bytes| decode(bytes)).collect();
        for warning in compare(&of_ranks, fields)? {
            if self.rank() == 0 {
                tracing::warn!("{warning}");
            }
        }
        Ok(())
    }
}

/// Names and values of one rank's fields, in its order.
type Named = Vec<(String, String)>;

fn encode(fields: &[Field]) -> Vec<u8> {
    let pairs: Vec<Value> = fields.iter().map(|field| json!([field.name, field.value])).collect();
    Value::Array(pairs).to_string().into_bytes()
}

/// What `encode` wrote; nothing where another version of this program wrote something else, which then is the difference.
fn decode(bytes: &[u8]) -> Named {
    let Ok(Value::Array(pairs)) = serde_json::from_slice(bytes) else { return Vec::new() };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    pairs.iter().map(|pair| (text(&pair[0]), text(&pair[1]))).collect()
}

/// The first difference that must not be, or the warnings for those that may. `fields` are this rank's, for their kinds and
/// ways out.
fn compare(of_ranks: &[Named], fields: &[Field]) -> Result<Vec<String>> {
    let names: Vec<String> = of_ranks
        .iter()
        .map(|named| named.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", "))
        .collect();
    if let Some((rank, reference)) = odd_one_out(&names) {
        return Err(Error::Disagree(Box::new(Disagreement {
            field: "what to compare".into(),
            rank,
            theirs: shown(&names[rank]),
            reference,
            ours: shown(&names[reference]),
            way_out: "Start the same program on all ranks.".into(),
        })));
    }
    let mut warnings = Vec::new();
    for (index, field) in fields.iter().enumerate() {
        let values: Vec<&str> = of_ranks.iter().map(|named| named[index].1.as_str()).collect();
        let Some((rank, reference)) = odd_one_out(&values) else { continue };
        let (theirs, ours) = difference(values[rank], values[reference]);
        let (name, way_out) = (field.name.clone(), field.way_out.clone());
        let disagree = Disagreement { field: name, rank, theirs, reference, ours, way_out };
        match field.kind {
            Kind::MustMatch => return Err(Error::Disagree(Box::new(disagree))),
            Kind::Warn => warnings.push(disagree.to_string()),
        }
    }
    Ok(warnings)
}

/// The first rank whose value is not that of most ranks, and the first rank that has that. A tie goes to the lowest rank.
fn odd_one_out<T: Ord>(values: &[T]) -> Option<(usize, usize)> {
    let mut holders: BTreeMap<&T, Vec<usize>> = BTreeMap::new();
    for (rank, value) in values.iter().enumerate() {
        holders.entry(value).or_default().push(rank);
    }
    let most = holders.into_values().max_by_key(|ranks| (ranks.len(), std::cmp::Reverse(ranks[0])))?;
    let odd = (0..values.len()).find(|rank| !most.contains(rank))?;
    Some((odd, most[0]))
}

/// The part of each value that shows how they differ.
fn difference(theirs: &str, ours: &str) -> (String, String) {
    if !theirs.contains('\n') && !ours.contains('\n') {
        return (excerpt(theirs, ours), excerpt(ours, theirs));
    }
    let (their_lines, our_lines): (Vec<&str>, Vec<&str>) = (theirs.lines().collect(), ours.lines().collect());
    let count = their_lines.len().max(our_lines.len());
    let line = |lines: &[&str], index: usize| lines.get(index).copied().unwrap_or("no such line").to_string();
    let Some(index) = (0..count).find(|&index| their_lines.get(index) != our_lines.get(index)) else {
        return ("other line ends".into(), "these line ends".into());
    };
    let (mine, yours) = (line(&our_lines, index), line(&their_lines, index));
    // A key that only one of them has shifts all lines after it: say that it is missing, not what stands in its place.
    let key = |line: &str| line.split_once('=').map(|(key, _)| key.trim().to_string());
    let has = |lines: &[&str], wanted: &str| lines.iter().any(|line| key(line).as_deref() == Some(wanted));
    if let Some(only_theirs) = key(&yours).filter(|wanted| !has(&our_lines, wanted)) {
        return (excerpt(&yours, &mine), format!("no {only_theirs}"));
    }
    if let Some(only_ours) = key(&mine).filter(|wanted| !has(&their_lines, wanted)) {
        return (format!("no {only_ours}"), excerpt(&mine, &yours));
    }
    (excerpt(&yours, &mine), excerpt(&mine, &yours))
}

const SHOWN_CHARACTERS: usize = 120;

/// `value`, or where it is long the part of it in which it first differs from `other`.
fn excerpt(value: &str, other: &str) -> String {
    let same = value.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    if value.chars().count() <= SHOWN_CHARACTERS {
        return shown(value);
    }
    let first = same.saturating_sub(SHOWN_CHARACTERS / 4);
    let part: String = value.chars().skip(first).take(SHOWN_CHARACTERS).collect();
    let before = if first > 0 { "…" } else { "" };
    let after = if first + SHOWN_CHARACTERS < value.chars().count() { "…" } else { "" };
    format!("{before}{part}{after}")
}

fn shown(value: &str) -> String {
    if value.is_empty() { "nothing".into() } else { value.into() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn fields(value: &str) -> Vec<Field> {
        vec![
            Field::must_match("the program", "0.2.0", "Install one version everywhere."),
            Field::must_match("the configuration", value, "Give all ranks the same flags."),
            Field::warn("the CPU", if value == "odd" { "old" } else { "new" }, "Bits may differ."),
        ]
    }

    /// What each rank of a job gets whose ranks bring these fields.
    fn on_ranks(of_ranks: Vec<Vec<Field>>) -> Vec<Result<()>> {
        let worlds = World::threads(of_ranks.len(), None, Duration::from_secs(5)).unwrap();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = worlds
                .into_iter()
                .zip(of_ranks)
                .map(|(world, fields)| scope.spawn(move || world.handshake(&fields)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn message(of_ranks: Vec<Vec<Field>>) -> String {
        let outcomes = on_ranks(of_ranks);
        let messages: Vec<String> =
            outcomes.into_iter().map(|outcome| outcome.expect_err("ranks differ").to_string()).collect();
        assert!(messages.iter().all(|message| *message == messages[0]), "one error for all: {messages:?}");
        messages[0].clone()
    }

    #[test]
    fn equal_ranks_agree() {
        assert!(on_ranks(vec![fields("lr = 1"); 3]).iter().all(Result::is_ok));
        assert!(on_ranks(vec![fields("lr = 1")]).iter().all(Result::is_ok));
    }

    #[test]
    fn the_odd_one_is_named_with_both_values_on_all_ranks() {
        let said = message(vec![fields("4"), fields("3"), fields("3")]);
        assert_eq!(
            said,
            "ranks disagree on the configuration: rank 0 has 4, rank 1 has 3. Give all ranks the same flags."
        );
    }

    #[test]
    fn two_that_differ_are_compared_with_rank_0_and_end_with_78() {
        let error = on_ranks(vec![fields("3"), fields("")]).pop().unwrap().unwrap_err();
        assert_eq!(error.exit_code(), 78);
        assert!(error.to_string().contains("rank 1 has nothing, rank 0 has 3"), "{error}");
    }

    #[test]
    fn other_fields_are_a_difference_themselves() {
        let said = message(vec![fields("3"), fields("3")[..2].to_vec()]);
        assert!(said.contains("rank 1 has the program, the configuration, rank 0 has the program, "), "{said}");
        assert!(said.contains("the same program"), "{said}");
    }

    #[test]
    fn a_warning_stops_nobody() {
        let mut odd = fields("3");
        odd[2].value = "old".into();
        assert!(on_ranks(vec![fields("3"), odd.clone()]).iter().all(Result::is_ok));
        let named = |fields: &[Field]| decode(&encode(fields));
        let warnings = compare(&[named(&fields("3")), named(&odd)], &fields("3")).unwrap();
        assert_eq!(warnings, ["ranks disagree on the CPU: rank 1 has old, rank 0 has new. Bits may differ."]);
    }

    #[test]
    fn every_field_is_seen_when_it_alone_differs() {
        for index in 0..2 {
            let mut other = fields("3");
            other[index].value.push('!');
            let said = message(vec![fields("3"), fields("3"), other]);
            assert!(said.contains(&fields("3")[index].name) && said.contains("rank 2 has"), "{said}");
        }
    }

    #[test]
    fn of_many_lines_the_one_that_differs_is_shown() {
        let ours = "a = 1\nlr = 0.1\nz = 3";
        assert_eq!(difference("a = 1\nlr = 0.2\nz = 3", ours), ("lr = 0.2".into(), "lr = 0.1".into()));
        assert_eq!(difference("a = 1\nz = 3", ours), ("no lr".into(), "lr = 0.1".into()));
        assert_eq!(difference("a = 1\nb = 2\nlr = 0.1\nz = 3", ours), ("b = 2".into(), "no b".into()));
        assert_eq!(difference("a = 1", "a = 1\nplain words"), ("no such line".into(), "plain words".into()));
        assert_eq!(difference("a\r\nb", "a\nb").0, "other line ends");
    }

    #[test]
    fn of_long_values_the_part_that_differs_is_shown() {
        let (a, b) = (format!("{}x{}", "é".repeat(500), "t".repeat(500)), format!("{}y", "é".repeat(500)));
        let (theirs, ours) = difference(&a, &b);
        assert!(theirs.starts_with('…') && theirs.contains('x') && theirs.ends_with('…'), "{theirs}");
        assert!(ours.ends_with('y') && ours.chars().count() <= SHOWN_CHARACTERS + 2, "{ours}");
    }

    #[test]
    fn nonsense_from_another_rank_is_a_difference() {
        assert!(compare(&[decode(&encode(&fields("3"))), decode(b"\xff{")], &fields("3")).is_err());
        assert!(decode(b"[1, 2]").iter().all(|(name, _)| name.is_empty()));
    }
}
