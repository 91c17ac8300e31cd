use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use super::*;
use crate::roster::{Silent, identity};

/// The launcher's page, with seat 0, and that of another host, with seats 1 and 2.
fn pages() -> [Roster; 2] {
    [0, 1].map(|own| Roster::of_host(own, &[0, 1, 1], 1).unwrap())
}

/// Seats of a page wait for a generation after `after`, as processes that live.
fn wait(page: &Roster, seats: &[usize], after: u64) {
    for &seat in seats {
        page.write(seat, WAITS, after + 1);
        page.write(seat, PID, identity(std::process::id()));
    }
}

/// What the host says reaches the launcher, which forms a generation if it can and says so. Whom
/// the launcher waits for, and whom the host misses.
fn exchange([launcher, host]: &[Roster; 2]) -> (Vec<usize>, Vec<usize>) {
    // As on the way between hosts.
    let said = |page: &Roster| {
        let text = serde_json::to_string(&page.state()).unwrap();
        serde_json::from_str::<PageState>(&text).unwrap()
    };
    let missed = launcher.hear_host(1, said(host));
    let absent = launcher.form().unwrap();
    host.hear_job(&said(launcher));
    (absent, missed)
}

/// The number, the seats and the lost seats of the current generation, with the reasons.
fn seen(page: &Roster) -> (u32, Vec<usize>, Vec<(usize, String)>) {
    let it = page.describe(page.current());
    let members = it.members.iter().map(|member| member.0).collect();
    let lost = it.change.lost.into_iter();
    (
        it.number,
        members,
        lost.map(|lost| (lost.rank, lost.why)).collect(),
    )
}

#[test]
fn hosts_see_the_generations_that_the_launcher_forms() {
    let pages = pages();
    let [launcher, host] = &pages;
    wait(launcher, &[0], 0);
    wait(host, &[1], 0);
    host.listen_at(1, 4711);
    assert_eq!(exchange(&pages).0, [2], "the first one needs all");
    assert_eq!((launcher.current(), host.current()), (0, 0));
    wait(host, &[2], 0);
    assert!(exchange(&pages).0.is_empty());
    for page in &pages {
        assert_eq!(seen(page), (1, vec![0, 1, 2], vec![]));
        assert_eq!(page.port_of(1), 4711);
    }
    assert!(!launcher.has_left(&exchange(&pages).0));

    host.has_ended(1, ExitStatus::from_raw(9));
    assert!(launcher.has_left(&exchange(&pages).0));
    launcher.end_current();
    assert!(!host.is_broken());
    assert_eq!(exchange(&pages).0, [0, 2]);
    assert!(host.is_broken() && host.ended().unwrap().ends_generation());
    wait(launcher, &[0], 1);
    wait(host, &[2], 1);
    assert!(exchange(&pages).0.is_empty());
    for page in &pages {
        let lost = (1, "killed by signal 9".to_string());
        assert_eq!(seen(page), (2, vec![0, 2], vec![lost]));
        assert!(!page.is_broken());
    }
}

#[test]
fn a_process_that_waits_on_one_host_is_seen_on_all() {
    let pages = pages();
    let [launcher, host] = &pages;
    wait(launcher, &[0], 0);
    wait(host, &[1, 2], 0);
    exchange(&pages);
    launcher.has_ended(0, ExitStatus::from_raw(9));
    wait(host, &[1, 2], 1);
    exchange(&pages);
    assert_eq!(seen(host).1, [1, 2]);
    launcher.clear(0);
    exchange(&pages);
    assert!(!host.has_newcomers());
    wait(launcher, &[0], 0);
    assert_eq!(exchange(&pages).0, [1, 2]);
    assert!(host.has_newcomers());
}

#[test]
fn a_host_that_was_cut_off_is_not_heard_again() {
    let pages = pages();
    let [launcher, host] = &pages;
    wait(launcher, &[0], 0);
    wait(host, &[1, 2], 0);
    exchange(&pages);
    [1, 2].iter().for_each(|&seat| launcher.cut_off(seat));
    wait(launcher, &[0], 1);
    wait(host, &[1, 2], 1);
    assert!(exchange(&pages).0.is_empty());
    let why = "its host was cut off".to_string();
    let lost = vec![(1, why.clone()), (2, why)];
    assert_eq!(seen(launcher), (2, vec![0], lost));
}

#[test]
fn a_host_says_nothing_of_seats_of_others() {
    let pages = pages();
    let [launcher, host] = &pages;
    wait(host, &[0, 1, 2], 0);
    let mut state = host.state();
    state.seats.push((0, [7; SAID.len()]));
    state.seats.push((99, [7; SAID.len()]));
    launcher.hear_host(1, state);
    assert_eq!(launcher.read(0, PID), 0);
    assert_ne!(launcher.read(1, PID), 0);
    // What a host says of its own seats counts there, and not what the launcher has heard.
    launcher.write(1, PID, 7);
    host.hear_job(&launcher.state());
    assert_ne!(host.read(1, PID), 7);
}

#[test]
fn who_is_missed_counts_in_one_generation_only() {
    let pages = pages();
    let [launcher, host] = &pages;
    wait(launcher, &[0], 0);
    wait(host, &[1, 2], 0);
    exchange(&pages);
    host.leave_out_ranks(&[0]);
    let late = host.state();
    assert_eq!(exchange(&pages).1, [0]);
    assert!(launcher.state().missed.is_empty());
    wait(launcher, &[0], 1);
    wait(host, &[1, 2], 1);
    exchange(&pages);
    assert!(exchange(&pages).1.is_empty());
    assert!(launcher.hear_host(1, late).is_empty());
}

#[test]
fn a_launcher_sees_who_is_at_work_while_ranks_meet() {
    let pages = pages();
    let [launcher, host] = &pages;
    wait(launcher, &[0], 0);
    wait(host, &[1, 2], 0);
    exchange(&pages);
    let mut silent = Silent::default();
    let mut seats = |pulse, seconds| {
        host.show_pulse(1, pulse);
        exchange(&pages);
        let limit = Duration::from_secs(4);
        let found = launcher.silent(&[1, 2], &mut silent, Duration::from_secs(seconds), limit);
        found.into_iter().map(|it| it.0).collect::<Vec<_>>()
    };
    // While they train, nobody asks.
    assert!(seats(1, 1).is_empty());
    assert_eq!(launcher.read(1, PULSE), 0);
    launcher.end_current();
    for (pulse, seconds, expected) in [(2, 2, &[][..]), (3, 4, &[]), (4, 7, &[2]), (4, 9, &[2])] {
        assert_eq!(seats(pulse, seconds), expected, "{seconds}");
    }
    assert_eq!(seats(4, 12), [1, 2]);
}

#[test]
fn the_end_of_a_job_reaches_all_hosts() {
    let all = pages();
    all[1].end(65);
    exchange(&all);
    assert_eq!(all[0].over(), Some(65));
    let all = pages();
    all[0].end(0);
    exchange(&all);
    assert_eq!(all[1].over(), Some(0));
    assert!(all[1].ended().is_none(), "a job that is done ends no calls");
}
