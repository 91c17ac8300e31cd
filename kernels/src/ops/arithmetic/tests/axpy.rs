//! Tests of axpy.

use super::super::*;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

#[test]
fn every_element_is_rounded_once_for_every_size() {
    for size in SIZES {
        let (y, x) = (random_f32(size, 51), random_f32(size, 52));
        let expected: Vec<f32> = y
            .iter()
            .zip(&x)
            .map(|(y, x)| (-0.3f32).mul_add(*x, *y))
            .collect();
        let y = cpu(&y, &[size]);
        axpy(&y, -0.3, &cpu(&x, &[size])).unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), expected);
    }
}

#[test]
fn f64_is_computed_in_f64() {
    let y = cpu_of(&[1.0f64, -2.0], &[2]);
    axpy(&y, 0.1, &cpu_of(&[3.0, 0.7], &[2])).unwrap();
    assert_eq!(
        y.to_vec::<f64>().unwrap(),
        [0.1f64.mul_add(3.0, 1.0), 0.1f64.mul_add(0.7, -2.0)]
    );
}

#[test]
fn operands_that_do_not_fit_or_overlap_are_named() {
    let (y, bias) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]).named("bias"));
    let line = line!() + 1;
    let error = axpy(&y, 1.0, &bias).unwrap_err().to_string();
    assert!(
        error.contains(r#"axpy: x "bias" f32[3] on cpu: expected shape [2], as y has"#),
        "{error}"
    );
    assert!(error.contains(&format!("axpy.rs:{line}")), "{error}");
    let error = axpy(&y, 1.0, &cpu_of(&[0i32; 2], &[2]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("axpy: x i32[2] on cpu: expected dtype f32, as y has"),
        "{error}"
    );
    let error = axpy(&y, 1.0, &y).unwrap_err().to_string();
    assert!(
        error.contains("axpy: y f32[2] on cpu and x f32[2] on cpu share memory"),
        "{error}"
    );
}
