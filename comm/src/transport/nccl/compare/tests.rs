use super::*;
use crate::transport::shared::LaneMarks;

/// A rank that made the collectives `calls`, numbered from `first`; a ring holds the last 64.
fn rank(first: u32, calls: &[u32]) -> Marks {
    let mut chain = 0u32;
    let all = calls.iter().enumerate().map(|(index, &call)| {
        chain = (chain ^ call).wrapping_mul(0x9e37_79b9) ^ chain >> 5;
        ReportedWork {
            number: first.wrapping_add(index as u32),
            call,
            chain,
            place: 0,
        }
    });
    let all: Vec<ReportedWork> = all.collect();
    let mut marks = Marks::default();
    let last = all.last().copied().unwrap_or_default();
    marks.lanes[COLLECTIVES] = LaneMarks {
        begun: last.number,
        call: last.call,
        ended: last.number.wrapping_sub(1),
    };
    marks.ring = all[all.len().saturating_sub(64)..].to_vec();
    marks
}

#[test]
fn ranks_that_make_the_same_calls_do_not_differ_wherever_they_are() {
    let calls: Vec<u32> = (0..300).map(|call| call % 7).collect();
    let mine = rank(u32::MAX - 100, &calls);
    for length in [1, 5, 200, 250, 299, 300] {
        assert_eq!(
            difference(&mine, &[(1, rank(u32::MAX - 100, &calls[..length]))]),
            None
        );
    }
}

#[test]
fn the_first_difference_is_found_and_named() {
    let mine = rank(1, &[1, 2, 3, 4, 5]);
    for (theirs, at) in [
        (vec![1, 2, 4, 3, 5], 2),
        (vec![9], 0),
        (vec![1, 2, 3, 5], 3),
    ] {
        let found = difference(&mine, &[(3, rank(1, &[1, 2])), (2, rank(1, &theirs))]).unwrap();
        assert_eq!((found.peer, found.mine.number), (2, 1 + at as u32));
        assert_eq!(
            (found.mine.call, found.theirs.call),
            ([1, 2, 3, 4, 5][at], theirs[at])
        );
        assert!(!found.is_older());
    }
}

#[test]
fn an_old_difference_still_shows() {
    let calls: Vec<u32> = (0..300).map(|call| call % 7).collect();
    let mut theirs = calls.clone();
    theirs.swap(10, 11);
    let found = difference(&rank(1, &calls), &[(1, rank(1, &theirs))]).unwrap();
    assert!(found.is_older() && found.mine.number == 237);
}

#[test]
fn missing_ranks_are_found_also_when_numbers_wrap() {
    let mine = rank(u32::MAX, &[1, 2, 3]);
    let others = [
        (0, rank(u32::MAX, &[1])),
        (1, rank(u32::MAX, &[1, 2, 3])),
        (3, rank(u32::MAX, &[1, 2])),
    ];
    assert_eq!(missing(&mine, &others), [0, 3]);
    assert_eq!(missing(&rank(1, &[1]), &[(1, Marks::default())]), [1]);
}
