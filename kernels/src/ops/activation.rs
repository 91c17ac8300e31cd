//! Activations: functions that a linear layer can apply to its sums, also as separate operations.
//! NaN stays NaN.
//!
//! f32 uses `math.rs`, with the same bits everywhere; f64, for checks, uses the C math library. −∞
//! gives −0 in gelu and silu, where PyTorch gives NaN.
//!
//! A new activation is a variant of `Activation`, a type with its formulas, its name in
//! `with_function!`, and the same in math.cuh; tests take it from `Activation::all`.
//!
//! swiglu is `out = silu(gate) · up`, where one matmul made gate and up side by side: each row of x
//! is a row of gate and then one of up. silu(z) is z / (1 + e⁻ᶻ). Letters: R rows, H columns of the
//! result.

use crate::error::Result;
use crate::launch::{CuFile, GpuLaunch, Grid, KernelArgument, args};
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, Slot};
use crate::ops::elementwise::{binary_op, of_elements, unary_op};
use crate::ops::formulas::Formulas;
use crate::ops::stored::{Stored, with_stored};
use crate::setting::Choice;
use crate::simd::multiversion;
use crate::threads::{self, Shares};
use crate::{Tensor, choices};

pub(super) static ACTIVATION: CuFile = CuFile::new("activation.cu", include_str!("activation.cu"));

choices! {
    /// A function of each element, which a linear layer can apply.
    #[derive(Default)]
    pub enum Activation {
        /// max(z, 0)
        #[default]
        Relu = "relu",
        /// z if it is positive, else 0.01·z
        LeakyRelu = "leaky-relu",
        /// max(z, 0)²
        ReluSquared = "relu2",
        /// z·Φ(z), exact
        Gelu = "gelu",
        /// z·Φ(z), approximated with tanh
        GeluTanh = "gelu-tanh",
    }
}

impl Activation {
    /// Every activation.
    pub fn all() -> impl Iterator<Item = Activation> {
        Activation::ALL.iter().map(|&(activation, ..)| activation)
    }

    /// Its number in math.cuh. 0 stands for no activation.
    pub(crate) fn number(self) -> u32 {
        self as u32 + 1
    }

    /// Whether its derivative is computed from its input; else from its output.
    pub fn keeps_input(self) -> bool {
        match self {
            Activation::Relu | Activation::LeakyRelu => false,
            Activation::ReluSquared | Activation::Gelu | Activation::GeluTanh => true,
        }
    }
}

/// The expression with `$f` as the type of an activation's formulas, compiled for each.
macro_rules! with_function {
    ($activation:expr, $f:ident => $value:expr) => {
        with_function!($activation, $f => $value; Relu LeakyRelu ReluSquared Gelu GeluTanh)
    };
    ($activation:expr, $f:ident => $value:expr; $($Name:ident)+) => {
        match $activation {
            $($crate::ops::activation::Activation::$Name => {
                let $f = $crate::ops::activation::$Name;
                $value
            })+
        }
    };
}
pub(crate) use with_function;

// Each with its derivative times `dy`. Not max(): that would turn NaN into 0.
of_elements! {
    /// The derivative is 0 at 0 and 1 at NaN, as in PyTorch.
    pub(crate) Relu(): (x) => if x < T::ZERO { T::ZERO } else { x },
        (dy, y) => if y <= T::ZERO { T::ZERO } else { dy };
    /// The derivative is 0.01 at 0, as in PyTorch.
    pub(crate) LeakyRelu(): (x) => if x > T::ZERO { x } else { x * T::from_f64(0.01) },
        (dy, y) => if y > T::ZERO { dy } else { dy * T::from_f64(0.01) };
    pub(crate) ReluSquared(): (x) => if x < T::ZERO { T::ZERO } else { x * x },
        (dy, x) => if x <= T::ZERO { T::ZERO } else { dy * (x + x) };
}

of_elements! { of Formulas =>
    /// x Φ(x), Φ being the normal distribution. f32 is off by at most 4ε max(|x|, 1), ε = 2⁻²⁴; its
    /// derivative by 6ε.
    pub(crate) Gelu(): (x) => x.gelu_erf(), (dy, x) => dy * x.gelu_erf_grad();
    /// x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³). f32 is off by at most 4ε max(|x|, 1);
    /// its derivative by 8ε.
    pub(crate) GeluTanh(): (x) => x.gelu_tanh(), (dy, x) => dy * x.gelu_tanh_grad();
}

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
    with_function!(activation, f => binary_op(op, operands, f, kernel, None))
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
                *out = S::rounded(gate.wide().silu().0 * up.wide());
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
                let ((silu, slope), dout) = (gate.wide().silu(), dout.wide());
                *gate = S::rounded(dout * up.wide() * slope);
                *up = S::rounded(dout * silu);
            }
        }
    }
}

#[cfg(test)]
mod tests;
