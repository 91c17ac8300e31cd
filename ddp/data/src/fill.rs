//! Missing numbers: NaN in files, replaced when rows are read by numbers that were fitted on the
//! rows that are trained on.

use crate::error::{Error, Result};
use crate::plan::Missing;
use crate::ranks::Ranks;
use crate::scan::{self, RowReader};
use crate::stack::Stack;

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
    pub(crate) rows: &'a Stack,
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

/// What stands for missing numbers, `None` if none may be missing; and how many of each feature are
/// missing in the rows that are trained on. All ranks share the work.
pub(crate) fn fit(
    how: Missing,
    features: &Stack,
    columns: Option<&[String]>,
    is_trained_on: &(dyn Fn(u64) -> bool + Sync),
    ranks: &dyn Ranks,
) -> Result<(Option<Vec<f32>>, Vec<u64>)> {
    let zeros = Some(vec![0.0; features.width()]);
    match how {
        Missing::Error => return Ok((None, Vec::new())),
        // Of tables, missing cells are counted when they are converted.
        Missing::Zero if columns.is_some() => return Ok((zeros, Vec::new())),
        Missing::Zero | Missing::Mean => {}
    }
    let present = Filled {
        rows: features,
        fill: None,
    };
    let found = scan::features(&present, is_trained_on, ranks, scan::BYTES_MAX)?;
    // An infinite number ends the scan early; the scan that follows names it.
    if found.bad.is_some() {
        return Ok((zeros, Vec::new()));
    }
    let (sums, parts) = found.moments.mean.split_at(features.width());
    let count = found.moments.count as f64;
    let missing = parts
        .iter()
        .map(|part| (count * (1.0 - part)).round() as u64);
    let missing = missing.collect();
    if how == Missing::Zero {
        return Ok((zeros, missing));
    }
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
    let means = sums.iter().zip(parts).map(mean).collect();
    Ok((Some(means), missing))
}
