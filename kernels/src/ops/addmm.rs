//! addmm: `out = beta * acc + alpha * (mat1 · mat2)`.
//!
//! `mat1` and `mat2` may be transposed views (`t()`), which are read without a copy. `acc` has the
//! output's shape, or is one row for all rows (a bias), or is the output itself (then it is added
//! within the product, so the last bits differ from those with a separate output). On a GPU all
//! three may also be bf16, with sums in f32; f32 is strict unless `with_f32_math` says otherwise.
//! As in BLAS, an operand whose factor is 0 is not read: NaN in it has no effect.

use crate::cuda::blaslt::{Epilogue, Product, Side};
use crate::cuda::launch::args;
use crate::cuda::{Grid, Launcher, Source};
use crate::error::Result;
use crate::ops::call::{Buffer, Call, FLOATS_AND_BF16, Placed, Slot, with_float};
use crate::ops::matmul::{self, AsIs, Finish, Matrix, Real, Tile};
use crate::simd::multiversion;
use crate::{DType, Tensor};

static SOURCE: Source = Source::new("addmm.cu", include_str!("addmm.cu"));

/// `beta * acc + alpha * (mat1 · mat2)` in a new tensor (M, N), on the device where the operands
/// meet.
///
/// `mat1` (M, K) and `mat2` (K, N) may be `t()` views; `acc` is (M, N), or (N) or (1, N) for all
/// rows. An operand whose factor is 0 is not read.
#[track_caller]
pub fn addmm(acc: &Tensor, mat1: &Tensor, mat2: &Tensor, alpha: f64, beta: f64) -> Result<Tensor> {
    let mut call = Call::new("addmm");
    let acc = call.reads("acc", acc);
    let operands = Operands::check(&mut call, acc, mat1, mat2, [alpha, beta])?;
    call.run(operands.mat1, &FLOATS_AND_BF16, |placed| {
        let [m, n, _] = operands.mnk;
        let out = placed.tensor(operands.mat1).new_empty(&[m, n])?;
        let buffer = placed.enter_new(&out)?;
        operands.run(placed, buffer)?;
        Ok(out)
    })
}

/// As [`addmm`], into `out` (M, N); `acc` may be `out`.
#[track_caller]
pub fn addmm_into(
    out: &Tensor,
    acc: &Tensor,
    mat1: &Tensor,
    mat2: &Tensor,
    alpha: f64,
    beta: f64,
) -> Result<()> {
    let mut call = Call::new("addmm");
    let out = call.writes("out", out);
    let acc = call.reads("acc", acc);
    call.may_be_in_place(acc, out);
    let operands = Operands::check(&mut call, acc, mat1, mat2, [alpha, beta])?;
    let [m, n, _] = operands.mnk;
    call.has_shape(out, &[m, n], "[rows of mat1, columns of mat2]")?;
    call.same_dtype(out, operands.mat1)?;
    call.row_major(out)?;
    call.run(operands.mat1, &FLOATS_AND_BF16, |placed| {
        let [out] = placed.enter([out])?;
        operands.run(placed, out)
    })
}

/// The checked operands of one addmm.
struct Operands {
    acc: Slot,
    mat1: Slot,
    mat2: Slot,
    /// Rows of the output, its columns, and the length of the sums.
    mnk: [usize; 3],
    /// `acc` is one row.
    broadcast: bool,
    alpha: f64,
    beta: f64,
}

impl Operands {
    fn check<'a>(
        call: &mut Call<'a>,
        acc: Slot,
        mat1: &'a Tensor,
        mat2: &'a Tensor,
        [alpha, beta]: [f64; 2],
    ) -> Result<Operands> {
        let (mat1, mat2) = (call.reads("mat1", mat1), call.reads("mat2", mat2));
        let [m, k] = call.dims::<2>(mat1, "[rows, inner]")?;
        let [inner, n] = call.dims::<2>(mat2, "[inner, columns]")?;
        if inner != k {
            let expected = format!("{k} rows, as mat1 has columns");
            let help = "if mat2 is a weight of [out, in], pass it as .t()";
            return Err(call.operand_error(mat2, expected, help));
        }
        call.same_dtype(mat2, mat1)?;
        call.same_dtype(acc, mat1)?;
        call.row_major(acc)?;
        let shape = call.tensor(acc).shape().dims();
        let broadcast = shape != [m, n];
        if broadcast && shape != [n] && shape != [1, n] {
            let expected = format!("shape [{m}, {n}], or one row [{n}] for all rows");
            return Err(call.operand_error(acc, expected, "reshape or slice it"));
        }
        Ok(Operands {
            acc,
            mat1,
            mat2,
            mnk: [m, n, k],
            broadcast,
            alpha,
            beta,
        })
    }

    fn run(&self, placed: &Placed<'_>, mut out: Buffer<'_>) -> Result<()> {
        let [acc, mat1, mat2] = placed.enter([self.acc, self.mat1, self.mat2])?;
        let operands = [(&mat1, self.mat1), (&mat2, self.mat2)]
            .map(|(buffer, slot)| (buffer, placed.tensor(slot).is_transposed()));
        if let Some(gpu) = placed.launcher() {
            return self.run_on_gpu(&gpu, &out, &acc, operands);
        }
        with_float!(placed.dtype, T => self.run_on_cpu::<T>(&mut out, &acc, operands));
        Ok(())
    }

    /// Usually one product. If `acc` is one row and nothing is scaled, it is the library's bias; a
    /// scaled row is first written to all rows of `out`.
    fn run_on_gpu(
        &self,
        gpu: &Launcher,
        out: &Buffer<'_>,
        acc: &Buffer<'_>,
        sides: [(&Buffer<'_>, bool); 2],
    ) -> Result<()> {
        let [m, n, k] = self.mnk;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let [alpha, beta] = [self.alpha as f32, self.beta as f32];
        // In place, the one row is all of out.
        let broadcast = self.broadcast && !acc.is_in_place();
        let (dtype, out, acc) = (out.dtype, out.address(), acc.address_or(out));
        if k == 0 || alpha == 0.0 {
            return scale_rows(gpu, dtype, [out, acc], broadcast, [m, n], beta);
        }
        let [left, right] = sides.map(|(matrix, transposed)| Side {
            address: matrix.address(),
            transposed,
        });
        let mut product = Product::new(self.mnk, left, right, out);
        (product.dtype, product.out_dtype, product.alpha) = (dtype, dtype, alpha);
        if beta == 0.0 {
            return gpu.multiply(&product);
        }
        if broadcast {
            let mut with_bias = product;
            with_bias.epilogue.bias = Some(acc);
            let fits = alpha == 1.0 && beta == 1.0 && Epilogue::fits(acc);
            if fits && gpu.multiply_if_supported(&with_bias)? {
                return Ok(());
            }
            scale_rows(gpu, dtype, [out, acc], true, [m, n], 1.0)?;
        } else {
            product.existing = acc;
        }
        product.beta = beta;
        gpu.multiply(&product)
    }

    fn run_on_cpu<T: Real>(
        &self,
        out: &mut Buffer<'_>,
        acc: &Buffer<'_>,
        [(mat1, mat1_transposed), (mat2, mat2_transposed)]: [(&Buffer<'_>, bool); 2],
    ) {
        let [m, n, k] = self.mnk;
        let (alpha, beta) = (T::from_f64(self.alpha), T::from_f64(self.beta));
        let (a, b) = if alpha == T::ZERO {
            (Matrix::new(&[], m, 0, false), Matrix::new(&[], 0, n, false))
        } else {
            let a = Matrix::new(mat1.elements(), m, k, mat1_transposed);
            (a, Matrix::new(mat2.elements(), k, n, mat2_transposed))
        };
        let out = out.elements_mut::<T>();
        match acc.unless_in_place::<T>() {
            None => matmul::product(out, a, b, alpha, beta, &AsIs),
            Some(_) if beta == T::ZERO => matmul::product(out, a, b, alpha, beta, &AsIs),
            Some(acc) => {
                let stride = if self.broadcast { 0 } else { n };
                let finish = Accumulator { acc, stride, beta };
                matmul::product(out, a, b, alpha, T::ZERO, &finish);
            }
        }
    }
}

/// `out = beta * acc`; `acc` is as large as out (M, N), or one row of it, or out itself. It is not
/// read if `beta` is 0.
pub(super) fn scale_rows(
    gpu: &Launcher,
    dtype: DType,
    [out, acc]: [u64; 2],
    broadcast: bool,
    [m, n]: [usize; 2],
    beta: f32,
) -> Result<()> {
    let args = args![out, acc, m * n, n, broadcast, beta];
    gpu.launch(&SOURCE, ("scale_rows", dtype), Grid::elements(m * n), args)
}

/// Adds `beta * acc` to finished tiles. With a `stride` of 0 all rows get the same one.
struct Accumulator<'a, T> {
    acc: &'a [T],
    stride: usize,
    beta: T,
}

impl<T: Real> Finish<T> for Accumulator<'_, T> {
    fn finish(&self, mut tile: Tile<'_, T>) {
        for row in tile.rows.clone() {
            let first = row * self.stride + tile.columns.start;
            let acc = &self.acc[first..first + tile.columns.len()];
            add_scaled(tile.row(row), self.beta, acc);
        }
    }
}

multiversion! {
    /// `out += factor * x` for a row.
    fn add_scaled[T: Real](out: &mut [T], factor: T, x: &[T]) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = factor.fused(x, *out);
        }
    }
}

#[cfg(test)]
mod tests;
