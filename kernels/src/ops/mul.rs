//! mul: `out = a b`, element by element; `b` may be a vector along the rows or columns of `a`.

use crate::Tensor;
use crate::error::Result;
use crate::launch::Source;
use crate::ops::add::empty_where_they_meet;
use crate::ops::elementwise::broadcast_op;
use crate::ops::loops::Binary;

static SOURCE: Source = Source::new("mul.cu", include_str!("mul.cu"));

/// The product of two elements.
#[derive(Clone, Copy)]
struct Mul;

impl<T: std::ops::Mul<Output = T>> Binary<T> for Mul {
    #[inline(always)]
    fn apply(self, a: T, b: T) -> T {
        a * b
    }
}

/// `a b` in a new tensor, on the device where the transfer policy in force brings them together.
#[track_caller]
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = empty_where_they_meet("mul", a, b)?;
    mul_into(&out, a, b)?;
    Ok(out)
}

/// `out = a b`, all of one shape; `out` may be `a`. For `a` (…, C), `b` may also be (C), with which
/// each row is multiplied, or (…, 1), a number for each row.
///
/// Backward: `da = dout b`, `db = dout a` (`mul_into`); for a vector `b` then summed as for
/// `add_into`.
#[track_caller]
pub fn mul_into(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    broadcast_op("mul", [out, a, b], Mul, (&SOURCE, "mul"), "mul_vector")
}

#[cfg(test)]
mod tests;
