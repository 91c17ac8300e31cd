//! Tests of vote_stopped.

use super::super::*;
use crate::ops::testing::{cpu, cpu_of};

#[test]
fn a_rank_that_was_stopped_says_so() {
    for (flag, voted) in [(0i64, 0.0), (7, 0.0), (-1, 1.0)] {
        let (flags, vote) = (cpu_of(&[flag, 0, 6], &[3]), cpu(&[9.0], &[1]));
        vote_stopped(&vote, &flags, None).unwrap();
        assert_eq!(vote.item().unwrap(), voted, "{flag}");
    }
}

#[test]
fn wrong_operands_are_named() {
    let (flags, vote) = (cpu_of(&[0i64; 3], &[3]), cpu(&[0.0; 2], &[2]));
    let error = vote_stopped(&vote, &flags, None).unwrap_err();
    assert!(error.to_string().contains("vote"), "{error}");
}
