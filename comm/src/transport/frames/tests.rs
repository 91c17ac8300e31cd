use super::*;

const LIMIT: usize = 100_000;

fn pair() -> (Frames, Frames) {
    let (left, right) = UnixStream::pair().unwrap();
    let frames = |end: UnixStream| Frames::new(end.into(), LIMIT).unwrap();
    (frames(left), frames(right))
}

/// The next message, moved along by both ends.
fn next(from: &mut Frames, to: &mut Frames) -> Option<Vec<u8>> {
    (0..1000).find_map(|_| {
        from.advance();
        to.advance();
        to.take()
    })
}

#[test]
fn messages_arrive_whole_and_in_order() {
    let (mut left, mut right) = pair();
    let messages = [vec![], vec![7u8; 3], vec![1; LIMIT], vec![2; LIMIT]];
    messages.iter().for_each(|message| left.queue(message));
    for message in &messages {
        assert_eq!(next(&mut left, &mut right).as_ref(), Some(message));
    }
    assert!(left.is_sent() && right.take().is_none());
    right.queue(b"back");
    assert_eq!(next(&mut right, &mut left).unwrap(), b"back");
}

#[test]
fn what_came_before_the_end_can_still_be_taken() {
    let (mut left, mut right) = pair();
    left.queue(b"last");
    left.advance();
    drop(left);
    right.advance();
    assert!(right.is_closed());
    assert_eq!(right.take().unwrap(), b"last");
    assert_eq!(right.take(), None);
}

#[test]
fn a_length_beyond_the_limit_closes_the_socket() {
    let (left, right) = UnixStream::pair().unwrap();
    let mut right = Frames::new(right.into(), LIMIT).unwrap();
    (&left).write_all(b"GET / HTTP/1.1\r\n").unwrap();
    right.advance();
    assert!(right.take().is_none() && right.is_closed());
}
