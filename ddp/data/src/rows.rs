//! The arrays of several files as one, row after row. Messages name the file of a row.

use std::ops::Range;

use super::files::array::WIDTH_MAX;
use super::files::{Array, Element, shown_number};
use crate::error::{Error, Result, ensure};

/// Arrays whose rows have the same shape, one after another.
#[derive(Debug)]
pub(crate) struct Rows {
    arrays: Vec<Array>,
    /// The first row of each array, then the number of all rows.
    starts: Vec<u64>,
    width: usize,
}

impl Rows {
    /// At least one array.
    pub(crate) fn new(arrays: Vec<Array>) -> Result<Rows> {
        let first = &arrays[0];
        let mut starts = vec![0];
        let mut rows = 0u64;
        for array in &arrays {
            let (expected, got) = (first.row_shape(), array.row_shape());
            let (name, as_in) = (array.name(), first.name());
            ensure!(
                got == expected,
                "{name}: expected rows of shape {expected:?}, as in {as_in}, got {got:?}"
            );
            let sum = rows.checked_add(array.rows());
            let many = || Error::Data(format!("{name}: more than 2^64 rows in all files together"));
            rows = sum.ok_or_else(many)?;
            starts.push(rows);
        }
        let width = first.row_elements();
        ensure!(
            width <= WIDTH_MAX,
            "{}: expected at most {WIDTH_MAX} numbers a row, got {width} (shape {:?}); the first dimension counts rows",
            first.name(),
            first.row_shape()
        );
        Ok(Rows {
            arrays,
            starts,
            width,
        })
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> u64 {
        self.starts[self.arrays.len()]
    }

    /// Numbers in a row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// The arrays, in the order of rows.
    pub(crate) fn arrays(&self) -> &[Array] {
        &self.arrays
    }

    /// The type of the numbers, which all arrays have in common.
    pub(crate) fn element(&self) -> Result<Element> {
        let (first, expected) = (&self.arrays[0], self.arrays[0].element());
        for array in &self.arrays {
            let (name, got) = (array.name(), array.element());
            ensure!(
                got == expected,
                "{name}: expected elements of type {expected}, as in {}, got {got}; help: save all files with the same type",
                first.name()
            );
        }
        Ok(expected)
    }

    /// Whether this array is one of them.
    pub(crate) fn has(&self, array: &Array) -> bool {
        self.arrays.iter().any(|own| own.is_same(array))
    }

    /// The array that has this row, and the row in it.
    #[inline]
    pub(crate) fn find(&self, row: u64) -> (usize, u64) {
        let index = match self.arrays.len() {
            1 => 0,
            _ => self.starts.partition_point(|&start| start <= row) - 1,
        };
        (index, row - self.starts[index])
    }

    /// The file and its row, for messages.
    pub(crate) fn place(&self, row: u64) -> String {
        let (index, row) = self.find(row);
        format!("{}, row {row}", self.arrays[index].name())
    }

    /// Splits `count` rows from `first` on by arrays: the array, its first row, and which of the
    /// `count` rows these are.
    pub(crate) fn pieces(
        &self,
        first: u64,
        count: usize,
    ) -> impl Iterator<Item = (usize, u64, Range<usize>)> {
        let end = first + count as u64;
        let mut next = first;
        std::iter::from_fn(move || {
            if next == end {
                return None;
            }
            let (index, row) = self.find(next);
            let stop = self.starts[index + 1].min(end);
            let range = (next - first) as usize..(stop - first) as usize;
            next = stop;
            Some((index, row, range))
        })
    }

    /// Reads whole rows from `first` on, rounded to f32.
    #[inline]
    pub(crate) fn read_f32(&self, first: u64, into: &mut [f32]) -> Result<()> {
        if into.len() == self.width {
            let (index, row) = self.find(first);
            return self.arrays[index].read_f32(row, into);
        }
        for (index, row, range) in self.pieces(first, into.len() / self.width) {
            self.arrays[index].read_f32(
                row,
                &mut into[range.start * self.width..range.end * self.width],
            )?;
        }
        Ok(())
    }

    /// One number, as f64, for messages.
    pub(crate) fn number(&self, row: u64, column: usize) -> Result<f64> {
        let mut numbers = vec![0f64; self.width];
        self.read_f64(row, &mut numbers)?;
        Ok(numbers[column])
    }

    /// The error of a non-finite number; `columns` are the names of features.
    pub(crate) fn nonfinite(&self, row: u64, column: usize, columns: Option<&[String]>) -> Error {
        let place = self.place(row);
        let number = match self.number(row, column) {
            Ok(number) if !(number as f32).is_finite() => number,
            Ok(_) => {
                return format!("{place}: it changed while it was read; help: start again").into();
            }
            Err(error) => return error,
        };
        let name = columns.and_then(|columns| columns.get(column));
        let name = name.map_or(String::new(), |name| format!(" ({name})"));
        format!(
            "{place}, feature {column}{name}: expected a finite f32, got {} (rows and features are counted from 0); help: \
             leave out such rows, or replace the number",
            shown_number(number)
        )
        .into()
    }

    /// Reads one row as f64.
    pub(crate) fn read_f64(&self, row: u64, into: &mut [f64]) -> Result<()> {
        let (index, row) = self.find(row);
        self.arrays[index].read_f64(row, into)
    }
}

/// Puts the numbers of `fill` (F) where rows of F features have NaN.
pub(crate) fn fill_in(fill: &[f32], x: &mut [f32]) {
    for row in x.chunks_exact_mut(fill.len()) {
        for (x, &fill) in row.iter_mut().zip(fill) {
            *x = if x.is_nan() { fill } else { *x };
        }
    }
}
