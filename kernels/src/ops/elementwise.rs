//! A whole elementwise operation, from the checks to the loop or the kernel: shared by relu, gelu,
//! add, sub, mul, rsqrt and scale.

use crate::Tensor;
use crate::error::Result;
use crate::launch::{Grid, Source, args};
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::loops::{self, Binary, Unary};

/// The file and the name of an operation's kernels, of which there is one for each dtype.
pub(crate) type Kernel = (&'static Source, &'static str);

/// `out = f(x)`, in f32, or f64 on the CPU; `x` may be `out`. The kernel gets `number` last, if
/// given.
#[track_caller]
pub(crate) fn unary_op(
    op: &'static str,
    out: &Tensor,
    x: &Tensor,
    f: impl Unary<f32> + Unary<f64>,
    (source, name): Kernel,
    number: Option<f32>,
) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.may_be_in_place(x, out);
    call.elementwise(&[out, x])?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.launcher() {
            let args = args![out, x, out.count, number];
            let args = &args[..3 + usize::from(number.is_some())];
            let grid = Grid::packs(out.count, out.dtype);
            return gpu.launch(source, (name, out.dtype), grid, args);
        }
        with_float!(placed.dtype, T => loops::unary::<T, _>(&mut out, &x, f));
        Ok(())
    })
}

/// `out = f(a, b)`, in f32, or f64 on the CPU; `a` may be `out`. Each operand comes with its role.
#[track_caller]
pub(crate) fn binary_op(
    op: &'static str,
    [out, a, b]: [(&'static str, &Tensor); 3],
    f: impl Binary<f32> + Binary<f64>,
    (source, name): Kernel,
) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes(out.0, out.1);
    let a = call.reads(a.0, a.1);
    let b = call.reads(b.0, b.1);
    call.may_be_in_place(a, out);
    call.elementwise(&[out, a, b])?;
    call.run(a, &FLOATS_AND_BF16, |placed| {
        let [mut out, a, b] = placed.enter([out, a, b])?;
        if let Some(gpu) = placed.launcher() {
            let args = args![out, a, b, out.count];
            let grid = Grid::packs(out.count, out.dtype);
            return gpu.launch(source, (name, out.dtype), grid, args);
        }
        with_float!(placed.dtype, T => loops::binary::<T, _>(&mut out, &a, &b, f));
        Ok(())
    })
}

/// As `binary_op`, where `b` may also be a vector for a matrix `a` (…, C): (C), a number for each
/// column, or (…, 1), a number for each row. `vector` is the name of the kernel for these.
#[track_caller]
pub(crate) fn broadcast_op(
    op: &'static str,
    [out, a, b]: [&Tensor; 3],
    f: impl Binary<f32> + Binary<f64>,
    (source, name): Kernel,
    vector: &'static str,
) -> Result<()> {
    let mut call = Call::new(op);
    let (a_dims, b_dims) = (a.shape().dims(), b.shape().dims());
    let out = call.writes("out", out);
    let a = call.reads("a", a);
    let b = call.reads("b", b);
    call.may_be_in_place(a, out);
    call.elementwise(&[out, a])?;
    call.same_dtype(b, a)?;
    call.row_major(b)?;
    let (columns, by_row) = match (a_dims, b_dims) {
        _ if a_dims == b_dims => (0, None),
        ([rows @ .., columns], [b_rows @ .., 1]) if rows == b_rows => (*columns, Some(true)),
        ([.., columns], [count]) if columns == count => (*columns, Some(false)),
        _ => {
            let expected = format!(
                "shape {a_dims:?}, as a has, or a vector: [columns of a], or [rows of a, 1]"
            );
            return Err(call.operand_error(b, expected, "reshape it: only b is broadcast"));
        }
    };
    call.run(a, &FLOATS_AND_BF16, |placed| {
        let [mut out, a, b] = placed.enter([out, a, b])?;
        if let Some(gpu) = placed.launcher() {
            let (count, dtype) = (out.count, out.dtype);
            let (name, grid) = match by_row {
                None => (name, Grid::packs(count, dtype)),
                Some(_) => (vector, Grid::elements(count)),
            };
            let args = args![out, a, b, count, columns, by_row == Some(true)];
            let args = if by_row.is_some() { args } else { &args[..4] };
            return gpu.launch(source, (name, dtype), grid, args);
        }
        with_float!(placed.dtype, T => match by_row {
            None => loops::binary::<T, _>(&mut out, &a, &b, f),
            Some(by_row) => loops::broadcast::<T, _>(&mut out, &a, &b, f, columns, by_row),
        });
        Ok(())
    })
}
