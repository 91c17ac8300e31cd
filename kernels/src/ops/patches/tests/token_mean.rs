//! Tests of token_mean.

use super::super::*;
use crate::ops::testing::{alone_with_the_pool, assert_close, cpu, random_f32};

/// 2⁻²⁴, half the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// Sequences, tokens, columns, tokens in the mean.
const SIZES: [[usize; 4]; 7] = [
    [0, 3, 2, 3],
    [2, 3, 0, 1],
    [1, 1, 1, 1],
    [3, 5, 7, 5],
    [3, 5, 7, 1],
    [2, 6, 33, 4],
    [60, 49, 40, 49],
];

#[test]
fn it_is_the_mean_of_the_first_tokens_and_its_gradient_their_share() {
    for [sequences, time, columns, tokens] in SIZES {
        let x = random_f32(sequences * time * columns, 51);
        let dout = random_f32(sequences * columns, 52);
        let at = |sequence: usize, token: usize, column: usize| {
            f64::from(x[(sequence * time + token) * columns + column])
        };
        let (mut expected, mut bounds, mut gradients) = (vec![], vec![], vec![]);
        for sequence in 0..sequences {
            for column in 0..columns {
                let column = (0..tokens).map(|token| at(sequence, token, column));
                let sizes: f64 = column.clone().map(f64::abs).sum();
                expected.push(column.sum::<f64>() / tokens as f64);
                // Each sum rounds, and so does the division.
                bounds.push(tokens as f64 * UNIT * sizes / tokens as f64);
            }
            for token in 0..time {
                for column in 0..columns {
                    let share = f64::from(dout[sequence * columns + column]) / tokens as f64;
                    gradients.push(if token < tokens { share } else { 0.0 });
                }
            }
        }
        let out = cpu(&dout, &[sequences, columns]).empty_like().unwrap();
        let x = cpu(&x, &[sequences, time, columns]);
        token_mean_into(&out, &x, tokens).unwrap();
        assert_close(&out.to_vec().unwrap(), &expected, |index, _| bounds[index]);
        token_mean_backward_into(&x, &cpu(&dout, &[sequences, columns]), tokens).unwrap();
        assert_close(&x.to_vec().unwrap(), &gradients, |_, share| {
            UNIT * share.abs()
        });
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _alone = alone_with_the_pool();
    let x = cpu(&random_f32(300 * 50 * 33, 53), &[300, 50, 33]);
    let results = [1, 2, 3].map(|threads| {
        threads::set_count(threads).unwrap();
        let out = cpu(&vec![0.0; 300 * 33], &[300, 33]);
        token_mean_into(&out, &x, 50).unwrap();
        out.to_vec::<f32>().unwrap()
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let told = |out: &[usize], x: &[usize], tokens| {
        let zeros = |shape: &[usize]| cpu(&vec![0.0; shape.iter().product()], shape);
        token_mean_into(&zeros(out), &zeros(x), tokens)
            .unwrap_err()
            .to_string()
    };
    let error = told(&[2, 4], &[2, 3, 5], 3);
    assert!(
        error.contains("token_mean: out f32[2, 4] on cpu: expected shape [2, 5]"),
        "{error}"
    );
    for tokens in [0, 4] {
        let error = told(&[2, 5], &[2, 3, 5], tokens);
        let expected =
            format!("tokens: expected from 1 to 3, all tokens of a sequence, got {tokens}");
        assert!(error.contains(&expected), "{error}");
    }
    let error = told(&[2, 5], &[6, 5], 3);
    assert!(
        error.contains("x f32[6, 5] on cpu: expected 3 dimensions"),
        "{error}"
    );
}
