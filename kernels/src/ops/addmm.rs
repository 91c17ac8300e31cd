//! addmm: `out = beta * acc + alpha * (mat1 · mat2)`.
//!
//! `mat1` and `mat2` may be transposed views (`t()`), which are read without a copy. `acc` has the
//! output's shape, or is the output itself. All three may also be bf16, with sums in f32; on a GPU
//! f32 is strict unless `with_f32_math` says otherwise. Several matrices of one shape (three
//! dimensions) are multiplied one by one on the CPU, and in one call of cuBLASLt on a GPU.

use crate::error::Result;
use crate::launch::blaslt::{GpuMatrix, Matmul};
use crate::ops::arithmetic::scale_on;
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, Placed, Slot};
use crate::ops::create::zero_on;
use crate::ops::float::Float;
use crate::ops::matmul::{AsIs, Matrix, Output};
use crate::ops::stored::{Stored, with_stored};
use crate::{Element, Tensor};

/// `beta * acc + alpha * (mat1 · mat2)` in a new tensor (M, N), on the device where the operands
/// meet.
///
/// `mat1` (M, K) and `mat2` (K, N) may be `t()` views; `acc` is (M, N). It is not read if `beta` is
/// 0. All may have one dimension more in front, (S, …), for S matrices of one shape each. K may be
/// 0, as in the backward of a batch without rows: then the result is `beta * acc`.
///
/// Backward: `dmat1 = alpha · dout · mat2ᵀ`, `dmat2 = alpha · mat1ᵀ · dout`, `dacc = beta · dout`,
/// with `addmm` and `t()`.
#[track_caller]
pub fn addmm(acc: &Tensor, mat1: &Tensor, mat2: &Tensor, alpha: f64, beta: f64) -> Result<Tensor> {
    let (mut call, like) = (OpCall::new("addmm"), acc);
    let acc = call.reads("acc", acc);
    let operands = Operands::check(&mut call, &[acc], [mat1, mat2], [alpha, beta])?;
    let made = call.run(operands.mat1, &FLOATS_AND_BF16, |placed| {
        let shape = placed.tensor(acc).shape();
        let out = placed.tensor(operands.mat1).new_empty(shape)?;
        let buffer = placed.enter_new(&out)?;
        operands.run(placed, buffer)?;
        Ok(Some(out))
    })?;
    made.map_or_else(|| like.empty_like(), Ok)
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
    let mut call = OpCall::new("addmm");
    let out = call.writes("out", out);
    let acc = call.reads("acc", acc);
    call.may_be_in_place(acc, out);
    let operands = Operands::check(&mut call, &[acc, out], [mat1, mat2], [alpha, beta])?;
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
    /// How many matrices each operand has.
    batch: usize,
    /// Rows of the output, its columns, and the length of the sums.
    mnk: [usize; 3],
    alpha: f64,
    beta: f64,
}

impl Operands {
    /// `outputs` are the accumulator and, where there is one, the output.
    fn check<'a>(
        call: &mut OpCall<'a>,
        outputs: &[Slot],
        [mat1, mat2]: [&'a Tensor; 2],
        [alpha, beta]: [f64; 2],
    ) -> Result<Operands> {
        let (mat1, mat2) = (call.reads("mat1", mat1), call.reads("mat2", mat2));
        let dims = |slot: Slot, meaning: &str| match call.tensor(slot).shape()[..] {
            [batch, rows, columns] => Ok([batch, rows, columns]),
            _ => call
                .dims(slot, meaning)
                .map(|[rows, columns]| [1, rows, columns]),
        };
        let [batch, m, k] = dims(mat1, "[rows, inner]")?;
        let [others, inner, n] = dims(mat2, "[inner, columns]")?;
        if others != batch {
            let expected = format!("{batch} matrices, as mat1 has");
            return Err(call.operand_error(mat2, expected, "slice the longer one"));
        }
        if inner != k {
            let expected = format!("{k} rows, as mat1 has columns");
            let help = "if mat2 is a weight of [out, in], pass it as .t()";
            return Err(call.operand_error(mat2, expected, help));
        }
        call.same_dtype(mat2, mat1)?;
        let (shape, meaning) = match call.tensor(mat1).shape().rank() {
            2 => (&[m, n][..], "[rows of mat1, columns of mat2]"),
            _ => (
                &[batch, m, n][..],
                "[matrices, rows of mat1, columns of mat2]",
            ),
        };
        for &output in outputs {
            call.same_dtype(output, mat1)?;
            call.row_major(output)?;
            call.has_shape(output, shape, meaning)?;
        }
        Ok(Operands {
            acc: outputs[0],
            mat1,
            mat2,
            batch,
            mnk: [m, n, k],
            alpha,
            beta,
        })
    }

    fn run(&self, placed: &Placed<'_>, mut out: Buffer<'_>) -> Result<()> {
        let [acc, mat1, mat2] = placed.enter([self.acc, self.mat1, self.mat2])?;
        let operands = [(&mat1, self.mat1), (&mat2, self.mat2)]
            .map(|(buffer, slot)| (buffer, placed.tensor(slot).is_transposed()));
        let Some(gpu) = placed.gpu() else {
            with_stored!(placed.dtype, S => self.run_on_cpu::<S>(&mut out, &acc, operands));
            return Ok(());
        };
        if out.count == 0 {
            return Ok(());
        }
        match self.mnk[2] {
            0 if self.beta == 0.0 => return zero_on(&gpu, &out),
            0 => return scale_on(&gpu, [&out, &acc], self.beta),
            _ => {}
        }
        let [left, right] = operands.map(|(matrix, transposed)| GpuMatrix {
            address: matrix.address(),
            transposed,
        });
        gpu.multiply(&Matmul {
            batch: self.batch,
            existing: acc.address(),
            dtype: out.dtype,
            out_dtype: out.dtype,
            alpha: self.alpha as f32,
            beta: self.beta as f32,
            ..Matmul::new(self.mnk, left, right, out.address())
        })
    }

    fn run_on_cpu<S: Stored>(
        &self,
        out: &mut Buffer<'_>,
        acc: &Buffer<'_>,
        [(mat1, mat1_transposed), (mat2, mat2_transposed)]: [(&Buffer<'_>, bool); 2],
    ) {
        let ([m, n, k], [mat1, mat2]) = (self.mnk, [mat1, mat2].map(|it| it.elements::<S>()));
        let scales = (S::Math::from_f64(self.alpha), S::Math::from_f64(self.beta));
        let out = out.elements_mut::<S>();
        if let Some(acc) = acc.unless_in_place::<S>()
            && scales.1 != S::Math::ZERO
        {
            out.copy_from_slice(acc);
        }
        for index in 0..self.batch {
            let of = |elements: usize| index * elements..(index + 1) * elements;
            let a = Matrix::new(&mat1[of(m * k)], m, k, mat1_transposed);
            let b = Matrix::new(&mat2[of(k * n)], k, n, mat2_transposed);
            let out = Output::Stored(&mut out[of(m * n)]);
            S::multiply(out, a, b, scales, &AsIs);
        }
    }
}

#[cfg(test)]
mod tests;
