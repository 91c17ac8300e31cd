//! add: `out = a + b`, element by element.

use std::panic::Location;

use crate::cuda::Source;
use crate::error::{Error, Result};
use crate::ops::elementwise::{InPlace, Kernels, binary_op, kernel_names};
use crate::ops::loops::Binary;
use crate::{Tensor, transfer};

static SOURCE: Source = Source::new("add.cu", include_str!("add.cu"));
const KERNELS: Kernels = Kernels { source: &SOURCE, names: kernel_names!("add") };

/// The sum of two elements.
#[derive(Clone, Copy)]
pub(crate) struct Add;

impl<T: std::ops::Add<Output = T>> Binary<T> for Add {
    #[inline(always)]
    fn apply(self, a: T, b: T) -> T {
        a + b
    }
}

/// `a + b` in a new tensor, on the device where the two meet under the transfer policy in force.
#[track_caller]
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = empty_where_they_meet("add", a, b)?;
    add_into(&out, a, b)?;
    Ok(out)
}

/// `out = a + b`; `out` may be `a` itself, or `b`, or both.
#[track_caller]
pub fn add_into(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    binary_op("add", [("out", out), ("a", a), ("b", b)], InPlace::Either, Add, &KERNELS)
}

/// Room for the result of an elementwise operation on two tensors, or the error that says why they cannot meet.
#[track_caller]
pub(super) fn empty_where_they_meet(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let at = Location::caller();
    let device = transfer::meeting_place(op, &[("a", a), ("b", b)], at)?;
    let refuse = |expected: String, hint: &str| {
        Err(Error::Operand { op, operand: Box::new(b.as_operand("b")), expected, hint: hint.to_string(), at })
    };
    if a.shape() != b.shape() {
        let hint =
            "Shapes are not broadcast: slice or reshape one of them; a row is added to all rows by addmm or linear.";
        return refuse(format!("shape {}, as a has", a.shape()), hint);
    }
    if a.dtype() != b.dtype() {
        return refuse(format!("dtype {}, as a has", a.dtype()), "Cast one of them with .to_dtype(…).");
    }
    Tensor::empty(a.shape(), a.dtype(), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

    #[test]
    fn sums_are_exact_for_every_size_apart_and_in_place() {
        for size in SIZES {
            let (a, b) = (random_f32(size, 21), random_f32(size, 22));
            let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            let twice: Vec<f32> = expected.iter().map(|sum| sum + sum).collect();
            let (a, b) = (cpu(&a, &[size]), cpu(&b, &[size]));
            assert_eq!(add(&a, &b).unwrap().to_vec::<f32>().unwrap(), expected);
            let in_place_of_b = b.empty_like().unwrap();
            in_place_of_b.copy_from(&b).unwrap();
            add_into(&in_place_of_b, &a, &in_place_of_b).unwrap();
            assert_eq!(in_place_of_b.to_vec::<f32>().unwrap(), expected);
            add_into(&a, &a, &b).unwrap();
            assert_eq!(a.to_vec::<f32>().unwrap(), expected);
            add_into(&a, &a, &a).unwrap();
            assert_eq!(a.to_vec::<f32>().unwrap(), twice);
        }
    }

    #[test]
    fn f64_is_added_in_f64() {
        let sum = add(&cpu_of(&[1.0f64, 0.1], &[2]), &cpu_of(&[f64::EPSILON, 0.2], &[2])).unwrap();
        assert_eq!(sum.to_vec::<f64>().unwrap(), [1.0 + f64::EPSILON, 0.1 + 0.2]);
    }

    #[test]
    fn operands_that_do_not_fit_are_named_with_the_callers_line() {
        let (a, b) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]).named("bias"));
        let line = line!() + 1;
        let error = add(&a, &b).unwrap_err().to_string();
        assert!(error.contains(r#"add: b "bias" f32[3] on cpu: expected shape [2], as a has"#), "{error}");
        assert!(error.contains(&format!("add.rs:{line}")), "{error}");
        let error = add(&a, &cpu_of(&[1.0f64; 2], &[2])).unwrap_err().to_string();
        assert!(error.contains("add: b f64[2] on cpu: expected dtype f32, as a has"), "{error}");
        let whole = cpu(&[1.0, 2.0, 3.0], &[3]);
        let error = add_into(&whole.slice(0..2).unwrap(), &a, &whole.slice(1..3).unwrap()).unwrap_err().to_string();
        assert!(error.contains("add: out f32[2] on cpu and b f32[2] on cpu share memory"), "{error}");
    }
}
