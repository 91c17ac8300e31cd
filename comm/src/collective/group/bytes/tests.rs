use super::*;
use crate::tests::on_ranks;

#[test]
fn all_ranks_get_the_bytes_of_all_when_all_succeed() {
    let brought = |rank: usize| vec![rank as u8; rank];
    for outcome in on_ranks(3, Some(7), |world| {
        let group = world.group("outcomes").unwrap();
        group.share_outcome(Ok(&brought(group.rank())))
    }) {
        assert_eq!(outcome.unwrap().unwrap(), [0, 1, 2].map(brought));
    }
    assert_eq!(
        Group::alone().share_outcome(Ok(b"me")).unwrap().unwrap(),
        [b"me"]
    );
}

#[test]
fn all_ranks_get_the_error_of_the_lowest_rank_that_failed() {
    let outcomes = on_ranks(3, Some(7), |world| {
        let outcome = match world.rank() {
            0 => Ok(&b"fine"[..]),
            rank => Err((60 + rank as u8, format!("disk {rank} is full"))),
        };
        world.share_outcome(outcome)
    });
    for outcome in outcomes {
        let error = outcome.unwrap().unwrap_err();
        assert_eq!(
            (error.rank, error.exit_code, error.to_string().as_str()),
            (1, 61, "disk 1 is full")
        );
    }
}

#[test]
fn lengths_from_other_ranks_are_checked() {
    let at = Location::caller();
    let lengths = checked_lengths("all_gather_bytes", &[3, 0, 8], 8, at).unwrap();
    assert_eq!(lengths, [3, 0, 8]);
    for wrong in [-1, i64::MIN, 9, i64::MAX] {
        let error = checked_lengths("all_gather_bytes", &[3, wrong], 8, at).unwrap_err();
        let expected = format!(
            "all_gather_bytes: bytes of rank 1: expected at most 8 bytes, got {wrong} (called at "
        );
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
    let error = checked_lengths("broadcast_bytes", &[-1], 8, at).unwrap_err();
    assert!(error.to_string().contains("bytes of the root"), "{error}");
}
