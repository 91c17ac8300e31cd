//! add: `out = a + b`, element by element; `b` may be a vector along the rows or columns of `a`.

use crate::error::{Caller, Result};
use crate::launch::Source;
use crate::ops::elementwise::broadcast_op;
use crate::ops::loops::Binary;
use crate::{Tensor, transfer};

static SOURCE: Source = Source::new("add.cu", include_str!("add.cu"));

/// The sum of two elements.
#[derive(Clone, Copy)]
struct Add;

impl<T: std::ops::Add<Output = T>> Binary<T> for Add {
    #[inline(always)]
    fn apply(self, a: T, b: T) -> T {
        a + b
    }
}

/// `a + b` in a new tensor, on the device where the transfer policy in force brings them together.
#[track_caller]
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = empty_where_they_meet("add", a, b)?;
    add_into(&out, a, b)?;
    Ok(out)
}

/// `out = a + b`, all of one shape; `out` may be `a`. For `a` (…, C), `b` may also be (C), which is
/// added to each row, or (…, 1), a number for each row.
///
/// Backward: `da = db = dout`; for a vector `b`, `column_sum_into` or `row_sum_into` of `dout`.
#[track_caller]
pub fn add_into(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    broadcast_op("add", [out, a, b], Add, (&SOURCE, "add"), "add_vector")
}

/// An output for an elementwise operation on two tensors, on the device where they meet.
#[track_caller]
pub(super) fn empty_where_they_meet(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let device = transfer::meeting_place(&[("a", a), ("b", b)], Caller::new(op))?;
    Tensor::empty(a.shape(), a.dtype(), device)
}

#[cfg(test)]
mod tests;
