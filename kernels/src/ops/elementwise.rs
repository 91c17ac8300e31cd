//! A whole elementwise operation, from the checks to the loop or the kernel: shared by relu, gelu,
//! add, mul and scale.

use crate::Tensor;
use crate::cuda::launch::args;
use crate::cuda::{Grid, Source};
use crate::error::Result;
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
            let args = args![out, x.address_or(&out), out.count, number];
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
            let args = args![out, a.address_or(&out), b, out.count];
            let grid = Grid::packs(out.count, out.dtype);
            return gpu.launch(source, (name, out.dtype), grid, args);
        }
        with_float!(placed.dtype, T => loops::binary::<T, _>(&mut out, &a, &b, f));
        Ok(())
    })
}
