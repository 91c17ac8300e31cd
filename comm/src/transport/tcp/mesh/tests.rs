use std::os::unix::net::UnixStream;

use super::*;

/// Two ranks on two hosts.
fn pair() -> [Arc<Mesh>; 2] {
    let (left, right) = UnixStream::pair().unwrap();
    let peer = |end: UnixStream, host: &str| {
        Some((
            Frames::new(end.into(), FRAME_BYTES_MAX).unwrap(),
            host.to_string(),
        ))
    };
    let zero = Mesh::new(0, vec![None, peer(left, "b")]);
    let one = Mesh::new(1, vec![peer(right, "a"), None]);
    [Arc::new(zero), Arc::new(one)]
}

fn finish(letter: &mut Letter<'_>) -> Result<()> {
    while !letter.is_done()? {}
    Ok(())
}

#[test]
fn messages_of_one_tag_and_channel_arrive_in_order_and_apart_from_others() {
    let [zero, one] = pair();
    let (zeros, ones) = (MeshChannel::new(&zero), MeshChannel::new(&one));
    let (more_zeros, more_ones) = (zeros.duplicate(), ones.duplicate());
    let big = vec![7u8; MESSAGE_BYTES_MAX];
    let mut sent = vec![zeros.send(b"first", 1, 3), zeros.send(&big, 1, 3)];
    sent.push(more_zeros.send(b"other", 1, 3));
    sent.push(zeros.send(b"tag 4", 1, 4));
    // Sending continues while the other end receives.
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || sent.iter_mut().try_for_each(finish));
        assert_eq!(received(&more_ones, 5, 3), b"other");
        assert_eq!(received(&ones, 5, 4), b"tag 4");
        assert_eq!(ones.take_any(3).unwrap(), b"first");
        assert_eq!(received(&ones, MESSAGE_BYTES_MAX, 3), big);
        assert_eq!(ones.take_any(3), None);
        sender.join().unwrap().unwrap();
    });
}

fn received(channel: &MeshChannel, count: usize, tag: u32) -> Vec<u8> {
    let mut bytes = vec![0; count];
    finish(&mut channel.receive(&mut bytes, 0, tag)).unwrap();
    bytes
}

#[test]
fn messages_go_to_those_who_wait_in_the_order_in_which_they_began_to() {
    let [zero, one] = pair();
    let (zeros, ones) = (MeshChannel::new(&zero), MeshChannel::new(&one));
    // One has come before anyone waits, others while two wait.
    finish(&mut zeros.send(&[1; 9], 1, 3)).unwrap();
    ones.advance();
    let mut bytes = [[0; 9]; 3];
    let mut letters = bytes.each_mut().map(|into| ones.receive(into, 0, 3));
    for value in [2, 3] {
        finish(&mut zeros.send(&[value; 9], 1, 3)).unwrap();
    }
    letters.iter_mut().rev().for_each(|letter| {
        // The last one's message is behind that of the one before.
        _ = letter.is_done().unwrap();
    });
    letters.iter_mut().try_for_each(finish).unwrap();
    drop(letters);
    assert_eq!(bytes, [[1; 9], [2; 9], [3; 9]]);
}

#[test]
fn a_message_of_another_length_is_an_error_and_the_next_one_does_not_overtake_it() {
    let [zero, one] = pair();
    let (zeros, ones) = (MeshChannel::new(&zero), MeshChannel::new(&one));
    let mut into = [0; 9];
    let mut letter = ones.receive(&mut into, 0, 3);
    for bytes in [&[1; 5][..], &[2; 9]] {
        finish(&mut zeros.send(bytes, 1, 3)).unwrap();
    }
    let error = finish(&mut letter).unwrap_err().to_string();
    assert!(
        error.contains("expected 9 bytes from rank 0, got 5"),
        "{error}"
    );
}

#[test]
fn calls_that_give_up_in_the_middle_of_a_message_leave_others_whole() {
    let [zero, one] = pair();
    let (zeros, ones) = (MeshChannel::new(&zero), MeshChannel::new(&one));
    let big: Vec<u8> = (0..MESSAGE_BYTES_MAX).map(|at| (at % 251) as u8).collect();
    let mut sent = zeros.send(&big, 1, 3);
    assert!(!sent.is_done().unwrap(), "the socket has less room");
    let mut into = vec![0; MESSAGE_BYTES_MAX];
    let mut letter = ones.receive(&mut into, 0, 3);
    assert!(!letter.is_done().unwrap());
    drop((sent, letter));
    assert_eq!(into[..1000], big[..1000], "a part has come");
    let mut last = zeros.send(b"last", 1, 4);
    std::thread::scope(|scope| {
        scope.spawn(|| finish(&mut last).unwrap());
        assert_eq!(received(&ones, 4, 4), b"last");
    });
    assert_eq!(received(&ones, MESSAGE_BYTES_MAX, 3), big);
}

#[test]
fn a_rank_that_vanishes_in_the_middle_of_a_message_is_lost() {
    for is_awaited in [true, false] {
        let [zero, one] = pair();
        let (zeros, ones) = (MeshChannel::new(&zero), MeshChannel::new(&one));
        let big = vec![7; MESSAGE_BYTES_MAX];
        let mut sent = zeros.send(&big, 1, 3);
        let mut into = vec![0; if is_awaited { MESSAGE_BYTES_MAX } else { 1 }];
        let mut letter = ones.receive(&mut into, 0, 3);
        assert!(!sent.is_done().unwrap() && !letter.is_done().unwrap());
        drop((sent, zeros, zero));
        let error = finish(&mut letter).unwrap_err();
        assert!(
            error.to_string().contains("to rank 0 on a was lost"),
            "{error}"
        );
    }
}

#[test]
fn a_socket_that_closes_is_a_lost_rank_unless_it_said_farewell() {
    let [zero, one] = pair();
    let channel = MeshChannel::new(&zero);
    let mut into = [0];
    let mut letter = channel.receive(&mut into, 1, 0);
    drop(one);
    let error = finish(&mut letter).unwrap_err();
    assert_eq!(error.exit_code(), 77);
    let text = error.to_string();
    assert!(
        text.contains("the connection to rank 1 on b was lost"),
        "{text}"
    );
    assert_eq!(channel.lost(LOST_MAX), Some((1, "b".into())));

    let [zero, one] = pair();
    let leaver = std::thread::spawn(move || one.leave(Duration::from_secs(60)));
    zero.leave(Duration::from_secs(60));
    leaver.join().unwrap();
    assert_eq!(MeshChannel::new(&zero).lost(Duration::ZERO), None);
}

#[test]
fn a_message_of_another_length_is_an_error() {
    let [zero, one] = pair();
    finish(&mut MeshChannel::new(&zero).send(b"four", 1, 0)).unwrap();
    let ones = MeshChannel::new(&one);
    let error = finish(&mut ones.receive(&mut [0; 3], 0, 0)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("expected 3 bytes from rank 0, got 4"),
        "{error}"
    );
}
