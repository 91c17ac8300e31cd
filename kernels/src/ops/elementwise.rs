//! The whole of an elementwise operation, from the checks to the loop: what relu, gelu, add, mul and scale share.

use crate::error::Result;
use crate::ops::call::{Call, FLOATS};
use crate::ops::loops::{self, Binary, Unary};
use crate::{DType, Tensor};

/// `out = f(x)`, in f32 or f64; `x` may be `out`.
#[track_caller]
pub(crate) fn unary_op(op: &'static str, out: &Tensor, x: &Tensor, f: impl Unary<f32> + Unary<f64>) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.may_be_in_place(x, out);
    call.elementwise(&[out, x])?;
    let placed = call.place(x, &FLOATS)?;
    {
        let [mut lent_out, lent_x] = placed.enter([out, x])?;
        match placed.tensor(x).dtype() {
            DType::F32 => loops::unary::<f32, _>(&mut lent_out, &lent_x, f),
            _ => loops::unary::<f64, _>(&mut lent_out, &lent_x, f),
        }
    }
    placed.finish()
}

/// Which inputs of a binary operation may be its output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum InPlace {
    /// The first alone.
    First,
    /// Either, or both.
    Either,
}

/// `out = f(a, b)`, in f32 or f64. Each operand comes with its role.
#[track_caller]
pub(crate) fn binary_op(
    op: &'static str,
    [out, a, b]: [(&'static str, &Tensor); 3],
    in_place: InPlace,
    f: impl Binary<f32> + Binary<f64>,
) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes(out.0, out.1);
    let a = call.reads(a.0, a.1);
    let b = call.reads(b.0, b.1);
    call.may_be_in_place(a, out);
    if in_place == InPlace::Either {
        call.may_be_in_place(b, out);
    }
    call.elementwise(&[out, a, b])?;
    let placed = call.place(a, &FLOATS)?;
    {
        let [mut lent_out, lent_a, lent_b] = placed.enter([out, a, b])?;
        match placed.tensor(a).dtype() {
            DType::F32 => loops::binary::<f32, _>(&mut lent_out, &lent_a, &lent_b, f),
            _ => loops::binary::<f64, _>(&mut lent_out, &lent_a, &lent_b, f),
        }
    }
    placed.finish()
}
