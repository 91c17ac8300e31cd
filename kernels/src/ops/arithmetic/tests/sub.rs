//! Tests of sub.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, random_f32};

#[test]
fn differences_are_exact_for_every_size_apart_and_in_place() {
    for size in SIZES {
        let (a, b) = (random_f32(size, 96), random_f32(size, 97));
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
        let (a, b) = (cpu(&a, &[size]), cpu(&b, &[size]));
        assert_eq!(sub(&a, &b).unwrap().to_vec::<f32>().unwrap(), expected);
        sub_into(&a, &a, &b).unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), expected);
    }
}
