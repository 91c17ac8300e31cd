//! The whole of an elementwise operation, from the checks to the loop or the kernel: what relu, gelu, add, mul and scale
//! share.

use crate::cuda::{Grid, Source};
use crate::error::Result;
use crate::ops::call::{Call, WIDE};
use crate::ops::loops::{self, Binary, Unary};
use crate::{DType, Tensor};

/// The kernels of one elementwise operation: on a GPU its math is in f32, rounded once to the dtype of its operands.
pub(crate) struct Kernels {
    pub(crate) source: &'static Source,
    /// For f32, bf16 and f16: `kernel_names!`.
    pub(crate) names: [&'static str; 3],
}

/// The names of an operation's three kernels.
macro_rules! kernel_names {
    ($op:literal) => {
        [concat!($op, "_f32"), concat!($op, "_bf16"), concat!($op, "_f16")]
    };
}
pub(crate) use kernel_names;

/// Which of an operation's three kernels is for `dtype`, which its versions allow.
pub(crate) fn kernel_for(names: [&'static str; 3], dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => names[1],
        DType::F16 => names[2],
        _ => names[0],
    }
}

/// As many threads as there are 16 bytes to write.
pub(crate) fn grid_of_packs(count: usize, dtype: DType) -> Grid {
    Grid::elements((count * dtype.bytes()).div_ceil(16))
}

/// `out = f(x)`, in f32, or f64 on the CPU; `x` may be `out`. The kernel is given `number` last, if there is one.
#[track_caller]
pub(crate) fn unary_op(
    op: &'static str,
    out: &Tensor,
    x: &Tensor,
    f: impl Unary<f32> + Unary<f64>,
    kernels: &Kernels,
    number: Option<f32>,
) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.may_be_in_place(x, out);
    call.elementwise(&[out, x])?;
    let placed = call.place(x, &WIDE)?;
    let (dtype, count) = (placed.tensor(x).dtype(), placed.tensor(x).count());
    {
        let [mut lent_out, lent_x] = placed.enter([out, x])?;
        match placed.launcher()? {
            Some(_) if count == 0 => {}
            Some(gpu) => {
                let kernel = gpu.kernel(kernels.source, kernel_for(kernels.names, dtype))?;
                let kernel = kernel.output(&lent_out).input(&lent_x, &lent_out).count(count);
                let kernel = match number {
                    Some(number) => kernel.f32(number),
                    None => kernel,
                };
                kernel.launch(grid_of_packs(count, dtype))?;
            }
            None if dtype == DType::F32 => loops::unary::<f32, _>(&mut lent_out, &lent_x, f),
            None => loops::unary::<f64, _>(&mut lent_out, &lent_x, f),
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

/// `out = f(a, b)`, in f32, or f64 on the CPU. Each operand comes with its role.
#[track_caller]
pub(crate) fn binary_op(
    op: &'static str,
    [out, a, b]: [(&'static str, &Tensor); 3],
    in_place: InPlace,
    f: impl Binary<f32> + Binary<f64>,
    kernels: &Kernels,
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
    let placed = call.place(a, &WIDE)?;
    let (dtype, count) = (placed.tensor(a).dtype(), placed.tensor(a).count());
    {
        let [mut lent_out, lent_a, lent_b] = placed.enter([out, a, b])?;
        match placed.launcher()? {
            Some(_) if count == 0 => {}
            Some(gpu) => {
                let kernel = gpu.kernel(kernels.source, kernel_for(kernels.names, dtype))?.output(&lent_out);
                let kernel = kernel.input(&lent_a, &lent_out).input(&lent_b, &lent_out).count(count);
                kernel.launch(grid_of_packs(count, dtype))?;
            }
            None if dtype == DType::F32 => loops::binary::<f32, _>(&mut lent_out, &lent_a, &lent_b, f),
            None => loops::binary::<f64, _>(&mut lent_out, &lent_a, &lent_b, f),
        }
    }
    placed.finish()
}
