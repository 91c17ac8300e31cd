//! gelu: `out = x Φ(x)` (`Erf`, PyTorch's default) or its tanh form (`Tanh`, what GPT-2 was trained with), and their
//! derivatives. In f32 by `math.rs`, so the same bits everywhere; in f64, for checking, by the C math library.
//! NaN stays NaN; −∞ gives −0 where PyTorch gives NaN.

use crate::Tensor;
use crate::cuda::Source;
use crate::error::Result;
use crate::math;
use crate::ops::elementwise::{InPlace, Kernels, binary_op, kernel_names, unary_op};
use crate::ops::loops::{Binary, Unary};

static SOURCE: Source = Source::new("gelu.cu", include_str!("gelu.cu"));
const TANH: Kernels = Kernels { source: &SOURCE, names: kernel_names!("gelu_tanh") };
const TANH_BACKWARD: Kernels = Kernels { source: &SOURCE, names: kernel_names!("gelu_tanh_backward") };
const ERF: Kernels = Kernels { source: &SOURCE, names: kernel_names!("gelu_erf") };
const ERF_BACKWARD: Kernels = Kernels { source: &SOURCE, names: kernel_names!("gelu_erf_backward") };

/// Which formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³). f32 is off by at most 4ε max(|x|, 1), ε = 2⁻²⁴; its
    /// derivative by 8ε.
    Tanh,
    /// x Φ(x), Φ being the normal distribution. f32 is off by at most 4ε max(|x|, 1); its derivative by 6ε.
    Erf,
}

/// gelu of one element in its tanh form.
#[derive(Clone, Copy)]
pub(crate) struct GeluTanh;

/// The derivative of the tanh form at `x`, times `dy`: `apply(dy, x)`.
#[derive(Clone, Copy)]
pub(crate) struct GeluTanhGrad;

/// gelu of one element, proper.
#[derive(Clone, Copy)]
pub(crate) struct GeluErf;

/// The derivative of gelu proper at `x`, times `dy`: `apply(dy, x)`.
#[derive(Clone, Copy)]
pub(crate) struct GeluErfGrad;

macro_rules! gelu_for {
    ($($T:ty, $in:path;)*) => {$(
        impl Unary<$T> for GeluTanh {
            const WAITS_FOR_MEMORY: bool = false;
            #[inline(always)]
            fn apply(self, x: $T) -> $T {
                use $in as formulas;
                formulas::gelu_tanh(x)
            }
        }
        impl Binary<$T> for GeluTanhGrad {
            const WAITS_FOR_MEMORY: bool = false;
            #[inline(always)]
            fn apply(self, dy: $T, x: $T) -> $T {
                use $in as formulas;
                dy * formulas::gelu_tanh_grad(x)
            }
        }
        impl Unary<$T> for GeluErf {
            const WAITS_FOR_MEMORY: bool = false;
            #[inline(always)]
            fn apply(self, x: $T) -> $T {
                use $in as formulas;
                formulas::gelu_erf(x)
            }
        }
        impl Binary<$T> for GeluErfGrad {
            const WAITS_FOR_MEMORY: bool = false;
            #[inline(always)]
            fn apply(self, dy: $T, x: $T) -> $T {
                use $in as formulas;
                dy * formulas::gelu_erf_grad(x)
            }
        }
    )*};
}
gelu_for! {
    f32, math;
    f64, in_f64;
}

/// The four formulas in f64, within some units of 2⁻⁵³ of max(|x|, 1): what finite differences are taken of.
mod in_f64 {
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

    // The C math library, which the standard library links already on every Unix; Rust itself has no stable erfc.
    // SAFETY: C's `double erfc(double)`, defined for every argument.
    unsafe extern "C" {
        safe fn erfc(x: f64) -> f64;
    }

    /// Beyond ±40 every formula has reached its limit; without the bound infinity would meet 0.
    const FAR: f64 = 40.0;

    /// u and its derivative, for |x| <= 40.
    fn tanh_argument(x: f64) -> (f64, f64) {
        let root = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
        (root * (x + 0.044715 * x * x * x), root * (1.0 + 3.0 * 0.044715 * x * x))
    }

    pub(super) fn gelu_tanh(x: f64) -> f64 {
        let (u, _) = tanh_argument(x.clamp(-FAR, FAR));
        // Not x itself below −40: −∞ × 0.
        let x = if x < -FAR { -FAR } else { x };
        0.5 * x * (1.0 + u.tanh())
    }

    pub(super) fn gelu_tanh_grad(x: f64) -> f64 {
        let x = x.clamp(-FAR, FAR);
        let (u, slope) = tanh_argument(x);
        let tanh = u.tanh();
        0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope
    }

    pub(super) fn gelu_erf(x: f64) -> f64 {
        let x = if x < -FAR { -FAR } else { x };
        0.5 * x * erfc(-x * FRAC_1_SQRT_2)
    }

    pub(super) fn gelu_erf_grad(x: f64) -> f64 {
        let x = x.clamp(-FAR, FAR);
        let density = 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (-0.5 * x * x).exp();
        0.5 * erfc(-x * FRAC_1_SQRT_2) + x * density
    }
}

/// gelu of `x` in a new tensor.
#[track_caller]
pub fn gelu(x: &Tensor, kind: Gelu) -> Result<Tensor> {
    let out = x.empty_like()?;
    gelu_into(&out, x, kind)?;
    Ok(out)
}

/// `out = gelu(x)`; `out` may be `x` itself.
#[track_caller]
pub fn gelu_into(out: &Tensor, x: &Tensor, kind: Gelu) -> Result<()> {
    match kind {
        Gelu::Tanh => unary_op("gelu", out, x, GeluTanh, &TANH, None),
        Gelu::Erf => unary_op("gelu", out, x, GeluErf, &ERF, None),
    }
}

/// `dx = dy · gelu′(x)`; `x` is gelu's input, `dx` may be `dy` itself.
#[track_caller]
pub fn gelu_backward_into(dx: &Tensor, dy: &Tensor, x: &Tensor, kind: Gelu) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("x", x)];
    match kind {
        Gelu::Tanh => binary_op("gelu_backward", operands, InPlace::First, GeluTanhGrad, &TANH_BACKWARD),
        Gelu::Erf => binary_op("gelu_backward", operands, InPlace::First, GeluErfGrad, &ERF_BACKWARD),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};

    const KINDS: [Gelu; 2] = [Gelu::Tanh, Gelu::Erf];
    /// 2⁻²⁴, the ε of `math.rs`.
    const EPSILON: f64 = 1.0 / (1 << 24) as f64;

    fn widened(values: &[f32]) -> Vec<f64> {
        values.iter().map(|&value| f64::from(value)).collect()
    }

    #[test]
    fn gelu_and_its_derivative_are_within_their_bounds_for_every_size_apart_and_in_place() {
        for (size, kind) in SIZES.into_iter().flat_map(|size| KINDS.map(|kind| (size, kind))) {
            let x: Vec<f32> = random_f32(size, 11).iter().map(|x| 3.0 * x).collect();
            let dy = random_f32(size, 12);
            let (x32, dy32) = (cpu(&x, &[size]), cpu(&dy, &[size]));
            let (x64, dy64) = (cpu_of(&widened(&x), &[size]), cpu_of(&widened(&dy), &[size]));

            let out = gelu(&x32, kind).unwrap().to_vec::<f32>().unwrap();
            let reference = gelu(&x64, kind).unwrap().to_vec::<f64>().unwrap();
            // The bound that the enum's comments state; math.rs derives it.
            assert_close(&out, &reference, |index, _| 4.0 * EPSILON * f64::from(x[index].abs().max(1.0)));

            gelu_backward_into(&dy64, &dy64, &x64, kind).unwrap();
            let dx32 = dy32.empty_like().unwrap();
            gelu_backward_into(&dx32, &dy32, &x32, kind).unwrap();
            let dx = dx32.to_vec::<f32>().unwrap();
            // The derivative is off by at most 8ε and below 1.2; the product with dy rounds once more.
            assert_close(&dx, &dy64.to_vec::<f64>().unwrap(), |index, _| {
                (8.0 + 1.2) * EPSILON * f64::from(dy[index].abs())
            });

            gelu_backward_into(&dy32, &dy32, &x32, kind).unwrap();
            assert_eq!(dy32.to_vec::<f32>().unwrap(), dx);
            gelu_into(&x32, &x32, kind).unwrap();
            assert_eq!(x32.to_vec::<f32>().unwrap(), out);
        }
    }

    #[test]
    fn the_f64_version_agrees_with_pytorch_and_its_derivative_with_finite_differences() {
        // torch 2.11, float64: F.gelu(torch.tensor([-6, -1, -0.25, 0.5, 3]), approximate=…)
        let x = [-6.0, -1.0, -0.25, 0.5, 3.0];
        let known = [
            (
                Gelu::Tanh,
                [
                    -8.43964897967453e-11,
                    -0.15880800939172324,
                    -0.100324649298315,
                    0.34571400982514394,
                    2.996362607918227,
                ],
            ),
            (
                Gelu::Erf,
                [
                    -5.919525869479969e-09,
                    -0.15865525393145702,
                    -0.10032341857926907,
                    0.34573123063700656,
                    2.99595030590511,
                ],
            ),
        ];
        for (kind, known) in known {
            let at = |shift: f64| {
                let x: Vec<f64> = x.iter().map(|x| x + shift).collect();
                gelu(&cpu_of(&x, &[5]), kind).unwrap().to_vec::<f64>().unwrap()
            };
            for (got, known) in at(0.0).iter().zip(known) {
                // PyTorch's f64 cancels in 1 + tanh and 1 + erf: some 2⁻⁵³ of |x| <= 6.
                assert!((got - known).abs() < 6.0 * f64::EPSILON, "{kind:?}: {got:e} is not {known:e}");
            }
            let dx = cpu_of(&[1.0f64; 5], &[5]);
            gelu_backward_into(&dx, &dx, &cpu_of(&x, &[5]), kind).unwrap();
            const STEP: f64 = 1e-5;
            for ((dx, above), below) in dx.to_vec::<f64>().unwrap().iter().zip(at(STEP)).zip(at(-STEP)) {
                // The central difference leaves h²/6 |f‴| < 1e-10 and rounding 6 · 2⁻⁵³ / h < 1e-10.
                let slope = (above - below) / (2.0 * STEP);
                assert!((dx - slope).abs() < 2e-10, "{kind:?}: {dx} is not {slope}");
            }
        }
    }

    #[test]
    fn infinities_give_limits_and_nan_stays_nan() {
        let edges = [f64::NEG_INFINITY, -1e30, 0.0, 1e30, f64::INFINITY, f64::NAN];
        let edges32 = edges.map(|edge| edge as f32);
        for kind in KINDS {
            let out = gelu(&cpu_of(&edges, &[6]), kind).unwrap().to_vec::<f64>().unwrap();
            let out32 = gelu(&cpu(&edges32, &[6]), kind).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(
                (&out[..5], &out32[..5]),
                (&[0.0, 0.0, 0.0, 1e30, f64::INFINITY][..], &[0.0, 0.0, 0.0, 1e30, f32::INFINITY][..])
            );
            let (dx, dx32) = (cpu_of(&[1.0f64; 6], &[6]), cpu(&[1.0; 6], &[6]));
            gelu_backward_into(&dx, &dx, &cpu_of(&edges, &[6]), kind).unwrap();
            gelu_backward_into(&dx32, &dx32, &cpu(&edges32, &[6]), kind).unwrap();
            let (dx, dx32) = (dx.to_vec::<f64>().unwrap(), dx32.to_vec::<f32>().unwrap());
            assert_eq!((&dx[..5], &dx32[..5]), (&[0.0, 0.0, 0.5, 1.0, 1.0][..], &[0.0, 0.0, 0.5, 1.0, 1.0][..]));
            assert!(out[5].is_nan() && out32[5].is_nan() && dx[5].is_nan() && dx32[5].is_nan());
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let (x, out) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]));
        let error = gelu_into(&out, &x, Gelu::Erf).unwrap_err().to_string();
        assert!(error.contains("gelu: x f32[2] on cpu: expected shape [3], as out has"), "{error}");
        let error = gelu(&x.to_dtype(DType::F16).unwrap(), Gelu::Tanh).unwrap_err().to_string();
        assert!(error.contains("there is no version for f16 on cpu"), "{error}");
        let error = gelu_backward_into(&x, &cpu(&[0.0; 2], &[2]), &x, Gelu::Erf).unwrap_err().to_string();
        assert!(error.contains("gelu_backward: dx f32[2] on cpu and x f32[2] on cpu share memory"), "{error}");
    }
}
