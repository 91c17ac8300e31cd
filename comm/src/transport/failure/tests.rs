use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::*;
use crate::membership::client::REQUESTED;
use crate::membership::client::tests::{client, generation};
use crate::membership::packets::Packets;
use crate::membership::wire::{ToLauncher, ToRank};
use crate::transport::shared::Segment;

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
    let identity = RankIdentity::in_process("test".into(), 2, 3);
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
        // Sleep: this body does not end.
        std::thread::sleep(Duration::from_secs(3600))
    });
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// Where a process of the test below finds its socket to the launcher.
const SOCKET: &str = "DDP_TEST_SOCKET";

#[test]
fn a_rank_that_ends_because_of_another_ends_the_job_although_that_one_has_not_said_so_yet() {
    if let Some(fd) = std::env::var(SOCKET).ok().and_then(|fd| fd.parse().ok()) {
        let identity = RankIdentity::in_process("test".into(), 1, 2);
        let board = Board::new(&Segment::in_process(2).unwrap());
        // SAFETY: the process above has given this one the descriptor.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let client = Client::new(1, socket).unwrap();
        REQUESTED.store(libc::SIGTERM, Ordering::SeqCst);
        let failure = Failure {
            link: Some(Arc::clone(&client)),
            client: Some(client),
            ..Failure::in_process(identity, board, |_| "")
        };
        failure.end(74);
    }
    let (launcher, socket) = Packets::pair().unwrap();
    // SAFETY: a descriptor of this test, which the process below inherits.
    unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, 0) };
    let welcome = ToRank::Welcome {
        is_elastic: false,
        min_ranks: 2,
        hosts: vec![0; 2],
        generation: 0,
    };
    launcher.send(&welcome, true);
    let mut command = Command::new(std::env::current_exe().unwrap());
    let own = "transport::failure::tests::a_rank_that_ends_because_of_another_ends_the_job_although_that_one_has_not_said_so_yet";
    command.args(["--exact", own]);
    command.env(SOCKET, socket.as_raw_fd().to_string());
    let ended = command.output().unwrap();
    assert_eq!(ended.status.code(), Some(74), "{ended:?}");
    let asked = ToLauncher::Asked(libc::SIGTERM);
    assert_eq!(launcher.receive(), Some(asked), "it was asked to stop, too");
    assert_eq!(launcher.receive(), Some(ToLauncher::Ends(74)));
}

#[test]
fn a_rank_that_misses_another_says_so_also_if_the_launcher_ends_the_generation_meanwhile() {
    const IS_CHILD: &str = "DDP_TEST_IS_CHILD";
    if std::env::var_os(IS_CHILD).is_some() {
        let formed = ToRank::Formed(generation(1, &[0, 1]));
        let (client, launcher) = client(0, 2, &[formed]);
        client.meet(0, 0);
        // The launcher does not listen, so that `lose` waits when it tells it.
        (1..100_000).for_each(|number| client.show_progress(number));
        let identity = RankIdentity::in_process("test".into(), 0, 2);
        let failure = Failure {
            client: Some(client),
            ..Failure::in_process(
                identity,
                Board::new(&Segment::in_process(2).unwrap()),
                |_| "",
            )
        };
        let error = Error::Timeout {
            call: "all-reduce".into(),
            missing: vec![1],
            waited: Duration::from_secs(1),
            total: Duration::from_secs(1),
        };
        std::thread::scope(|scope| {
            let loses = scope.spawn(|| failure.lose(&error, &[1]));
            let started = Instant::now();
            while !failure.board.has_speaker() {
                if loses.is_finished() || started.elapsed() > Duration::from_secs(60) {
                    std::process::exit(1);
                }
                std::thread::yield_now();
            }
            failure.end_generation("the launcher says so".into());
            while !matches!(launcher.receive(), Some(ToLauncher::Misses { .. })) {}
        });
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let own = "transport::failure::tests::a_rank_that_misses_another_says_so_also_if_the_launcher_ends_the_generation_meanwhile";
    command
        .args(["--exact", own, "--nocapture"])
        .env(IS_CHILD, "1");
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{said}");
    assert!(said.contains("the ranks that are left continue"), "{said}");
}

/// 58 frames hid the one of the user's own code.
#[test]
fn a_backtrace_shows_the_first_frames_of_the_program() {
    let frame = |name: &str, file: &str| format!("   0: {name}\n             at {file}:1:5\n");
    let library = "/rustc/29483883/library/std/src/panicking.rs";
    let own = frame("own::forward", "./src/main.rs");
    let trace = [
        frame("hook", "./comm/src/world/ending.rs"),
        frame("__rustc::rust_begin_unwind", library),
        own.repeat(12),
        frame("std::panicking::try", library),
        "  21: main\n".into(),
    ];
    let all = own.repeat(8) + "(RUST_BACKTRACE=full: all frames)";
    assert_eq!(own_frames(&trace.concat()), all);
}
