//! relu, relu² and gelu, and their derivatives: functions that a linear layer can apply to its
//! sums, and operations of their own. NaN stays NaN.
//!
//! gelu is `x Φ(x)` (`Erf`, PyTorch's default) or its tanh form (`Tanh`, as in GPT-2). f32 uses
//! `math.rs`, with the same bits everywhere; f64, for checks, uses the C math library. −∞ gives −0
//! where PyTorch gives NaN.

use crate::error::Result;
use crate::launch::Source;
use crate::ops::elementwise::{binary_op, unary_op};
use crate::ops::loops::{Binary, Unary, of_elements};
use crate::{Tensor, math};

static SOURCE: Source = Source::new("activation.cu", include_str!("activation.cu"));

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

// Not max(): that would turn NaN into 0.
of_elements! {
    /// relu, and its derivative (0 at 0, as in PyTorch) times `dy`, from relu's input or output.
    pub(crate) Relu(): (x) => if x < T::ZERO { T::ZERO } else { x },
        (dy, y) => if y > T::ZERO { dy } else { T::ZERO };
    /// relu² of one element, and its derivative at x times `dy`.
    ReluSquared(): (x) => if x < T::ZERO { T::ZERO } else { x * x },
        (dy, x) => if x <= T::ZERO { T::ZERO } else { dy * (x + x) };
}

/// Which formula of gelu.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³). f32 is off by at most 4ε max(|x|, 1),
    /// ε = 2⁻²⁴; its derivative by 8ε.
    Tanh,
    /// x Φ(x), Φ being the normal distribution. f32 is off by at most 4ε max(|x|, 1); its
    /// derivative by 6ε.
    Erf,
}

/// gelu of one element in its tanh form, and its derivative times `dy`.
#[derive(Clone, Copy)]
pub(crate) struct GeluTanh;

/// gelu of one element in its exact form, and its derivative times `dy`.
#[derive(Clone, Copy)]
pub(crate) struct GeluErf;

macro_rules! formula {
    ($Form:ident, $T:ty, $value:path, $slope:path) => {
        impl Unary<$T> for $Form {
            const MEMORY_BOUND: bool = false;
            #[inline(always)]
            fn apply(self, x: $T) -> $T {
                $value(x)
            }
        }
        impl Binary<$T> for $Form {
            const MEMORY_BOUND: bool = false;
            #[inline(always)]
            fn apply(self, dy: $T, x: $T) -> $T {
                dy * $slope(x)
            }
        }
    };
}
formula!(GeluTanh, f32, math::gelu_tanh, math::gelu_tanh_grad);
formula!(GeluTanh, f64, in_f64::gelu_tanh, in_f64::gelu_tanh_grad);
formula!(GeluErf, f32, math::gelu_erf, math::gelu_erf_grad);
formula!(GeluErf, f64, in_f64::gelu_erf, in_f64::gelu_erf_grad);

/// The four formulas in f64, within a few 2⁻⁵³ of max(|x|, 1): for finite differences.
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
}

/// relu of `x` in a new tensor.
#[track_caller]
pub fn relu(x: &Tensor) -> Result<Tensor> {
    let out = x.empty_like()?;
    relu_into(&out, x)?;
    Ok(out)
}

/// `out = relu(x)`; `out` may be `x`.
#[track_caller]
pub fn relu_into(out: &Tensor, x: &Tensor) -> Result<()> {
    unary_op("relu", out, x, Relu, (&SOURCE, "relu"), None)
}

/// `dx = dy` where `y > 0`, else 0; `y` is relu's input or output, `dx` may be `dy`.
#[track_caller]
pub fn relu_backward_into(dx: &Tensor, dy: &Tensor, y: &Tensor) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("y", y)];
    let kernel = (&SOURCE, "relu_backward");
    binary_op("relu_backward", operands, Relu, kernel, None)
}

/// relu² of `x` in a new tensor.
#[track_caller]
pub fn relu_squared(x: &Tensor) -> Result<Tensor> {
    let out = x.empty_like()?;
    relu_squared_into(&out, x)?;
    Ok(out)
}

/// `out = max(x, 0)²`; `out` may be `x`.
#[track_caller]
pub fn relu_squared_into(out: &Tensor, x: &Tensor) -> Result<()> {
    let kernel = (&SOURCE, "relu_squared");
    unary_op("relu_squared", out, x, ReluSquared, kernel, None)
}

/// `dx = dy · 2 max(x, 0)`; `x` is the input of relu², `dx` may be `dy`.
#[track_caller]
pub fn relu_squared_backward_into(dx: &Tensor, dy: &Tensor, x: &Tensor) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("x", x)];
    let kernel = (&SOURCE, "relu_squared_backward");
    binary_op("relu_squared_backward", operands, ReluSquared, kernel, None)
}

/// gelu of `x` in a new tensor.
#[track_caller]
pub fn gelu(x: &Tensor, kind: Gelu) -> Result<Tensor> {
    let out = x.empty_like()?;
    gelu_into(&out, x, kind)?;
    Ok(out)
}

/// `out = gelu(x)`; `out` may be `x`.
#[track_caller]
pub fn gelu_into(out: &Tensor, x: &Tensor, kind: Gelu) -> Result<()> {
    let kernel = |name| (&SOURCE, name);
    match kind {
        Gelu::Tanh => unary_op("gelu", out, x, GeluTanh, kernel("gelu_tanh"), None),
        Gelu::Erf => unary_op("gelu", out, x, GeluErf, kernel("gelu_erf"), None),
    }
}

/// `dx = dy · gelu′(x)`; `x` is gelu's input, `dx` may be `dy`.
#[track_caller]
pub fn gelu_backward_into(dx: &Tensor, dy: &Tensor, x: &Tensor, kind: Gelu) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("x", x)];
    let (op, kernel) = ("gelu_backward", |name| (&SOURCE, name));
    match kind {
        Gelu::Tanh => binary_op(op, operands, GeluTanh, kernel("gelu_tanh_backward"), None),
        Gelu::Erf => binary_op(op, operands, GeluErf, kernel("gelu_erf_backward"), None),
    }
}

#[cfg(test)]
mod tests;
