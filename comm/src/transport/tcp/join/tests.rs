use std::io::{Read, Write};

use super::*;
use crate::transport::tcp::Secret;

const LONG: Duration = Duration::from_secs(60);

fn key(rank: usize, secret: Option<&str>) -> JobKey {
    JobKey::new("job", Secret::new(secret), rank, 3)
}

/// Rank 0 of a job, and its address.
fn host(secret: Option<&str>) -> (Acceptor, SocketAddr) {
    let (listener, _) = listen_for_ranks(&[[127, 0, 0, 1].into()]).unwrap();
    let address = listener.local_addr().unwrap();
    (
        Acceptor::new(listener, key(0, secret), 1 << 16).unwrap(),
        address,
    )
}

fn call(address: SocketAddr, key: &JobKey, limit: Duration) -> Result<Joined> {
    connect(0, || vec![address], "there", key, 1 << 16, limit)
}

/// Answers whoever calls until `is_done`.
fn serve(listener: &mut Acceptor, expected: &[usize], is_done: impl Fn(&Acceptor) -> bool) {
    while !is_done(listener) {
        listener.accept();
        listener.talk(expected).unwrap();
        std::thread::yield_now();
    }
}

#[test]
fn ranks_join_in_any_order_and_strangers_do_not_delay_them() {
    let (mut listener, address) = host(Some("secret"));
    let mut slow = TcpStream::connect(address).unwrap();
    slow.write_all(&[1]).unwrap();
    while listener.candidates.is_empty() {
        listener.accept();
    }
    // If it delayed ranks, they would be too late.
    listener.candidates[0].since += 2 * LONG;
    let mut garbage = TcpStream::connect(address).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    std::thread::scope(|scope| {
        // Each keeps its socket until it is joined.
        let callers = [2, 1].map(|rank| {
            scope.spawn(move || {
                let other_job = JobKey::new("another", Secret::new(Some("secret")), rank, 2);
                let refused = attempt(address, 0, &other_job, 1 << 16).unwrap();
                assert!(matches!(refused, Attempt::Answered(_)));
                call(address, &key(rank, Some("secret")), LONG).unwrap()
            })
        });
        listener.gather(&[1, 2], LONG, "here").unwrap();
        _ = callers.map(|caller| caller.join().unwrap());
    });
    let mut joined: Vec<usize> = listener.joined.iter().map(|joined| joined.rank).collect();
    joined.sort_unstable();
    assert_eq!(joined, [1, 2]);
    assert_eq!(listener.candidates.len(), 1, "the slow client may go on");
    // The garbage was a length beyond the limit: its connection is closed.
    assert_eq!(garbage.read(&mut [0; 8]).unwrap_or(0), 0);
    drop(slow);
}

#[test]
fn a_rank_with_another_secret_is_refused_by_name_on_both_sides() {
    for (ours, theirs, help) in [
        (
            Some("a"),
            Some("b"),
            "set the same DDP_JOB_SECRET on all ranks",
        ),
        (Some("a"), None, "set DDP_JOB_SECRET=none on all ranks"),
    ] {
        let (mut listener, address) = host(ours);
        // It asks until this time is over, at least once.
        let limit = Duration::from_secs(2);
        let caller = std::thread::spawn(move || call(address, &key(1, theirs), limit));
        serve(&mut listener, &[1], |_| caller.is_finished());
        let gathered = listener.gather(&[1], Duration::from_millis(500), "here");
        let text = gathered.unwrap_err().to_string();
        assert!(
            text.contains("rank 1 did not come to here within 0.5 s"),
            "{text}"
        );
        let told = "127.0.0.1 was refused: rank 1, as it says: it has ";
        assert!(text.contains(told), "{text}");
        let text = caller.join().unwrap().unwrap_err().to_string();
        let told = "rank 0 did not answer at there within 2 s: rank 0 at 127.0.0.1:";
        assert!(
            text.contains(told) && text.contains("it has another secret"),
            "{text}"
        );
        assert!(text.contains(help), "{text}");
    }
}

/// A stranger that holds the port until a rank has warned of it.
#[test]
fn who_holds_the_port_with_another_secret_does_not_end_a_rank() {
    let (mut stranger, address) = host(Some("stranger"));
    let caller = std::thread::spawn(move || call(address, &key(1, Some("a")), LONG));
    serve(&mut stranger, &[1], |stranger| !stranger.notes.is_empty());
    drop(stranger);
    // Connections of the stranger may hold the port for a moment.
    let listener = loop {
        if let Ok(listener) = TcpListener::bind(address) {
            break listener;
        }
        std::thread::yield_now();
    };
    let mut listener = Acceptor::new(listener, key(0, Some("a")), 1 << 16).unwrap();
    listener.gather(&[1], LONG, "here").unwrap();
    assert_eq!(caller.join().unwrap().unwrap().rank, 0);
}

/// A socket between a rank and rank 0, in whose frames a stranger changes something.
#[test]
fn a_frame_that_a_stranger_adds_is_not_taken() {
    let (mut listener, address) = host(Some("a"));
    let caller = std::thread::spawn(move || call(address, &key(1, Some("a")), LONG).unwrap());
    listener.gather(&[1], LONG, "here").unwrap();
    let (mut zero, one) = (
        listener.joined.remove(0).frames,
        caller.join().unwrap().frames,
    );
    let (_, mut writer) = one.into_streams().unwrap();
    writer.write_all(b"genuine").unwrap();
    // As the launcher's order of a stranger would come: with a length, and without the key.
    let forged = br#"{"Start":[1,77,[["LD_PRELOAD","/tmp/x.so"]]]}"#;
    let mut frame = (forged.len() as u32).to_le_bytes().to_vec();
    frame.extend([0; 16]);
    frame.extend(forged);
    writer.0.write_all(&frame).unwrap();
    writer.write_all(b"later").unwrap();
    let mut taken = Vec::new();
    wait_for(LONG, std::slice::from_mut(&mut zero), |frames| {
        taken.extend(frames[0].take());
        frames[0].is_closed().then_some(())
    })
    .unwrap();
    assert_eq!(taken, [b"genuine"]);
    assert_eq!(zero.take(), None);
}

#[test]
fn a_rank_of_another_job_and_the_one_it_called_both_say_so_first() {
    let (mut listener, address) = host(None);
    let caller = std::thread::spawn(move || {
        let other = JobKey::new("job of two", Secret::new(None), 1, 2);
        // It asks until this time is over, at least once, and keeps the first answer, for which it
        // waits however short this time is.
        call(address, &other, Duration::from_secs(2))
    });
    serve(&mut listener, &[1], |listener| !listener.notes.is_empty());
    let gathered = listener.gather(&[1], Duration::from_millis(500), "here");
    // From now on the port refuses connections, which is not the reason.
    drop(listener);
    let text = gathered.unwrap_err().to_string();
    let told = "was refused: it is rank 1 of another job (of 2 ranks, not 3)";
    assert!(text.contains(told), "{text}");
    let text = caller.join().unwrap().unwrap_err().to_string();
    assert!(
        text.contains(": another job (of 3 ranks, not 2) listens there;"),
        "{text}"
    );
}

#[test]
fn a_rank_that_nobody_expects_and_a_second_one_are_refused() {
    let (mut listener, address) = host(None);
    let ones = [(); 2].map(|()| std::thread::spawn(move || call(address, &key(1, None), LONG)));
    // Asks until it is refused: on a busy machine an answer may come too late.
    let unknown = std::thread::spawn(move || {
        let is_refused = || {
            let made = attempt(address, 0, &key(7, None), 1 << 16).unwrap();
            matches!(made, Attempt::Answered(why) if why == "rank 0 did not take this rank in")
        };
        while !is_refused() {}
    });
    let are_answered =
        |_: &Acceptor| unknown.is_finished() && ones.iter().all(|one| one.is_finished());
    serve(&mut listener, &[1, 2], are_answered);
    let gathered = listener.gather(&[1, 2], Duration::from_millis(50), "here");
    let text = gathered.unwrap_err().to_string();
    assert!(text.contains("rank 2 did not come"), "{text}");
    assert!(text.contains("it says that it is rank 7"), "{text}");
    unknown.join().unwrap();
    let ones = ones.map(|one| one.join().unwrap());
    assert_eq!(ones.iter().filter(|one| one.is_ok()).count(), 1);
    let second = ones.into_iter().find_map(Result::err).unwrap().to_string();
    assert!(
        second.contains("another process is rank 1 already"),
        "{second}"
    );
}

#[test]
fn a_rank_that_finds_no_other_says_where_it_looked() {
    let (_, port) = listen_for_ranks(&[[127, 0, 0, 1].into()]).unwrap();
    let error = call(
        ([127, 0, 0, 1], port).into(),
        &key(1, None),
        Duration::from_millis(100),
    )
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("rank 0 did not answer at there within 0.1 s"),
        "{text}"
    );
    assert!(text.contains("refused"), "{text}");
}
