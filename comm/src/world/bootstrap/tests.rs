use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;

/// Ranks 0 and 1 of a job.
fn two(options: &Options) -> [Star; 2] {
    let (zero, one) = UnixStream::pair().unwrap();
    [(0, zero), (1, one)].map(|(rank, socket)| {
        Star::on_one_host((rank, 2), vec![socket.into()], None, options).unwrap()
    })
}

/// A stranger who joins, says that it is a process of this user, and goes silent: the process it
/// names would be killed when it does not end.
#[test]
fn a_process_that_has_not_opened_the_ranks_memory_is_no_peer_whatever_a_rank_says() {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let mut named = Command::new("sleep");
    let mut named = named.arg("600").stdin(Stdio::null()).spawn().unwrap();
    let [mut zero, mut stranger] = two(&options);
    let lookup = |_: &str| None;
    let error = std::thread::scope(|scope| {
        let joined = scope.spawn(|| join(&options, Launcher::Variables, &mut zero, Ok(())));
        exchange_infos(&mut stranger, &lookup).unwrap();
        let pid = named.id();
        stranger.exchange(&json!([pid, 3])).unwrap();
        stranger.exchange(&json!([null, false])).unwrap();
        joined.join().unwrap().err().expect("no rank 1 is there")
    });
    let text = error.to_string();
    let told = "rank 1 says that it is on this host, and has not opened its memory";
    assert!(text.contains(told), "{text}");
    assert!(named.try_wait().unwrap().is_none(), "it was killed");
    named.kill().unwrap();
    named.wait().unwrap();
}

#[test]
fn ranks_know_the_processes_that_have_opened_their_memory() {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let [mut zero, mut one] = two(&options);
    let (zero, one) = std::thread::scope(|scope| {
        let one = scope.spawn(|| join(&options, Launcher::Own, &mut one, Ok(())));
        let zero = join(&options, Launcher::Own, &mut zero, Ok(()));
        (zero.unwrap(), one.join().unwrap().unwrap())
    });
    for (start, rank) in [(&zero, 1), (&one, 0)] {
        let [peer] = &start.failure.peers[..] else {
            panic!("there is one other rank")
        };
        assert_eq!((peer.rank, peer.process.pid), (rank, std::process::id()));
    }
}
