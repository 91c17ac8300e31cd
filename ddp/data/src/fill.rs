//! Missing numbers: NaN in files, replaced when rows are read by numbers that were fitted on the
//! rows that are trained on.

use crate::error::{Error, Result};
use crate::feature_plan::Missing;
use crate::ranks::Ranks;
use crate::rows::Rows;
use crate::scan::{self, RowReader};

/// Puts the numbers of `fill` (F) where rows of F features have NaN.
pub(crate) fn apply(fill: &[f32], x: &mut [f32]) {
    for row in x.chunks_exact_mut(fill.len()) {
        for (x, &fill) in row.iter_mut().zip(fill) {
            *x = if x.is_nan() { fill } else { *x };
        }
    }
}

/// Rows of F features whose missing numbers are filled in. Without a fill they are rows of 2F
/// numbers: each number, 0 where it is missing, then 1 where it is there.
pub(crate) struct Filled<'a> {
    pub(crate) rows: &'a Rows,
    /// One for each feature.
    pub(crate) fill: Option<&'a [f32]>,
}

impl RowReader for Filled<'_> {
    fn rows(&self) -> u64 {
        self.rows.rows()
    }

    fn width(&self) -> usize {
        self.rows.width() * if self.fill.is_some() { 1 } else { 2 }
    }

    fn read(&self, first: u64, into: &mut [f32]) -> Result<()> {
        let width = self.rows.width();
        if let Some(fill) = self.fill {
            self.rows.read_f32(first, into)?;
            apply(fill, into);
            return Ok(());
        }
        for (row, into) in (first..).zip(into.chunks_exact_mut(2 * width)) {
            let (x, is_there) = into.split_at_mut(width);
            self.rows.read_f32(row, x)?;
            for (x, is_there) in x.iter_mut().zip(is_there) {
                *is_there = f32::from(u8::from(!x.is_nan()));
                *x = if x.is_nan() { 0.0 } else { *x };
            }
        }
        Ok(())
    }
}

/// Where numbers are there, in some rows of F features.
pub(crate) struct Present {
    /// Of the numbers of each feature, 0 where one is missing, then of 1 where one is there (2F).
    mean: Vec<f64>,
    rows: u64,
    /// Whether all rows were read, and not a sample.
    pub(crate) is_complete: bool,
}

impl Present {
    /// All ranks share the work. An infinite number ends it early: `None`.
    pub(crate) fn find(
        features: &Rows,
        is_wanted: &(dyn Fn(u64) -> bool + Sync),
        ranks: &dyn Ranks,
    ) -> Result<Option<Present>> {
        let rows = Filled {
            rows: features,
            fill: None,
        };
        let found = scan::features(&rows, is_wanted, ranks, scan::BYTES_MAX)?;
        Ok(found.bad.is_none().then_some(Present {
            mean: found.moments.mean,
            rows: found.moments.count,
            is_complete: found.is_complete,
        }))
    }

    /// How many numbers of each feature are missing.
    pub(crate) fn missing(&self) -> Vec<u64> {
        let parts = self.mean[self.mean.len() / 2..].iter();
        let missing = parts.map(|part| (self.rows as f64 * (1.0 - part)).round() as u64);
        missing.collect()
    }
}

/// What stands for missing numbers, `None` if none may be missing. `present` is of the rows that
/// are trained on.
pub(crate) fn fit(
    how: Missing,
    features: &Rows,
    columns: Option<&[String]>,
    present: Option<&Present>,
) -> Result<Option<Vec<f32>>> {
    let present = match (how, present) {
        (Missing::Error, _) => return Ok(None),
        (Missing::Mean, Some(present)) => present,
        // The scan that follows names an infinite number.
        _ => return Ok(Some(vec![0.0; features.width()])),
    };
    let (sums, parts) = present.mean.split_at(features.width());
    if let Some(column) = parts.iter().position(|part| *part == 0.0) {
        let name = columns.and_then(|columns| columns.get(column));
        let name = name.map_or(format!("feature {column}"), |name| {
            format!("column \"{name}\"")
        });
        return Err(Error::Data(format!(
            "{}: {name}: `missing` mean: expected a number in some row that is trained on, got none; help: leave the column out \
             with `drop`",
            features.arrays()[0].name()
        )));
    }
    let mean = |(sum, part): (&f64, &f64)| (sum / part) as f32;
    Ok(Some(sums.iter().zip(parts).map(mean).collect()))
}
