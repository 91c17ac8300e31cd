use std::os::unix::process::ExitStatusExt;
use std::time::Instant;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(10);
/// The end of patience with the system.
const PATIENCE: Duration = Duration::from_secs(60);

fn sleeper() -> Command {
    let mut command = Command::new("sleep");
    command.arg("600");
    command
}

fn until<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE);
        // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Stops a rank, or lets it continue.
fn send(ranks: &Children, rank: usize, signal: c_int) {
    let pid = ranks.running.iter().find(|it| it.0 == rank).unwrap().1.id();
    // SAFETY: sends a signal to a child that has not been waited for.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
    until(|| (is_stopped(pid) == (signal == libc::SIGSTOP)).then_some(()));
}

fn kills(ranks: &mut Children, roster: Option<&Roster>, seconds: u64) -> bool {
    ranks.kill_stopped("test", Duration::from_secs(seconds), TIMEOUT, roster)
}

fn ended(ranks: &mut Children) -> (usize, ExitStatus) {
    until(|| ranks.collect().pop())
}

#[test]
fn a_rank_that_stays_stopped_for_three_timeouts_is_killed() {
    let mut ranks = Children::default();
    for rank in 0..3 {
        ranks.start(rank, 3, ':', &[], sleeper()).unwrap();
    }
    send(&ranks, 1, libc::SIGSTOP);
    send(&ranks, 2, libc::SIGSTOP);
    assert!(!kills(&mut ranks, None, 100));
    send(&ranks, 2, libc::SIGCONT);
    assert!(!kills(&mut ranks, None, 110));
    send(&ranks, 2, libc::SIGSTOP);
    assert!(!kills(&mut ranks, None, 129));
    assert!(kills(&mut ranks, None, 130));
    let (rank, status) = ended(&mut ranks);
    assert_eq!((rank, status.signal()), (1, Some(libc::SIGKILL)));
    // The other one has run in between.
    assert!(!kills(&mut ranks, None, 158));
    assert!(kills(&mut ranks, None, 159));
    assert_eq!(ended(&mut ranks).0, 2);
    assert!(!kills(&mut ranks, None, 1000));
    assert_eq!(ranks.running.len(), 1);
}

#[test]
fn a_rank_that_is_stopped_while_the_job_ends_is_killed_soon_and_the_roster_says_why() {
    let (roster, mut ranks) = (Roster::new(1, 1).unwrap(), Children::default());
    ranks.start_at(&roster, [0, 1], sleeper()).unwrap();
    send(&ranks, 0, libc::SIGSTOP);
    assert!(!kills(&mut ranks, Some(&roster), 1));
    assert!(!kills(&mut ranks, Some(&roster), 10));
    roster.end(0);
    assert!(kills(&mut ranks, Some(&roster), 11));
    let (rank, status) = ended(&mut ranks);
    roster.has_ended(rank, status);
    let why = roster.how_ended(rank, status);
    assert_eq!(why, "killed because it showed no progress");
}
