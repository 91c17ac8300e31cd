//! Where a matrix is in memory, and the reason for which one is refused.

use std::ops::Range;

use super::attributes::Layout;
use super::element::Type;
use crate::work::Address;

/// The reason, as the library's status and in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// CUBLAS_STATUS_INVALID_VALUE: contradictory.
    Invalid(String),
    /// CUBLAS_STATUS_NOT_SUPPORTED: meaningful but not available.
    Unsupported(String),
}

/// One matrix (of each member of a batch): where element (row, column) is, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) kind: Type,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) row_stride: u64,
    pub(super) column_stride: u64,
    pub(super) batch: u64,
    pub(super) batch_stride: u64,
}

impl Matrix {
    pub(super) fn new(operand: char, layout: &Layout) -> Result<Self, Refusal> {
        let Layout {
            kind,
            order,
            rows,
            columns,
            ld,
            batch,
            batch_stride,
        } = *layout;
        let kind = Type::from_raw(kind).ok_or_else(|| {
            Refusal::Unsupported(format!(
                "{operand} has the data type {kind}; modelled: f32, f64, f16, bf16"
            ))
        })?;
        if rows == 0 || columns == 0 {
            return Err(Refusal::Invalid(format!(
                "{operand} is {rows}x{columns}: a dimension is zero"
            )));
        }
        let contiguous = match order {
            0 => rows,
            1 => columns,
            _ => {
                return Err(Refusal::Unsupported(format!(
                    "{operand} has the order {order}; modelled: COL, ROW"
                )));
            }
        };
        let ld = u64::try_from(ld).ok().filter(|&ld| ld >= contiguous);
        let Some(ld) = ld else {
            return Err(Refusal::Invalid(format!(
                "{operand} is {rows}x{columns} with a leading dimension of {}, less than {contiguous}",
                layout.ld
            )));
        };
        let (Ok(batch), Ok(batch_stride)) =
            (u64::try_from(batch.max(0)), u64::try_from(batch_stride))
        else {
            return Err(Refusal::Unsupported(format!(
                "{operand} has a negative batch stride of {batch_stride} elements"
            )));
        };
        if batch == 0 {
            return Err(Refusal::Invalid(format!(
                "{operand} has a batch count of {}",
                layout.batch
            )));
        }
        let (row_stride, column_stride) = if order == 0 { (1, ld) } else { (ld, 1) };
        Ok(Self {
            kind,
            rows,
            columns,
            row_stride,
            column_stride,
            batch,
            batch_stride,
        })
    }

    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// The bytes of all elements at `address`: one range without gaps, else one range per line.
    pub(super) fn ranges(&self, address: Address) -> Vec<Range<Address>> {
        let (contiguous, lines, stride) =
            if self.row_stride == 1 && (self.column_stride != 1 || self.rows > 1) {
                (self.rows, self.columns, self.column_stride)
            } else {
                (self.columns, self.rows, self.row_stride)
            };
        lines_of(
            address,
            self.kind.bytes(),
            contiguous,
            lines,
            stride,
            self.batch,
            self.batch_stride,
        )
    }

    /// The bytes from the first to the last element, gaps included: they must lie in one
    /// allocation.
    pub(super) fn span(&self, address: Address) -> Range<Address> {
        let last = (self.rows - 1) * self.row_stride
            + (self.columns - 1) * self.column_stride
            + (self.batch - 1) * self.batch_stride;
        address..address + (last + 1) * self.kind.bytes()
    }
}

/// `lines` runs of `contiguous` elements, `stride` elements apart, for each matrix of a batch;
/// merged where they touch.
pub(super) fn lines_of(
    address: Address,
    bytes: u64,
    contiguous: u64,
    lines: u64,
    stride: u64,
    batch: u64,
    batch_stride: u64,
) -> Vec<Range<Address>> {
    let mut ranges: Vec<Range<Address>> = Vec::new();
    for member in 0..batch {
        // A batch may share one matrix.
        if member > 0 && batch_stride == 0 {
            break;
        }
        for line in 0..lines {
            let start = address + (member * batch_stride + line * stride) * bytes;
            let end = start + contiguous * bytes;
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
    }
    ranges
}
