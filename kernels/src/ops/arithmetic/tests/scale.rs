//! Tests of scale.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

fn scaled(x: &Tensor, factor: f64) -> Tensor {
    let out = x.empty_like().unwrap();
    scale_into(&out, x, factor).unwrap();
    out
}

#[test]
fn scaling_is_exact_for_every_size_apart_and_in_place() {
    for size in SIZES {
        let x = random_f32(size, 41);
        let expected: Vec<f32> = x.iter().map(|x| x * 0.1).collect();
        let x = cpu(&x, &[size]);
        assert_eq!(scaled(&x, 0.1).to_vec::<f32>().unwrap(), expected);
        scale_into(&x, &x, 0.1).unwrap();
        assert_eq!(x.to_vec::<f32>().unwrap(), expected);
    }
}

#[test]
fn the_factor_keeps_its_f64_digits_for_f64_and_zero_keeps_nan() {
    let x = scaled(&cpu_of(&[3.0f64], &[1]), 0.1);
    assert_eq!(x.to_vec::<f64>().unwrap(), [3.0 * 0.1]);
    let x = scaled(&cpu(&[f32::NAN, f32::INFINITY, -2.0], &[3]), 0.0);
    let x = x.to_vec::<f32>().unwrap();
    assert!(x[0].is_nan() && x[1].is_nan() && x[2] == 0.0);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (x, out) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]));
    let error = scale_into(&out, &x, 2.0).unwrap_err().to_string();
    assert!(
        error.contains("scale: x f32[2] on cpu: expected shape [3], as out has"),
        "{error}"
    );
    let bytes = cpu_of(&[1u8], &[1]);
    let error = scale_into(&bytes, &bytes, 2.0).unwrap_err().to_string();
    assert!(
        error.contains("scale: there is no version for u8 on cpu"),
        "{error}"
    );
}
