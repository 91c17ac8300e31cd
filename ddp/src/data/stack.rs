//! Arrays of several files as one: rows one after another. A row is found by its number, and every message names its file.

use std::ops::Range;

use super::files::{Array, Element};
use super::scan::Rows;
use crate::error::{Error, Result};

/// The most numbers of a row: as many as the widest layer has.
pub(crate) const WIDTH_MAX: usize = 1 << 24;

/// Arrays whose rows have one shape, one after another.
#[derive(Debug)]
pub(crate) struct Stack {
    arrays: Vec<Array>,
    /// The number of the first row of each, and behind the last one how many rows there are.
    starts: Vec<u64>,
    width: usize,
}

impl Stack {
    /// `arrays`, at least one, in this order.
    pub(crate) fn new(arrays: Vec<Array>) -> Result<Stack> {
        let first = &arrays[0];
        let mut starts = vec![0];
        let mut rows = 0u64;
        for array in &arrays {
            if array.row_shape() != first.row_shape() {
                return Err(Error::Data(format!(
                    "{}: expected rows of shape {:?}, as in {}, got {:?}. All files of one --data have rows of one shape",
                    array.name(),
                    first.row_shape(),
                    first.name(),
                    array.row_shape()
                )));
            }
            rows = rows
                .checked_add(array.rows())
                .ok_or_else(|| Error::Data(format!("{}: more rows than can be counted", array.name())))?;
            starts.push(rows);
        }
        let width = first.row_elements();
        if width > WIDTH_MAX {
            return Err(Error::Data(format!(
                "{}: expected at most {WIDTH_MAX} numbers a row, got {width} (shape {:?}). The first dimension counts rows",
                first.name(),
                first.row_shape()
            )));
        }
        Ok(Stack { arrays, starts, width })
    }

    /// How many rows there are.
    pub(crate) fn rows(&self) -> u64 {
        self.starts[self.arrays.len()]
    }

    /// How many numbers a row has.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// In the order of rows.
    pub(crate) fn arrays(&self) -> &[Array] {
        &self.arrays
    }

    /// The type of numbers, if all arrays have the same.
    pub(crate) fn element(&self) -> Result<Element> {
        let first = &self.arrays[0];
        match self.arrays.iter().find(|array| array.element() != first.element()) {
            None => Ok(first.element()),
            Some(other) => Err(Error::Data(format!(
                "{}: expected elements of type {}, as in {}, got {}. Save all files of one --data with the same type",
                other.name(),
                first.element().name(),
                first.name(),
                other.element().name()
            ))),
        }
    }

    /// Which array has this row, and where.
    #[inline]
    pub(crate) fn find(&self, row: u64) -> (usize, u64) {
        let index = match self.arrays.len() {
            1 => 0,
            _ => self.starts.partition_point(|&start| start <= row) - 1,
        };
        (index, row - self.starts[index])
    }

    /// For messages: the file and its row.
    pub(crate) fn place(&self, row: u64) -> String {
        let (index, row) = self.find(row);
        format!("{}, row {row}", self.arrays[index].name())
    }

    /// `count` rows from `first` on, array by array: which one, its first row, and which of the `count` these are.
    pub(crate) fn pieces(&self, first: u64, count: usize) -> impl Iterator<Item = (usize, u64, Range<usize>)> {
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

    /// Whole rows from `first` on, rounded to f32.
    #[inline]
    pub(crate) fn read_f32(&self, first: u64, into: &mut [f32]) -> Result<()> {
        if into.len() == self.width {
            let (index, row) = self.find(first);
            return self.arrays[index].read_f32(row, into);
        }
        for (index, row, range) in self.pieces(first, into.len() / self.width) {
            self.arrays[index].read_f32(row, &mut into[range.start * self.width..range.end * self.width])?;
        }
        Ok(())
    }

    /// One number as it is in the file, as nearly as f64 has it: for messages.
    pub(crate) fn number(&self, row: u64, column: usize) -> Result<f64> {
        let mut numbers = vec![0f64; self.width];
        self.read_f64(row, &mut numbers)?;
        Ok(numbers[column])
    }

    /// One row as it is in the file, as nearly as f64 has it.
    pub(crate) fn read_f64(&self, row: u64, into: &mut [f64]) -> Result<()> {
        let (index, row) = self.find(row);
        self.arrays[index].read_f64(row, into)
    }
}

impl Rows for Stack {
    fn rows(&self) -> u64 {
        Stack::rows(self)
    }

    fn width(&self) -> usize {
        Stack::width(self)
    }

    fn read(&self, first: u64, into: &mut [f32]) -> Result<()> {
        self.read_f32(first, into)
    }
}
