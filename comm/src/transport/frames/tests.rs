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

/// Both ends of a connection, with the same two keys.
fn sealed(covers_all: bool) -> (Frames, UnixStream) {
    let (left, right) = UnixStream::pair().unwrap();
    let mut left = Frames::new(left.into(), LIMIT).unwrap();
    left.seal(seals(covers_all));
    (left, right)
}

fn seals(covers_all: bool) -> Seals {
    let [sent, received] = [1, 2].map(|key| Seal::new([key; 32], covers_all));
    Seals { sent, received }
}

/// Both ends of a socket: the first sends `bytes` as they are, the second expects sealed frames.
fn sending(bytes: &[u8], covers_all: bool) -> [Frames; 2] {
    let (left, right) = UnixStream::pair().unwrap();
    let [mut left, mut right] = [left, right].map(|it| Frames::new(it.into(), LIMIT).unwrap());
    let Seals { sent, received } = seals(covers_all);
    right.seal(Seals {
        sent: received,
        received: sent,
    });
    left.outgoing = bytes.to_vec();
    [left, right]
}

/// What the other end takes of bytes that came, and whether it closes then.
fn taken(bytes: &[u8], covers_all: bool) -> (Vec<Vec<u8>>, bool) {
    let [mut left, mut right] = sending(bytes, covers_all);
    let mut taken = Vec::new();
    while !left.is_sent() && !right.is_closed() {
        left.advance();
        right.advance();
        taken.extend(std::iter::from_fn(|| right.take()));
    }
    right.advance();
    taken.extend(std::iter::from_fn(|| right.take()));
    (taken, right.is_closed())
}

/// As `taken`, each into its receiver's memory.
fn filled(bytes: &[u8], covers_all: bool) -> (Vec<Vec<u8>>, bool) {
    let [mut left, mut right] = sending(bytes, covers_all);
    let mut filled = Vec::new();
    loop {
        left.advance();
        let was_sent = left.is_sent();
        right.advance_to(HEAD_BYTES_MAX);
        let Some((length, first)) = right.head().filter(|_| !right.is_closed()) else {
            break (filled, right.is_closed());
        };
        right.begin();
        let mut rest = vec![0; length - ALWAYS_BYTES];
        while !right.fill(&mut rest) {
            left.advance();
            if right.is_closed() || was_sent {
                assert!(
                    !right.is_closed() || right.take().is_none(),
                    "what follows a forged frame is dropped"
                );
                return (filled, right.is_closed());
            }
        }
        filled.push([&first[..], &rest].concat());
    }
}

/// Three frames, as they are on the wire.
fn wire(messages: &[Vec<u8>; 3], covers_all: bool) -> [Vec<u8>; 3] {
    let (mut left, _right) = sealed(covers_all);
    messages.each_ref().map(|message| {
        left.outgoing.clear();
        left.queue_parts(&[&message[..1], &message[1..]]);
        left.outgoing.clone()
    })
}

#[test]
fn frames_that_are_changed_added_left_out_repeated_or_swapped_are_not_taken() {
    let messages = [vec![1; 20], vec![2; 30], vec![3; 40]];
    let [one, two, three] = wire(&messages, false);
    let all = [&one[..], &two, &three];
    assert_eq!(taken(&all.concat(), false), (messages.to_vec(), false));
    for (frames, genuine) in [
        (vec![&one, &one, &two], 1),
        (vec![&two, &one, &three], 0),
        (vec![&one, &three], 1),
        (vec![&one, &two, &three, &one], 3),
    ] {
        let bytes = frames.into_iter().flatten().copied().collect::<Vec<_>>();
        assert_eq!(taken(&bytes, false), (messages[..genuine].to_vec(), true));
    }
    for at in 4..two.len() {
        let mut changed = all.concat();
        changed[one.len() + at] ^= 4;
        assert_eq!(
            taken(&changed, false),
            (messages[..1].to_vec(), true),
            "byte {at}"
        );
    }
    // One that is sent back to its sender has the key of the other direction.
    let (mut left, right) = sealed(false);
    (&right).write_all(&one).unwrap();
    left.advance();
    assert!(left.take().is_none() && left.is_closed());
}

#[test]
fn long_payloads_are_covered_if_one_end_wants_it_and_their_headers_always() {
    let long = vec![7; seal::SMALL_BYTES_MAX + 1];
    let messages = [long.clone(), long, vec![1; 9]];
    for covers_all in [false, true] {
        let frames = wire(&messages, covers_all);
        assert_eq!(
            filled(&frames.concat(), covers_all),
            (messages.to_vec(), false)
        );
        let header = LENGTH_BYTES + MAC_BYTES;
        for (at, is_seen) in [
            (header, true),
            (header + seal::ALWAYS_BYTES - 1, true),
            (header + seal::ALWAYS_BYTES, covers_all),
            (frames[0].len() - 1, covers_all),
        ] {
            let mut changed = frames.concat();
            changed[at] ^= 1;
            for receive in [taken, filled] {
                let (received, is_closed) = receive(&changed, covers_all);
                assert_eq!(
                    (received.is_empty(), is_closed),
                    (is_seen, is_seen),
                    "byte {at}"
                );
            }
        }
    }
}

#[test]
fn streams_of_frames_carry_any_bytes_and_end_at_a_forged_one() {
    let text: Vec<u8> = (0..200_000).map(|index| (index % 251) as u8).collect();
    let mut wire = Vec::new();
    let mut writer = SealedWriter(&mut wire, Seal::new([1; 32], false));
    writer.write_all(&text[..70_000]).unwrap();
    writer.write_all(&text[70_000..]).unwrap();
    let read = |wire: &[u8]| {
        let mut read = Vec::new();
        let mut reader = SealedReader::new(wire, Seal::new([1; 32], false));
        reader
            .read_to_end(&mut read)
            .map(|_| read)
            .map_err(|error| error.kind())
    };
    assert_eq!(read(&wire).unwrap(), text);
    for at in [5, wire.len() - 1] {
        let mut changed = wire.clone();
        changed[at] ^= 1;
        assert_eq!(read(&changed), Err(ErrorKind::InvalidData));
    }
    let endless = [0xff; 70_000];
    assert_eq!(read(&endless), Err(ErrorKind::InvalidData));
    // After an error nothing more is read.
    wire[5] ^= 1;
    let mut reader = SealedReader::new(&wire[..], Seal::new([1; 32], false));
    let mut bytes = [0; 100];
    assert!(reader.read(&mut bytes).is_err() && reader.read(&mut bytes).is_err());
    wire[5] ^= 1;
    assert_eq!(read(&wire[..wire.len() - 1]), Err(ErrorKind::UnexpectedEof));
}

proptest::proptest! {
    /// Whatever comes: nothing panics, and nothing is taken that was not sent.
    #[test]
    fn random_bytes_are_never_taken(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
        proptest::prop_assert_eq!(taken(&bytes, false).0.len(), 0);
    }
}
