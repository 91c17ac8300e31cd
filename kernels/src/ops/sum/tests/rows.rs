//! Tests of row_sum.

use super::super::*;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};

type Reduction = fn(&Tensor, &Tensor) -> Result<()>;

fn of(reduction: Reduction, x: &Tensor) -> Vec<f32> {
    let (_, rows) = x.shape().dims().split_last().unwrap();
    let out = x.new_full(&[rows, &[1]].concat(), 9.0).unwrap();
    reduction(&out, x).unwrap();
    out.to_vec().unwrap()
}

#[test]
fn each_row_gives_its_sum_whatever_its_length() {
    for columns in SIZES.into_iter().filter(|&columns| columns > 0) {
        let rows = (100_000 / columns).clamp(1, 300);
        let x = random_f32(rows * columns, 91);
        let tensor = cpu(&x, &[rows, columns]);
        let by_row = |f: &dyn Fn(&[f32]) -> f64| x.chunks(columns).map(f).collect::<Vec<f64>>();
        let sum = |row: &[f32]| row.iter().map(|&x| f64::from(x)).sum::<f64>();
        // One rounding to f32, and in f64 at most one for each element of size up to 6.
        let bound = |_: usize, sum: f64| {
            sum.abs() * 2f64.powi(-24) + 6.0 * (columns * columns) as f64 * f64::EPSILON
        };
        assert_close(&of(row_sum_into, &tensor), &by_row(&sum), bound);
    }
}

#[test]
fn the_dimensions_before_the_last_are_rows() {
    let x = cpu(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[2, 2, 2]);
    assert_eq!(of(row_sum_into, &x), [3.0, 7.0, 11.0, 15.0]);
    assert_eq!(of(row_sum_into, &x.flatten().unwrap()), [36.0]);
    let wide = cpu_of(&[1.0f64, f64::EPSILON], &[1, 2]);
    let out = wide.new_empty(&[1, 1]).unwrap();
    row_sum_into(&out, &wide).unwrap();
    assert_eq!(out.item().unwrap(), 1.0 + f64::EPSILON);
}

#[test]
fn nan_and_infinity_pass_through_and_rows_of_nothing_have_the_limits() {
    let x = cpu(&[f32::NAN, 1.0, f32::INFINITY, -1.0], &[2, 2]);
    let sums = of(row_sum_into, &x);
    assert!(sums[0].is_nan() && sums[1] == f32::INFINITY);
    let nothing = cpu(&[], &[2, 0]);
    assert_eq!(of(row_sum_into, &nothing), [0.0; 2]);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let x = cpu(&[0.0; 6], &[2, 3]);
    let error = row_sum_into(&cpu(&[0.0; 2], &[2]), &x)
        .unwrap_err()
        .to_string();
    let expected =
        "row_sum: out f32[2] on cpu: expected shape [2, 1], that is a number for each row";
    assert!(error.contains(expected), "{error}");
    let one = cpu(&[0.0], &[]);
    let error = row_sum_into(&one, &one.new_empty(&[]).unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("row_sum: x f32[] on cpu: expected at least one dimension"),
        "{error}"
    );
    let error = row_sum_into(&cpu_of(&[0.0f64; 2], &[2, 1]), &x)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("row_sum: out f64[2, 1] on cpu: expected dtype f32"),
        "{error}"
    );
}
