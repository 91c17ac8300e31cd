//! What the numbers that a model gives for a row mean. Letters: C classes.

use crate::error::{Error, Result};

/// The place of the first of the largest, as training counts right answers. There is no NaN among them.
pub(super) fn first_largest(logits: &[f32]) -> usize {
    let mut best = 0;
    for (index, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = index;
        }
    }
    best
}

/// The probabilities of classes, softmax of the logits `[C]`: computed in f64, added in the order of classes, rounded once.
pub(super) fn probabilities(logits: &[f32], into: &mut Vec<f32>) {
    let largest = f64::from(logits[first_largest(logits)]);
    let part = |&logit: &f32| (f64::from(logit) - largest).exp();
    let sum: f64 = logits.iter().map(part).sum();
    into.clear();
    into.extend(logits.iter().map(|logit| (part(logit) / sum) as f32));
}

/// Refuses what is no number: of rows of `outputs` numbers, the first of which is row `first`.
pub(super) fn check_finite(values: &[f32], outputs: usize, first: u64) -> Result<()> {
    let Some(at) = values.iter().position(|value| !value.is_finite()) else { return Ok(()) };
    let row = first + (at / outputs.max(1)) as u64;
    Err(Error::NonFinite(format!(
        "row {row}: the model gives {} for it, which is no finite number. Look at that row: its features may be far from those the model was \
         trained on",
        values[at]
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_largest_is_the_answer() {
        assert_eq!(first_largest(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(first_largest(&[-1.0]), 0);
        assert_eq!(first_largest(&[-0.0, 0.0]), 0);
    }

    #[test]
    fn probabilities_are_those_of_softmax_and_no_logit_is_too_large() {
        let mut p = Vec::new();
        probabilities(&[0.0, 0.0, f32::MAX], &mut p);
        assert_eq!(p, [0.0, 0.0, 1.0]);
        probabilities(&[0.0, std::f32::consts::LN_2], &mut p);
        // f32 of ln 2 is off by 2^-25 of it at most.
        let thirds = [1.0 / 3.0, 2.0 / 3.0];
        assert!(p.iter().zip(thirds).all(|(p, third)| (f64::from(*p) - third).abs() < 1e-7), "{p:?}");
    }

    #[test]
    fn what_is_no_number_is_named_by_its_row() {
        check_finite(&[0.0; 6], 3, 10).unwrap();
        let error = check_finite(&[0.0, 1.0, 2.0, 3.0, f32::NAN, f32::INFINITY], 3, 10).unwrap_err();
        assert_eq!(error.exit_code(), 76);
        assert!(error.to_string().starts_with("row 11: the model gives NaN"), "{error}");
    }
}
