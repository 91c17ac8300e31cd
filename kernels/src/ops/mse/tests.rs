//! Tests of mse.

use super::*;
use crate::DType;
use crate::ops::testing::{assert_close, cpu, cpu_of, random_f32};
use crate::ops::{mean, sum};

/// 2⁻²⁴: what one rounding to f32 is off by at most, relative.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;
const SHAPES: [&[usize]; 9] = [
    &[0, 3],
    &[3, 0],
    &[1, 1],
    &[7],
    &[2, 8],
    &[3, 17],
    &[5, 3, 33],
    &[1025, 3],
    &[301, 1001],
];

#[test]
fn losses_and_derivative_are_those_of_f64_for_every_shape_apart_and_in_place() {
    for shape in SHAPES {
        let (count, rows) = (shape.iter().product(), shape[0]);
        let (pred, target) = (random_f32(count, 91), random_f32(count, 92));
        let features = count.checked_div(rows).unwrap_or(0).max(1);
        let distance = |index: usize| f64::from(pred[index]) - f64::from(target[index]);
        let mut expected = vec![0.0; rows];
        (0..count).for_each(|index| expected[index / features] += distance(index).powi(2));
        let gradient: Vec<f64> = (0..count)
            .map(|index| 2.0 * 0.3 * distance(index))
            .collect();

        let (p, t) = (cpu(&pred, shape), cpu(&target, shape));
        let (losses, dpred) = (cpu(&vec![9.0; rows], &[rows]), p.ones_like().unwrap());
        mse_into(&losses, Some(&dpred), &p, &t, 0.3, None).unwrap();
        let got = losses.to_vec::<f32>().unwrap();
        // Each difference is off by ε relative, so its square by 2ε; the sum of f64 rounds to f32
        // once more. The slack covers ε² and f64's own roundings.
        assert_close(&got, &expected, |_, loss| 3.001 * EPSILON * loss);
        // The difference, the factor and the product round once each.
        let got_gradient = dpred.to_vec::<f32>().unwrap();
        assert_close(&got_gradient, &gradient, |_, slope| {
            3.001 * EPSILON * slope.abs()
        });

        let (p64, t64) = (
            p.to_dtype(DType::F64).unwrap(),
            t.to_dtype(DType::F64).unwrap(),
        );
        let losses64 = losses.to_dtype(DType::F64).unwrap();
        mse_into(&losses64, None, &p64, &t64, 1.0, None).unwrap();
        for (got, expected) in losses64.to_vec::<f64>().unwrap().iter().zip(&expected) {
            // At most as many roundings as features, on each side, of positive terms.
            assert!((got - expected).abs() <= 2.0 * features as f64 * f64::EPSILON * expected);
        }
        mse_into(&losses, Some(&p), &p, &t, 0.3, None).unwrap();
        assert_eq!(
            (losses.to_vec::<f32>().unwrap(), p.to_vec::<f32>().unwrap()),
            (got, got_gradient)
        );
    }
}

#[test]
fn sum_over_count_is_the_mean_and_dpred_its_finite_difference() {
    let (pred, target) = (random_f32(12, 93), random_f32(12, 94));
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (pred, target) = (wide(&pred), cpu_of(&wide(&target), &[4, 3]));
    let losses = cpu_of(&[0.0f64; 4], &[4]);
    let loss = |pred: &[f64]| {
        mse_into(&losses, None, &cpu_of(pred, &[4, 3]), &target, 1.0, None).unwrap();
        sum(&losses).unwrap().item().unwrap() / 12.0
    };
    let squares: Vec<f64> = pred
        .iter()
        .zip(target.to_vec::<f64>().unwrap())
        .map(|(pred, target)| (pred - target).powi(2))
        .collect();
    let expected = mean(&cpu_of(&squares, &[12])).unwrap().item().unwrap();
    // Twelve squares of a few units, each and their sum rounded by 2⁻⁵³ relative: below 12 · 2 · 10
    // · 1.2e-16.
    assert!((loss(&pred) - expected).abs() < 3e-14);

    let dpred = cpu_of(&[0.0f64; 12], &[4, 3]);
    mse_into(
        &losses,
        Some(&dpred),
        &cpu_of(&pred, &[4, 3]),
        &target,
        1.0 / 12.0,
        None,
    )
    .unwrap();
    const STEP: f64 = 1e-4;
    for (index, slope) in dpred.to_vec::<f64>().unwrap().into_iter().enumerate() {
        let shifted = |step: f64| {
            let mut pred = pred.clone();
            pred[index] += step;
            loss(&pred)
        };
        // A quadratic: the central difference is exact but for rounding, some 2⁻⁵³ / STEP.
        assert!((slope - (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP)).abs() < 1e-10);
    }
}

#[test]
fn infinite_and_nan_errors_reach_their_own_row_alone() {
    let pred = cpu(&[1.0, f32::NAN, f32::INFINITY, 1.0, 1.0, 1.0], &[3, 2]);
    let (losses, target) = (cpu(&[0.0; 3], &[3]), cpu(&[0.0; 6], &[3, 2]));
    mse_into(&losses, None, &pred, &target, 1.0, None).unwrap();
    let losses = losses.to_vec::<f32>().unwrap();
    assert!(losses[0].is_nan() && losses[1] == f32::INFINITY && losses[2] == 2.0);
}

#[test]
fn operands_that_do_not_fit_or_overlap_are_named() {
    let (x, losses) = (cpu(&[0.0; 6], &[2, 3]), cpu(&[0.0; 2], &[2]));
    let error = |losses: &Tensor, dpred, pred: &Tensor, target: &Tensor| {
        mse_into(losses, dpred, pred, target, 1.0, None)
            .unwrap_err()
            .to_string()
    };
    let got = error(&losses, None, &x, &cpu(&[0.0; 6], &[3, 2]));
    assert!(
        got.contains("mse: target f32[3, 2] on cpu: expected shape [2, 3], as pred has"),
        "{got}"
    );
    let got = error(&cpu(&[0.0; 3], &[3]), None, &x, &x);
    assert!(
        got.contains("mse: losses f32[3] on cpu: expected shape [2], that is [rows of pred]"),
        "{got}"
    );
    let got = error(&cpu_of(&[0.0f64; 2], &[2]), None, &x, &x);
    assert!(
        got.contains("mse: losses f64[2] on cpu: expected dtype f32, as pred has"),
        "{got}"
    );
    let got = error(&losses, Some(&x), &cpu(&[0.0; 6], &[2, 3]), &x);
    assert!(
        got.contains("mse: dpred f32[2, 3] on cpu and target f32[2, 3] on cpu share memory"),
        "{got}"
    );
    let whole = cpu_of(&[0i32; 6], &[2, 3]);
    let got = error(&cpu_of(&[0i32; 2], &[2]), None, &whole, &whole);
    assert!(
        got.contains("mse: there is no version for i32 on cpu"),
        "{got}"
    );
}
