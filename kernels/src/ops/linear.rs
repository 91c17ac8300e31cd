//! linear: `y = activation(x·Wᵀ + b)` with W as PyTorch keeps it, `[out, in]`, and the three products of its backward.
//!
//! Letters: B rows of the batch, I inputs, O outputs. Backward goes down with the gradient at the *pre-activation* of each
//! layer: `linear_backward_input_into` folds in the derivative of the activation of the layer BELOW, so no gradient is
//! ever written before its activation's derivative is applied. Bias, activation and derivative are applied to each tile
//! of a product while it is in the cache of the thread that made it; on a GPU (`linear/gpu.rs`) by cuBLASLt where it can.
//!
//! On a GPU operands may also be bf16 or f16, with sums in f32; f32 itself is strict unless `with_f32_math` says otherwise.

pub(in crate::ops) mod gpu;

use crate::error::Result;
use crate::ops::addmm::AddScaled;
use crate::ops::call::{Call, Lent, Placed, Slot, WIDE};
use crate::ops::gelu::{Gelu, GeluErf, GeluErfGrad, GeluTanh, GeluTanhGrad};
use crate::ops::loops::{Binary, Unary};
use crate::ops::matmul::{self, AsIs, Finish, Matrix, Tile};
use crate::ops::relu::{Relu, ReluGrad};
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

/// What a layer applies to `x·Wᵀ + b`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    Identity,
    /// max(z, 0).
    Relu,
    /// z·Φ(z), by tanh or erf.
    Gelu(Gelu),
}

/// The activation of the layer below, whose derivative is folded into the gradient that goes down to it.
#[derive(Clone, Copy, Debug, Default)]
pub enum Below<'a> {
    /// No activation there (or it is applied elsewhere).
    #[default]
    Identity,
    /// relu there; its output (or input), `[B, I]`.
    Relu(&'a Tensor),
    /// gelu there; its input, `[B, I]`.
    Gelu(Gelu, &'a Tensor),
}

/// `y = activation(x·Wᵀ + bias)`. `pre_activation` receives `x·Wᵀ + bias`, which gelu's backward needs.
///
/// `y [B, O]`, `x [B, I]`, `weight [O, I]`, `bias [O]`, `pre_activation [B, O]`.
#[track_caller]
pub fn linear_into(
    y: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    pre_activation: Option<&Tensor>,
) -> Result<()> {
    let mut call = Call::new("linear");
    let y = call.writes("y", y);
    let x = call.reads("x", x);
    let weight = call.reads("weight", weight);
    let bias = call.reads_some("bias", bias);
    let pre = call.writes_some("pre_activation", pre_activation);
    let [rows, inputs] = call.dims::<2>(x, "[rows, inputs]")?;
    let [outputs, columns] = call.dims::<2>(weight, "[outputs, inputs]")?;
    if columns != inputs {
        let hint = "Weights are [outputs, inputs], as in torch.nn.Linear; if this one is [inputs, outputs], pass \
                    .t()?.contiguous()?.";
        return Err(call.misfit(weight, format!("shape [outputs, {inputs}], since x has {inputs} columns"), hint));
    }
    call.has_shape(y, &[rows, outputs], "[rows of x, rows of weight]")?;
    check_same(&call, x, &[Some(y), Some(weight), bias, pre])?;
    if let Some(bias) = bias {
        call.has_shape(bias, &[outputs], "[rows of weight]")?;
    }
    if let Some(pre) = pre {
        call.same_shape(pre, y)?;
    }
    let placed = call.place(x, &WIDE)?;
    let sizes = [rows, inputs, outputs];
    match (placed.launcher()?, placed.tensor(x).dtype()) {
        (Some(gpu), _) => gpu::forward(&gpu, &placed, [y, x, weight], bias, pre, activation, sizes)?,
        (None, DType::F32) => forward::<f32>(&placed, [y, x, weight], bias, pre, activation, sizes)?,
        (None, _) => forward::<f64>(&placed, [y, x, weight], bias, pre, activation, sizes)?,
    }
    placed.finish()
}

/// `dx = (dy·W) ⊙ f'(below)`: the gradient at the pre-activation of the layer below.
///
/// `dx [B, I]`, `dy [B, O]` (the gradient at this layer's pre-activation), `weight [O, I]`.
#[track_caller]
pub fn linear_backward_input_into(dx: &Tensor, dy: &Tensor, weight: &Tensor, below: Below<'_>) -> Result<()> {
    let mut call = Call::new("linear_backward_input");
    let dx = call.writes("dx", dx);
    let dy = call.reads("dy", dy);
    let weight = call.reads("weight", weight);
    let saved = match below {
        Below::Identity => None,
        Below::Relu(saved) | Below::Gelu(_, saved) => Some(call.reads("below", saved)),
    };
    let [rows, outputs] = call.dims::<2>(dy, "[rows, outputs]")?;
    let [weight_rows, inputs] = call.dims::<2>(weight, "[outputs, inputs]")?;
    if weight_rows != outputs {
        let expected = format!("shape [{outputs}, inputs], since dy has {outputs} columns");
        return Err(call.misfit(weight, expected, "Pass the weight that the forward product used."));
    }
    call.has_shape(dx, &[rows, inputs], "[rows of dy, columns of weight]")?;
    check_same(&call, dy, &[Some(dx), Some(weight), saved])?;
    if let Some(saved) = saved {
        call.same_shape(saved, dx)?;
    }
    let placed = call.place(dy, &WIDE)?;
    let sizes = [rows, inputs, outputs];
    match (placed.launcher()?, placed.tensor(dy).dtype()) {
        (Some(gpu), _) => gpu::backward_input(&gpu, &placed, [dx, dy, weight], saved, below, sizes)?,
        (None, DType::F32) => backward_input::<f32>(&placed, [dx, dy, weight], saved, below, sizes)?,
        (None, _) => backward_input::<f64>(&placed, [dx, dy, weight], saved, below, sizes)?,
    }
    placed.finish()
}

/// `dw = dyᵀ·x` and `db = Σ rows of dy`, or added to what is there with `accumulate`.
///
/// `dw [O, I]`, `db [O]`, `dy [B, O]`, `x [B, I]`. Rows of `db` are summed in blocks of 64, in order, so the bits do not
/// depend on the number of threads, and are the same on a GPU. Where `dy` and `x` are bf16 or f16, `dw` and `db` may be
/// f32, each by itself.
#[track_caller]
pub fn linear_backward_weight_into(
    dw: &Tensor,
    db: Option<&Tensor>,
    dy: &Tensor,
    x: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let mut call = Call::new("linear_backward_weight");
    let dw = call.writes("dw", dw);
    let dy = call.reads("dy", dy);
    let x = call.reads("x", x);
    let db = call.writes_some("db", db);
    let [rows, outputs] = call.dims::<2>(dy, "[rows, outputs]")?;
    let [x_rows, inputs] = call.dims::<2>(x, "[rows, inputs]")?;
    if x_rows != rows {
        let expected = format!("shape [{rows}, inputs], since dy has {rows} rows");
        return Err(call.misfit(x, expected, "Pass the x that the forward product used."));
    }
    call.has_shape(dw, &[outputs, inputs], "[columns of dy, columns of x]")?;
    check_same(&call, dy, &[Some(x)])?;
    check_gradients(&call, dy, &[Some(dw), db])?;
    if let Some(db) = db {
        call.has_shape(db, &[outputs], "[columns of dy]")?;
    }
    let placed = call.place(dy, &WIDE)?;
    let sizes = [rows, inputs, outputs];
    match (placed.launcher()?, placed.tensor(dy).dtype()) {
        (Some(gpu), _) => gpu::backward_weight(&gpu, &placed, [dw, dy, x], db, accumulate, sizes)?,
        (None, DType::F32) => backward_weight::<f32>(&placed, [dw, dy, x], db, accumulate, sizes)?,
        (None, _) => backward_weight::<f64>(&placed, [dw, dy, x], db, accumulate, sizes)?,
    }
    placed.finish()
}

/// Every operand has the dtype of `first` and is row-major.
fn check_same(call: &Call<'_>, first: Slot, others: &[Option<Slot>]) -> Result<()> {
    call.row_major(first)?;
    for &slot in others.iter().flatten() {
        call.same_dtype(slot, first)?;
        call.row_major(slot)?;
    }
    Ok(())
}

/// Gradients of parameters have the dtype of `dy`, or are f32 where that is narrower.
fn check_gradients(call: &Call<'_>, dy: Slot, gradients: &[Option<Slot>]) -> Result<()> {
    let narrow = [DType::BF16, DType::F16].contains(&call.tensor(dy).dtype());
    for &slot in gradients.iter().flatten() {
        if !(narrow && call.tensor(slot).dtype() == DType::F32) {
            call.same_dtype(slot, dy)?;
        }
        call.row_major(slot)?;
    }
    Ok(())
}

fn forward<T: Layer>(
    placed: &Placed<'_>,
    slots: [Slot; 3],
    bias: Option<Slot>,
    pre: Option<Slot>,
    activation: Activation,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let [mut y, x, weight] = placed.enter(slots)?;
    let bias = placed.enter_some(bias)?;
    let mut pre = placed.enter_some(pre)?;
    let finish = Forward {
        bias: bias.as_ref().map(Lent::elements),
        activation,
        pre: pre.as_mut().map(|pre| Aside { start: pre.elements_mut::<T>().as_mut_ptr(), stride: outputs }),
    };
    let x = Matrix::new(x.elements::<T>(), rows, inputs, false);
    let weight = Matrix::new(weight.elements::<T>(), outputs, inputs, false);
    matmul::product(y.elements_mut(), x, weight.t(), T::ONE, T::ZERO, &finish);
    Ok(())
}

fn backward_input<T: Layer>(
    placed: &Placed<'_>,
    slots: [Slot; 3],
    saved: Option<Slot>,
    below: Below<'_>,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let [mut dx, dy, weight] = placed.enter(slots)?;
    let saved = placed.enter_some(saved)?;
    let dy = Matrix::new(dy.elements::<T>(), rows, outputs, false);
    let weight = Matrix::new(weight.elements::<T>(), outputs, inputs, false);
    let dx = dx.elements_mut();
    match &saved {
        None => matmul::product(dx, dy, weight, T::ONE, T::ZERO, &AsIs),
        Some(saved) => {
            let finish = FoldBelow { below, saved: saved.elements::<T>(), stride: inputs };
            matmul::product(dx, dy, weight, T::ONE, T::ZERO, &finish);
        }
    }
    Ok(())
}

fn backward_weight<T: Layer>(
    placed: &Placed<'_>,
    slots: [Slot; 3],
    db: Option<Slot>,
    accumulate: bool,
    [rows, inputs, outputs]: [usize; 3],
) -> Result<()> {
    let [mut dw, dy, x] = placed.enter(slots)?;
    let db = placed.enter_some(db)?;
    let existing_scale = if accumulate { T::ONE } else { T::ZERO };
    let gradients = dy.elements::<T>();
    let dy = Matrix::new(gradients, rows, outputs, false);
    let x = Matrix::new(x.elements::<T>(), rows, inputs, false);
    matmul::product(dw.elements_mut(), dy.t(), x, T::ONE, existing_scale, &AsIs);
    if let Some(mut db) = db {
        add_rows(db.elements_mut::<T>(), gradients, accumulate);
    }
    Ok(())
}

/// Rows added up before their sum joins the others: the rounding error grows with B/64 + 64, not with B.
const ROW_BLOCK: usize = 64;
/// Columns at a time: their block sums stay in registers and the first cache.
const COLUMN_BLOCK: usize = 64;

/// `db = Σ rows of dy`, added to what is there with `accumulate`.
fn add_rows<T: Layer>(db: &mut [T], dy: &[T], accumulate: bool) {
    let outputs = db.len();
    let pieces = if dy.len() < threads::PARALLEL_MIN { 1 } else { threads::count() };
    threads::split_mut_in(db, COLUMN_BLOCK, pieces, |first, db| {
        if !accumulate {
            db.fill(T::ZERO);
        }
        for (index, db) in db.chunks_mut(COLUMN_BLOCK).enumerate() {
            let first = first + index * COLUMN_BLOCK;
            for block in dy.chunks(ROW_BLOCK * outputs) {
                T::add_block(db, &block[first..], outputs);
            }
        }
    });
}

/// What the tiles need of a type: the loops over rows, compiled for each SIMD level.
trait Layer: AddScaled {
    /// `z = activation(z + bias)` for a row; `z + bias` also goes to `pre`.
    fn activate(z: &mut [Self], bias: Option<&[Self]>, activation: Activation, pre: Option<&mut [Self]>);
    /// `dx = dx · f'(saved)` for a row.
    fn fold(dx: &mut [Self], saved: &[Self], below: Below<'_>);
    /// Adds the sum of the rows in `block`, `stride` apart, to `sums`.
    fn add_block(sums: &mut [Self], block: &[Self], stride: usize);
}

macro_rules! layer_for {
    ($T:ident, $add:ident, $map:ident, $fold:ident, $block:ident) => {
        multiversion! {
            fn $add[](z: &mut [$T], bias: &[$T]) {
                for (z, &bias) in z.iter_mut().zip(bias) {
                    *z += bias;
                }
            }
        }
        multiversion! {
            fn $map[F: Unary<$T>](z: &mut [$T], f: F) {
                for z in z {
                    *z = f.apply(*z);
                }
            }
        }
        multiversion! {
            fn $fold[F: Binary<$T>](dx: &mut [$T], saved: &[$T], f: F) {
                for (dx, &saved) in dx.iter_mut().zip(saved) {
                    *dx = f.apply(*dx, saved);
                }
            }
        }
        multiversion! {
            fn $block[](sums: &mut [$T], block: &[$T], stride: usize) {
                let mut block_sums = [0.0; COLUMN_BLOCK];
                let width = sums.len();
                for row in block.chunks(stride) {
                    for (sum, &value) in block_sums[..width].iter_mut().zip(&row[..width]) {
                        *sum += value;
                    }
                }
                for (sum, &block_sum) in sums.iter_mut().zip(&block_sums) {
                    *sum += block_sum;
                }
            }
        }
        impl Layer for $T {
            fn activate(z: &mut [$T], bias: Option<&[$T]>, activation: Activation, pre: Option<&mut [$T]>) {
                if let Some(bias) = bias {
                    $add(z, bias);
                }
                if let Some(pre) = pre {
                    pre.copy_from_slice(z);
                }
                match activation {
                    Activation::Identity => {}
                    Activation::Relu => $map(z, Relu),
                    Activation::Gelu(Gelu::Tanh) => $map(z, GeluTanh),
                    Activation::Gelu(Gelu::Erf) => $map(z, GeluErf),
                }
            }
            fn fold(dx: &mut [$T], saved: &[$T], below: Below<'_>) {
                match below {
                    Below::Identity => {}
                    Below::Relu(_) => $fold(dx, saved, ReluGrad),
                    Below::Gelu(Gelu::Tanh, _) => $fold(dx, saved, GeluTanhGrad),
                    Below::Gelu(Gelu::Erf, _) => $fold(dx, saved, GeluErfGrad),
                }
            }
            fn add_block(sums: &mut [$T], block: &[$T], stride: usize) {
                $block(sums, block, stride);
            }
        }
    };
}
layer_for!(f32, add_f32, map_f32, fold_f32, block_f32);
layer_for!(f64, add_f64, map_f64, fold_f64, block_f64);

/// A second output that tiles are copied to.
struct Aside<T> {
    start: *mut T,
    stride: usize,
}

// SAFETY: tiles do not overlap, so the parts of the second output written for them do not either.
unsafe impl<T: Send> Sync for Aside<T> {}

/// Bias, activation, and the pre-activation kept aside.
struct Forward<'a, T> {
    bias: Option<&'a [T]>,
    activation: Activation,
    pre: Option<Aside<T>>,
}

impl<T: Layer> Finish<T> for Forward<'_, T> {
    fn finish(&self, mut tile: Tile<'_, T>) {
        let columns = tile.columns.clone();
        let bias = self.bias.map(|bias| &bias[columns.clone()]);
        for row in tile.rows.clone() {
            let pre = self.pre.as_ref().map(|pre| {
                // SAFETY: the pre-activation has the output's shape (checked) and is entered for writing; this row
                // of this tile is inside it and no other tile has it.
                unsafe {
                    let first = pre.start.add(row * pre.stride + columns.start);
                    std::slice::from_raw_parts_mut(first, columns.len())
                }
            });
            T::activate(tile.row(row), bias, self.activation, pre);
        }
    }
}

/// The derivative of the activation below.
struct FoldBelow<'a, T> {
    below: Below<'a>,
    saved: &'a [T],
    stride: usize,
}

impl<T: Layer> Finish<T> for FoldBelow<'_, T> {
    fn finish(&self, mut tile: Tile<'_, T>) {
        for row in tile.rows.clone() {
            let first = row * self.stride + tile.columns.start;
            let saved = &self.saved[first..first + tile.columns.len()];
            T::fold(tile.row(row), saved, self.below);
        }
    }
}

#[cfg(test)]
mod tests;
