//! Membership in simulated jobs: the launcher's real decisions (`membership::decide`) and what real
//! ranks hear, with simulated time, processes, hosts and connections. See `docs/elastic.md`.
//!
//! A job is simulated by a seed. One that fails is shrunk, and printed with a time line.
//! `DDP_CASES=N` runs the N-th set of seeds, `DDP_CASES=N..M` those from N to before M.

mod random;
mod schedule;
mod simulated;

use std::ops::Range;

use schedule::Schedule;
use simulated::{Job, Outcome};

const JOBS: u64 = 10_000;

/// The seeds that run.
fn seeds() -> Range<u64> {
    let text = std::env::var("DDP_CASES").unwrap_or_default();
    let number = |text: &str| text.parse().expect("a number");
    match text.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None if text.is_empty() => 0..JOBS,
        None if text == "all" => 0..50 * JOBS,
        None => number(&text) * JOBS..(number(&text) + 1) * JOBS,
    }
}

/// The smallest schedule found that fails as this one does.
fn shrunk(mut schedule: Schedule) -> Schedule {
    loop {
        let smaller = schedule.smaller().into_iter();
        let Some(next) = { smaller }.find(|it| Job::run(it).wrong.is_some()) else {
            return schedule;
        };
        schedule = next;
    }
}

fn check(seed: u64) -> Outcome {
    let outcome = Job::run(&Schedule::new(seed));
    if outcome.wrong.is_some() {
        let schedule = shrunk(Schedule::new(seed));
        let outcome = Job::run(&schedule);
        panic!(
            "{schedule:#?}\n{}\nseed {seed}: {}",
            outcome.log.join("\n"),
            outcome.wrong.unwrap_or_default()
        );
    }
    outcome
}

#[test]
fn jobs_lose_nothing_and_end_whatever_happens() {
    let seeds = seeds();
    let count = seeds.end - seeds.start;
    let (mut hours, mut lost, mut joined, mut done) = (0.0, 0, 0, 0);
    let mut outcome_log = Vec::new();
    for seed in seeds {
        let outcome = check(seed);
        hours += outcome.hours;
        lost += outcome.lost;
        joined += outcome.joined;
        done += u64::from(outcome.exit_code == 0);
        outcome_log = outcome.log;
    }
    println!(
        "{count} jobs, {hours:.0} simulated hours: {lost} processes lost, {joined} joined, {done} jobs done"
    );
    if count == 1 {
        println!("{}", outcome_log.join("\n"));
    }
    // What is simulated does happen.
    assert!(count < JOBS || lost as u64 > count && joined as u64 > count / 2 && done > count / 2);
}
