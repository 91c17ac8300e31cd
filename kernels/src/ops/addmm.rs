//! addmm: `out = beta * acc + alpha * (mat1 · mat2)`, the product of every linear layer.
//!
//! `mat1` and `mat2` may be transposed views (`t()`), read as they are. `acc` has the output's shape, or is one row for
//! all rows (a bias), or is the output itself (then it is added within the product, whose last bits differ from those of
//! a separate output). On a GPU all three may also be bf16 or f16, with sums in f32; f32 itself is strict unless
//! `with_f32_math` says otherwise. As in BLAS, a factor of 0 means that its operand is not read at all: NaN there does no harm.

use crate::cuda::Launcher;
use crate::cuda::blaslt::{Epilogue, Product, Side};
use crate::error::Result;
use crate::ops::call::{Call, Lent, Placed, Slot, WIDE};
use crate::ops::linear::gpu::{address, fits_epilogue, scale_rows};
use crate::ops::matmul::{self, AsIs, Finish, Matrix, Real, Tile};
use crate::simd::multiversion;
use crate::{DType, Tensor};

/// `beta * acc + alpha * (mat1 · mat2)` in a new tensor, on the device where the operands are (or meet).
///
/// `acc` has the product's shape or is one row for all; `mat1` and `mat2` may be `t()` views. A factor of 0 means that its
/// operand is not read at all.
#[track_caller]
pub fn addmm(acc: &Tensor, mat1: &Tensor, mat2: &Tensor, alpha: f64, beta: f64) -> Result<Tensor> {
    let mut call = Call::new("addmm");
    let acc = call.reads("acc", acc);
    let operands = Operands::check(&mut call, acc, mat1, mat2)?;
    let placed = call.place(operands.mat1, &WIDE)?;
    let [m, n, _] = operands.mnk;
    let out = placed.tensor(operands.mat1).new_empty(&[m, n])?;
    {
        let lent_out = placed.enter_new(&out)?;
        let lent_acc = placed.enter_one(acc)?;
        operands.run(&placed, lent_out, &lent_acc, alpha, beta)?;
    }
    placed.finish()?;
    Ok(out)
}

/// `out = beta * acc + alpha * (mat1 · mat2)`; `acc` may be `out` itself.
#[track_caller]
pub fn addmm_into(out: &Tensor, acc: &Tensor, mat1: &Tensor, mat2: &Tensor, alpha: f64, beta: f64) -> Result<()> {
    let mut call = Call::new("addmm");
    let out = call.writes("out", out);
    let acc = call.reads("acc", acc);
    call.may_be_in_place(acc, out);
    let operands = Operands::check(&mut call, acc, mat1, mat2)?;
    let [m, n, _] = operands.mnk;
    call.has_shape(out, &[m, n], "[rows of mat1, columns of mat2]")?;
    call.same_dtype(out, operands.mat1)?;
    call.row_major(out)?;
    let placed = call.place(operands.mat1, &WIDE)?;
    {
        let [lent_out, lent_acc] = placed.enter([out, acc])?;
        operands.run(&placed, lent_out, &lent_acc, alpha, beta)?;
    }
    placed.finish()
}

/// The checked operands of one addmm.
struct Operands {
    mat1: Slot,
    mat2: Slot,
    /// Rows of the output, its columns, and the length of the sums.
    mnk: [usize; 3],
    /// `acc` is one row.
    broadcast: bool,
}

impl Operands {
    fn check<'a>(call: &mut Call<'a>, acc: Slot, mat1: &'a Tensor, mat2: &'a Tensor) -> Result<Operands> {
        let (mat1, mat2) = (call.reads("mat1", mat1), call.reads("mat2", mat2));
        let [m, k] = call.dims::<2>(mat1, "[rows, inner]")?;
        let [inner, n] = call.dims::<2>(mat2, "[inner, columns]")?;
        if inner != k {
            let hint = "If mat2 is a weight of [out, in], pass it as .t().";
            return Err(call.misfit(mat2, format!("{k} rows, as mat1 has columns"), hint));
        }
        call.same_dtype(mat2, mat1)?;
        call.same_dtype(acc, mat1)?;
        call.row_major(acc)?;
        let shape = call.tensor(acc).shape().dims();
        let broadcast = shape != [m, n];
        if broadcast && shape != [n] && shape != [1, n] {
            let expected = format!("shape [{m}, {n}], or one row [{n}] for all rows");
            return Err(call.misfit(acc, expected, "Reshape or slice it."));
        }
        Ok(Operands { mat1, mat2, mnk: [m, n, k], broadcast })
    }

    fn run(&self, placed: &Placed<'_>, mut out: Lent<'_>, acc: &Lent<'_>, alpha: f64, beta: f64) -> Result<()> {
        let [mat1, mat2] = placed.enter([self.mat1, self.mat2])?;
        let transposed = [self.mat1, self.mat2].map(|slot| placed.tensor(slot).is_transposed());
        match (placed.launcher()?, placed.tensor(self.mat1).dtype()) {
            (Some(gpu), dtype) => {
                let [left, right] = [(&mat1, transposed[0]), (&mat2, transposed[1])]
                    .map(|(lent, transposed)| Side { address: address(lent), transposed });
                self.compute_on_gpu(&gpu, dtype, [&out, acc], [left, right], [alpha as f32, beta as f32])?;
            }
            (None, DType::F32) => self.compute::<f32>(&mut out, acc, [&mat1, &mat2], transposed, alpha, beta),
            (None, _) => self.compute::<f64>(&mut out, acc, [&mat1, &mat2], transposed, alpha, beta),
        }
        Ok(())
    }

    /// One product, mostly. `acc` is read by it where it is; one row for all is the library's bias if nothing is scaled, and
    /// else is written to all rows of `out` first.
    fn compute_on_gpu(
        &self,
        gpu: &Launcher,
        dtype: DType,
        [out, acc]: [&Lent<'_>; 2],
        [left, right]: [Side; 2],
        [alpha, beta]: [f32; 2],
    ) -> Result<()> {
        let [m, n, k] = self.mnk;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let out = address(out);
        // In place, one row is all of out.
        let broadcast = self.broadcast && acc.address().is_some();
        let acc = acc.address().unwrap_or(out);
        if k == 0 || alpha == 0.0 {
            return scale_rows(gpu, dtype, out, acc, broadcast, [m, n], beta);
        }
        let epilogue = Epilogue::default();
        let product =
            Product { mnk: self.mnk, left, right, out, existing: acc, dtype, out_dtype: dtype, alpha, beta, epilogue };
        if beta == 0.0 {
            return gpu.multiply(&Product { existing: out, ..product });
        }
        if !broadcast {
            return gpu.multiply(&product);
        }
        if alpha == 1.0 && beta == 1.0 && fits_epilogue(acc) {
            let epilogue = Epilogue { bias: Some(acc), ..epilogue };
            if gpu.multiply_if_supported(&Product { beta: 0.0, existing: out, epilogue, ..product })? {
                return Ok(());
            }
        }
        scale_rows(gpu, dtype, out, acc, true, [m, n], 1.0)?;
        gpu.multiply(&Product { existing: out, ..product })
    }

    fn compute<T: Real + AddScaled>(
        &self,
        out: &mut Lent<'_>,
        acc: &Lent<'_>,
        [mat1, mat2]: [&Lent<'_>; 2],
        [mat1_transposed, mat2_transposed]: [bool; 2],
        alpha: f64,
        beta: f64,
    ) {
        let [m, n, k] = self.mnk;
        let (alpha, beta) = (T::from_f64(alpha), T::from_f64(beta));
        let (a, b) = if alpha == T::ZERO {
            (Matrix::new(&[], m, 0, false), Matrix::new(&[], 0, n, false))
        } else {
            (
                Matrix::new(mat1.elements::<T>(), m, k, mat1_transposed),
                Matrix::new(mat2.elements::<T>(), k, n, mat2_transposed),
            )
        };
        let out = out.elements_mut::<T>();
        match acc.unless_in_place::<T>() {
            None => matmul::product(out, a, b, alpha, beta, &AsIs),
            Some(_) if beta == T::ZERO => matmul::product(out, a, b, alpha, T::ZERO, &AsIs),
            Some(acc) => {
                let stride = if self.broadcast { 0 } else { n };
                matmul::product(out, a, b, alpha, T::ZERO, &Accumulator { acc, stride, beta });
            }
        }
    }
}

/// Adds `beta * acc` to finished tiles; a `stride` of 0 gives every row the same one.
struct Accumulator<'a, T> {
    acc: &'a [T],
    stride: usize,
    beta: T,
}

impl<T: AddScaled> Finish<T> for Accumulator<'_, T> {
    fn finish(&self, mut tile: Tile<'_, T>) {
        for row in tile.rows.clone() {
            let first = row * self.stride + tile.columns.start;
            let acc = &self.acc[first..first + tile.columns.len()];
            T::add_scaled(tile.row(row), self.beta, acc);
        }
    }
}

/// `out += factor * x` for a row.
pub(crate) trait AddScaled: Real {
    fn add_scaled(out: &mut [Self], factor: Self, x: &[Self]);
}

macro_rules! add_scaled_for {
    ($($T:ident $loop:ident),*) => {$(
        multiversion! {
            fn $loop[](out: &mut [$T], factor: $T, x: &[$T]) {
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = factor.mul_add(x, *out);
                }
            }
        }
        impl AddScaled for $T {
            fn add_scaled(out: &mut [$T], factor: $T, x: &[$T]) {
                $loop(out, factor, x);
            }
        }
    )*};
}
add_scaled_for!(f32 add_scaled_f32, f64 add_scaled_f64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, cpu, random_f32};
    use crate::{Device, Random};

    /// Rounding error of a dot product of length k in any order, of inputs with the given sum of magnitudes:
    /// at most k + 3 roundings (products, sums, the two factors), each of 2⁻²⁴ of what is being added.
    fn bound(k: usize, magnitudes: f64) -> f64 {
        (k + 3) as f64 * 2f64.powi(-24) * magnitudes
    }

    struct Case {
        m: usize,
        n: usize,
        k: usize,
        alpha: f64,
        beta: f64,
        mat1_t: bool,
        mat2_t: bool,
        broadcast: bool,
    }

    /// The tensor that is `[rows, columns]` with its elements in the order of the transpose if `t`.
    fn matrix(data: &[f32], rows: usize, columns: usize, t: bool) -> Tensor {
        if t { cpu(data, &[columns, rows]).t().unwrap() } else { cpu(data, &[rows, columns]) }
    }

    fn check(case: &Case, seed: u64) {
        let Case { m, n, k, alpha, beta, mat1_t, mat2_t, broadcast } = *case;
        let (a, b) = (random_f32(m * k, seed), random_f32(k * n, seed + 1));
        let acc_data = random_f32(if broadcast { n } else { m * n }, seed + 2);
        let at = |i: usize, l: usize| f64::from(a[if mat1_t { l * m + i } else { i * k + l }]);
        let bt = |l: usize, j: usize| f64::from(b[if mat2_t { j * k + l } else { l * n + j }]);
        let mut reference = Vec::with_capacity(m * n);
        let mut magnitudes = Vec::with_capacity(m * n);
        for i in 0..m {
            for j in 0..n {
                let acc = beta * f64::from(acc_data[if broadcast { j } else { i * n + j }]);
                let terms = (0..k).map(|l| alpha * at(i, l) * bt(l, j));
                reference.push(acc + terms.clone().sum::<f64>());
                magnitudes.push(acc.abs() + terms.map(f64::abs).sum::<f64>());
            }
        }
        let (mat1, mat2) = (matrix(&a, m, k, mat1_t), matrix(&b, k, n, mat2_t));
        let acc_shape: &[usize] = if broadcast { &[n] } else { &[m, n] };
        let acc = cpu(&acc_data, acc_shape);
        let out = addmm(&acc, &mat1, &mat2, alpha, beta).unwrap();
        assert_close(&out.to_vec::<f32>().unwrap(), &reference, |index, _| bound(k, magnitudes[index]));
        if !broadcast {
            addmm_into(&acc, &acc, &mat1, &mat2, alpha, beta).unwrap();
            assert_close(&acc.to_vec::<f32>().unwrap(), &reference, |index, _| bound(k, magnitudes[index]));
        }
    }

    #[test]
    fn every_transposition_factor_and_odd_size_agrees_with_f64() {
        let sizes =
            [(1, 1, 1), (1, 5, 3), (5, 1, 3), (3, 4, 1), (7, 9, 2), (17, 33, 65), (66, 10, 129), (130, 70, 520)];
        for (seed, (m, n, k)) in sizes.into_iter().enumerate() {
            for bits in 0..8 {
                for (alpha, beta) in [(1.0, 1.0), (0.5, -2.0), (1.0, 0.0), (0.0, 1.0)] {
                    let [mat1_t, mat2_t, broadcast] = [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0];
                    check(&Case { m, n, k, alpha, beta, mat1_t, mat2_t, broadcast }, 10 * seed as u64);
                }
            }
        }
    }

    #[test]
    fn empty_sides_give_the_scaled_accumulator_or_nothing() {
        for (m, n, k) in [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)] {
            check(&Case { m, n, k, alpha: 1.5, beta: 0.5, mat1_t: false, mat2_t: true, broadcast: false }, 3);
        }
    }

    #[test]
    fn a_factor_of_zero_does_not_read_its_operand() {
        let nan = cpu(&[f32::NAN; 4], &[2, 2]);
        let one = cpu(&[1.0; 4], &[2, 2]);
        assert_eq!(addmm(&nan, &one, &one, 1.0, 0.0).unwrap().to_vec::<f32>().unwrap(), [2.0; 4]);
        assert_eq!(addmm(&one, &nan, &one, 0.0, 3.0).unwrap().to_vec::<f32>().unwrap(), [3.0; 4]);
        addmm_into(&nan, &nan, &one, &one, 1.0, 0.0).unwrap();
        assert_eq!(nan.to_vec::<f32>().unwrap(), [2.0; 4]);
    }

    #[test]
    fn the_f64_version_agrees_with_the_f32_version() {
        let mut random = Random::new(5);
        let a = Tensor::randn(&[40, 600], DType::F32, Device::Cpu, &mut random).unwrap();
        let b = Tensor::randn(&[30, 600], DType::F32, Device::Cpu, &mut random).unwrap().t().unwrap();
        let acc = Tensor::randn(&[30], DType::F32, Device::Cpu, &mut random).unwrap();
        let [wide_acc, wide_a, wide_b] = [&acc, &a, &b].map(|x| x.to_dtype(DType::F64).unwrap());
        let wide = addmm(&wide_acc, &wide_a, &wide_b, 1.0, 1.0).unwrap().to_vec::<f64>().unwrap();
        let narrow = addmm(&acc, &a, &b, 1.0, 1.0).unwrap().to_vec::<f32>().unwrap();
        // 600 products of standard normals: magnitudes of about 600 · 2/π, at most 600 in practice.
        assert_close(&narrow, &wide, |_, _| bound(600, 600.0));
    }

    #[test]
    fn operands_that_do_not_fit_are_named_with_the_way_out() {
        let x = cpu(&[0.0; 6], &[2, 3]).named("batch");
        let w = cpu(&[0.0; 12], &[4, 3]).named("fc1.weight");
        let bias = cpu(&[0.0; 4], &[4]);
        let error = addmm(&bias, &x, &w, 1.0, 1.0).unwrap_err().to_string();
        assert!(
            error.contains(r#"addmm: mat2 "fc1.weight" f32[4, 3] on cpu: expected 3 rows, as mat1 has columns"#)
                && error.contains("pass it as .t()"),
            "{error}"
        );
        let error = addmm(&cpu(&[0.0; 3], &[3]), &x, &w.t().unwrap(), 1.0, 1.0).unwrap_err().to_string();
        assert!(error.contains("acc f32[3] on cpu: expected shape [2, 4], or one row [4]"), "{error}");
        let error = addmm(&bias, &x.flatten().unwrap(), &w, 1.0, 1.0).unwrap_err().to_string();
        assert!(error.contains("expected 2 dimensions, [rows, inner]"), "{error}");
        let square = cpu(&[0.0; 4], &[2, 2]);
        let error = addmm_into(&square, &square, &square, &square, 1.0, 1.0).unwrap_err().to_string();
        assert!(error.contains("out f32[2, 2] on cpu and mat1 f32[2, 2] on cpu share memory"), "{error}");
        let half = square.to_dtype(DType::BF16).unwrap();
        let error = addmm(&half, &half, &half, 1.0, 1.0).unwrap_err().to_string();
        assert!(error.contains("addmm: there is no version for bf16 on cpu: mat1 bf16[2, 2] on cpu"), "{error}");
    }
}
