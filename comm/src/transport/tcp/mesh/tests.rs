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

fn finish(letter: &mut Letter) -> Result<()> {
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
    let receive = |channel: &MeshChannel, count: usize, tag: u32| {
        let mut letter = channel.receive(count, 0, tag);
        finish(&mut letter).unwrap();
        letter.into_bytes()
    };
    // Both ranks are on this thread: sending continues while the other end receives.
    let sender = std::thread::spawn(move || sent.iter_mut().try_for_each(finish));
    assert_eq!(receive(&more_ones, 5, 3), b"other");
    assert_eq!(receive(&ones, 5, 4), b"tag 4");
    assert_eq!(ones.arrived(3), Some((0, 5)));
    assert_eq!(receive(&ones, 5, 3), b"first");
    assert_eq!(receive(&ones, MESSAGE_BYTES_MAX, 3), big);
    assert_eq!(ones.arrived(3), None);
    sender.join().unwrap().unwrap();
}

#[test]
fn a_socket_that_closes_is_a_lost_rank_unless_it_said_farewell() {
    let [zero, one] = pair();
    let channel = MeshChannel::new(&zero);
    let mut letter = channel.receive(1, 1, 0);
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
    let mut sent = MeshChannel::new(&zero).send(b"four", 1, 0);
    finish(&mut sent).unwrap();
    let error = finish(&mut MeshChannel::new(&one).receive(3, 0, 0)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("expected 3 bytes from rank 0, got 4"),
        "{error}"
    );
}
