//! mul: `out = a b`, element by element.

use crate::Tensor;
use crate::cuda::Source;
use crate::error::Result;
use crate::ops::add::empty_where_they_meet;
use crate::ops::elementwise::{InPlace, Kernels, binary_op, kernel_names};
use crate::ops::loops::Binary;

static SOURCE: Source = Source::new("mul.cu", include_str!("mul.cu"));
const KERNELS: Kernels = Kernels { source: &SOURCE, names: kernel_names!("mul") };

/// The product of two elements.
#[derive(Clone, Copy)]
pub(crate) struct Mul;

impl<T: std::ops::Mul<Output = T>> Binary<T> for Mul {
    #[inline(always)]
    fn apply(self, a: T, b: T) -> T {
        a * b
    }
}

/// `a b`, element by element, in a new tensor, on the device where the two meet under the transfer policy in force.
#[track_caller]
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = empty_where_they_meet("mul", a, b)?;
    mul_into(&out, a, b)?;
    Ok(out)
}

/// `out = a b`, element by element; `out` may be `a` itself, or `b`, or both.
#[track_caller]
pub fn mul_into(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    binary_op("mul", [("out", out), ("a", a), ("b", b)], InPlace::Either, Mul, &KERNELS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

    #[test]
    fn products_are_exact_for_every_size_apart_and_in_place() {
        for size in SIZES {
            let (a, b) = (random_f32(size, 31), random_f32(size, 32));
            let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a * b).collect();
            let squares: Vec<f32> = expected.iter().map(|product| product * product).collect();
            let (a, b) = (cpu(&a, &[size]), cpu(&b, &[size]));
            assert_eq!(mul(&a, &b).unwrap().to_vec::<f32>().unwrap(), expected);
            mul_into(&b, &a, &b).unwrap();
            assert_eq!(b.to_vec::<f32>().unwrap(), expected);
            mul_into(&b, &b, &b).unwrap();
            assert_eq!(b.to_vec::<f32>().unwrap(), squares);
        }
    }

    #[test]
    fn f64_is_multiplied_in_f64_and_infinity_times_zero_is_nan() {
        let product = mul(&cpu_of(&[0.1f64, f64::INFINITY], &[2]), &cpu_of(&[0.2, 0.0], &[2])).unwrap();
        let product = product.to_vec::<f64>().unwrap();
        assert!(product[0] == 0.1 * 0.2 && product[1].is_nan());
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let (a, b) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]));
        let error = mul(&a, &b).unwrap_err().to_string();
        assert!(error.contains("mul: b f32[3] on cpu: expected shape [2], as a has"), "{error}");
        let whole_numbers = cpu_of(&[1i64, 2], &[2]);
        let error = mul(&whole_numbers, &whole_numbers).unwrap_err().to_string();
        assert!(error.contains("mul: there is no version for i64 on cpu"), "{error}");
    }
}
