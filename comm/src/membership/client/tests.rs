use std::sync::mpsc;
use std::time::Duration;

use super::super::wire::{Change, Generation, MemberAddress};
use super::*;

/// A rank of a job of `ranks`, which has been told this, and the launcher's end.
pub(crate) fn client(rank: usize, ranks: usize, messages: &[ToRank]) -> (Arc<Client>, Packets) {
    let (launcher, socket) = Packets::pair().unwrap();
    let welcome = ToRank::Welcome {
        is_elastic: true,
        min_ranks: 1,
        hosts: vec![0; ranks],
        generation: 0,
    };
    launcher.send(&welcome, true);
    let client = Client::new(rank, socket).unwrap();
    client.listen_on().unwrap();
    for message in messages {
        launcher.send(message, true);
    }
    (client, launcher)
}

/// A generation of these ranks.
pub(crate) fn generation(number: u32, ranks: &[usize]) -> Generation {
    let member = |&rank: &usize| MemberAddress {
        rank,
        address: None,
        port: 0,
    };
    Generation {
        number,
        members: ranks.iter().map(member).collect(),
        hosts: vec![0; 3],
        change: Change::default(),
        over_for: Duration::ZERO,
    }
}

#[test]
fn a_rank_waits_for_a_later_generation_and_says_so() {
    let first = ToRank::Formed(generation(1, &[0, 2]));
    let (client, launcher) = client(0, 3, &[first]);
    assert!(matches!(client.meet(0, 4711), MeetingOutcome::Formed(it) if it.number == 1));
    let (after, port) = (0, 4711);
    assert_eq!(launcher.receive(), Some(ToLauncher::Waits { after, port }));
    launcher.send(&ToRank::Newcomers(true), true);
    launcher.send(&ToRank::Over(1), true);
    launcher.send(&ToRank::Formed(generation(3, &[0, 1, 2])), true);
    assert!(matches!(client.meet(1, 7), MeetingOutcome::Formed(it) if it.number == 3));
    assert!(!client.heard().newcomers && client.ended().is_none());
    client.leave_out(vec![1], true);
    launcher.receive::<ToLauncher>();
    let (generation, ranks, have_met) = (3, vec![1], true);
    assert_eq!(
        launcher.receive(),
        Some(ToLauncher::Misses {
            generation,
            ranks,
            have_met
        })
    );
}

#[test]
fn what_comes_before_the_welcome_does_not_hide_it() {
    let (launcher, socket) = Packets::pair().unwrap();
    launcher.send(&ToRank::Alive(Duration::ZERO), true);
    launcher.send(&ToRank::Newcomers(true), true);
    let welcome = ToRank::Welcome {
        is_elastic: true,
        min_ranks: 2,
        hosts: vec![0, 1, 1],
        generation: 4,
    };
    launcher.send(&welcome, true);
    let client = Client::new(1, socket).unwrap();
    assert!(client.heard().is_elastic && client.heard().is_newcomer());
    assert_eq!((client.ranks(), client.heard().min_ranks), (3, 2));
}

#[test]
fn the_end_of_the_job_or_of_the_launcher_ends_a_wait() {
    let (left, launcher) = client(0, 1, &[ToRank::Ends(65), ToRank::Ends(0)]);
    assert!(matches!(left.meet(0, 7), MeetingOutcome::JobEnds(65)));
    drop(launcher);
    assert!(!left.end(0), "it ends already");
    let (alone, launcher) = client(0, 1, &[]);
    drop(launcher);
    assert!(matches!(
        alone.meet(0, 7),
        MeetingOutcome::JobEnds(EXIT_PEER_LOST)
    ));
    assert_eq!(alone.heard().job_ends(), Some(EXIT_PEER_LOST));
}

#[test]
fn a_generation_that_is_over_ends_its_calls_and_no_later_ones() {
    let (rank, launcher) = client(0, 2, &[]);
    let (sender, ends) = mpsc::channel();
    for (number, over, ended) in [(1, 1, true), (2, 1, false), (3, 3, true)] {
        launcher.send(&ToRank::Formed(generation(number, &[0, 1])), true);
        let heard = |of: u64| {
            while rank.heard().signs < of {
                std::thread::yield_now()
            }
        };
        launcher.send(&ToRank::Alive(Duration::ZERO), true);
        heard(u64::from(2 * number - 1));
        let sender = sender.clone();
        rank.set_end_calls(move |cause| sender.send(cause.ends_generation()).unwrap());
        launcher.send(&ToRank::Over(over), true);
        launcher.send(&ToRank::Alive(Duration::ZERO), true);
        heard(u64::from(2 * number));
        assert_eq!(ends.try_iter().any(|of_it| of_it), ended, "{number}");
        assert_eq!(rank.ended().is_some(), ended, "{number}");
    }
    // So it does where the job has done its work.
    launcher.send(&ToRank::Ends(0), true);
    launcher.send(&ToRank::Formed(generation(4, &[0, 1])), true);
    launcher.send(&ToRank::Over(4), true);
    launcher.send(&ToRank::Alive(Duration::ZERO), true);
    while rank.heard().signs < 7 {
        std::thread::yield_now();
    }
    // What it has heard before counts, too.
    rank.set_end_calls(move |cause| sender.send(cause.ends_generation()).unwrap());
    assert_eq!(ends.recv(), Ok(true));
}
