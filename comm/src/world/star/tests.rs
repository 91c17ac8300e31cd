use std::os::unix::net::UnixStream;

use serde_json::json;

use super::*;
use crate::membership::client::MeetingOutcome;
use crate::membership::client::tests::{client, generation};
use crate::membership::packets::Packets;
use crate::membership::wire::ToRank;

/// The ranks of a job, by socket pairs.
fn stars(size: usize, timeout: Duration) -> Vec<Star> {
    let frames = |end: UnixStream| Frames::new(end.into(), VALUE_BYTES_MAX).unwrap();
    let pairs = (1..size).map(|_| UnixStream::pair().unwrap());
    let (hub, others): (Vec<Frames>, Vec<Frames>) = pairs
        .map(|(hub, other)| (frames(hub), frames(other)))
        .unzip();
    let others = others.into_iter().enumerate();
    let others = others.map(|(index, socket)| Star::new(index + 1, size, vec![socket], timeout));
    let mut all = vec![Star::new(0, size, hub, timeout)];
    all.extend(others);
    all
}

/// The results of `body`, which runs on a separate thread for each rank.
fn each<T: Send>(stars: Vec<Star>, body: impl Fn(Star) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks = stars
            .into_iter()
            .map(|star| scope.spawn(move || body(star)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const LONG: Duration = Duration::from_secs(60);
/// Long enough for all ranks to come that will, also on a busy machine.
const SHORT: Duration = Duration::from_secs(20);

#[test]
fn every_rank_gets_the_values_of_all_in_the_order_agreed() {
    let values = each(stars(3, LONG), |mut star| {
        let came_as = star.rank();
        let first = star.exchange(&json!(came_as)).unwrap();
        star.numbers().order = vec![0, 2, 1];
        let long = "x".repeat(VALUE_BYTES_MAX);
        let rank = star.rank();
        let second = star.exchange(&json!([rank])).unwrap();
        (first, second, star.exchange(&json!(long)).unwrap())
    });
    for (first, second, long) in values {
        assert_eq!(first, [json!(0), json!(1), json!(2)]);
        assert_eq!(second, [json!([0]), json!([1]), json!([2])]);
        assert_eq!(long, vec![Value::Null; 3]);
    }
}

#[test]
fn a_late_rank_is_named_by_rank_0_alone() {
    let errors = each(stars(4, SHORT), |mut star| {
        if star.numbers.came_as == 2 {
            // Stays until the others have given up.
            wait_for(LONG, &mut star.sockets, |sockets| sockets[0].take());
            return None;
        }
        Some(star.exchange(&json!(1)).unwrap_err())
    });
    let text = errors[0].as_ref().unwrap().to_string();
    assert!(text.contains("rank 2 did not come within 20 s"), "{text}");
    for silent in [&errors[1], &errors[3]] {
        assert!(matches!(silent, Some(Error::PeerFailed(_))), "{silent:?}");
    }
}

#[test]
fn a_rank_that_ends_is_named_without_waiting_for_the_timeout() {
    let errors = each(stars(3, LONG), |mut star| {
        (star.numbers.came_as != 1).then(|| star.exchange(&json!(1)).unwrap_err())
    });
    let text = errors[0].as_ref().unwrap().to_string();
    assert!(
        text.contains("rank 1 ended before all ranks had met"),
        "{text}"
    );
    assert!(
        matches!(&errors[2], Some(Error::PeerFailed(_))),
        "{errors:?}"
    );
    let errors = each(stars(2, LONG), |mut star| {
        (star.numbers.came_as != 0).then(|| star.exchange(&json!(1)).unwrap_err())
    });
    let text = errors[1].as_ref().unwrap().to_string();
    assert!(text.contains("rank 0 ended before"), "{text}");
}

/// Rank `rank` of two, in a generation of a job with this secret.
fn meets(rank: usize, (generation, secret): (u32, &str), at: &Meetings) -> Result<Star> {
    let place = Rendezvous {
        rank,
        size: at.size,
        local_size: None,
        host: "127.0.0.1".into(),
        ports: vec![at.port],
        job: format!("generation {generation}"),
        is_of_torchrun: false,
    };
    let options = Options {
        timeout: at.timeout,
        ..Options::default()
    };
    let listener = (rank == 0).then(|| at.listener.try_clone().unwrap());
    let text = format!("a secret, and which: {secret}");
    let secret = Secret::read(&|name| (name == "DDP_JOB_SECRET").then(|| text.clone()))?;
    let client = Some(Arc::clone(&at.client));
    Star::over_tcp(place, listener, (secret, client), &options)
}

/// Where ranks of the first generation meet.
struct Meetings {
    listener: TcpListener,
    port: u16,
    client: Arc<Client>,
    launcher: Arc<Packets>,
    timeout: Duration,
    size: usize,
}

fn meetings(timeout: Duration) -> Meetings {
    let (listener, port) = tcp::listen_for_ranks(&[]).unwrap();
    let first = ToRank::Formed(generation(1, &[0]));
    let (client, launcher) = client(0, 1, &[first]);
    assert!(matches!(client.meet(0, 0), MeetingOutcome::Formed(_)));
    Meetings {
        listener,
        port,
        client,
        launcher: Arc::new(launcher),
        timeout,
        size: 2,
    }
}

#[test]
fn a_rank_that_ends_while_another_is_late_makes_nobody_miss_the_late_one() {
    let at = meetings(SHORT);
    let at = Meetings { size: 3, ..at };
    let patient = Meetings {
        timeout: Duration::from_secs(600),
        listener: at.listener.try_clone().unwrap(),
        client: Arc::clone(&at.client),
        launcher: Arc::clone(&at.launcher),
        ..at
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| meets(0, (1, "a"), &patient));
        drop(meets(1, (1, "a"), &patient).unwrap());
        let error = first.join().unwrap().unwrap_err();
        assert!(error.is_rank_lost(), "{error}");
        let first = scope.spawn(|| meets(0, (1, "a"), &at));
        let _second = meets(1, (1, "a"), &at).unwrap();
        let error = first.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Timeout { missing, .. } if missing == [2]));
    });
}

#[test]
fn ranks_of_an_older_generation_and_strangers_are_refused_and_delay_nobody() {
    use std::io::Write;
    let at = meetings(LONG);
    // Asks until this time is over, at least once.
    let late = Meetings {
        timeout: Duration::from_secs(1),
        listener: at.listener.try_clone().unwrap(),
        client: Arc::clone(&at.client),
        launcher: Arc::clone(&at.launcher),
        ..at
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| meets(0, (2, "a"), &at));
        let mut stranger = std::net::TcpStream::connect(("127.0.0.1", at.port)).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let old = meets(1, (1, "a"), &late).unwrap_err().to_string();
        assert!(old.contains("another job"), "{old}");
        let wrong = meets(1, (2, "b"), &late).unwrap_err().to_string();
        assert!(wrong.contains("rank 0 did not answer"), "{wrong}");
        assert!(!first.is_finished());
        let second = meets(1, (2, "a"), &at).unwrap();
        let came_as = |star: &Star| star.numbers.came_as;
        let first = first.join().unwrap().unwrap();
        assert_eq!((came_as(&second), came_as(&first)), (1, 0));
    });
}

#[test]
fn a_generation_that_is_over_ends_every_wait() {
    let at = meetings(Duration::from_secs(600));
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        // Each waits for the other, which never comes.
        let other = meetings(Duration::from_secs(600));
        let first = scope.spawn(|| meets(0, (1, "a"), &at));
        let second = scope.spawn(move || {
            let closed = Meetings { port: 1, ..other };
            closed.launcher.send(&ToRank::Over(1), true);
            meets(1, (1, "a"), &closed)
        });
        at.launcher.send(&ToRank::Over(1), true);
        for ended in [first, second] {
            assert!(ended.join().unwrap().unwrap_err().is_rank_lost());
        }
    });
    assert!(began.elapsed() < Duration::from_secs(60));
}
