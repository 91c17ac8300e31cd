//! Tests of relu.

use super::super::*;
use crate::DType;
use crate::ops::testing::{SIZES, cpu, random_f32};

#[test]
fn relu_and_its_derivative_are_exact_for_every_size_apart_and_in_place() {
    for size in SIZES {
        let x = random_f32(size, 1);
        let expected: Vec<f32> = x.iter().map(|&x| if x > 0.0 { x } else { 0.0 }).collect();
        let tensor = cpu(&x, &[size]);
        assert_eq!(relu(&tensor).unwrap().to_vec::<f32>().unwrap(), expected);

        let dy = random_f32(size, 2);
        let dx = cpu(&dy, &[size]);
        relu_backward_into(&dx, &dx, &tensor).unwrap();
        let expected_dx: Vec<f32> = x
            .iter()
            .zip(&dy)
            .map(|(&x, &dy)| if x > 0.0 { dy } else { 0.0 })
            .collect();
        assert_eq!(dx.to_vec::<f32>().unwrap(), expected_dx);

        relu_into(&tensor, &tensor).unwrap();
        assert_eq!(tensor.to_vec::<f32>().unwrap(), expected);
    }
}

#[test]
fn zero_has_derivative_zero_and_nan_stays_nan() {
    let x = cpu(
        &[0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY],
        &[5],
    );
    let y = relu(&x).unwrap().to_vec::<f32>().unwrap();
    assert!(y[0] == 0.0 && y[1] == 0.0 && y[2].is_nan() && y[3] == f32::INFINITY && y[4] == 0.0);
    let dx = x.ones_like().unwrap();
    relu_backward_into(&dx, &dx, &x).unwrap();
    assert_eq!(dx.to_vec::<f32>().unwrap(), [0.0, 0.0, 0.0, 1.0, 0.0]);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (x, out) = (cpu(&[1.0, 2.0], &[2]).named("h1"), cpu(&[0.0; 3], &[3]));
    let error = relu_into(&out, &x).unwrap_err().to_string();
    assert!(
        error.contains(r#"relu: x "h1" f32[2] on cpu: expected shape [3], as out has"#),
        "{error}"
    );
    let half = x.to_dtype(DType::BF16).unwrap();
    let error = relu(&half).unwrap_err().to_string();
    assert!(
        error.contains("there is no version for bf16 on cpu"),
        "{error}"
    );
}

#[test]
fn an_output_that_overlaps_its_input_is_refused_with_both_names() {
    let whole = cpu(&[1.0, 2.0, 3.0], &[3]);
    let (a, b) = (whole.slice(0..2).unwrap(), whole.slice(1..3).unwrap());
    let error = relu_into(&a, &b).unwrap_err().to_string();
    assert!(
        error.contains("relu: out f32[2] on cpu and x f32[2] on cpu share memory"),
        "{error}"
    );
}
