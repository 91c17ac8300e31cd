//! `--val-split`: which rows are kept for evaluation. A pure function of the seed and the number of rows; no list of them is kept.

use super::mix::derive;
use super::sampler::Permutation;
use crate::error::{Error, Result};

/// What the order that splits is derived with, so that it has nothing to do with that of any epoch.
const PURPOSE: u64 = 0x7661_6c2d_7370_6c69;

/// Rows in a random order, of which the first are kept for evaluation.
#[derive(Clone, Debug)]
pub(crate) struct Split {
    order: Permutation,
    rows: u64,
    held_out: u64,
}

impl Split {
    /// Of `rows` rows the part `fraction`, rounded, but at least one row on either side.
    pub(crate) fn new(rows: u64, fraction: f64, seed: u64) -> Result<Split> {
        if rows < 2 {
            return Err(Error::Data(format!(
                "--val-split {fraction}: expected at least 2 rows to split, got {rows}. Give more data, or leave \
                 --val-split out"
            )));
        }
        let held_out = ((rows as f64 * fraction).round() as u64).clamp(1, rows - 1);
        Ok(Split { order: Permutation::new(rows, derive(derive(seed, PURPOSE), 0)), rows, held_out })
    }

    /// How many rows are kept for evaluation.
    pub(crate) fn held_out_rows(&self) -> u64 {
        self.held_out
    }

    /// How many are trained on.
    pub(crate) fn training_rows(&self) -> u64 {
        self.rows - self.held_out
    }

    /// Which of all rows is row `index` of those kept for evaluation.
    pub(crate) fn held_out_row(&self, index: u64) -> u64 {
        self.order.row(index)
    }

    /// Which of all rows is row `index` of those trained on.
    pub(crate) fn training_row(&self, index: u64) -> u64 {
        self.order.row(self.held_out + index)
    }

    /// Whether this one of all rows is trained on.
    pub(crate) fn is_trained_on(&self, row: u64) -> bool {
        self.order.position(row) >= self.held_out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_row_is_on_one_side(rows in 2u64..500, fraction in 0.001f64..0.999, seed: u64) {
            let split = Split::new(rows, fraction, seed).unwrap();
            let mut sides = vec![0; rows as usize];
            for index in 0..split.held_out_rows() {
                let row = split.held_out_row(index);
                prop_assert!(!split.is_trained_on(row));
                sides[row as usize] += 1;
            }
            for index in 0..split.training_rows() {
                let row = split.training_row(index);
                prop_assert!(split.is_trained_on(row));
                sides[row as usize] += 1;
            }
            prop_assert!(sides.iter().all(|&count| count == 1));
            let off = split.held_out_rows() as f64 - rows as f64 * fraction;
            prop_assert!(off.abs() <= 1.0, "{off}");
        }
    }

    #[test]
    fn another_seed_keeps_other_rows_and_one_row_cannot_be_split() {
        let held = |seed| -> Vec<u64> {
            let split = Split::new(1000, 0.1, seed).unwrap();
            (0..split.held_out_rows()).map(|index| split.held_out_row(index)).collect()
        };
        assert_eq!(held(1), held(1));
        assert_ne!(held(1), held(2));
        let error = Split::new(1, 0.5, 0).unwrap_err();
        assert!(error.exit_code() == 65 && error.to_string().contains("--val-split"), "{error}");
    }
}
