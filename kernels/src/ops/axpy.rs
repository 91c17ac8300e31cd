//! axpy: `y += a x`, each element by one fused multiply-add, so one rounding. `a` is rounded first to the type
//! of the math: f32, or f64 for f64.

use crate::cuda::Source;
use crate::error::Result;
use crate::ops::call::{Call, HALVES, WIDE};
use crate::ops::elementwise::{grid_of_packs, kernel_for, kernel_names};
use crate::ops::float::Float;
use crate::ops::loops::GRAIN;
use crate::simd::multiversion;
use crate::threads;
use crate::{DType, Tensor};

static SOURCE: Source = Source::new("axpy.cu", include_str!("axpy.cu"));

/// `y += a x`. `x` may not be `y`: that is `scale_into(y, y, 1.0 + a)`. On a GPU `y` may be f32 where `x` is bf16 or f16, to add up
/// what those would lose.
#[track_caller]
pub fn axpy(y: &Tensor, a: f64, x: &Tensor) -> Result<()> {
    let mut call = Call::new("axpy");
    let y = call.writes("y", y);
    let x = call.reads("x", x);
    call.same_shape(x, y)?;
    call.all_row_major()?;
    if call.tensor(y).dtype() != DType::F32 || !HALVES.contains(&call.tensor(x).dtype()) {
        call.same_dtype(x, y)?;
    }
    let placed = call.place(x, &WIDE)?;
    let (dtype, count) = (placed.tensor(y).dtype(), placed.tensor(y).count());
    {
        let [mut lent_y, lent_x] = placed.enter([y, x])?;
        match placed.launcher()? {
            Some(_) if count == 0 => {}
            Some(gpu) => {
                let name = match placed.tensor(x).dtype() {
                    DType::BF16 if dtype == DType::F32 => "axpy_bf16_to_f32",
                    DType::F16 if dtype == DType::F32 => "axpy_f16_to_f32",
                    _ => kernel_for(kernel_names!("axpy"), dtype),
                };
                let kernel = gpu.kernel(&SOURCE, name)?;
                let kernel = kernel.output(&lent_y).reads(&lent_x).count(count).f32(a as f32);
                kernel.launch(grid_of_packs(count, dtype))?;
            }
            None if dtype == DType::F32 => update(lent_y.elements_mut(), a as f32, lent_x.elements()),
            None => update(lent_y.elements_mut(), a, lent_x.elements()),
        }
    }
    placed.finish()
}

fn update<T: Float>(y: &mut [T], a: T, x: &[T]) {
    threads::split_mut(y, GRAIN, |first, y| update_part(y, a, &x[first..first + y.len()]));
}

multiversion! {
    fn update_part[T: Float](y: &mut [T], a: T, x: &[T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = a.fused(x, *y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

    #[test]
    fn every_element_is_rounded_once_for_every_size() {
        for size in SIZES {
            let (y, x) = (random_f32(size, 51), random_f32(size, 52));
            let expected: Vec<f32> = y.iter().zip(&x).map(|(y, x)| (-0.3f32).mul_add(*x, *y)).collect();
            let y = cpu(&y, &[size]);
            axpy(&y, -0.3, &cpu(&x, &[size])).unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), expected);
        }
    }

    #[test]
    fn f64_is_computed_in_f64() {
        let y = cpu_of(&[1.0f64, -2.0], &[2]);
        axpy(&y, 0.1, &cpu_of(&[3.0, 0.7], &[2])).unwrap();
        assert_eq!(y.to_vec::<f64>().unwrap(), [0.1f64.mul_add(3.0, 1.0), 0.1f64.mul_add(0.7, -2.0)]);
    }

    #[test]
    fn operands_that_do_not_fit_or_overlap_are_named() {
        let y = cpu(&[1.0, 2.0], &[2]);
        let error = axpy(&y, 1.0, &cpu(&[0.0; 3], &[3])).unwrap_err().to_string();
        assert!(error.contains("axpy: x f32[3] on cpu: expected shape [2], as y has"), "{error}");
        let error = axpy(&y, 1.0, &cpu_of(&[0i32; 2], &[2])).unwrap_err().to_string();
        assert!(error.contains("axpy: x i32[2] on cpu: expected dtype f32, as y has"), "{error}");
        let error = axpy(&y, 1.0, &y).unwrap_err().to_string();
        assert!(error.contains("axpy: y f32[2] on cpu and x f32[2] on cpu share memory"), "{error}");
    }
}
