//! Membership in simulated jobs: the launcher's real decisions (`membership::decide`) and what real
//! ranks hear, with simulated time, processes, hosts and connections. See `docs/elastic.md`.
//!
//! A job is simulated by a seed. One that fails is shrunk, and printed with a time line. Ten
//! commits in a row run ten sets of seeds, and the next ten the same. `DDP_TEST_SLICE=seeds:N` runs
//! set N, to try others after a change, `DDP_TEST_SLICE=seed:N` the job of seed N alone.

mod random;
mod schedule;
mod simulated;

use schedule::Schedule;
use simulated::{Job, Outcome};

/// With each commit, and under --long.
const JOBS: u64 = 10_000;
const MANY: u64 = 500_000;
/// How many sets of seeds commits run in turns.
const SETS: u64 = 10;

/// The first seed.
fn first() -> u64 {
    let text = std::env::var("DDP_TEST_SLICE").unwrap_or_default();
    let sum = |sum: u64, byte| sum.wrapping_mul(31) + u64::from(byte);
    let number = text.parse().unwrap_or_else(|_| text.bytes().fold(0, sum));
    let set = text.strip_prefix("seeds:");
    set.map_or(number % SETS, |set| set.parse().unwrap()) * MANY
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
    let text = std::env::var("DDP_TEST_SLICE").unwrap_or_default();
    if let Some(seed) = text.strip_prefix("seed:") {
        let outcome = check(seed.parse().unwrap());
        println!("{}", outcome.log.join("\n"));
        return;
    }
    let count = if ddp_slice::is_all() { MANY } else { JOBS };
    let first = first();
    let (mut hours, mut lost, mut joined, mut done) = (0.0, 0, 0, 0);
    for seed in first..first + count {
        let outcome = check(seed);
        hours += outcome.hours;
        lost += outcome.lost;
        joined += outcome.joined;
        done += u64::from(outcome.exit_code == 0);
    }
    println!(
        "{count} jobs, {hours:.0} simulated hours: {lost} processes lost, {joined} joined, {done} jobs done"
    );
    // What is simulated does happen.
    assert!(lost as u64 > count && joined as u64 > count / 2 && done > count / 2);
}
