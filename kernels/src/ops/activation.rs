//! relu, relu² and gelu, and their derivatives: functions that a linear layer can apply to its
//! sums, and operations of their own. NaN stays NaN.
//!
//! gelu is `x Φ(x)` (`Erf`, PyTorch's default) or its tanh form (`Tanh`, as in GPT-2). f32 uses
//! `math.rs`, with the same bits everywhere; f64, for checks, uses the C math library. −∞ gives −0
//! where PyTorch gives NaN.

//!
//! swiglu is `out = silu(gate) · up`, where one matmul made gate and up side by side: each row of x
//! is a row of gate and then one of up. silu(z) is z / (1 + e⁻ᶻ). Letters: R rows, H columns of the
//! result.

use crate::error::Result;
use crate::launch::{Grid, Launcher, Source, args};
use crate::ops::call::{Buffer, Call, FLOATS_AND_BF16, Slot, with_float};
use crate::ops::elementwise::{Binary, Unary, binary_op, of_elements, unary_op};
use crate::ops::float::Float;
use crate::simd::multiversion;
use crate::threads::{self, Shares};
use crate::{Tensor, math};

static ACTIVATION: Source = Source::new("activation.cu", include_str!("activation.cu"));

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
    unary_op("relu", out, x, Relu, (&ACTIVATION, "relu"), None)
}

/// `dx = dy` where `y > 0`, else 0; `y` is relu's input or output, `dx` may be `dy`.
#[track_caller]
pub fn relu_backward_into(dx: &Tensor, dy: &Tensor, y: &Tensor) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("y", y)];
    let kernel = (&ACTIVATION, "relu_backward");
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
    let kernel = (&ACTIVATION, "relu_squared");
    unary_op("relu_squared", out, x, ReluSquared, kernel, None)
}

/// `dx = dy · 2 max(x, 0)`; `x` is the input of relu², `dx` may be `dy`.
#[track_caller]
pub fn relu_squared_backward_into(dx: &Tensor, dy: &Tensor, x: &Tensor) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("x", x)];
    let kernel = (&ACTIVATION, "relu_squared_backward");
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
    let kernel = |name| (&ACTIVATION, name);
    match kind {
        Gelu::Tanh => unary_op("gelu", out, x, GeluTanh, kernel("gelu_tanh"), None),
        Gelu::Erf => unary_op("gelu", out, x, GeluErf, kernel("gelu_erf"), None),
    }
}

/// `dx = dy · gelu′(x)`; `x` is gelu's input, `dx` may be `dy`.
#[track_caller]
pub fn gelu_backward_into(dx: &Tensor, dy: &Tensor, x: &Tensor, kind: Gelu) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("x", x)];
    let (op, kernel) = ("gelu_backward", |name| (&ACTIVATION, name));
    match kind {
        Gelu::Tanh => binary_op(op, operands, GeluTanh, kernel("gelu_tanh_backward"), None),
        Gelu::Erf => binary_op(op, operands, GeluErf, kernel("gelu_erf_backward"), None),
    }
}

static SWIGLU: Source = Source::new("swiglu.cu", include_str!("swiglu.cu"));

/// A type whose silu is known.
trait Silu: Float {
    /// silu and its derivative.
    fn silu(self) -> (Self, Self);
}

impl Silu for f32 {
    #[inline(always)]
    fn silu(self) -> (f32, f32) {
        math::silu(self)
    }
}

impl Silu for f64 {
    fn silu(self) -> (f64, f64) {
        // Beyond these e⁻ᶻ would overflow, or ∞ × 0 give NaN.
        let x = if self < -700.0 { -700.0 } else { self };
        let s = 1.0 / (1.0 + (-x).exp());
        let slope = if x > 700.0 {
            1.0
        } else {
            s + x * s * (1.0 - s)
        };
        (x * s, slope)
    }
}

/// `out = silu(gate) · up`: `x` (R, 2 H), gate and then up in each row; `out` (R, H).
#[track_caller]
pub fn swiglu_into(out: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = Call::new("swiglu");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let columns = check_halves(&call, out, x)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.launcher() {
            return launch_swiglu(
                &gpu,
                "swiglu",
                &out,
                columns,
                args![out, x, out.count, columns],
            );
        }
        with_float!(placed.dtype, T => {
            let x = x.elements::<T>();
            threads::split_mut(out.elements_mut::<T>(), columns.max(1), |first, out| {
                swiglu_run(out, &x[2 * first..][..2 * out.len()], columns);
            });
        });
        Ok(())
    })
}

/// The gradients of gate and up, side by side in `dx` (R, 2 H), from `dout` (R, H) and forward's
/// `x` (R, 2 H); `dx` may be `x`.
#[track_caller]
pub fn swiglu_backward_into(dx: &Tensor, dout: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = Call::new("swiglu_backward");
    let dx = call.writes("dx", dx);
    let dout = call.reads("dout", dout);
    let x = call.reads("x", x);
    call.may_be_in_place(x, dx);
    call.elementwise(&[x, dx])?;
    let columns = check_halves(&call, dout, x)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut dx, dout, x] = placed.enter([dx, dout, x])?;
        if let Some(gpu) = placed.launcher() {
            let args = args![dx, dout, x, dout.count, columns];
            return launch_swiglu(&gpu, "swiglu_backward", &dout, columns, args);
        }
        with_float!(placed.dtype, T => {
            let (dout, x) = (dout.elements::<T>(), x.unless_in_place::<T>());
            let dx = Shares::new(dx.elements_mut::<T>());
            threads::split(dout.len(), columns.max(1), |range| {
                let pair = 2 * range.start..2 * range.end;
                // SAFETY: `split` hands out ranges of whole rows that do not overlap.
                let dx = unsafe { dx.part(pair.clone()) };
                if let Some(x) = x {
                    dx.copy_from_slice(&x[pair]);
                }
                swiglu_backward_run(dx, &dout[range], columns);
            });
        });
        Ok(())
    })
}

/// Checks `half` (R, H) and `x` (R, 2 H). Gives H.
fn check_halves(call: &Call<'_>, half: Slot, x: Slot) -> Result<usize> {
    let [rows, columns] = call.dims::<2>(half, "[rows, columns]")?;
    let meaning = "gate and up side by side in each row";
    call.has_shape(x, &[rows, 2 * columns], meaning)?;
    call.same_dtype(x, half)?;
    call.all_row_major()?;
    Ok(columns)
}

/// A kernel with a thread for 16 bytes of `half`, or for an element where rows cannot be so cut.
fn launch_swiglu(
    gpu: &Launcher,
    name: &'static str,
    half: &Buffer<'_>,
    columns: usize,
    args: &[u64],
) -> Result<()> {
    let grid = match columns.is_multiple_of(4) {
        true => Grid::elements(half.count / 4),
        false => Grid::elements(half.count),
    };
    gpu.launch(&SWIGLU, (name, half.dtype), grid, args)
}

multiversion! {
    fn swiglu_run[T: Silu](out: &mut [T], x: &[T], columns: usize) {
        for (out, x) in out.chunks_exact_mut(columns.max(1)).zip(x.chunks_exact(2 * columns.max(1))) {
            let (gate, up) = x.split_at(columns);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate.silu().0 * up;
            }
        }
    }
}

multiversion! {
    /// `dx` holds x.
    fn swiglu_backward_run[T: Silu](dx: &mut [T], dout: &[T], columns: usize) {
        let rows = dx.chunks_exact_mut(2 * columns.max(1));
        for (dx, dout) in rows.zip(dout.chunks_exact(columns.max(1))) {
            let (gate, up) = dx.split_at_mut(columns);
            for ((gate, up), &dout) in gate.iter_mut().zip(up).zip(dout) {
                let (silu, slope) = gate.silu();
                *gate = dout * *up * slope;
                *up = dout * silu;
            }
        }
    }
}

#[cfg(test)]
mod tests;
