//! Tests of mul.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

#[test]
fn products_are_exact_for_every_size_apart_and_in_place() {
    for size in SIZES {
        let (a, b) = (random_f32(size, 31), random_f32(size, 32));
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a * b).collect();
        let (a, b) = (cpu(&a, &[size]), cpu(&b, &[size]));
        assert_eq!(mul(&a, &b).unwrap().to_vec::<f32>().unwrap(), expected);
        mul_into(&a, &a, &b).unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), expected);
    }
}

#[test]
fn f64_is_multiplied_in_f64_and_infinity_times_zero_is_nan() {
    let product = mul(
        &cpu_of(&[0.1f64, f64::INFINITY], &[2]),
        &cpu_of(&[0.2, 0.0], &[2]),
    )
    .unwrap();
    let product = product.to_vec::<f64>().unwrap();
    assert!(product[0] == 0.1 * 0.2 && product[1].is_nan());
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (a, b) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]));
    let error = mul(&a, &b).unwrap_err().to_string();
    assert!(
        error.contains("mul: b f32[3] on cpu: expected shape [2], as a has"),
        "{error}"
    );
    let whole_numbers = cpu_of(&[1i64, 2], &[2]);
    let error = mul(&whole_numbers, &whole_numbers).unwrap_err().to_string();
    assert!(
        error.contains("mul: there is no version for i64 on cpu"),
        "{error}"
    );
}
