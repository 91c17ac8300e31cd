use std::time::Duration;

use super::*;
use crate::tests::on_threads;
use crate::world::World;

fn fields(value: &str) -> Vec<Field> {
    vec![
        Field::must_match("the program", "0.2.0", "Install one version everywhere."),
        Field::must_match("the configuration", value, "Give all ranks the same flags."),
        Field::warn(
            "the CPU",
            if value == "odd" { "old" } else { "new" },
            "Bits may differ.",
        ),
    ]
}

/// The outcome of each rank of a job whose ranks bring these fields.
fn on_ranks(of_ranks: Vec<Vec<Field>>) -> Vec<Result<()>> {
    let worlds = World::threads(of_ranks.len(), None, Duration::from_secs(60)).unwrap();
    let ranks = worlds.into_iter().zip(of_ranks).collect();
    on_threads(ranks, |(world, fields): (World, Vec<Field>)| {
        world.handshake(&fields)
    })
}

fn message(of_ranks: Vec<Vec<Field>>) -> String {
    let outcomes = on_ranks(of_ranks);
    let messages: Vec<String> = outcomes
        .into_iter()
        .map(|outcome| outcome.expect_err("ranks differ").to_string())
        .collect();
    assert!(
        messages.iter().all(|message| *message == messages[0]),
        "one error for all: {messages:?}"
    );
    messages[0].clone()
}

#[test]
fn equal_ranks_agree() {
    assert!(
        on_ranks(vec![fields("lr = 1"); 3])
            .iter()
            .all(Result::is_ok)
    );
    assert!(on_ranks(vec![fields("lr = 1")]).iter().all(Result::is_ok));
}

#[test]
fn all_ranks_name_the_odd_rank_and_both_values() {
    let said = message(vec![fields("4"), fields("3"), fields("3")]);
    assert_eq!(
        said,
        "ranks disagree on the configuration: rank 0 has 4, rank 1 has 3; help: Give all ranks the same flags."
    );
}

#[test]
fn two_that_differ_are_compared_with_rank_0_and_end_with_78() {
    let error = on_ranks(vec![fields("3"), fields("")])
        .pop()
        .unwrap()
        .unwrap_err();
    assert_eq!(error.exit_code(), 78);
    assert!(
        error
            .to_string()
            .contains("rank 1 has nothing, rank 0 has 3"),
        "{error}"
    );
}

#[test]
fn different_fields_are_a_difference() {
    let said = message(vec![fields("3"), fields("3")[..2].to_vec()]);
    assert!(
        said.contains("rank 1 has the program, the configuration, rank 0 has the program, "),
        "{said}"
    );
    assert!(said.contains("the same program"), "{said}");
}

#[test]
fn a_warning_ends_no_rank() {
    let mut odd = fields("3");
    odd[2].value = "old".into();
    assert!(
        on_ranks(vec![fields("3"), odd.clone()])
            .iter()
            .all(Result::is_ok)
    );
    let named = |fields: &[Field]| decode(&encode(fields));
    let warnings = compare(&[named(&fields("3")), named(&odd)], &fields("3")).unwrap();
    assert_eq!(
        warnings,
        ["ranks disagree on the CPU: rank 1 has old, rank 0 has new; help: Bits may differ."]
    );
}

#[test]
fn every_field_is_seen_when_it_alone_differs() {
    for index in 0..2 {
        let mut other = fields("3");
        other[index].value.push('!');
        let said = message(vec![fields("3"), fields("3"), other]);
        assert!(
            said.contains(&fields("3")[index].name) && said.contains("rank 2 has"),
            "{said}"
        );
    }
}

#[test]
fn the_first_of_many_differing_lines_is_shown() {
    let ours = "a = 1\nlr = 0.1\nz = 3";
    assert_eq!(
        difference("a = 1\nlr = 0.2\nz = 3", ours),
        ("lr = 0.2".into(), "lr = 0.1".into())
    );
    assert_eq!(
        difference("a = 1\nz = 3", ours),
        ("no lr".into(), "lr = 0.1".into())
    );
    assert_eq!(
        difference("a = 1\nb = 2\nlr = 0.1\nz = 3", ours),
        ("b = 2".into(), "no b".into())
    );
    assert_eq!(
        difference("a = 1", "a = 1\nplain words"),
        ("no such line".into(), "plain words".into())
    );
    assert_eq!(difference("a\r\nb", "a\nb").0, "other line ends");
}

#[test]
fn only_the_differing_part_of_long_values_is_shown() {
    let (a, b) = (
        format!("{}x{}", "é".repeat(500), "t".repeat(500)),
        format!("{}y", "é".repeat(500)),
    );
    let (theirs, ours) = difference(&a, &b);
    assert!(
        theirs.starts_with('…') && theirs.contains('x') && theirs.ends_with('…'),
        "{theirs}"
    );
    assert!(
        ours.ends_with('y') && ours.chars().count() <= SHOWN_CHARACTERS + 2,
        "{ours}"
    );
}

#[test]
fn invalid_bytes_from_another_rank_are_a_difference() {
    assert!(
        compare(
            &[decode(&encode(&fields("3"))), decode(b"\xff{")],
            &fields("3")
        )
        .is_err()
    );
    assert!(decode(b"[1, 2]").is_empty());
}
