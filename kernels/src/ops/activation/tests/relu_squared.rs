//! Tests of relu_squared.

use super::super::*;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};

/// Half the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

#[test]
fn relu_squared_and_its_derivative_round_once_or_twice_apart_and_in_place() {
    for size in SIZES {
        let (x, dy) = (random_f32(size, 21), random_f32(size, 22));
        let (x32, dy32) = (cpu(&x, &[size]), cpu(&dy, &[size]));
        let above = |x: &f32| f64::from(x.max(0.0));
        let expected: Vec<f64> = x.iter().map(|x| above(x).powi(2)).collect();
        let out = relu_squared(&x32).unwrap();
        assert_close(&out.to_vec().unwrap(), &expected, |_, out| UNIT * out);

        let slopes = x
            .iter()
            .zip(&dy)
            .map(|(x, &dy)| f64::from(dy) * 2.0 * above(x));
        let expected: Vec<f64> = slopes.collect();
        let dx = dy32.empty_like().unwrap();
        relu_squared_backward_into(&dx, &dy32, &x32).unwrap();
        assert_close(&dx.to_vec().unwrap(), &expected, |_, dx| UNIT * dx.abs());

        relu_squared_backward_into(&dy32, &dy32, &x32).unwrap();
        assert_eq!(dy32.to_vec::<f32>().unwrap(), dx.to_vec::<f32>().unwrap());
        relu_squared_into(&x32, &x32).unwrap();
        assert_eq!(x32.to_vec::<f32>().unwrap(), out.to_vec::<f32>().unwrap());
    }
}

#[test]
fn the_derivative_is_that_of_finite_differences_and_nan_stays_nan() {
    let x = [-2.0, -1e-3, 1e-3, 0.5, 3.0];
    let of = |x: &[f64]| {
        let out = relu_squared(&cpu_of(x, &[x.len()])).unwrap();
        out.to_vec::<f64>().unwrap()
    };
    let dx = cpu_of(&[1.0f64; 5], &[5]);
    relu_squared_backward_into(&dx, &dx, &cpu_of(&x, &[5])).unwrap();
    const STEP: f64 = 1e-6;
    for (x, dx) in x.iter().zip(dx.to_vec::<f64>().unwrap()) {
        // Exact for a square, but for rounding: 9 · 2⁻⁵³ / h.
        let slope = (of(&[x + STEP])[0] - of(&[x - STEP])[0]) / (2.0 * STEP);
        assert!((dx - slope).abs() < 2e-9, "{dx} is not {slope}");
    }
    let edges = cpu(&[f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0], &[4]);
    let out = relu_squared(&edges).unwrap().to_vec::<f32>().unwrap();
    assert!(out[0].is_nan() && out[1..] == [0.0, f32::INFINITY, 0.0]);
    let dx = cpu(&[1.0; 4], &[4]);
    relu_squared_backward_into(&dx, &dx, &edges).unwrap();
    let dx = dx.to_vec::<f32>().unwrap();
    assert!(dx[0].is_nan() && dx[1..] == [0.0, f32::INFINITY, 0.0]);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (x, dx) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]));
    let error = relu_squared_backward_into(&dx, &x, &x)
        .unwrap_err()
        .to_string();
    let expected = "relu_squared_backward: dy f32[2] on cpu: expected shape [3], as dx has";
    assert!(error.contains(expected), "{error}");
}
