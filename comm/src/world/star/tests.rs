use std::os::unix::net::UnixStream;

use serde_json::json;

use super::*;

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

#[test]
fn every_rank_gets_the_values_of_all_in_the_order_agreed() {
    let values = each(stars(3, LONG), |mut star| {
        let first = star.exchange(&json!(star.rank())).unwrap();
        star.renumber(&[0, 2, 1]).unwrap();
        let long = "x".repeat(VALUE_BYTES_MAX);
        let second = star.exchange(&json!([star.rank()])).unwrap();
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
    let errors = each(stars(4, Duration::from_millis(100)), |mut star| {
        if star.rank == 2 {
            // Stays until the others have given up.
            wait_for(LONG, &mut star.sockets, |sockets| sockets[0].take());
            return None;
        }
        Some(star.exchange(&json!(1)).unwrap_err())
    });
    let text = errors[0].as_ref().unwrap().to_string();
    assert!(text.contains("rank 2 did not come within 0.1 s"), "{text}");
    for silent in [&errors[1], &errors[3]] {
        assert!(matches!(silent, Some(Error::PeerFailed(_))), "{silent:?}");
    }
}

#[test]
fn a_rank_that_ends_is_named_without_waiting_for_the_timeout() {
    let errors = each(stars(3, LONG), |mut star| {
        (star.rank != 1).then(|| star.exchange(&json!(1)).unwrap_err())
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
        (star.rank != 0).then(|| star.exchange(&json!(1)).unwrap_err())
    });
    let text = errors[1].as_ref().unwrap().to_string();
    assert!(text.contains("rank 0 ended before"), "{text}");
}
