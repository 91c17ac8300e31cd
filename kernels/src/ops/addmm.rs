//! addmm: `out = beta * acc + alpha * (mat1 · mat2)`.
//!
//! `mat1` and `mat2` may be transposed views (`t()`), which are read without a copy. `acc` has the
//! output's shape, or is the output itself. On a GPU all three may also be bf16, with sums in f32;
//! f32 is strict unless `with_f32_math` says otherwise.

use crate::Tensor;
use crate::error::Result;
use crate::launch::blaslt::{Product, Side};
use crate::ops::call::{Buffer, Call, FLOATS_AND_BF16, Placed, Slot, with_float};
use crate::ops::matmul::{self, AsIs, Matrix, Real};

/// `beta * acc + alpha * (mat1 · mat2)` in a new tensor (M, N), on the device where the operands
/// meet.
///
/// `mat1` (M, K) and `mat2` (K, N) may be `t()` views; `acc` is (M, N). It is not read if `beta` is
/// 0.
///
/// Backward: `dmat1 = alpha · dout · mat2ᵀ`, `dmat2 = alpha · mat1ᵀ · dout`, `dacc = beta · dout`,
/// with `addmm` and `t()`.
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
        if k == 0 {
            return Err(call.operand_error(mat1, "at least one column", "scale acc instead"));
        }
        call.same_dtype(mat2, mat1)?;
        call.same_dtype(acc, mat1)?;
        call.row_major(acc)?;
        call.has_shape(acc, &[m, n], "[rows of mat1, columns of mat2]")?;
        Ok(Operands {
            acc,
            mat1,
            mat2,
            mnk: [m, n, k],
            alpha,
            beta,
        })
    }

    fn run(&self, placed: &Placed<'_>, mut out: Buffer<'_>) -> Result<()> {
        let [acc, mat1, mat2] = placed.enter([self.acc, self.mat1, self.mat2])?;
        let operands = [(&mat1, self.mat1), (&mat2, self.mat2)]
            .map(|(buffer, slot)| (buffer, placed.tensor(slot).is_transposed()));
        let Some(gpu) = placed.launcher() else {
            with_float!(placed.dtype, T => self.run_on_cpu::<T>(&mut out, &acc, operands));
            return Ok(());
        };
        if out.count == 0 {
            return Ok(());
        }
        let [left, right] = operands.map(|(matrix, transposed)| Side {
            address: matrix.address(),
            transposed,
        });
        gpu.multiply(&Product {
            existing: acc.address_or(&out),
            dtype: out.dtype,
            out_dtype: out.dtype,
            alpha: self.alpha as f32,
            beta: self.beta as f32,
            ..Product::new(self.mnk, left, right, out.address())
        })
    }

    fn run_on_cpu<T: Real>(
        &self,
        out: &mut Buffer<'_>,
        acc: &Buffer<'_>,
        [(mat1, mat1_transposed), (mat2, mat2_transposed)]: [(&Buffer<'_>, bool); 2],
    ) {
        let [m, n, k] = self.mnk;
        let a = Matrix::new(mat1.elements(), m, k, mat1_transposed);
        let b = Matrix::new(mat2.elements(), k, n, mat2_transposed);
        let (alpha, beta) = (T::from_f64(self.alpha), T::from_f64(self.beta));
        let out = out.elements_mut::<T>();
        if let Some(acc) = acc.unless_in_place::<T>()
            && beta != T::ZERO
        {
            out.copy_from_slice(acc);
        }
        matmul::product(out, a, b, alpha, beta, &AsIs);
    }
}

#[cfg(test)]
mod tests;
