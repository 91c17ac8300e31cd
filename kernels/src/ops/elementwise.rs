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
///
/// With a kernel `vector`, `b` may also be a vector for a matrix `a` (…, C): (C), a number for each
/// column, or (…, 1), a number for each row.
#[track_caller]
pub(crate) fn binary_op(
    op: &'static str,
    [out, a, b]: [(&'static str, &Tensor); 3],
    f: impl Binary<f32> + Binary<f64>,
    (source, name): Kernel,
    vector: Option<&'static str>,
) -> Result<()> {
    let mut call = Call::new(op);
    let (a_dims, b_dims) = (a.1.shape().dims(), b.1.shape().dims());
    let out = call.writes(out.0, out.1);
    let a = call.reads(a.0, a.1);
    let b = call.reads(b.0, b.1);
    call.may_be_in_place(a, out);
    call.elementwise(&[out, a])?;
    // The vector's kernel, the columns of a, and whether b has a number for each row.
    let by_vector = match (vector, a_dims, b_dims) {
        (None, ..) => None,
        _ if a_dims == b_dims => None,
        (Some(name), [rows @ .., columns], [b_rows @ .., 1]) if rows == b_rows => {
            Some((name, *columns, true))
        }
        (Some(name), [.., columns], [count]) if columns == count => Some((name, *columns, false)),
        _ => {
            let expected = format!(
                "shape {a_dims:?}, as a has, or a vector: [columns of a], or [rows of a, 1]"
            );
            return Err(call.operand_error(b, expected, "reshape it: only b is broadcast"));
        }
    };
    match by_vector {
        None => call.elementwise(&[a, b])?,
        Some(_) => call.same_dtype(b, a).and_then(|()| call.row_major(b))?,
    }
    call.run(a, &FLOATS_AND_BF16, |placed| {
        let [mut out, a, b] = placed.enter([out, a, b])?;
        if let Some(gpu) = placed.launcher() {
            let (count, dtype) = (out.count, out.dtype);
            let (name, columns, by_row) = by_vector.unwrap_or((name, 0, false));
            let args = args![out, a, b, count, columns, by_row];
            let (grid, args) = match by_vector {
                None => (Grid::packs(count, dtype), &args[..4]),
                Some(_) => (Grid::elements(count), &args[..]),
            };
            return gpu.launch(source, (name, dtype), grid, args);
        }
        with_float!(placed.dtype, T => match by_vector {
            None => loops::binary::<T, _>(&mut out, &a, &b, f),
            Some((_, columns, by_row)) => {
                loops::broadcast::<T, _>(&mut out, &a, &b, f, columns, by_row);
            }
        });
        Ok(())
    })
}
