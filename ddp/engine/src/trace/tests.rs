//! Tests of the rows of a file, of the summary, and of the steps that are traced.

use proptest::prelude::*;

use ddp_kernels::trace::Lane;

use super::spans::TracedSpan;
use super::*;

fn span(lane: Lane, step: u64, begin_ns: i64, end_ns: i64) -> TracedSpan {
    TracedSpan {
        lane,
        name: 0,
        index: None,
        step,
        begin_ns,
        end_ns,
    }
}

fn rank(name: &str, spans: Vec<TracedSpan>) -> RankTrace {
    RankTrace {
        host: "here".into(),
        readings: Vec::new(),
        missed: 0,
        bound_ns: 0,
        names: vec![name.into()],
        spans,
    }
}

/// Ten steps of 100 ns with a backward each; in some steps it ends later.
fn late_by(late: impl Fn(u64) -> i64) -> RankTrace {
    let steps = (1..=10).flat_map(|step| {
        let begin = step as i64 * 100;
        let end = begin + 50 + late(step);
        [
            span(Lane::Step, step, begin, begin + 100),
            span(Lane::Backward, step, begin, end),
        ]
    });
    rank("backward", steps.collect())
}

#[test]
fn a_rank_is_late_steadily_or_in_passing() {
    let lines = |ranks: &[RankTrace]| Summary::of(ranks).lines().join("\n");
    let on_time = || late_by(|_| 0);
    let none = lines(&[on_time(), on_time()]);
    assert!(none.contains("no rank is late"), "{none}");
    assert!(none.contains("the largest part is backward"), "{none}");
    assert!(none.contains("backward 50%, other 50%"), "{none}");

    let steadily = lines(&[on_time(), on_time(), late_by(|_| 20)]);
    assert!(steadily.contains("rank 2 is steadily late: in 10 of 10 steps"));
    assert!(!steadily.contains("rank 0 is") && !steadily.contains("rank 1 is"));

    let once = lines(&[late_by(|step| if step == 4 { 30 } else { 0 }), on_time()]);
    assert!(once.contains("rank 0 is late in passing: in 1 of 10 steps"));
    assert!(once.contains("in step 4 "), "{once}");
}

#[test]
fn clocks_that_may_be_off_further_make_no_rank_late() {
    let mut late = late_by(|_| 20);
    late.bound_ns = 15;
    let lines = Summary::of(&[late_by(|_| 0), late]).lines().join("\n");
    assert!(lines.contains("no rank is late"), "{lines}");
}

#[test]
fn captured_steps_are_said_to_hide_late_ranks() {
    let captured = || {
        rank(
            "captured step",
            vec![span(Lane::Captured, 1, 0, 9), span(Lane::Step, 1, 0, 9)],
        )
    };
    let lines = Summary::of(&[captured(), captured()]).lines().join("\n");
    assert!(lines.contains("`graph` off"), "{lines}");
    assert!(
        lines.contains("the largest part is captured steps"),
        "{lines}"
    );
}

#[test]
fn steps_read_back_as_they_print() {
    for text in ["5", "5..", "100..110"] {
        assert_eq!(text.parse::<TraceSteps>().unwrap().to_string(), text);
    }
    for text in [
        "", "0", "..", "..5", "5..4", "a..b", "1...3", "-1", "1..2..3",
    ] {
        let error = text.parse::<TraceSteps>().unwrap_err();
        assert!(error.contains("100..110"), "{text}: {error}");
    }
}

#[test]
fn steps_that_the_run_does_not_take_are_named() {
    let problem = |text: &str| text.parse::<TraceSteps>().unwrap().problem(11, 20);
    assert_eq!(problem("11..20"), None);
    assert_eq!(problem("20.."), None);
    for (text, why) in [
        ("21..", "no step"),
        ("1..10", "no step"),
        ("5..15", "begins later"),
        ("15..21", "ends earlier"),
    ] {
        assert!(
            problem(text).is_some_and(|text| text.contains(why)),
            "{text}"
        );
    }
}

proptest! {
    #[test]
    fn spans_of_a_row_nest_or_do_not_overlap(times in prop::collection::vec((0i64..40, 0i64..10), 0..40)) {
        let spans: Vec<_> = times.iter().map(|&(begin, length)| span(Lane::Data, 1, begin, begin + length)).collect();
        let rows = file::rows(spans.iter());
        prop_assert_eq!(rows.iter().map(Vec::len).sum::<usize>(), spans.len());
        for row in &rows {
            for (index, a) in row.iter().enumerate() {
                for b in &row[index + 1..] {
                    let apart = a.end_ns <= b.begin_ns || b.end_ns <= a.begin_ns;
                    let nested = a.begin_ns <= b.begin_ns && b.end_ns <= a.end_ns;
                    prop_assert!(apart || nested, "{a:?} {b:?}");
                }
            }
        }
    }
}
