//! Views: other shapes of the same memory. No view copies; `contiguous` copies only what is seen transposed.

use std::ops::Range;
use std::panic::Location;

use super::Tensor;
use crate::Shape;
use crate::error::{Error, Result, Site};
use crate::ops::write_transposed;
use crate::storage::Origin;

impl Tensor {
    /// The same elements in another shape of as many. A transposed matrix has to be made `contiguous` first.
    #[track_caller]
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        let shape = Shape::checked("reshape", shape, Location::caller())?;
        if shape.count() != self.count() {
            let expected = format!("{} elements for the shape {shape}, got {}", shape.count(), self.count());
            return Err(self.misfit("reshape", expected, "Ask for a shape of as many elements."));
        }
        self.need_row_major("reshape")?;
        Ok(Tensor { shape, ..self.clone() })
    }

    /// All elements in one dimension.
    #[track_caller]
    pub fn flatten(&self) -> Result<Tensor> {
        self.reshape(&[self.count()])
    }

    /// The indices `range` of the outermost dimension: rows of a matrix, elements of a vector.
    #[track_caller]
    pub fn slice(&self, range: Range<usize>) -> Result<Tensor> {
        let Some(&rows) = self.shape.first() else {
            return Err(self.misfit("slice", "at least one dimension".into(), "A scalar has no rows to slice."));
        };
        if range.start > range.end || range.end > rows {
            return Err(Error::value("slice", "range", format!("within 0..{rows} of {self}"), format!("{range:?}")));
        }
        self.need_row_major("slice")?;
        let row_elements: usize = self.shape[1..].iter().product();
        let mut dims = [0; crate::shape::RANK_MAX];
        dims[..self.shape.rank()].copy_from_slice(&self.shape);
        dims[0] = range.len();
        let shape = Shape::new(&dims[..self.shape.rank()])?;
        Ok(Tensor { offset: self.offset + range.start * row_elements, shape, ..self.clone() })
    }

    /// One index of the outermost dimension, which goes away.
    #[track_caller]
    pub fn index(&self, index: usize) -> Result<Tensor> {
        let rows = self.shape.first().copied().unwrap_or(0);
        if index >= rows {
            return Err(Error::value("index", "index", format!("below {rows} for {self}"), index));
        }
        let row = self.slice(index..index + 1)?;
        row.reshape(&self.shape[1..])
    }

    /// The matrix transposed, without a copy. The matrix products take it as it is; for the rest, `contiguous`.
    #[track_caller]
    pub fn t(&self) -> Result<Tensor> {
        let [rows, columns] = self.shape[..] else {
            return Err(self.misfit("t", "a matrix (two dimensions)".into(), "Reshape it to two dimensions first."));
        };
        Ok(Tensor { shape: Shape::new(&[columns, rows])?, transposed: !self.transposed, ..self.clone() })
    }

    /// This tensor if it is row-major, else a row-major copy on the same device.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        self.contiguous_at("contiguous", Location::caller())
    }

    pub(super) fn contiguous_at(&self, op: &'static str, at: Site) -> Result<Tensor> {
        if !self.transposed {
            return Ok(self.clone());
        }
        let copy = Tensor::allocate(self.shape, self.dtype, self.device(), Origin::Computed, op, at)?;
        write_transposed(&copy, self, op, at)?;
        Ok(copy.with_name_of(self))
    }

    #[track_caller]
    fn need_row_major(&self, op: &'static str) -> Result<()> {
        if self.transposed {
            return Err(self.misfit(
                op,
                "row-major elements, got a transposed view".into(),
                "Call .contiguous() first.",
            ));
        }
        Ok(())
    }

    #[track_caller]
    pub(super) fn misfit(&self, op: &'static str, expected: String, hint: &str) -> Error {
        Error::Operand {
            op,
            operand: Box::new(self.as_operand("x")),
            expected,
            hint: hint.to_string(),
            at: Location::caller(),
        }
    }
}
