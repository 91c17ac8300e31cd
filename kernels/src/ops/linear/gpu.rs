//! linear on a GPU: cuBLASLt's products with as much of bias and activation in their epilogues as is there and exact enough,
//! and the passes of `linear.cu` for the rest.
//!
//! * The bias is added before the sums are rounded to what is stored, unless its address is odd (below 16 bytes of
//!   alignment) or the library has no algorithm that does it.
//! * relu is the library's where that leaves NaN as it is. So is the tanh form of gelu for bf16, f16 and TF32; it is an approximation (2e-4), so strict f32 has
//!   ours, and erf always has. Where activation is a pass of its own it is applied to what is stored.
//! * The mask of relu's derivative is z > 0, as in PyTorch, from the layer's saved output; the library's own is of bits and z >= 0.
//! * The gradient of the bias is always a pass of ours. The library's epilogue cannot add to what is there, depends in its
//!   order on the algorithm, and is not there for all shapes; ours has the CPU's bits in f32, the same eager and captured and
//!   from run to run, and reads `dy` while it is still in the cache mostly.

use super::{Activation, Below};
use crate::DType;
use crate::cuda::blaslt::{Epilogue, Function, Product, Side};
use crate::cuda::launch::Kernel;
use crate::cuda::{Grid, Launcher, Source};
use crate::error::Result;
use crate::ops::call::{Lent, Placed, Slot};
use crate::ops::gelu::Gelu;
use crate::ops::{F32Math, f32_math};

static SOURCE: Source = Source::new("linear.cu", include_str!("../linear.cu"));

/// The versions of one kernel.
type Names = [&'static str; 3];
const ACTIVATE: Names = ["activate_f32", "activate_bf16", "activate_f16"];
const BIAS_ACTIVATE: Names = ["bias_activate_f32", "bias_activate_bf16", "bias_activate_f16"];
const FOLD_BELOW: Names = ["fold_below_f32", "fold_below_bf16", "fold_below_f16"];
const SCALE_ROWS: Names = ["scale_rows_f32", "scale_rows_bf16", "scale_rows_f16"];

fn kernel<'a>(gpu: &'a Launcher, names: &Names, dtype: DType) -> Result<Kernel<'a>> {
    let [in_f32, in_bf16, in_f16] = *names;
    let name = match dtype {
        DType::BF16 => in_bf16,
        DType::F16 => in_f16,
        _ => in_f32,
    };
    gpu.kernel(&SOURCE, name)
}

/// The address of an operand that is never in place of another.
pub(in crate::ops) fn address(lent: &Lent<'_>) -> u64 {
    lent.address().expect("only operands declared with may_be_in_place are ever in place")
}

/// A row-major side of a product.
pub(in crate::ops) fn side(lent: &Lent<'_>, transposed: bool) -> Side {
    Side { address: address(lent), transposed }
}

/// What the library's epilogues ask of the vectors and matrices beside the product.
pub(in crate::ops) fn fits_epilogue(address: u64) -> bool {
    address.is_multiple_of(16)
}

/// Whether the library's approximate functions are as exact as the product itself.
fn approximate(dtype: DType) -> bool {
    dtype != DType::F32 || f32_math() == F32Math::Tf32
}

/// The numbers that linear.cu has for activations.
fn number(activation: Activation) -> u32 {
    match activation {
        Activation::Identity => 0,
        Activation::Relu => 1,
        Activation::Gelu(Gelu::Tanh) => 2,
        Activation::Gelu(Gelu::Erf) => 3,
    }
}

/// `out = beta * acc`, `acc` being out's `[m, n]`, or one row of it, or out itself. A `beta` of 0 does not read it.
pub(in crate::ops) fn scale_rows(
    gpu: &Launcher,
    dtype: DType,
    out: u64,
    acc: u64,
    broadcast: bool,
    [m, n]: [usize; 2],
    beta: f32,
) -> Result<()> {
    let count = m * n;
    let kernel = kernel(gpu, &SCALE_ROWS, dtype)?.address(out).address(acc).count(count).count(n);
    kernel.u32(u32::from(broadcast)).f32(beta).launch(Grid::elements(count))
}

/// `out = epilogue(left·right + beta * out)`, also for sums of length 0.
fn multiply(gpu: &Launcher, product: &Product) -> Result<()> {
    let [m, n, k] = product.mnk;
    if k > 0 {
        return gpu.multiply(product);
    }
    if product.beta == 1.0 { Ok(()) } else { scale_rows(gpu, product.out_dtype, product.out, 0, false, [m, n], 0.0) }
}

pub(super) fn forward(
    gpu: &Launcher,
    placed: &Placed<'_>,
    slots: [Slot; 3],
    bias: Option<Slot>,
    pre: Option<Slot>,
    activation: Activation,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let dtype = placed.tensor(slots[0]).dtype();
    let [y, x, weight] = placed.enter(slots)?;
    let (bias, pre) = (placed.enter_some(bias)?, placed.enter_some(pre)?);
    let count = rows * outputs;
    if count == 0 {
        return Ok(());
    }
    let (bias, pre) = (bias.as_ref().map(address), pre.as_ref().map(address));
    let out = address(&y);
    let product = Product {
        mnk: [rows, outputs, inputs],
        left: side(&x, false),
        right: side(&weight, false).t(),
        out,
        existing: out,
        dtype,
        out_dtype: dtype,
        alpha: 1.0,
        beta: 0.0,
        epilogue: Epilogue::default(),
    };
    if inputs > 0 && bias.is_none_or(fits_epilogue) {
        // All at once …
        if let Some(epilogue) = fused(activation, bias, pre, dtype, outputs)
            && (epilogue.function != Function::Relu || gpu.relu_keeps_nan(dtype)?)
            && gpu.multiply_if_supported(&Product { epilogue, ..product })?
        {
            return Ok(());
        }
        // … or all but the activation. What comes before it goes to where it is wanted.
        let z = pre.unwrap_or(out);
        let epilogue = Epilogue { bias, ..Epilogue::default() };
        if gpu.multiply_if_supported(&Product { epilogue, out: z, existing: z, ..product })? {
            let kernel = kernel(gpu, &ACTIVATE, dtype)?.address(out).address(z).count(count);
            return kernel.u32(number(activation)).launch(Grid::elements(count));
        }
    }
    multiply(gpu, &product)?;
    let kernel = kernel(gpu, &BIAS_ACTIVATE, dtype)?.address(out).address(pre.unwrap_or(0)).address(bias.unwrap_or(0));
    kernel.count(count).count(outputs).u32(number(activation)).launch(Grid::elements(count))
}

/// The epilogue that does everything, if the library has it and it is exact enough.
fn fused(
    activation: Activation,
    bias: Option<u64>,
    pre: Option<u64>,
    dtype: DType,
    outputs: usize,
) -> Option<Epilogue> {
    let function = match (activation, pre) {
        (Activation::Identity, None) => Function::Identity,
        (Activation::Relu, None) => Function::Relu,
        (Activation::Gelu(Gelu::Tanh), None) if approximate(dtype) => Function::Gelu,
        (Activation::Gelu(Gelu::Tanh), Some(pre)) if approximate(dtype) && fits_aux(pre, outputs) => Function::Gelu,
        _ => return None,
    };
    Some(Epilogue { function, bias, aux: pre })
}

/// Rows of the library's aux matrices are multiples of 8 elements.
fn fits_aux(address: u64, columns: usize) -> bool {
    fits_epilogue(address) && columns.is_multiple_of(8)
}

pub(super) fn backward_input(
    gpu: &Launcher,
    placed: &Placed<'_>,
    slots: [Slot; 3],
    saved: Option<Slot>,
    below: Below<'_>,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let dtype = placed.tensor(slots[0]).dtype();
    let [dx, dy, weight] = placed.enter(slots)?;
    let saved = placed.enter_some(saved)?;
    let count = rows * inputs;
    if count == 0 {
        return Ok(());
    }
    let (out, saved) = (address(&dx), saved.as_ref().map(address));
    let product = Product {
        mnk: [rows, inputs, outputs],
        left: side(&dy, false),
        right: side(&weight, false),
        out,
        existing: out,
        dtype,
        out_dtype: dtype,
        alpha: 1.0,
        beta: 0.0,
        epilogue: Epilogue::default(),
    };
    let activation = match below {
        Below::Identity => Activation::Identity,
        Below::Relu(_) => Activation::Relu,
        Below::Gelu(form, _) => Activation::Gelu(form),
    };
    let Some(saved) = saved else { return multiply(gpu, &product) };
    if outputs > 0 && activation == Activation::Gelu(Gelu::Tanh) && approximate(dtype) && fits_aux(saved, inputs) {
        let epilogue = Epilogue { function: Function::GeluGradient, bias: None, aux: Some(saved) };
        if gpu.multiply_if_supported(&Product { epilogue, ..product })? {
            return Ok(());
        }
    }
    multiply(gpu, &product)?;
    let kernel = kernel(gpu, &FOLD_BELOW, dtype)?.address(out).address(saved).count(count);
    kernel.u32(number(activation)).launch(Grid::elements(count))
}

pub(super) fn backward_weight(
    gpu: &Launcher,
    placed: &Placed<'_>,
    slots: [Slot; 3],
    db: Option<Slot>,
    accumulate: bool,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let [dw_dtype, dtype, _] = slots.map(|slot| placed.tensor(slot).dtype());
    let db_dtype = db.map(|slot| placed.tensor(slot).dtype());
    let [dw, dy, x] = placed.enter(slots)?;
    let db = placed.enter_some(db)?;
    if outputs == 0 {
        return Ok(());
    }
    if inputs > 0 {
        let out = address(&dw);
        let product = Product {
            mnk: [outputs, inputs, rows],
            left: side(&dy, false).t(),
            right: side(&x, false),
            out,
            existing: out,
            dtype,
            out_dtype: dw_dtype,
            alpha: 1.0,
            beta: if accumulate { 1.0 } else { 0.0 },
            epilogue: Epilogue::default(),
        };
        multiply(gpu, &product)?;
    }
    match (db, db_dtype) {
        (Some(db), Some(db_dtype)) => sum_rows(gpu, [db_dtype, dtype], [&db, &dy], [rows, outputs], accumulate),
        _ => Ok(()),
    }
}

/// `db = Σ rows of dy`, or added to what is there.
fn sum_rows(
    gpu: &Launcher,
    dtypes: [DType; 2],
    [db, dy]: [&Lent<'_>; 2],
    [rows, columns]: [usize; 2],
    accumulate: bool,
) -> Result<()> {
    /// As in linear.cu.
    const COLUMNS: usize = 32;
    const ROW_BLOCKS_AT_ONCE: usize = 16;
    let name = match dtypes {
        [DType::BF16, _] => "sum_rows_bf16_bf16",
        [_, DType::BF16] => "sum_rows_bf16_f32",
        [DType::F16, _] => "sum_rows_f16_f16",
        [_, DType::F16] => "sum_rows_f16_f32",
        _ => "sum_rows_f32_f32",
    };
    let height = rows.div_ceil(super::ROW_BLOCK).clamp(1, ROW_BLOCKS_AT_ONCE);
    let grid = Grid { threads: [COLUMNS as u32, height as u32, 1], ..Grid::blocks(columns.div_ceil(COLUMNS), 1) };
    let kernel = gpu.kernel(&SOURCE, name)?.output(db).reads(dy).count(rows).count(columns);
    kernel.u32(u32::from(accumulate)).launch(grid)
}
