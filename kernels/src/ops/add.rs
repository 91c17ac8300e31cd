//! add: `out = a + b`, element by element.

use std::panic::Location;

use crate::cuda::Source;
use crate::error::{Error, Result};
use crate::ops::elementwise::binary_op;
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

/// `out = a + b`, all of one shape; `out` may be `a`.
#[track_caller]
pub fn add_into(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    let operands = [("out", out), ("a", a), ("b", b)];
    binary_op("add", operands, Add, (&SOURCE, "add"))
}

/// An output for an elementwise operation on two tensors, on the device where they meet.
#[track_caller]
pub(super) fn empty_where_they_meet(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let at = Location::caller();
    let device = transfer::meeting_place(op, &[("a", a), ("b", b)], at)?;
    let refuse = |expected: String, help: &str| {
        let operand = b.as_operand("b");
        Err(Error::operand(op, operand, expected, help, at))
    };
    if a.shape() != b.shape() {
        let help = "shapes are not broadcast: slice or reshape one of them; to add a row to all \
                    rows, use linear";
        return refuse(format!("shape {}, as a has", a.shape()), help);
    }
    if a.dtype() != b.dtype() {
        let expected = format!("dtype {}, as a has", a.dtype());
        return refuse(expected, "cast one of them with .to_dtype(…)");
    }
    Tensor::empty(a.shape(), a.dtype(), device)
}

#[cfg(test)]
mod tests;
