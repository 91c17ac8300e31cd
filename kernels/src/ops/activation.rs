//! Activations: functions that a linear layer can apply to its sums, also as separate operations.
//! NaN stays NaN.
//!
//! f32 uses `math.rs`, with the same bits everywhere; f64, for checks, uses the C math library. −∞
//! gives −0 in gelu and silu, where PyTorch gives NaN.
//!
//! An activation is an entry of `activations!`. Its value and its gradient are texts that are Rust
//! as well as CUDA, written in the functions of formulas.rs; activations.cuh has them for kernels,
//! and a test writes that file. Flags, methods, chains, epilogues and tests follow from the list.
//!
//! swiglu is `out = silu(gate) · up`, where one matmul made gate and up side by side: each row of x
//! is a row of gate and then one of up. silu(z) is z / (1 + e⁻ᶻ). Letters: R rows, H columns of the
//! result.

use crate::error::Result;
use crate::launch::{CuFile, GpuLaunch, Grid, KernelArgument, args};
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, Slot};
use crate::ops::elementwise::{Binary, Unary, binary_op, unary_op};
use crate::ops::formulas::{
    Formulas, gelu_erf, gelu_erf_grad, gelu_tanh, gelu_tanh_grad, number, select, silu, silu_slope,
};
use crate::ops::stored::{Stored, with_stored};
use crate::setting::Choice;
use crate::simd::multiversion;
use crate::threads::{self, Shares};
use crate::{Tensor, choices};

pub(super) static ACTIVATION: CuFile = CuFile::new("activation.cu", include_str!("activation.cu"));

/// Properties of an activation.
pub struct AboutActivation {
    /// Its module in PyTorch, if there is one.
    pub pytorch: Option<&'static str>,
    /// Whether its gradient is computed from its input; else from its output.
    keeps_input: bool,
    /// Whether memory is the bottleneck, not arithmetic.
    memory_bound: bool,
    /// How far f32 may be off at z, where the value is y, in units of 2⁻²⁴: the value, and the
    /// gradient for dy = 1.
    pub errors: fn(z: f64, y: f64) -> [f64; 2],
    /// No slope near z is steeper.
    pub steepest: fn(z: f64) -> f64,
    /// Whether the method of `Var` leaves it to chains even right after a linear layer.
    pub stays_in_chains: bool,
}

/// Passes the list of activations to a macro, after other tokens. Each has its help, its type, its
/// method, its flag, its value at z, its gradient (the derivative times dy, from z or from the
/// output y), and `AboutActivation`.
#[macro_export]
macro_rules! activations {
    ($to:ident $($first:tt)*) => {
        $to! {
            $($first)*
            /// max(z, 0)
            Relu relu "relu" {
                // Not a maximum: that would turn NaN into 0. The slope is 0 at 0 and 1 at NaN.
                value(z) { return select(z < number(0.0), number(0.0), z); }
                gradient(dy, y) { return select(y <= number(0.0), number(0.0), dy); }
                about AboutActivation {
                    pytorch: Some("nn.ReLU()"),
                    keeps_input: false,
                    memory_bound: true,
                    errors: |_, _| [0.0, 0.0],
                    steepest: |_| 1.0,
                    stays_in_chains: false,
                }
            }
            /// z if it is positive, else 0.01·z
            LeakyRelu leaky_relu "leaky-relu" {
                // The slope is 0.01 at 0.
                value(z) { return select(z > number(0.0), z, z * number(0.01)); }
                gradient(dy, y) { return select(y > number(0.0), dy, dy * number(0.01)); }
                about AboutActivation {
                    pytorch: Some("nn.LeakyReLU()"),
                    keeps_input: false,
                    memory_bound: true,
                    // The slope and the product round.
                    errors: |_, y| [2.01 * y.abs(), 0.0201],
                    steepest: |_| 1.0,
                    stays_in_chains: false,
                }
            }
            /// max(z, 0)²
            ReluSquared relu_squared "relu2" {
                value(z) { return select(z < number(0.0), number(0.0), z * z); }
                gradient(dy, z) { return select(z <= number(0.0), number(0.0), dy * (z + z)); }
                about AboutActivation {
                    pytorch: None,
                    keeps_input: true,
                    memory_bound: true,
                    // The square, and the product with dy.
                    errors: |z, y| [y, 2.0 * z.abs()],
                    steepest: |z| 2.1 * z.abs().max(1.0),
                    stays_in_chains: false,
                }
            }
            /// z·Φ(z), exact
            Gelu gelu "gelu" {
                value(z) { return gelu_erf(z); }
                gradient(dy, z) { return dy * gelu_erf_grad(z); }
                about AboutActivation {
                    pytorch: Some("nn.GELU()"),
                    keeps_input: true,
                    memory_bound: false,
                    // As math.rs says; the slope is below 1.2, and the product with dy rounds.
                    errors: |z, _| [4.0 * z.abs().max(1.0), 6.0 + 1.2],
                    steepest: |_| 1.13,
                    stays_in_chains: false,
                }
            }
            /// z·Φ(z), approximated with tanh
            GeluTanh gelu_tanh "gelu-tanh" {
                value(z) { return gelu_tanh(z); }
                gradient(dy, z) { return dy * gelu_tanh_grad(z); }
                about AboutActivation {
                    pytorch: Some("nn.GELU(approximate=\"tanh\")"),
                    keeps_input: true,
                    memory_bound: false,
                    errors: |z, _| [4.0 * z.abs().max(1.0), 8.0 + 1.2],
                    steepest: |_| 1.13,
                    stays_in_chains: false,
                }
            }
            /// z / (1 + e⁻ᶻ)
            Silu silu "silu" {
                value(z) { return silu(z); }
                gradient(dy, z) { return dy * silu_slope(z); }
                about AboutActivation {
                    pytorch: Some("nn.SiLU()"),
                    keeps_input: true,
                    memory_bound: false,
                    errors: |_, y| [6.0 * y.abs(), 7.0 + 1.2],
                    steepest: |_| 1.1,
                    // Gates multiply its output.
                    stays_in_chains: true,
                }
            }
        }
    };
}

macro_rules! declare {
    ($(#[doc = $help:literal] $Name:ident $method:ident $flag:literal {
        value($z:ident) $value:tt
        gradient($dy:ident, $saved:ident) $gradient:tt
        about $about:expr
    })*) => {
        choices! {
            /// A function of each element, which a linear layer can apply.
            #[derive(Hash)]
            pub enum Activation {
                $(#[doc = $help] $Name = $flag,)*
            }
        }

        impl Activation {
            /// Its properties.
            pub const fn about(self) -> &'static AboutActivation {
                match self {
                    $(Activation::$Name => &const { $about },)*
                }
            }

            /// Its method, and the names of value and gradient in kernels.
            pub(crate) const fn names(self) -> [&'static str; 2] {
                match self {
                    $(Activation::$Name => {
                        [stringify!($method), concat!(stringify!($method), "_gradient")]
                    })*
                }
            }

            /// Its type in kernels.
            pub(crate) const fn kind(self) -> &'static str {
                match self {
                    $(Activation::$Name => stringify!($Name),)*
                }
            }
        }

        $(
            #[derive(Clone, Copy)]
            pub(crate) struct $Name;

            impl<T: Formulas> Unary<T> for $Name {
                const MEMORY_BOUND: bool = Activation::$Name.about().memory_bound;
                #[inline(always)]
                #[allow(clippy::needless_return)]
                fn apply(self, $z: T) -> T $value
            }

            impl<T: Formulas> Binary<T> for $Name {
                const MEMORY_BOUND: bool = Activation::$Name.about().memory_bound;
                #[inline(always)]
                #[allow(clippy::needless_return)]
                fn apply(self, $dy: T, $saved: T) -> T $gradient
            }
        )*

        /// Of each: the type's name, and its functions in CUDA.
        #[cfg(test)]
        const TEXTS: &[(&str, &str)] = &[$((
            stringify!($Name),
            concat!(
                "    static INLINE float value(float ", stringify!($z), ") ",
                stringify!($value),
                "\n    static INLINE float chain(float ", stringify!($dy),
                ", float ", stringify!($saved), ") ",
                stringify!($gradient),
            ),
        )),*];
    };
}
activations!(declare);

impl Activation {
    /// Every activation.
    pub fn all() -> impl Iterator<Item = Activation> {
        Activation::ALL.iter().map(|&(activation, ..)| activation)
    }

    /// Whether its gradient is computed from its input; else from its output.
    pub fn keeps_input(self) -> bool {
        self.about().keeps_input
    }

    /// Its number in activations.cuh. 0 stands for no activation.
    pub(crate) fn number(self) -> u32 {
        self as u32 + 1
    }
}

/// The expression with `$f` as the type of an activation's formulas, compiled for each:
/// `with_function!(activation, f => unary_in_place(z, f))`.
macro_rules! with_function {
    ([$activation:expr, $f:ident => $result:expr]
        $($(#[$help:meta])* $Name:ident $method:ident $flag:literal $entry:tt)*) => {
        match $activation {
            $($crate::ops::activation::Activation::$Name => {
                let $f = $crate::ops::activation::$Name;
                $result
            })*
        }
    };
    ($($call:tt)*) => { $crate::activations! { with_function [$($call)*] } };
}
pub(crate) use with_function;

/// `activation` of `x` in a new tensor.
#[track_caller]
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    let out = x.empty_like()?;
    activate_into(&out, x, activation)?;
    Ok(out)
}

/// `out = activation(x)`; `out` may be `x`.
#[track_caller]
pub fn activate_into(out: &Tensor, x: &Tensor, activation: Activation) -> Result<()> {
    let kernel = (&ACTIVATION, "activate", Some(activation.number().word()));
    with_function!(activation, f => unary_op("activate", out, x, f, kernel))
}

/// `dx = dy · activation′`, from what `Activation::keeps_input` says was saved of forward; `dx` may
/// be `dy`.
#[track_caller]
pub fn activate_backward_into(
    dx: &Tensor,
    dy: &Tensor,
    saved: &Tensor,
    activation: Activation,
) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("saved", saved)];
    let op = "activate_backward";
    let kernel = (&ACTIVATION, op, Some(activation.number().word()));
    with_function!(activation, f => binary_op(op, operands, f, kernel))
}

pub(super) static SWIGLU: CuFile = CuFile::new("swiglu.cu", include_str!("swiglu.cu"));

/// `out = silu(gate) · up`: `x` (R, 2 H), gate and then up in each row; `out` (R, H).
#[track_caller]
pub fn swiglu_into(out: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = OpCall::new("swiglu");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let columns = check_halves(&call, out, x)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.gpu() {
            return launch_swiglu(
                &gpu,
                "swiglu",
                &out,
                columns,
                args![out, x, out.count, columns],
            );
        }
        with_stored!(placed.dtype, S => {
            let x = x.elements::<S>();
            threads::split_mut(out.elements_mut::<S>(), columns.max(1), |first, out| {
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
    let mut call = OpCall::new("swiglu_backward");
    let dx = call.writes("dx", dx);
    let dout = call.reads("dout", dout);
    let x = call.reads("x", x);
    call.may_be_in_place(x, dx);
    call.elementwise(&[x, dx])?;
    let columns = check_halves(&call, dout, x)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut dx, dout, x] = placed.enter([dx, dout, x])?;
        if let Some(gpu) = placed.gpu() {
            let args = args![dx, dout, x, dout.count, columns];
            return launch_swiglu(&gpu, "swiglu_backward", &dout, columns, args);
        }
        with_stored!(placed.dtype, S => {
            let (dout, x) = (dout.elements::<S>(), x.unless_in_place::<S>());
            let dx = Shares::new(dx.elements_mut::<S>());
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
fn check_halves(call: &OpCall<'_>, half: Slot, x: Slot) -> Result<usize> {
    let [rows, columns] = call.dims::<2>(half, "[rows, columns]")?;
    let meaning = "gate and up side by side in each row";
    call.has_shape(x, &[rows, 2 * columns], meaning)?;
    call.same_dtype(x, half)?;
    call.all_row_major()?;
    Ok(columns)
}

/// A kernel with a thread for 16 bytes of `half`, or for an element where rows cannot be so cut.
fn launch_swiglu(
    gpu: &GpuLaunch,
    name: &'static str,
    half: &Buffer<'_>,
    columns: usize,
    args: &[u64],
) -> Result<()> {
    let grid = if columns.is_multiple_of(4) {
        Grid::elements(half.count / 4)
    } else {
        Grid::elements(half.count)
    };
    gpu.launch(&SWIGLU, (name, half.dtype), grid, args)
}

multiversion! {
    fn swiglu_run[S: Stored](out: &mut [S], x: &[S], columns: usize) {
        for (out, x) in out.chunks_exact_mut(columns.max(1)).zip(x.chunks_exact(2 * columns.max(1))) {
            let (gate, up) = x.split_at(columns);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = S::rounded(gate.wide().silu() * up.wide());
            }
        }
    }
}

multiversion! {
    /// `dx` holds x.
    fn swiglu_backward_run[S: Stored](dx: &mut [S], dout: &[S], columns: usize) {
        let rows = dx.chunks_exact_mut(2 * columns.max(1));
        for (dx, dout) in rows.zip(dout.chunks_exact(columns.max(1))) {
            let (gate, up) = dx.split_at_mut(columns);
            for ((gate, up), &dout) in gate.iter_mut().zip(up).zip(dout) {
                let ((silu, slope), dout) = (gate.wide().silu_and_slope(), dout.wide());
                *gate = S::rounded(dout * up.wide() * slope);
                *up = S::rounded(dout * silu);
            }
        }
    }
}

#[cfg(test)]
mod tests;
