//! linear: `y = activation(x·Wᵀ + b)` with W as in PyTorch, (O, I), and the matmuls of its
//! backward.
//!
//! Letters: B rows of the batch, I inputs, O outputs. Backward passes the gradient at the
//! *pre-activation* of each layer: `linear_backward_input_into` folds in the derivative of the
//! activation of the layer BELOW, so no gradient is written before that derivative is applied.
//! Bias, activation and derivative are applied to each tile of a matmul while it is in the cache of
//! the thread that made it; on a GPU (`linear/gpu.rs`) by cuBLASLt where it can.
//!
//! Operands may also be bf16, with sums in f32; f32 is strict unless `with_f32_math` says
//! otherwise.

pub(super) mod gpu;

use crate::error::Result;
use crate::ops::activation::{Activation, with_function};
use crate::ops::arithmetic::Add;
use crate::ops::call::{Buffer, FLOATS, FLOATS_AND_BF16, OpCall, Slot, with_float};
use crate::ops::elementwise::{binary_in_place, unary_in_place};
use crate::ops::float::Float;
use crate::ops::matmul::{AsIs, COLUMNS_MAX, Finish, Matrix, Output, Tile};
use crate::ops::stored::{Stored, with_stored};
use crate::simd::multiversion;
use crate::{Tensor, threads};

/// `y = activation(x·Wᵀ + bias)`. `pre_activation` receives `x·Wᵀ + bias`, for the backward of
/// activations of which `Activation::keeps_input` is true.
///
/// `y` (B, O), `x` (B, I), `weight` (O, I), `bias` (O), `pre_activation` (B, O).
#[track_caller]
pub fn linear_into(
    y: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Option<Activation>,
    pre_activation: Option<&Tensor>,
) -> Result<()> {
    let mut call = OpCall::new("linear");
    let y = call.writes("y", y);
    let x = call.reads("x", x);
    let weight = call.reads("weight", weight);
    let bias = call.reads_some("bias", bias);
    let pre = call.writes_some("pre_activation", pre_activation);
    let [rows, inputs] = call.dims::<2>(x, "[rows, inputs]")?;
    let [outputs, columns] = call.dims::<2>(weight, "[outputs, inputs]")?;
    if columns != inputs {
        let expected = format!("shape [outputs, {inputs}], since x has {inputs} columns");
        let help = "weights are [outputs, inputs], as in torch.nn.Linear; if this one is \
                    [inputs, outputs], pass .t()?.contiguous()?";
        return Err(call.operand_error(weight, expected, help));
    }
    call.has_shape(y, &[rows, outputs], "[rows of x, rows of weight]")?;
    check_same(&call, x, &[Some(y), Some(weight), bias, pre])?;
    if let Some(bias) = bias {
        call.has_shape(bias, &[outputs], "[rows of weight]")?;
    }
    if let Some(pre) = pre {
        call.same_shape(pre, y)?;
    }
    let sizes = [rows, inputs, outputs];
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut y, x, weight] = placed.enter([y, x, weight])?;
        let (bias, mut pre) = (placed.enter_some(bias)?, placed.enter_some(pre)?);
        if let Some(gpu) = placed.gpu() {
            let optional = [bias.as_ref(), pre.as_ref()];
            return gpu::forward(&gpu, [&y, &x, &weight], optional, activation, sizes);
        }
        with_stored!(placed.dtype, S => {
            let finish = BiasAndActivation::<S> {
                bias: bias.as_ref().map(Buffer::elements),
                activation,
                pre: pre.as_mut().map(|pre| pre.elements_mut::<S>().as_mut_ptr()),
                outputs,
            };
            let x = Matrix::new(x.elements(), rows, inputs, false);
            let weight = Matrix::new(weight.elements(), outputs, inputs, false);
            let y = Output::Stored(y.elements_mut());
            S::multiply(y, x, weight.t(), (1.0, 0.0), &finish);
        });
        Ok(())
    })
}

/// `dx = (dy·W) ⊙ f'(below)`: the gradient at the pre-activation of the layer below, given its
/// activation, unless that is applied elsewhere, and what was saved of it.
///
/// `dx` (B, I), `dy` (B, O; the gradient at this layer's pre-activation), `weight` (O, I), `below`
/// (B, I).
#[track_caller]
pub fn linear_backward_input_into(
    dx: &Tensor,
    dy: &Tensor,
    weight: &Tensor,
    below: Option<(Activation, &Tensor)>,
) -> Result<()> {
    linear_backward_input_summed_into(dx, None, dy, weight, below)
}

/// Blocks of rows whose sums are added before their sum is added to the others; as in linear.cu.
/// The rounding error grows with 128 + B/4096, not with B (in bf16 from 65,536 rows on with
/// 80 + B/1024), and a GPU adds many groups at a time.
const GROUP: usize = 64;

/// The shape of `row_sums` for `x` (B, C): (blocks of rows, C). A block has 64 rows. For more than
/// 1,024 rows in bf16 there are `norm_blocks_of(B)`: sums by a norm's backward have the same bits.
///
/// Backward: none.
pub fn row_sums_of(x: &Tensor) -> [usize; 2] {
    let [rows, columns] = [x.shape()[0], x.shape()[1]];
    [rows.div_ceil(gpu::block_rows_of(rows, x.dtype())), columns]
}

/// As [`linear_backward_input_into`]. Besides, sums blocks of rows of `dx` into `row_sums`
/// (`row_sums_of(dx)`), of the dtype of `dx`, or f32 if that is bf16. [`add_row_sums_into`]
/// makes the gradient of the bias below of them.
#[track_caller]
pub fn linear_backward_input_summed_into(
    dx: &Tensor,
    row_sums: Option<&Tensor>,
    dy: &Tensor,
    weight: &Tensor,
    below: Option<(Activation, &Tensor)>,
) -> Result<()> {
    let mut call = OpCall::new("linear_backward_input");
    let dx = call.writes("dx", dx);
    let dy = call.reads("dy", dy);
    let weight = call.reads("weight", weight);
    let saved = call.reads_some("below", below.map(|(_, saved)| saved));
    let row_sums = call.writes_some("row_sums", row_sums);
    let [rows, outputs] = call.dims::<2>(dy, "[rows, outputs]")?;
    let [weight_rows, inputs] = call.dims::<2>(weight, "[outputs, inputs]")?;
    if weight_rows != outputs {
        let expected = format!("shape [{outputs}, inputs], since dy has {outputs} columns");
        let help = "pass the weight that forward used";
        return Err(call.operand_error(weight, expected, help));
    }
    call.has_shape(dx, &[rows, inputs], "[rows of dy, columns of weight]")?;
    check_same(&call, dy, &[Some(dx), Some(weight), saved])?;
    if let Some(saved) = saved {
        call.same_shape(saved, dx)?;
    }
    if let Some(row_sums) = row_sums {
        let meaning = "a row for each block of rows of dx: row_sums_of";
        call.has_shape(row_sums, &row_sums_of(call.tensor(dx)), meaning)?;
        call.math_dtype(row_sums, dx)?;
        call.row_major(row_sums)?;
    }
    let (activation, sizes) = (below.map(|(of, _)| of), [rows, inputs, outputs]);
    call.run(dy, &FLOATS_AND_BF16, |placed| {
        let [mut dx, dy, weight] = placed.enter([dx, dy, weight])?;
        let (saved, mut row_sums) = (placed.enter_some(saved)?, placed.enter_some(row_sums)?);
        if let Some(gpu) = placed.gpu() {
            let (operands, optional) = ([&dx, &dy, &weight], [saved.as_ref(), row_sums.as_ref()]);
            return gpu::backward_input(&gpu, operands, optional, activation, sizes);
        }
        with_stored!(placed.dtype, S => {
            let dy = Matrix::new(dy.elements(), rows, outputs, false);
            let weight = Matrix::new(weight.elements(), outputs, inputs, false);
            let saved = saved.as_ref().map(|saved| saved.elements::<S>());
            let finish = FoldBelow {
                below: activation.zip(saved),
                inputs,
            };
            let out = Output::Stored(dx.elements_mut());
            S::multiply(out, dy, weight, (1.0, 0.0), &finish);
            if let Some(row_sums) = row_sums.as_mut() {
                sum_blocks::<S>(row_sums, dx.elements(), [rows, inputs]);
            }
        });
        Ok(())
    })
}

/// Whether the gradient of a bias over this many rows is faster from `row_block_sums_into`: on a
/// GPU `linear_backward_weight_into` has few threads for that many rows.
pub fn prefers_row_sums(rows: usize) -> bool {
    gpu::are_many(rows)
}

/// Sums blocks of rows of `x` (B, C) into `row_sums` (`row_sums_of(x)`), of the dtype of `x`,
/// or f32 if that is bf16: for [`add_row_sums_into`].
///
/// Backward: none; it is a part of `linear_into`'s.
#[track_caller]
pub fn row_block_sums_into(row_sums: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = OpCall::new("row_block_sums");
    let row_sums = call.writes("row_sums", row_sums);
    let x = call.reads("x", x);
    let [rows, columns] = call.dims::<2>(x, "[rows, columns]")?;
    let meaning = "a row for each block of rows of x: row_sums_of";
    call.has_shape(row_sums, &row_sums_of(call.tensor(x)), meaning)?;
    call.math_dtype(row_sums, x)?;
    call.all_row_major()?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut row_sums, x] = placed.enter([row_sums, x])?;
        if let Some(gpu) = placed.gpu() {
            return gpu::fold_and_sum(&gpu, &row_sums, &x, None, 0, [rows, columns]);
        }
        with_stored!(placed.dtype, S => {
            sum_blocks::<S>(&mut row_sums, x.elements(), [rows, columns]);
        });
        Ok(())
    })
}

/// Each row of `row_sums` becomes the sum of a block of rows of `x` (B, C).
fn sum_blocks<S: Stored>(row_sums: &mut Buffer<'_>, x: &[S], [rows, columns]: [usize; 2]) {
    if columns > 0 {
        let block_rows = gpu::block_rows_of(rows, S::DTYPE);
        let sums = row_sums.elements_mut::<S::Math>().chunks_mut(columns);
        for (sums, block) in sums.zip(x.chunks(block_rows * columns)) {
            add_rows(sums, block, block_rows, false);
        }
    }
}

/// `db` (C) `= Σ` of the rows of `row_sums` (…, C), in groups of 64 in order, or added to what is
/// there with `accumulate`: with the bits that [`linear_backward_weight_into`] gives, where blocks
/// have 64 rows.
///
/// Backward: none; it is a part of `linear_into`'s.
#[track_caller]
pub fn add_row_sums_into(db: &Tensor, row_sums: &Tensor, accumulate: bool) -> Result<()> {
    let mut call = OpCall::new("add_row_sums");
    let db = call.updates("db", db);
    let row_sums = call.reads("row_sums", row_sums);
    let [_, columns] = call.dims::<2>(row_sums, "[blocks of rows, columns]")?;
    call.has_shape(db, &[columns], "a number for each column")?;
    call.same_dtype(db, row_sums)?;
    call.all_row_major()?;
    call.run(db, &FLOATS, |placed| {
        let [mut db, row_sums] = placed.enter([db, row_sums])?;
        if let Some(gpu) = placed.gpu() {
            return gpu::add_row_sums(&gpu, &db, &row_sums, accumulate);
        }
        with_float!(placed.dtype, T => {
            add_rows(db.elements_mut(), row_sums.elements::<T>(), 1, accumulate)
        });
        Ok(())
    })
}

/// `dw = dyᵀ·x` and `db = Σ rows of dy`; with `accumulate` they are added to what is there.
///
/// `dw` (O, I), `db` (O), `dy` (B, O), `x` (B, I). Rows of `db` are summed in blocks of 64 and
/// these in groups of 64, in order, so the bits are the same for any number of threads and on a
/// GPU. Where `dy` and `x` are bf16, `dw` and `db` may each be f32.
#[track_caller]
pub fn linear_backward_weight_into(
    dw: &Tensor,
    db: Option<&Tensor>,
    dy: &Tensor,
    x: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let mut call = OpCall::new("linear_backward_weight");
    let dw = call.writes("dw", dw);
    let dy = call.reads("dy", dy);
    let x = call.reads("x", x);
    let db = call.writes_some("db", db);
    let [rows, outputs] = call.dims::<2>(dy, "[rows, outputs]")?;
    let [x_rows, inputs] = call.dims::<2>(x, "[rows, inputs]")?;
    if x_rows != rows {
        let expected = format!("shape [{rows}, inputs], since dy has {rows} rows");
        let help = "pass the x that forward used";
        return Err(call.operand_error(x, expected, help));
    }
    call.has_shape(dw, &[outputs, inputs], "[columns of dy, columns of x]")?;
    check_same(&call, dy, &[Some(x)])?;
    for gradient in [Some(dw), db].into_iter().flatten() {
        call.same_or_wider(gradient, dy)?;
        call.row_major(gradient)?;
    }
    if let Some(db) = db {
        call.has_shape(db, &[outputs], "[columns of dy]")?;
    }
    call.run(dy, &FLOATS_AND_BF16, |placed| {
        let [mut dw, dy, x] = placed.enter([dw, dy, x])?;
        let db = placed.enter_some(db)?;
        if let Some(gpu) = placed.gpu() {
            let (operands, sizes) = ([&dw, &dy, &x], [rows, inputs, outputs]);
            return gpu::backward_weight(&gpu, operands, db.as_ref(), accumulate, sizes);
        }
        with_stored!(placed.dtype, S => {
            let scales = (1.0, if accumulate { 1.0 } else { 0.0 });
            let gradients = dy.elements::<S>();
            let dy = Matrix::new(gradients, rows, outputs, false);
            let x = Matrix::new(x.elements(), rows, inputs, false);
            S::multiply(Output::Wide(dw.elements_mut()), dy.t(), x, scales, &AsIs);
            if let Some(mut db) = db {
                add_rows(db.elements_mut(), gradients, gpu::ROW_BLOCK, accumulate);
            }
        });
        Ok(())
    })
}

/// Every operand has the dtype of `first` and is row-major.
fn check_same(call: &OpCall<'_>, first: Slot, others: &[Option<Slot>]) -> Result<()> {
    call.row_major(first)?;
    for &slot in others.iter().flatten() {
        call.same_dtype(slot, first)?;
        call.row_major(slot)?;
    }
    Ok(())
}

/// Columns at a time: the sums of their blocks stay in registers and the first cache.
const COLUMN_BLOCK: usize = 64;

/// `db = Σ rows of x`, added to what is there with `accumulate`: sums of blocks of rows, the sums
/// of a group of these, and the groups, in order. The first group is added to `db` block by block.
pub(super) fn add_rows<S: Stored>(
    db: &mut [S::Math],
    x: &[S],
    block_rows: usize,
    accumulate: bool,
) {
    let columns = db.len();
    threads::split_sums(db, COLUMN_BLOCK, x.len(), |first, db| {
        if !accumulate {
            db.fill(S::Math::ZERO);
        }
        for (index, db) in db.chunks_mut(COLUMN_BLOCK).enumerate() {
            let first = first + index * COLUMN_BLOCK;
            for (index, group) in x.chunks(GROUP * block_rows * columns).enumerate() {
                let mut sums = [S::Math::ZERO; COLUMN_BLOCK];
                let sums = &mut sums[..db.len()];
                let into = if index == 0 { &mut *db } else { &mut *sums };
                for block in group.chunks(block_rows * columns) {
                    add_block(into, &block[first..], columns);
                }
                if index > 0 {
                    db.iter_mut()
                        .zip(sums)
                        .for_each(|(db, sum)| *db = *db + *sum);
                }
            }
        }
    });
}

multiversion! {
    /// Adds the sum of the rows in `block`, `stride` apart, to `sums`.
    fn add_block[S: Stored](sums: &mut [S::Math], block: &[S], stride: usize) {
        let mut block_sums = [S::Math::ZERO; COLUMN_BLOCK];
        let width = sums.len();
        for row in block.chunks(stride) {
            for (sum, &value) in block_sums[..width].iter_mut().zip(&row[..width]) {
                *sum = *sum + value.wide();
            }
        }
        for (sum, &block_sum) in sums.iter_mut().zip(&block_sums) {
            *sum = *sum + block_sum;
        }
    }
}

/// What is done to the tiles of forward.
struct BiasAndActivation<'a, S: Stored> {
    /// (O)
    bias: Option<&'a [S::Math]>,
    activation: Option<Activation>,
    /// Where the pre-activation (B, O) goes.
    pre: Option<*mut S>,
    outputs: usize,
}

// SAFETY: tiles do not overlap, so neither do the parts of the pre-activation that are written for
// them.
unsafe impl<S: Stored> Sync for BiasAndActivation<'_, S> {}

impl<S: Stored> Finish<S::Math> for BiasAndActivation<'_, S> {
    fn finish(&self, mut tile: Tile<'_, S::Math>) {
        let columns = tile.columns.clone();
        for row in tile.rows.clone() {
            let z = tile.row(row);
            if let Some(bias) = self.bias {
                binary_in_place(z, &bias[columns.clone()], Add);
            }
            if let Some(pre) = self.pre {
                // SAFETY: the pre-activation has the output's shape (checked) and is entered for
                // writing; this row of this tile is inside it and belongs to no other tile.
                let pre = unsafe {
                    let first = pre.add(row * self.outputs + columns.start);
                    std::slice::from_raw_parts_mut(first, columns.len())
                };
                S::keep(pre, z);
            }
            if let Some(activation) = self.activation {
                with_function!(activation, f => unary_in_place(z, f));
            }
        }
    }
}

/// Multiplies tiles by the derivative of the activation below.
struct FoldBelow<'a, S> {
    /// The activation and what was saved of it, (B, I).
    below: Option<(Activation, &'a [S])>,
    inputs: usize,
}

impl<S: Stored> Finish<S::Math> for FoldBelow<'_, S> {
    fn finish(&self, mut tile: Tile<'_, S::Math>) {
        let Some((activation, saved)) = self.below else {
            return;
        };
        let mut room = [S::Math::ZERO; COLUMNS_MAX];
        for row in tile.rows.clone() {
            let first = row * self.inputs + tile.columns.start;
            let saved = S::widened(&saved[first..first + tile.columns.len()], &mut room);
            let dx = tile.row(row);
            with_function!(activation, f => binary_in_place(dx, saved, f));
        }
    }
}

#[cfg(test)]
mod tests;
