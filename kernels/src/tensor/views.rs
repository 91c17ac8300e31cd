//! Views: other shapes of the same memory. A view never copies; `contiguous` copies only a
//! transposed view.

use std::ops::Range;

use super::Tensor;
use crate::error::{Caller, Error, Result};
use crate::{DType, Shape};

impl Tensor {
    /// The same elements in another shape. A transposed matrix must be made `contiguous` first.
    #[track_caller]
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        let shape = Shape::checked(shape, Caller::new("reshape"))?;
        let count = self.count();
        if shape.count() != count {
            let wanted = shape.count();
            let expected = format!("{wanted} elements for the shape {shape}, got {count}");
            let help = "ask for a shape with the same number of elements";
            return Err(self.misfit("reshape", expected, help));
        }
        self.need_row_major("reshape")?;
        Ok(Tensor {
            shape,
            ..self.clone()
        })
    }

    /// All elements in one dimension.
    #[track_caller]
    pub fn flatten(&self) -> Result<Tensor> {
        self.reshape(&[self.count()])
    }

    /// The same bytes as elements of `dtype`, in one dimension. The tensor must be row-major, and
    /// begin and end with whole elements of `dtype`.
    #[track_caller]
    pub fn bits_as(&self, dtype: DType) -> Result<Tensor> {
        self.need_row_major("bits_as")?;
        let (range, size) = (self.byte_range(), dtype.bytes());
        if !range.start.is_multiple_of(size) || !range.len().is_multiple_of(size) {
            let expected = format!("bytes of whole elements of {dtype} from its start");
            return Err(self.misfit("bits_as", expected, "slice what is of that dtype"));
        }
        Ok(Tensor {
            offset: range.start / size,
            shape: Shape::new(&[range.len() / size])?,
            dtype,
            ..self.clone()
        })
    }

    /// A range of the outermost dimension: rows of a matrix, elements of a vector.
    #[track_caller]
    pub fn slice(&self, range: Range<usize>) -> Result<Tensor> {
        let Some(&rows) = self.shape.first() else {
            let help = "a scalar has no rows to slice";
            return Err(self.misfit("slice", "at least one dimension", help));
        };
        if range.start > range.end || range.end > rows {
            let (expected, got) = (format!("within 0..{rows} of {self}"), format!("{range:?}"));
            return Err(Error::value("slice", "range", expected, got));
        }
        self.need_row_major("slice")?;
        let row_elements: usize = self.shape[1..].iter().product();
        Ok(Tensor {
            offset: self.offset + range.start * row_elements,
            shape: self.shape.with_first(range.len()),
            ..self.clone()
        })
    }

    /// One index of the outermost dimension, which is removed.
    #[track_caller]
    pub fn index(&self, index: usize) -> Result<Tensor> {
        let rows = self.shape.first().copied().unwrap_or(0);
        if index >= rows {
            let expected = format!("below {rows} for {self}");
            return Err(Error::value("index", "index", expected, index));
        }
        let row = self.slice(index..index + 1)?;
        row.reshape(&self.shape[1..])
    }

    /// The matrix transposed, or each of several (three dimensions), without a copy. Matmuls read
    /// it directly; other operations need `contiguous`, which is for one matrix.
    #[track_caller]
    pub fn t(&self) -> Result<Tensor> {
        let shape = match self.shape[..] {
            [rows, columns] => Shape::new(&[columns, rows])?,
            [matrices, rows, columns] => Shape::new(&[matrices, columns, rows])?,
            _ => {
                let help = "reshape it to two or three dimensions first";
                let expected = "a matrix (two dimensions) or several (three)";
                return Err(self.misfit("t", expected, help));
            }
        };
        Ok(Tensor {
            shape,
            transposed: !self.transposed,
            ..self.clone()
        })
    }

    #[track_caller]
    fn need_row_major(&self, op: &'static str) -> Result<()> {
        if self.transposed {
            let expected = "row-major elements, got a transposed view";
            return Err(self.misfit(op, expected, "call .contiguous() first"));
        }
        Ok(())
    }

    #[track_caller]
    pub(crate) fn misfit(
        &self,
        op: &'static str,
        expected: impl std::fmt::Display,
        help: &str,
    ) -> Error {
        Caller::new(op).operand(self.as_operand("x"), expected, help)
    }
}
