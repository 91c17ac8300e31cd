//! norm: LayerNorm and RMSNorm over the last dimension, with PyTorch's formulas, also of the sum
//! with the residual stream, and their derivatives.
//!
//! With m the mean of a row (0 in RMSNorm) and s = 1/√(mean of (x − m)² + ε):
//!
//! ```text
//! out = n · weight + bias, where n = (x − m) s
//! dx  = s (g − mean of g − n · mean of g n) + dresidual, where g = dy · weight
//! ```
//!
//! RMSNorm has no mean of g. The gradient of weight is the sum over rows of dy n, that of bias the
//! sum of dy. Each row is read from memory once; on a GPU (`norm.cu`) registers hold it. There f32
//! has the CPU's bits; bf16 is computed in f32, added in another order and rounded once.
//!
//! Letters: R rows, C columns.

mod cpu;
#[cfg(test)]
mod tests;

use std::ops::Range;

use self::cpu::{BackwardRows, ForwardRows, NormTerms};
use crate::error::Result;
use crate::launch::{CuFile, GpuLaunch, Grid, args};
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, Slot};
use crate::ops::float::Float;
use crate::ops::stored::{self, Stored, rooms, with_stored};
use crate::threads::Shares;
use crate::{DType, Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("norm.cu", include_str!("norm.cu"));

/// Which norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Norm {
    /// LayerNorm: subtracts the row's mean and divides by its standard deviation.
    Layer,
    /// RMSNorm: divides by the root of the mean of squares.
    Rms,
}

impl Norm {
    /// The statistics that forward keeps of a row for backward: the mean, if it is subtracted, and
    /// the reciprocal of what divides.
    pub fn statistics(self) -> usize {
        match self {
            Norm::Layer => 2,
            Norm::Rms => 1,
        }
    }
}

/// What forward and backward of a norm share.
#[derive(Clone, Copy, Debug)]
pub struct NormOptions<'a> {
    /// Which norm.
    pub norm: Norm,
    /// Added to the mean of squares: 1e-5 in PyTorch's LayerNorm.
    pub epsilon: f64,
    /// Multiplies each column, (C), of the dtype of x.
    pub weight: Option<&'a Tensor>,
    /// Added to each column, (C), of the dtype of x.
    pub bias: Option<&'a Tensor>,
}

/// What [`norm_backward_into`] writes, and the gradient that it adds.
#[derive(Clone, Copy, Debug)]
pub struct NormGradients<'a> {
    /// The gradient by x, (R, C). It may be dy or the residual's gradient.
    pub dx: &'a Tensor,
    /// The gradient that reaches x past the norm, along the residual stream, (R, C): added to dx.
    pub dresidual: Option<&'a Tensor>,
    /// Of each block of rows, the gradient of weight, (`norm_blocks_of(R)`, C), of the dtype of x,
    /// or f32 if that is bf16. `column_sum_into` adds the blocks, replaces or accumulates.
    pub weight_sums: Option<&'a Tensor>,
    /// Likewise for bias.
    pub bias_sums: Option<&'a Tensor>,
    /// Likewise of dx, for the gradient of the bias of the layer that gets dx, where
    /// [`norm_sums_rows`] says so. Each adds the rows of its block in order.
    pub row_sums: Option<&'a Tensor>,
}

/// Rows in bf16 that are widened at a time: as much as a cache holds.
const WIDENED_ROWS: usize = 8;

/// What a warp of a GPU holds of a row: four packs a lane.
const WARP_BYTES: usize = 2048;

/// Rows of `weight_sums`, `bias_sums` and `row_sums` for this many rows: at most 1,024, each the
/// sum of at least 16 rows. They do not depend on the device.
pub fn norm_blocks_of(rows: usize) -> usize {
    rows.div_ceil(block_rows_of(rows))
}

/// Rows that each row of the sums adds.
pub(super) fn block_rows_of(rows: usize) -> usize {
    /// Enough for a warp of a GPU each, and few to add.
    const BLOCKS_MAX: usize = 1024;
    const ROWS_MIN: usize = 16;
    rows.div_ceil(BLOCKS_MAX).max(ROWS_MIN)
}

/// Whether [`norm_backward_into`] can write `row_sums` besides: on a GPU in bf16, where all that is
/// accessed is whole packs of 16 bytes and a warp holds a row: at most 1,024 columns.
///
/// Backward: none.
pub fn norm_sums_rows(
    gradients: &NormGradients<'_>,
    dy: &Tensor,
    x: &Tensor,
    options: &NormOptions<'_>,
) -> bool {
    let (all, columns) = (gradients, x.shape().last().copied().unwrap_or(0));
    let is_bf16 = x.device().is_accelerator() && x.dtype() == DType::BF16;
    let fits = |tensor: &Tensor| tensor.address().is_multiple_of(16);
    let optional = [all.dresidual, all.weight_sums, all.bias_sums, all.row_sums];
    (is_bf16 && columns.is_multiple_of(8) && 2 * columns <= WARP_BYTES)
        && [all.dx, dy, x].into_iter().all(fits)
        && optional.into_iter().flatten().all(fits)
        && options.weight.is_none_or(fits)
}

/// `out = norm(x)`: `out` and `x` (R, C), `stats` (R, `Norm::statistics`) of their dtype, or f32 if
/// that is bf16, for backward. A row whose sum of squares is not finite (in f32, values from about
/// 1e19 on) gives NaN here and in backward.
#[track_caller]
pub fn norm_into(
    out: &Tensor,
    stats: &Tensor,
    x: &Tensor,
    options: &NormOptions<'_>,
) -> Result<()> {
    let call = OpCall::new("norm");
    forward(call, [out, stats, x], None, options)
}

/// `sum = x + residual` and `out = norm(sum)`, in one pass over memory. All are (R, C); `sum` may
/// be `x` or `residual`. `stats` is as in [`norm_into`], and backward's x is `sum`.
#[track_caller]
pub fn add_norm_into(
    sum: &Tensor,
    out: &Tensor,
    stats: &Tensor,
    [x, residual]: [&Tensor; 2],
    options: &NormOptions<'_>,
) -> Result<()> {
    let call = OpCall::new("add_norm");
    forward(call, [out, stats, x], Some([sum, residual]), options)
}

/// Both forms; `stream` is `[sum, residual]` if a residual is added.
fn forward<'a>(
    mut call: OpCall<'a>,
    [out, stats, x]: [&'a Tensor; 3],
    stream: Option<[&'a Tensor; 2]>,
    options: &NormOptions<'a>,
) -> Result<()> {
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let stats = call.writes("stats", stats);
    let sum = call.writes_some("sum", stream.map(|[sum, _]| sum));
    let residual = call.reads_some("residual", stream.map(|[_, residual]| residual));
    if let (Some(sum), Some(residual)) = (sum, residual) {
        call.may_be_in_place(x, sum);
        call.may_be_in_place(residual, sum);
        call.elementwise(&[x, sum, residual])?;
    }
    let (sizes, [weight, bias]) = check(&mut call, x, &[out], stats, options)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x, mut stats] = placed.enter([out, x, stats])?;
        let (mut sum, residual) = (placed.enter_some(sum)?, placed.enter_some(residual)?);
        let [weight, bias] = [placed.enter_some(weight)?, placed.enter_some(bias)?];
        let [rows, columns] = sizes;
        if let Some(gpu) = placed.gpu() {
            let (statistics, epsilon) = (options.norm.statistics() as u32, options.epsilon as f32);
            let args = args![
                out, sum, stats, x, residual, weight, bias, rows, columns, statistics, epsilon
            ];
            // As many warps as registers allow at once take row after row.
            let blocks = rows.min(12 * gpu.gpu.multiprocessors as usize);
            let names = ["norm", "norm_unaligned"];
            return launch(&gpu, names, &out, [blocks, columns], (args, 7));
        }
        with_stored!(placed.dtype, S => {
            let of = scaling(options, sizes, [&weight, &bias]);
            let outs = [&mut out, &mut stats];
            forward_on_cpu::<S>(&of, outs, sum.as_mut(), &x, residual.as_ref());
        });
        Ok(())
    })
}

/// `out` (R, C), `stats` (R, statistics), `sum`, `x` and `residual` (R, C).
fn forward_on_cpu<S: Stored>(
    of: &NormTerms<'_, S::Math>,
    [out, stats]: [&mut Buffer<'_>; 2],
    sum: Option<&mut Buffer<'_>>,
    x: &Buffer<'_>,
    residual: Option<&Buffer<'_>>,
) {
    let out = Shares::new(out.elements_mut::<S>());
    let stats = Shares::new(stats.elements_mut::<S::Math>());
    let sum = sum.map(|sum| Shares::new(sum.elements_mut::<S>()));
    let x = x.unless_in_place::<S>();
    let residual = residual.and_then(Buffer::unless_in_place::<S>);
    split_rows(of, out.len(), 1, |rows| {
        let at_once = if S::WIDENS { WIDENED_ROWS } else { rows.len() };
        let [mut out_room, mut x_room] = rooms::<S, 2>(at_once * of.columns);
        for first in rows.clone().step_by(at_once.max(1)) {
            let rows = first..rows.end.min(first + at_once);
            let elements = rows.start * of.columns..rows.end * of.columns;
            let statistics = rows.start * of.statistics()..rows.end * of.statistics();
            let [mut x, mut residual] = [x, residual].map(|of| of.map(|of| &of[elements.clone()]));
            // SAFETY: `split_rows` gives each row to one thread, once, and the parts belong to
            // those rows.
            let (out, stats, mut sum) = unsafe {
                let sum = sum.as_ref().map(|sum| sum.part(elements.clone()));
                (out.part(elements), stats.part(statistics), sum)
            };
            if S::WIDENS
                && let Some(of_rows) = sum.take()
            {
                // What is normalized is rounded, as backward reads it.
                stored::add(of_rows, x, residual);
                (x, residual) = (Some(&*of_rows), None);
            }
            S::with_wide(out, &mut out_room, false, |out| {
                let x = x.map(|x| S::widened(x, &mut x_room));
                let rows = ForwardRows {
                    out,
                    stats,
                    sum: sum.and_then(S::as_math),
                    x,
                    residual: residual.map(|of| S::widened(of, &mut [])),
                };
                cpu::forward(of, rows);
            });
        }
    });
}

/// The gradient of a norm by its input `x` (R, C), and by weight and bias for each block of rows,
/// from `dy` (R, C), the gradient by its output, and from forward's `stats` and options. The bias
/// is not read.
#[track_caller]
pub fn norm_backward_into(
    gradients: &NormGradients<'_>,
    dy: &Tensor,
    x: &Tensor,
    stats: &Tensor,
    options: &NormOptions<'_>,
) -> Result<()> {
    let sums_rows = norm_sums_rows(gradients, dy, x, options);
    let mut call = OpCall::new("norm_backward");
    let dx = call.writes("dx", gradients.dx);
    let dy = call.reads("dy", dy);
    let x = call.reads("x", x);
    let stats = call.reads("stats", stats);
    let dresidual = call.reads_some("dresidual", gradients.dresidual);
    let weight_sums = call.writes_some("weight_sums", gradients.weight_sums);
    let bias_sums = call.writes_some("bias_sums", gradients.bias_sums);
    let row_sums = call.writes_some("row_sums", gradients.row_sums);
    call.may_be_in_place(dy, dx);
    if let Some(dresidual) = dresidual {
        call.may_be_in_place(dresidual, dx);
        call.elementwise(&[x, dresidual])?;
    }
    let options = NormOptions {
        bias: None,
        ..*options
    };
    let (sizes, [weight, _]) = check(&mut call, x, &[dx, dy], stats, &options)?;
    let [rows, columns] = sizes;
    for sums in [weight_sums, bias_sums, row_sums].into_iter().flatten() {
        let meaning = "a row for each block of rows: norm_blocks_of";
        call.has_shape(sums, &[norm_blocks_of(rows), columns], meaning)?;
        call.math_dtype(sums, x)?;
        call.row_major(sums)?;
    }
    if let Some(sums) = row_sums.filter(|_| !sums_rows) {
        let help = "ask norm_sums_rows first, or sum the rows of dx by row_block_sums_into";
        return Err(call.operand_error(sums, "none for these operands", help));
    }
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut dx, dy, x, stats] = placed.enter([dx, dy, x, stats])?;
        let [dresidual, weight] = [placed.enter_some(dresidual)?, placed.enter_some(weight)?];
        let [mut weight_sums, mut bias_sums] = [
            placed.enter_some(weight_sums)?,
            placed.enter_some(bias_sums)?,
        ];
        let row_sums = placed.enter_some(row_sums)?;
        if let Some(gpu) = placed.gpu() {
            let args = args![
                dx,
                dy,
                x,
                stats,
                weight,
                dresidual,
                weight_sums,
                bias_sums,
                rows,
                columns,
                block_rows_of(rows),
                options.norm.statistics() as u32,
                row_sums,
            ];
            let (names, args) = match row_sums {
                Some(_) => (["norm_backward_summed"; 2], &args[..]),
                None => (["norm_backward", "norm_backward_unaligned"], &args[..12]),
            };
            return launch(&gpu, names, &dx, [norm_blocks_of(rows), columns], (args, 8));
        }
        with_stored!(placed.dtype, S => {
            let of = scaling(&options, sizes, [&weight, &None]);
            let sums = [weight_sums.as_mut(), bias_sums.as_mut()];
            backward_on_cpu::<S>(&of, &mut dx, [&dy, &x, &stats], dresidual.as_ref(), sums);
        });
        Ok(())
    })
}

/// `dx`, `dy`, `x` and `dresidual` (R, C), `stats` (R, statistics), sums for weight and bias
/// (blocks of rows, C).
fn backward_on_cpu<S: Stored>(
    of: &NormTerms<'_, S::Math>,
    dx: &mut Buffer<'_>,
    [dy, x, stats]: [&Buffer<'_>; 3],
    dresidual: Option<&Buffer<'_>>,
    [weight_sums, bias_sums]: [Option<&mut Buffer<'_>>; 2],
) {
    let (dy, x) = (dy.unless_in_place::<S>(), x.elements::<S>());
    let stats = stats.elements::<S::Math>();
    let dresidual = dresidual.map(Buffer::unless_in_place::<S>);
    let dx = Shares::new(dx.elements_mut::<S>());
    let weight_sums = weight_sums.map(|sums| Shares::new(sums.elements_mut::<S::Math>()));
    let bias_sums = bias_sums.map(|sums| Shares::new(sums.elements_mut::<S::Math>()));
    let block_rows = of.block_rows;
    split_rows(of, x.len(), block_rows, |rows| {
        let at_once = if S::WIDENS { block_rows } else { rows.len() };
        let [mut dx_room, mut dy_room, mut x_room, mut residual_room] =
            rooms::<S, 4>(at_once * of.columns);
        for first in rows.clone().step_by(at_once.max(1)) {
            let rows = first..rows.end.min(first + at_once);
            let elements = rows.start * of.columns..rows.end * of.columns;
            let statistics = rows.start * of.statistics()..rows.end * of.statistics();
            let blocks = rows.start / block_rows..rows.end.div_ceil(block_rows);
            let sums = blocks.start * of.columns..blocks.end * of.columns;
            let is_in_place = dy.is_none() || matches!(dresidual, Some(None));
            // SAFETY: `split_rows` gives each block of rows to one thread, once, and the parts
            // belong to those blocks.
            let (dx, weight_sums, bias_sums) = unsafe {
                let weight_sums = weight_sums.as_ref().map(|of| of.part(sums.clone()));
                let bias_sums = bias_sums.as_ref().map(|of| of.part(sums));
                (dx.part(elements.clone()), weight_sums, bias_sums)
            };
            let dresidual = dresidual.map(|of| of.map(|of| &of[elements.clone()]));
            S::with_wide(dx, &mut dx_room, is_in_place, |dx| {
                let rows = BackwardRows {
                    dx,
                    dy: dy.map(|dy| S::widened(&dy[elements.clone()], &mut dy_room)),
                    x: S::widened(&x[elements.clone()], &mut x_room),
                    stats: &stats[statistics],
                    dresidual: dresidual.map(|of| of.map(|of| S::widened(of, &mut residual_room))),
                    weight_sums,
                    bias_sums,
                };
                cpu::backward(of, rows);
            });
        }
    });
}

/// Checks what forward and backward share: `x` (R, C), `others` like it, `stats` and the options.
/// Gives R and C, and the operands of weight and bias.
fn check<'a>(
    call: &mut OpCall<'a>,
    x: Slot,
    others: &[Slot],
    stats: Slot,
    options: &NormOptions<'a>,
) -> Result<([usize; 2], [Option<Slot>; 2])> {
    let weight = call.reads_some("weight", options.weight);
    let bias = call.reads_some("bias", options.bias);
    let [rows, columns] = call.dims::<2>(x, "[rows, columns]")?;
    if columns == 0 {
        let help = "the second dimension is the one that is normalized";
        return Err(call.operand_error(x, "at least one column", help));
    }
    call.row_major(x)?;
    for &other in others {
        call.elementwise(&[x, other])?;
    }
    let (wanted, meaning) = match options.norm {
        Norm::Layer => (2, "mean and 1/σ of each row of x"),
        Norm::Rms => (1, "1/rms of each row of x"),
    };
    call.has_shape(stats, &[rows, wanted], meaning)?;
    call.math_dtype(stats, x)?;
    call.row_major(stats)?;
    for vector in [weight, bias].into_iter().flatten() {
        call.has_shape(vector, &[columns], "a number for each column of x")?;
        call.same_dtype(vector, x)?;
    }
    if !(options.epsilon >= 0.0 && options.epsilon.finite()) {
        return Err(call.value("epsilon", "a finite number from 0 up", options.epsilon));
    }
    Ok(([rows, columns], [weight, bias]))
}

/// The options for loops over this many rows and columns.
fn scaling<'a, T: Float>(
    options: &NormOptions<'_>,
    [rows, columns]: [usize; 2],
    [weight, bias]: [&'a Option<Buffer<'_>>; 2],
) -> NormTerms<'a, T> {
    NormTerms {
        centers: options.norm == Norm::Layer,
        epsilon: T::from_f64(options.epsilon),
        columns,
        block_rows: block_rows_of(rows),
        weight: weight.as_ref().map(Buffer::elements),
        bias: bias.as_ref().map(Buffer::elements),
    }
}

/// `body` on ranges of rows of `count` elements, cut at multiples of `grain` rows.
fn split_rows<T: Float>(
    of: &NormTerms<'_, T>,
    count: usize,
    grain: usize,
    body: impl Fn(Range<usize>) + Sync,
) {
    threads::split(count, grain * of.columns, |range| {
        body(range.start / of.columns..range.end / of.columns);
    });
}

/// A kernel of `norm.cu`, with as many warps as rows of this many columns keep busy: the first of
/// `names`, or the second where rows are not whole packs of 16 bytes at multiples of 16. The first
/// `addresses` of `args` are addresses.
fn launch(
    gpu: &GpuLaunch,
    names: [&'static str; 2],
    out: &Buffer<'_>,
    [blocks, columns]: [usize; 2],
    (args, addresses): (&[u64], usize),
) -> Result<()> {
    let row_bytes = columns * out.dtype.bytes();
    let aligned = row_bytes.is_multiple_of(16) && args[..addresses].iter().all(|at| at % 16 == 0);
    let warps = row_bytes.div_ceil(WARP_BYTES).min(cpu::WARPS_MAX);
    let rows_of_block = (out.count / columns.max(1)).div_ceil(blocks.max(1));
    let grid = Grid::blocks(blocks, 32 * warps as u32, rows_of_block);
    let name = names[usize::from(!aligned)];
    gpu.launch(&SOURCE, (name, out.dtype), grid, args)
}
