//! Tests of column_sum.

use super::super::*;
use crate::ops::testing::{assert_close, cpu, cpu_of, random_f32};

#[test]
fn rows_are_added_and_accumulated_for_every_shape() {
    for (rows, columns) in [(0, 3), (1, 1), (7, 5), (130, 1), (3, 1025), (700, 129)] {
        let x = random_f32(rows * columns, 93);
        let (mut exact, mut magnitudes) = (vec![0.0; columns], vec![0.0; columns]);
        for (index, &x) in x.iter().enumerate() {
            exact[index % columns] += f64::from(x);
            magnitudes[index % columns] += f64::from(x).abs();
        }
        // Additions within a block of 64 rows, and of the blocks.
        let roundings = 64.0 + rows as f64 / 64.0 + 2.0;
        let bound = |index: usize, _: f64| roundings * 2f64.powi(-24) * (magnitudes[index] + 1.0);
        let x = cpu(&x, &[rows, columns]);
        let out = x.new_full(&[columns], 1.0).unwrap();
        column_sum_into(&out, &x, true).unwrap();
        let more: Vec<f64> = exact.iter().map(|exact| exact + 1.0).collect();
        assert_close(&out.to_vec::<f32>().unwrap(), &more, bound);
        column_sum_into(&out, &x, false).unwrap();
        assert_close(&out.to_vec::<f32>().unwrap(), &exact, bound);
    }
}

#[test]
fn it_is_linear_s_bias_gradient_to_the_bit() {
    let (dy, x) = (random_f32(300 * 70, 94), random_f32(300 * 3, 95));
    let (dy, x) = (cpu(&dy, &[300, 70]), cpu(&x, &[300, 3]));
    let [dw, db, sum] = [[70, 3], [70, 1], [70, 1]].map(|[o, i]| {
        let flat = x.new_zeros(&[o * i]).unwrap();
        if i == 1 {
            flat
        } else {
            flat.reshape(&[o, i]).unwrap()
        }
    });
    crate::ops::linear_backward_weight_into(&dw, Some(&db), &dy, &x, false).unwrap();
    column_sum_into(&sum, &dy, false).unwrap();
    assert_eq!(sum.to_vec::<f32>().unwrap(), db.to_vec::<f32>().unwrap());
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let x = cpu(&[0.0; 6], &[2, 3]);
    let error = column_sum_into(&cpu(&[0.0; 2], &[2]), &x, false)
        .unwrap_err()
        .to_string();
    let expected =
        "column_sum: out f32[2] on cpu: expected shape [3], that is a number for each column";
    assert!(error.contains(expected), "{error}");
    let error = column_sum_into(&cpu_of(&[0.0f64; 3], &[3]), &x, false)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("column_sum: out f64[3] on cpu: expected dtype f32"),
        "{error}"
    );
}
