//! linear on a GPU: matmuls of cuBLASLt, whose epilogues compute as much of bias and activation as
//! is supported and exact enough; passes in `linear.cu` do the rest.
//!
//! * The bias is added before the sums are rounded to what is stored, unless its address is not a
//!   multiple of 16 bytes or the library has no algorithm for it.
//! * relu is the library's if that keeps NaN, which is tested for each plan. The tanh form of gelu
//!   is the library's for bf16 and TF32 where that is fast (`blaslt/choose.rs`); it is an
//!   approximation (2e-4), so strict f32 uses ours, and erf always does. A pass of ours reads what
//!   the matmul has stored.
//! * The mask of relu's derivative is z > 0, as in PyTorch, from the layer's saved output; the
//!   library's own is made of bits and z >= 0.
//! * The gradient of the bias is always a pass of ours. The library's epilogue cannot accumulate,
//!   adds in an order that depends on the algorithm, and does not support all shapes. Ours has the
//!   CPU's bits in f32, the same eager and captured. The pass that applies the derivative of the
//!   activation below also sums blocks of rows, if asked, so that `dy` is not read again.

use crate::DType;
use crate::error::Result;
use crate::launch::blaslt::{Epilogue, GpuMatrix, Matmul, MatmulFunction};
use crate::launch::{CuFile, GpuLaunch, Grid, args};
use crate::ops::activation::Activation;
use crate::ops::call::Buffer;
use crate::ops::create::zero_on;
use crate::ops::{F32Math, f32_math, norm};

pub(in crate::ops) static SOURCE: CuFile = CuFile::new("linear.cu", include_str!("../linear.cu"));

/// Rows that are summed before their sum is added to the others, on the CPU as well; as in
/// linear.cu.
pub(in crate::ops) const ROW_BLOCK: usize = 64;

/// Packs of columns that a block of threads sums; as in linear.cu.
const LANES: usize = 32;

/// Blocks of rows that such a block of threads sums side by side; as in linear.cu.
pub(super) const ROW_BLOCKS_AT_ONCE: usize = 16;

/// One side of a matmul.
fn side(matrix: &Buffer<'_>, transposed: bool) -> GpuMatrix {
    GpuMatrix {
        address: matrix.address(),
        transposed,
    }
}

/// Rows of the library's aux matrices must be multiples of 8 elements.
fn fits_aux(address: u64, columns: usize) -> bool {
    Epilogue::fits(address) && columns.is_multiple_of(8)
}

/// Whether the library's approximate functions are as exact as the matmul itself.
fn approximate(dtype: DType) -> bool {
    dtype != DType::F32 || f32_math() == F32Math::Tf32
}

/// The number of an activation in math.cuh.
fn number(activation: Option<Activation>) -> u32 {
    activation.map_or(0, Activation::number)
}

/// `out = epilogue(left·right + beta * out)`, also for sums of length 0.
fn multiply(gpu: &GpuLaunch, matmul: &Matmul, out: &Buffer<'_>) -> Result<()> {
    match matmul.mnk[2] {
        0 if matmul.beta == 1.0 => Ok(()),
        0 => zero_on(gpu, out),
        _ => gpu.multiply(matmul),
    }
}

/// `y` (B, O), `x` (B, I), `weight` (O, I), `bias` (O), `pre` (B, O).
pub(super) fn forward(
    gpu: &GpuLaunch,
    [y, x, weight]: [&Buffer<'_>; 3],
    [bias, pre]: [Option<&Buffer<'_>>; 2],
    activation: Option<Activation>,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let (count, dtype, out) = (y.count, y.dtype, y.address());
    if count == 0 {
        return Ok(());
    }
    let [bias, pre] = [bias, pre].map(|buffer| buffer.map(Buffer::address));
    let weight = side(weight, true);
    let mut matmul = Matmul::new([rows, outputs, inputs], side(x, false), weight, out);
    (matmul.dtype, matmul.out_dtype) = (dtype, dtype);
    let (number, grid) = (number(activation), Grid::elements(count));
    if inputs > 0 && bias.is_none_or(Epilogue::fits) {
        // All in one matmul …
        if let Some(function) = fused(activation, pre, dtype, outputs) {
            matmul.epilogue = Epilogue {
                function,
                bias,
                aux: pre,
            };
            if gpu.multiply_if_supported(&matmul)? {
                return Ok(());
            }
        }
        // … or all but the activation. The pre-activation goes where it is wanted.
        let z = pre.unwrap_or(out);
        matmul.epilogue = Epilogue {
            bias,
            ..Epilogue::default()
        };
        (matmul.out, matmul.existing) = (z, z);
        if gpu.multiply_if_supported(&matmul)? {
            return gpu.launch(
                &SOURCE,
                ("activate", dtype),
                grid,
                args![out, z, count, number],
            );
        }
        matmul.epilogue = Epilogue::default();
        (matmul.out, matmul.existing) = (out, out);
    }
    multiply(gpu, &matmul, y)?;
    let args = args![out, pre, bias, count, outputs, number];
    gpu.launch(&SOURCE, ("bias_activate", dtype), grid, args)
}

/// The function of an epilogue that does everything, if the library has it and it is exact enough.
fn fused(
    activation: Option<Activation>,
    pre: Option<u64>,
    dtype: DType,
    outputs: usize,
) -> Option<MatmulFunction> {
    match (activation, pre) {
        (None, None) => Some(MatmulFunction::Identity),
        (Some(Activation::Relu), None) => Some(MatmulFunction::Relu),
        (Some(Activation::GeluTanh), pre)
            if approximate(dtype) && pre.is_none_or(|pre| fits_aux(pre, outputs)) =>
        {
            Some(MatmulFunction::Gelu)
        }
        _ => None,
    }
}

/// Whether these are more rows than `sum_rows` has threads for.
pub(super) fn are_many(rows: usize) -> bool {
    rows > ROW_BLOCKS_AT_ONCE * ROW_BLOCK
}

/// Rows that each row of `row_sums` adds.
pub(super) fn block_rows_of(rows: usize, dtype: DType) -> usize {
    match dtype {
        DType::BF16 if are_many(rows) => norm::block_rows_of(rows),
        _ => ROW_BLOCK,
    }
}

/// Multiplies the derivative at `saved`, if given, into `dx` (B, I), and sums its blocks of rows
/// into `row_sums`.
pub(super) fn fold_and_sum(
    gpu: &GpuLaunch,
    row_sums: &Buffer<'_>,
    dx: &Buffer<'_>,
    saved: Option<u64>,
    activation: u32,
    [rows, columns]: [usize; 2],
) -> Result<()> {
    /// The most blocks of a grid's second dimension.
    const BLOCKS_MAX: usize = 65_535;
    let address = dx.address();
    let (name, pack) = match packs(columns, dx.dtype, 16, &[address, saved.unwrap_or(0)]) {
        Some(pack) => ("fold_and_sum", pack),
        None => ("fold_and_sum_unaligned", 1),
    };
    /// Rows whose loads a thread starts at once, as in linear.cu.
    const AT_ONCE: usize = 8;
    let blocks = columns.div_ceil(LANES * pack);
    let height = block_rows_of(rows, dx.dtype);
    let mut grid = Grid::blocks(blocks, LANES as u32, height.div_ceil(AT_ONCE));
    grid.blocks[1] = rows.div_ceil(height).min(BLOCKS_MAX) as u32;
    let args = args![row_sums, address, saved, rows, columns, height, activation];
    gpu.launch(&SOURCE, (name, dx.dtype), grid, args)
}

/// The elements of a pack of this many bytes, if rows of this many columns at these addresses are
/// whole packs.
fn packs(columns: usize, dtype: DType, bytes: usize, addresses: &[u64]) -> Option<usize> {
    let pack = bytes / dtype.bytes();
    let fits = addresses.iter().all(|at| at.is_multiple_of(bytes as u64));
    (fits && columns.is_multiple_of(pack)).then_some(pack)
}

/// `db` (O) `= Σ rows of row_sums` (blocks, O), or added to what is there.
pub(super) fn add_row_sums(
    gpu: &GpuLaunch,
    db: &Buffer<'_>,
    row_sums: &Buffer<'_>,
    accumulate: bool,
) -> Result<()> {
    /// Columns and threads of a block, as in linear.cu: few, so that all multiprocessors have work.
    const COLUMNS: usize = 8;
    const THREADS: u32 = 128;
    let columns = db.count;
    let blocks = row_sums.count.checked_div(columns).unwrap_or(0);
    // A thread adds 64 rows in order, all loaded at once, or 16 at once of fewer rows; 16 threads
    // do so side by side.
    let of_part = (blocks % 64).div_ceil(16);
    let rounds = blocks.saturating_sub(1) / 1024 + of_part.max(1);
    let grid = Grid::blocks(columns.div_ceil(COLUMNS), THREADS, rounds);
    let args = args![db, row_sums, blocks, columns, accumulate];
    gpu.launch(&SOURCE, "add_row_sums_f32", grid, args)
}

/// `dx` (B, I), `dy` (B, O), `weight` (O, I), `saved` (B, I), `row_sums` (blocks of B, I).
pub(super) fn backward_input(
    gpu: &GpuLaunch,
    [dx, dy, weight]: [&Buffer<'_>; 3],
    [saved, row_sums]: [Option<&Buffer<'_>>; 2],
    activation: Option<Activation>,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let (count, dtype, out) = (dx.count, dx.dtype, dx.address());
    let sum = |saved: Option<u64>| match row_sums {
        Some(sums) => fold_and_sum(gpu, sums, dx, saved, number(activation), [rows, inputs]),
        None => Ok(()),
    };
    if count == 0 {
        return Ok(());
    }
    let (dy, weight) = (side(dy, false), side(weight, false));
    let mut matmul = Matmul::new([rows, inputs, outputs], dy, weight, out);
    (matmul.dtype, matmul.out_dtype) = (dtype, dtype);
    let Some(saved) = saved.map(Buffer::address) else {
        multiply(gpu, &matmul, dx)?;
        return sum(None);
    };
    let is_tanh = activation == Some(Activation::GeluTanh);
    if outputs > 0 && is_tanh && approximate(dtype) && fits_aux(saved, inputs) {
        matmul.epilogue = Epilogue {
            function: MatmulFunction::GeluGradient,
            bias: None,
            aux: Some(saved),
        };
        if gpu.multiply_if_supported(&matmul)? {
            return sum(None);
        }
        matmul.epilogue = Epilogue::default();
    }
    multiply(gpu, &matmul, dx)?;
    if row_sums.is_some() {
        return sum(Some(saved));
    }
    let args = args![out, saved, count, number(activation)];
    gpu.launch(&SOURCE, ("fold_below", dtype), Grid::elements(count), args)
}

/// `dw` (O, I), `db` (O), `dy` (B, O), `x` (B, I).
pub(super) fn backward_weight(
    gpu: &GpuLaunch,
    [dw, dy, x]: [&Buffer<'_>; 3],
    db: Option<&Buffer<'_>>,
    accumulate: bool,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    if outputs > 0 && inputs > 0 {
        let (left, right) = (side(dy, true), side(x, false));
        let mut matmul = Matmul::new([outputs, inputs, rows], left, right, dw.address());
        (matmul.dtype, matmul.out_dtype) = (dy.dtype, dw.dtype);
        matmul.beta = if accumulate { 1.0 } else { 0.0 };
        multiply(gpu, &matmul, dw)?;
    }
    match db {
        Some(db) => sum_rows(gpu, db, dy, [rows, outputs], accumulate),
        None => Ok(()),
    }
}

/// `db` (O) `= Σ rows of dy` (B, O), or added to what is there.
pub(in crate::ops) fn sum_rows(
    gpu: &GpuLaunch,
    db: &Buffer<'_>,
    dy: &Buffer<'_>,
    [rows, columns]: [usize; 2],
    accumulate: bool,
) -> Result<()> {
    // Four elements in one access.
    let pack = packs(columns, dy.dtype, 4 * dy.dtype.bytes(), &[dy.address()]);
    let name = match (db.dtype, pack) {
        (DType::BF16, Some(_)) => "sum_rows_to_bf16",
        (DType::BF16, None) => "sum_rows_to_unaligned_bf16",
        (_, Some(_)) => "sum_rows_to_f32",
        (_, None) => "sum_rows_to_unaligned_f32",
    };
    let height = rows.div_ceil(ROW_BLOCK).clamp(1, ROW_BLOCKS_AT_ONCE);
    // A thread loads eight rows of its block at once.
    let loads = rows.div_ceil(height * ROW_BLOCK) * ROW_BLOCK.min(rows).div_ceil(8);
    let grid = Grid {
        threads: [LANES as u32, height as u32, 1],
        ..Grid::blocks(columns.div_ceil(LANES * pack.unwrap_or(1)), 1, loads)
    };
    gpu.launch(
        &SOURCE,
        (name, dy.dtype),
        grid,
        args![db, dy, rows, columns, accumulate],
    )
}
