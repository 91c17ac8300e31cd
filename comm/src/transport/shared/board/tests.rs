use std::os::unix::fs::MetadataExt;

use super::*;

fn board(ranks: usize) -> Board {
    Board::new(&Segment::in_process(ranks).unwrap())
}

fn cause(rank: usize, text: &str) -> Cause {
    Cause {
        rank,
        host: format!("node{rank}"),
        exit_code: 76,
        text: text.to_string(),
    }
}

#[test]
fn the_memory_of_a_generation_is_freed_when_the_next_one_shows_the_beats() {
    let show = || {
        let segment = Segment::create(1).unwrap();
        Board::new(&segment).show_beats(0);
        let file = format!("/proc/self/fd/{}", segment.fd());
        std::fs::metadata(file).unwrap().ino().to_string()
    };
    let (first, _) = (show(), show());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut inodes = maps.lines().map(|line| line.split_whitespace().nth(4));
    assert!(inodes.all(|inode| inode != Some(&*first)));
}

#[test]
fn the_first_cause_is_kept_whole() {
    let board = board(2);
    assert_eq!(board.cause(), None);
    assert!(board.fail(&cause(1, "loss is NaN — at step 7")));
    assert!(!board.fail(&cause(0, "another")));
    assert_eq!(board.cause(), Some(cause(1, "loss is NaN — at step 7")));
}

#[test]
fn one_of_many_simultaneous_causes_is_first() {
    let board = board(2);
    let firsts: Vec<usize> = std::thread::scope(|scope| {
        let fail = |rank: usize| {
            board
                .fail(&cause(rank, &format!("error of {rank}")))
                .then_some(rank)
        };
        let all: Vec<_> = (0..40)
            .map(|rank| scope.spawn(move || fail(rank)))
            .collect();
        all.into_iter()
            .filter_map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(firsts.len(), 1);
    assert_eq!(
        board.cause(),
        Some(cause(firsts[0], &format!("error of {}", firsts[0])))
    );
}

#[test]
fn a_rank_that_dies_while_it_writes_delays_no_other() {
    let board = board(2);
    // As if a rank had taken a slot and died before it published it.
    board
        .segment
        .u32_at(CAUSES_TAKEN_AT)
        .fetch_add(1, Ordering::Relaxed);
    assert!(board.fail(&cause(0, "the second slot")));
    assert_eq!(board.cause().unwrap().text, "the second slot");
}

#[test]
fn a_long_text_is_cut_between_characters() {
    let board = board(1);
    let text = "é".repeat(3000);
    assert!(board.fail(&Cause {
        host: text.clone(),
        ..cause(0, &format!("x{text}"))
    }));
    let kept = board.cause().unwrap();
    assert_eq!(kept.text, format!("x{}", "é".repeat(2047)));
    assert_eq!(kept.host, "é".repeat(128));
}

#[test]
fn a_waiter_is_woken_by_a_failure() {
    let board = board(1);
    assert_eq!(board.wait_for_abort(Duration::from_millis(3)), None);
    let seen = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| board.wait_for_abort(Duration::from_secs(600)));
        // Sleep: the waiter waits by then; one that begins later sees the failure too.
        std::thread::sleep(Duration::from_millis(10));
        board.fail(&cause(0, "enough"));
        waiter.join().unwrap()
    });
    assert_eq!(seen.unwrap().text, "enough");
}

#[test]
fn ranks_leave() {
    let board = board(3);
    assert!(!board.has_left(2));
    board.leave(2);
    assert!(board.has_left(2) && !board.has_left(1));
    assert_eq!(board.whereabouts(2), "its end: it left in order");
    assert_eq!(board.whereabouts(1), "its start, before its first call");
}
