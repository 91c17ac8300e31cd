//! How the CPU computes with what tensors hold: f32 and f64 as they are; bf16 in f32, rounded once.

use crate::Element;
use crate::dtype::{bf16, bf16_nearest, bf16_wide};
use crate::ops::float::{Float, LANES, tree_sum};
use crate::ops::formulas::Formulas;
use crate::ops::matmul::{self, Finish, Matrix, Output, Real};
use crate::ops::round::{round, widen};
use crate::simd::multiversion;

/// What a tensor holds, and the type of its arithmetic.
pub(crate) trait Stored: Element {
    type Math: Real + Formulas;

    fn wide(self) -> Self::Math;
    fn rounded(wide: Self::Math) -> Self;
    /// `to = from`, rounded.
    fn keep(to: &mut [Self], from: &[Self::Math]);
    /// The elements as numbers of the arithmetic, in `room` where they are not.
    fn widened<'a>(from: &'a [Self], room: &'a mut [Self::Math]) -> &'a [Self::Math];
    /// Whether rows are widened block by block, while they are in a cache.
    const WIDENS: bool;
    /// `body` on the elements as numbers of the arithmetic, in `room` where they are not; `reads`
    /// says whether it reads them before it writes them.
    fn with_wide(
        out: &mut [Self],
        room: &mut [Self::Math],
        reads: bool,
        body: impl FnOnce(&mut [Self::Math]),
    );
    /// The elements, unless they would have to be widened.
    fn math_of(from: &[Self]) -> Option<&[Self::Math]>;
    /// As above.
    fn as_math(out: &mut [Self]) -> Option<&mut [Self::Math]>;
    /// `out = scales.0 * a·b + scales.1 * out`, then `finish`, then rounded to what `out` holds.
    fn multiply(
        out: Output<'_, Self, Self::Math>,
        a: Matrix<'_, Self>,
        b: Matrix<'_, Self>,
        scales: (Self::Math, Self::Math),
        finish: &impl Finish<Self::Math>,
    );
}

impl<T: Real + Formulas> Stored for T {
    type Math = T;

    #[inline(always)]
    fn wide(self) -> T {
        self
    }
    #[inline(always)]
    fn rounded(wide: T) -> T {
        wide
    }
    fn keep(to: &mut [T], from: &[T]) {
        to.copy_from_slice(from);
    }
    fn widened<'a>(from: &'a [T], _: &'a mut [T]) -> &'a [T] {
        from
    }
    const WIDENS: bool = false;
    fn with_wide(out: &mut [T], _: &mut [T], _: bool, body: impl FnOnce(&mut [T])) {
        body(out);
    }
    fn math_of(from: &[T]) -> Option<&[T]> {
        Some(from)
    }
    fn as_math(out: &mut [T]) -> Option<&mut [T]> {
        Some(out)
    }
    fn multiply(
        out: Output<'_, T, T>,
        a: Matrix<'_, T>,
        b: Matrix<'_, T>,
        scales: (T, T),
        finish: &impl Finish<T>,
    ) {
        let (Output::Stored(out) | Output::Wide(out)) = out;
        matmul::matmul(out, a, b, scales.0, scales.1, finish);
    }
}

impl Stored for bf16 {
    type Math = f32;

    #[inline(always)]
    fn wide(self) -> f32 {
        bf16_wide(self)
    }
    #[inline(always)]
    fn rounded(wide: f32) -> bf16 {
        bf16_nearest(wide)
    }
    fn keep(to: &mut [bf16], from: &[f32]) {
        round(to, from);
    }
    fn widened<'a>(from: &'a [bf16], room: &'a mut [f32]) -> &'a [f32] {
        let room = &mut room[..from.len()];
        widen(room, from);
        room
    }
    const WIDENS: bool = true;
    fn with_wide(out: &mut [bf16], room: &mut [f32], reads: bool, body: impl FnOnce(&mut [f32])) {
        let room = &mut room[..out.len()];
        if reads {
            widen(room, out);
        }
        body(room);
        round(out, room);
    }
    fn math_of(_: &[bf16]) -> Option<&[f32]> {
        None
    }
    fn as_math(_: &mut [bf16]) -> Option<&mut [f32]> {
        None
    }
    fn multiply(
        out: Output<'_, bf16, f32>,
        a: Matrix<'_, bf16>,
        b: Matrix<'_, bf16>,
        scales: (f32, f32),
        finish: &impl Finish<f32>,
    ) {
        matmul::bf16::matmul(out, a, b, scales, finish);
    }
}

multiversion! {
    /// `sum = x + residual`; None is the sum itself.
    pub(crate) fn add[S: Stored](sum: &mut [S], x: Option<&[S]>, residual: Option<&[S]>) {
        for (index, sum) in sum.iter_mut().enumerate() {
            let [x, residual] = [x, residual].map(|of| of.map_or(*sum, |of| of[index]).wide());
            *sum = S::rounded(x + residual);
        }
    }
}

/// `float::lane_dot` of what tensors hold.
#[inline(always)]
pub(crate) fn lane_dot<S: Stored>(a: &[S], b: &[S]) -> S::Math {
    let mut lanes = [S::Math::ZERO; LANES];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane = a.wide().fused(b.wide(), *lane);
        }
    }
    for ((lane, &a), &b) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
        *lane = a.wide().fused(b.wide(), *lane);
    }
    tree_sum(lanes)
}

/// Rooms for `count` rows of this many numbers at a time; none where nothing is widened.
pub(crate) fn rooms<S: Stored, const N: usize>(count: usize) -> [Vec<S::Math>; N] {
    let len = if S::WIDENS { count } else { 0 };
    std::array::from_fn(|_| vec![S::Math::ZERO; len])
}

/// Runs `$body` with `$S` bound to what a tensor of this dtype holds: f32, f64 or bf16.
macro_rules! with_stored {
    ($dtype:expr, $S:ident => $body:expr) => {{
        #[allow(unused_imports)]
        use $crate::{Element as _, ops::float::Float as _};
        match $dtype {
            $crate::DType::F64 => {
                type $S = f64;
                $body
            }
            $crate::DType::BF16 => {
                type $S = $crate::dtype::bf16;
                $body
            }
            $crate::DType::F32 => {
                type $S = f32;
                $body
            }
            other @ ($crate::DType::F16
            | $crate::DType::U8
            | $crate::DType::I32
            | $crate::DType::I64) => unreachable!("nothing computes with {other}"),
        }
    }};
}
pub(crate) use with_stored;

#[cfg(test)]
mod tests;
