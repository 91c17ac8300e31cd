//! sub: `out = a - b`, element by element; `b` may be a vector along the rows or columns of `a`.

use crate::Tensor;
use crate::error::Result;
use crate::launch::Source;
use crate::ops::add::empty_where_they_meet;
use crate::ops::elementwise::broadcast_op;
use crate::ops::loops::Binary;

static SOURCE: Source = Source::new("sub.cu", include_str!("sub.cu"));

/// The difference of two elements.
#[derive(Clone, Copy)]
struct Sub;

impl<T: std::ops::Sub<Output = T>> Binary<T> for Sub {
    #[inline(always)]
    fn apply(self, a: T, b: T) -> T {
        a - b
    }
}

/// `a - b` in a new tensor, on the device where the transfer policy in force brings them together.
#[track_caller]
pub fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = empty_where_they_meet("sub", a, b)?;
    sub_into(&out, a, b)?;
    Ok(out)
}

/// `out = a - b`, all of one shape; `out` may be `a`. For `a` (…, C), `b` may also be (C), which is
/// taken from each row, or (…, 1), a number for each row.
///
/// Backward: `da = dout`, `db = -dout` (`scale_into`); for a vector `b` then summed as for
/// `add_into`.
#[track_caller]
pub fn sub_into(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    broadcast_op("sub", [out, a, b], Sub, (&SOURCE, "sub"), "sub_vector")
}

#[cfg(test)]
mod tests;
