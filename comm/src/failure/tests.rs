use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::*;
use crate::shared::Segment;

#[test]
fn a_peer_that_is_stopped_is_killed_and_one_that_leaves_is_not() {
    let sleeper = |_| Command::new("sleep").arg("60").spawn().unwrap();
    let mut children: Vec<_> = (0..2).map(sleeper).collect();
    // SAFETY: stops a child of this test that it has not waited for.
    unsafe { libc::kill(children[0].id() as libc::pid_t, libc::SIGSTOP) };
    let peer = |rank: usize| Peer {
        rank,
        local_rank: rank,
        process: Process::open(children[rank].id()),
    };
    let identity = Identity::in_process("test".into(), 2, 3);
    let board = Board::new(&Segment::in_process(3).unwrap());
    let failure = Failure {
        peers: vec![peer(0), peer(1)],
        must_kill: true,
        ..Failure::in_process(identity, board, |_| "")
    };
    failure.board.leave(1);
    failure.kill_peers_that_stay();
    assert_eq!(children[0].wait().unwrap().signal(), Some(libc::SIGKILL));
    assert_eq!(children[1].try_wait().unwrap(), None);
    children[1].kill().unwrap();
    children[1].wait().unwrap();
}

#[test]
fn a_body_past_its_deadline_is_abandoned() {
    let started = Instant::now();
    within(Duration::from_millis(20), || {
        std::thread::sleep(Duration::from_secs(3600))
    });
    assert!(started.elapsed() < Duration::from_secs(60));
}
