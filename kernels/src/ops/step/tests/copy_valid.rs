//! Tests of copy_valid.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

#[test]
fn what_has_no_result_is_not_copied() {
    for size in SIZES {
        let (old, new) = (random_f32(size, 1), random_f32(size, 2));
        for (flag, expected, voted) in [(0i64, &new, 0.0), (7, &old, 0.0), (-1, &old, 1.0)] {
            let (out, x) = (cpu(&old, &[size]), cpu(&new, &[size]));
            let (flags, vote) = (cpu_of(&[flag, 0, 6], &[3]), cpu(&[9.0], &[1]));
            copy_valid(&out, &x, &flags, Some(&vote), None).unwrap();
            assert_eq!(out.to_vec::<f32>().unwrap(), *expected, "{flag}");
            assert_eq!(vote.item().unwrap(), voted, "{flag}");
            copy_valid(&out, &x, &flags, None, None).unwrap();
        }
    }
}

#[test]
fn wrong_operands_are_named() {
    let (x, flags) = (cpu(&[1.0; 4], &[4]), cpu_of(&[0i64; 3], &[3]));
    let vote = cpu(&[0.0; 2], &[2]);
    for (out, vote, told) in [
        (cpu(&[0.0; 3], &[3]), None, "out"),
        (cpu(&[0.0; 4], &[4]), Some(&vote), "vote"),
    ] {
        let error = copy_valid(&out, &x, &flags, vote, None).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
    }
}
