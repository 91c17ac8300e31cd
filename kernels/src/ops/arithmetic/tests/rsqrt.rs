//! Tests of rsqrt.

use super::super::*;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};

#[test]
fn it_is_right_to_three_roundings_for_every_size_apart_and_in_place() {
    const EPSILON: f64 = 1.0 / 1024.0;
    for size in SIZES {
        let x: Vec<f32> = random_f32(size, 92).iter().map(|x| x * x).collect();
        let exact: Vec<f64> = x
            .iter()
            .map(|&x| 1.0 / (f64::from(x) + EPSILON).sqrt())
            .collect();
        let x = cpu(&x, &[size]);
        let out = x.empty_like().unwrap();
        rsqrt_into(&out, &x, EPSILON).unwrap();
        rsqrt_into(&x, &x, EPSILON).unwrap();
        for got in [out, x] {
            // Half of the sum's rounding, the root's and the quotient's, 2⁻²⁴ each.
            assert_close(&got.to_vec::<f32>().unwrap(), &exact, |_, exact| {
                2.6 * 2f64.powi(-24) * exact
            });
        }
    }
}

#[test]
fn its_derivative_is_the_slope_in_f64() {
    let x: Vec<f64> = (1..40).map(|x| f64::from(x) / 8.0).collect();
    let at = |shift: f64| {
        let x: Vec<f64> = x.iter().map(|x| x + shift).collect();
        let y = cpu_of(&x, &[x.len()]);
        rsqrt_into(&y, &y, 0.25).unwrap();
        y
    };
    const STEP: f64 = 1e-5;
    let (dx, dy) = (at(0.0), cpu_of(&vec![3.0; x.len()], &[x.len()]));
    rsqrt_backward_into(&dy, &dy, &dx).unwrap();
    let (above, below) = (
        at(STEP).to_vec::<f64>().unwrap(),
        at(-STEP).to_vec::<f64>().unwrap(),
    );
    let got = dy.to_vec::<f64>().unwrap();
    for ((got, above), below) in got.iter().zip(above).zip(below) {
        let slope = 3.0 * (above - below) / (2.0 * STEP);
        // The third derivative is below 1000 here, and the difference loses 1e-16 / 1e-5.
        assert!((got - slope).abs() < 1e-7, "{got} and {slope}");
    }
}

#[test]
fn its_limits_are_infinity_and_nan_and_operands_are_named() {
    let x = cpu(&[0.0, -1.0, f32::INFINITY], &[3]);
    rsqrt_into(&x, &x, 0.0).unwrap();
    let got = x.to_vec::<f32>().unwrap();
    assert!(got[0] == f32::INFINITY && got[1].is_nan() && got[2] == 0.0);
    let error = rsqrt_into(&x, &cpu(&[0.0; 2], &[2]), 0.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("rsqrt: x f32[2] on cpu: expected shape [3], as out has"),
        "{error}"
    );
}
