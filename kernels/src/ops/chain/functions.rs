//! The functions of steps on the CPU: each is a loop over a block of values.

use super::steps::Function;
use crate::dtype::{bf16, bf16_nearest, bf16_wide};
use crate::ops::activation::with_function;
use crate::ops::elementwise::{Binary, Unary};
use crate::ops::float::{Float, LANES, tree_sum};
use crate::ops::formulas::{Formulas, exponential, hyperbolic_tangent, logarithm, root, sigmoid};
use crate::simd::multiversion;

/// Functions that f32 and f64 compute in different ways.
pub(crate) trait Math: Formulas {
    fn size(self) -> Self;
    fn from_bf16(x: bf16) -> Self;
    fn to_bf16(self) -> bf16;
}

impl Math for f32 {
    #[inline(always)]
    fn size(self) -> f32 {
        self.abs()
    }
    #[inline(always)]
    fn from_bf16(x: bf16) -> f32 {
        bf16_wide(x)
    }
    #[inline(always)]
    fn to_bf16(self) -> bf16 {
        if self.is_nan() {
            bf16::from_bits(0x7fff)
        } else {
            bf16_nearest(self)
        }
    }
}

impl Math for f64 {
    #[inline(always)]
    fn size(self) -> f64 {
        self.abs()
    }
    #[inline(always)]
    fn from_bf16(x: bf16) -> f64 {
        bf16_wide(x).into()
    }
    #[inline(always)]
    fn to_bf16(self) -> bf16 {
        <bf16 as crate::Element>::from_f64(self)
    }
}

/// An argument of a step: values of a block, or one for all.
#[derive(Clone, Copy)]
pub(super) enum StepInput<'a, T> {
    Many(&'a [T]),
    One(T),
}

/// The loop of a function with one argument.
macro_rules! unary {
    ($out:ident, $a:ident: |$x:ident| $value:expr) => {
        match $a {
            StepInput::Many(a) => {
                for (out, &$x) in $out.iter_mut().zip(a) {
                    *out = $value;
                }
            }
            StepInput::One($x) => $out.fill($value),
        }
    };
}

/// The loop of a function with two.
macro_rules! binary {
    ($out:ident, $a:ident, $b:ident: |$x:ident, $y:ident| $value:expr) => {
        match ($a, $b) {
            (StepInput::Many(a), StepInput::Many(b)) => {
                for ((out, &$x), &$y) in $out.iter_mut().zip(a).zip(b) {
                    *out = $value;
                }
            }
            (StepInput::Many(a), StepInput::One($y)) => {
                for (out, &$x) in $out.iter_mut().zip(a) {
                    *out = $value;
                }
            }
            (StepInput::One($x), StepInput::Many(b)) => {
                for (out, &$y) in $out.iter_mut().zip(b) {
                    *out = $value;
                }
            }
            (StepInput::One($x), StepInput::One($y)) => $out.fill($value),
        }
    };
}

/// 1 or 0.
#[inline(always)]
fn one_if<T: Float>(is: bool) -> T {
    if is { T::ONE } else { T::ZERO }
}

#[inline(always)]
fn chosen<T: Float>(condition: T, yes: T, no: T) -> T {
    if condition != T::ZERO { yes } else { no }
}

multiversion! {
    pub(super) fn apply[T: Math](function: Function, out: &mut [T], a: StepInput<'_, T>, b: StepInput<'_, T>, c: StepInput<'_, T>) {
        match function {
            Function::Add => binary!(out, a, b: |x, y| x + y),
            Function::Sub => binary!(out, a, b: |x, y| x - y),
            Function::Mul => binary!(out, a, b: |x, y| x * y),
            Function::Div => binary!(out, a, b: |x, y| x / y),
            Function::Min => binary!(out, a, b: |x, y| if is_nan(x) || x < y { x } else { y }),
            Function::Max => binary!(out, a, b: |x, y| if is_nan(x) || x > y { x } else { y }),
            Function::Less => binary!(out, a, b: |x, y| one_if(x < y)),
            Function::LessEqual => binary!(out, a, b: |x, y| one_if(x <= y)),
            Function::Equal => binary!(out, a, b: |x, y| one_if(x == y)),
            Function::Where => {
                // The choice last, so that two loops of two arguments do.
                binary!(out, b, c: |x, _y| x);
                match (a, c) {
                    (StepInput::One(a), c) if a == T::ZERO => match c {
                        StepInput::Many(c) => out.copy_from_slice(c),
                        StepInput::One(c) => out.fill(c),
                    },
                    (StepInput::One(_), _) => {}
                    (StepInput::Many(a), StepInput::Many(c)) => {
                        for ((out, &a), &c) in out.iter_mut().zip(a).zip(c) {
                            *out = chosen(a, *out, c);
                        }
                    }
                    (StepInput::Many(a), StepInput::One(c)) => {
                        for (out, &a) in out.iter_mut().zip(a) {
                            *out = chosen(a, *out, c);
                        }
                    }
                }
            }
            Function::Neg => unary!(out, a: |x| x * T::from_f64(-1.0)),
            Function::Abs => unary!(out, a: |x| x.size()),
            Function::Exp => unary!(out, a: |x| exponential(x)),
            Function::Log => unary!(out, a: |x| logarithm(x)),
            Function::Sqrt => unary!(out, a: |x| root(x)),
            Function::Rsqrt => unary!(out, a: |x| T::ONE / root(x)),
            Function::Tanh => unary!(out, a: |x| hyperbolic_tangent(x)),
            Function::Sigmoid => unary!(out, a: |x| sigmoid(x)),
            Function::Activation(activation) => {
                with_function!(activation, f => unary!(out, a: |x| Unary::apply(f, x)))
            }
            Function::Gradient(activation) => {
                with_function!(activation, f => binary!(out, a, b: |x, y| Binary::apply(f, x, y)))
            }
            Function::Round => unary!(out, a: |x| T::from_bf16(x.to_bf16())),
        }
    }
}

#[inline(always)]
#[allow(clippy::eq_op)]
fn is_nan<T: Float>(x: T) -> bool {
    x != x
}

#[inline(always)]
fn larger<T: Float>(x: T, y: T) -> T {
    if is_nan(x) || x > y { x } else { y }
}

multiversion! {
    /// Adds a block of `len` values to the lanes of its row, or keeps the larger.
    pub(super) fn reduce[T: Math](lanes: &mut [T; LANES], x: StepInput<'_, T>, len: usize, adds: bool) {
        match x {
            StepInput::Many(x) => {
                // By whole blocks, so that the lanes stay in registers.
                let (blocks, rest) = x.as_chunks::<LANES>();
                let mut all = *lanes;
                for block in blocks {
                    for (lane, &x) in all.iter_mut().zip(block) {
                        *lane = if adds { *lane + x } else { larger(*lane, x) };
                    }
                }
                for (lane, &x) in all.iter_mut().zip(rest) {
                    *lane = if adds { *lane + x } else { larger(*lane, x) };
                }
                *lanes = all;
            }
            StepInput::One(x) => {
                for at in 0..len {
                    let lane = &mut lanes[at % LANES];
                    *lane = if adds { *lane + x } else { larger(*lane, x) };
                }
            }
        }
    }
}

/// The lanes as one: as `warp_reduce` on a GPU.
pub(super) fn reduced<T: Math>(mut lanes: [T; LANES], adds: bool) -> T {
    if adds {
        return tree_sum(lanes);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for at in 0..width {
            lanes[at] = larger(lanes[at], lanes[at + width]);
        }
        width /= 2;
    }
    // Not −0, whose place a GPU's lanes disagree about.
    lanes[0] + T::ZERO
}
