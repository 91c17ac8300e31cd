//! Which rows are held out for evaluation: a pure function of the seed and the number of rows,
//! without any list.

use super::mix::derive;
use super::sampler::Permutation;
use crate::error::{Error, Result};

/// Keeps the order of the split unrelated to those of epochs.
const PURPOSE: u64 = 0x7661_6c2d_7370_6c69;

/// Rows in a random order, the first of which are held out.
#[derive(Clone, Debug)]
pub(crate) struct Split {
    order: Permutation,
    rows: u64,
    held_out: u64,
}

impl Split {
    /// Holds out `fraction` of `rows` rows, rounded, and at least one row on either side.
    pub(crate) fn new(rows: u64, fraction: f64, seed: u64) -> Result<Split> {
        if rows < 2 {
            return Err(Error::Data(format!(
                "`val-split` {fraction}: expected at least 2 rows to split, got {rows}; help: give more data, or leave out \
                 `val-split`"
            )));
        }
        let held_out = ((rows as f64 * fraction).round() as u64).clamp(1, rows - 1);
        Ok(Split {
            order: Permutation::new(rows, derive(derive(seed, PURPOSE), 0)),
            rows,
            held_out,
        })
    }

    /// How many rows are held out.
    pub(crate) fn held_out_rows(&self) -> u64 {
        self.held_out
    }

    /// How many are trained on.
    pub(crate) fn training_rows(&self) -> u64 {
        self.rows - self.held_out
    }

    /// Row `index` of the held-out rows.
    pub(crate) fn held_out_row(&self, index: u64) -> u64 {
        self.order.row(index)
    }

    /// Row `index` of the rows trained on.
    pub(crate) fn training_row(&self, index: u64) -> u64 {
        self.order.row(self.held_out + index)
    }

    /// Whether this row is trained on.
    pub(crate) fn is_trained_on(&self, row: u64) -> bool {
        self.order.position(row) >= self.held_out
    }
}

#[cfg(test)]
mod tests;
