//! The functions that the texts of activations and of rules call: the same names in math.cuh. Some
//! are computed by f32 and f64 in different ways.

use crate::math;
use crate::ops::float::Float;

/// `a × b + c`, rounded once.
#[inline(always)]
pub(crate) fn fused<T: Float>(a: T, b: T, c: T) -> T {
    a.fused(b, c)
}

#[inline(always)]
pub(crate) fn root<T: Float>(x: T) -> T {
    x.root()
}

#[inline(always)]
pub(crate) fn select<T>(condition: bool, yes: T, no: T) -> T {
    if condition { yes } else { no }
}

#[inline(always)]
pub(crate) fn number<T: Float>(x: f64) -> T {
    T::from_f64(x)
}

#[inline(always)]
pub(crate) fn exponential<T: Float>(x: T) -> T {
    x.exponential()
}

#[inline(always)]
pub(crate) fn logarithm<T: Float>(x: T) -> T {
    x.logarithm()
}

#[inline(always)]
pub(crate) fn hyperbolic_tangent<T: Float>(x: T) -> T {
    x.tanh()
}

macro_rules! formulas {
    ($($name:ident)*) => {
        /// Functions that f32 and f64 compute in different ways.
        pub(crate) trait Formulas: Float {
            fn silu_and_slope(self) -> (Self, Self);
            $(fn $name(self) -> Self;)*
        }

        formulas! { f32, math: $($name)* }
        formulas! { f64, in_f64: $($name)* }

        $(
            #[inline(always)]
            pub(crate) fn $name<T: Formulas>(x: T) -> T {
                x.$name()
            }
        )*
    };
    ($T:ty, $from:ident: $($name:ident)*) => {
        impl Formulas for $T {
            #[inline(always)]
            fn silu_and_slope(self) -> ($T, $T) {
                $from::silu_and_slope(self)
            }
            $(
                #[inline(always)]
                fn $name(self) -> $T {
                    $from::$name(self)
                }
            )*
        }
    };
}
formulas! { sigmoid silu silu_slope gelu_erf gelu_erf_grad gelu_tanh gelu_tanh_grad }

/// In f64, within a few 2⁻⁵³ of max(|x|, 1): for finite differences.
mod in_f64 {
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

    // From the C math library, which the standard library links on every Unix: Rust has no stable
    // erfc. SAFETY: C's `double erfc(double)`, defined for every argument.
    unsafe extern "C" {
        safe fn erfc(x: f64) -> f64;
    }

    /// Beyond ±40 every formula has reached its limit. Without the bound, ∞ × 0 would give NaN.
    const FAR: f64 = 40.0;

    /// u and its derivative, for |x| <= 40.
    fn tanh_argument(x: f64) -> (f64, f64) {
        let root = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
        (
            root * (x + 0.044715 * x * x * x),
            root * (1.0 + 3.0 * 0.044715 * x * x),
        )
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

    pub(super) fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    pub(super) fn silu(x: f64) -> f64 {
        silu_and_slope(x).0
    }

    pub(super) fn silu_slope(x: f64) -> f64 {
        silu_and_slope(x).1
    }

    pub(super) fn silu_and_slope(x: f64) -> (f64, f64) {
        // At ±750 e^−|x| is 0 already; beyond, ∞ × 0 would give NaN.
        let x = if x < -750.0 { -750.0 } else { x };
        let s = 1.0 / (1.0 + (-x).exp());
        let near = if x > 750.0 { 750.0 } else { x };
        (x * s, s + near * s * (1.0 - s))
    }
}
