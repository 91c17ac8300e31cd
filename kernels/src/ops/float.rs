//! f32 and f64 under one trait, so that one loop serves training (f32) and its checks (f64).
//! Methods are `#[inline(always)]`, so that each SIMD version of a loop compiles its own.

use std::ops::{Add, Div, Mul, Sub};

use crate::Element;
use crate::math;

/// f32 or f64.
pub(crate) trait Float:
    Element
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    /// `self × factor + addend`, rounded once.
    fn fused(self, factor: Self, addend: Self) -> Self;
    /// The square root, rounded once.
    fn root(self) -> Self;
    /// eˣ: for f32 the same bits everywhere (`math.rs`), for f64 the system's.
    fn exponential(self) -> Self;
    /// eˣ for x <= 88, likewise; 0 where that is (almost) subnormal.
    fn exponential_or_zero(self) -> Self;
    /// The natural logarithm, likewise.
    fn logarithm(self) -> Self;
    /// The hyperbolic tangent, likewise.
    fn tanh(self) -> Self;
    /// As f64, exactly.
    fn widened(self) -> f64;
    /// Neither infinite nor NaN.
    fn finite(self) -> bool;
}

macro_rules! float {
    ($T:ty, $exp:path, $exp_or_zero:path, $ln:path, $tanh:path) => {
        impl Float for $T {
            const ZERO: $T = 0.0;
            const ONE: $T = 1.0;
            const NEG_INFINITY: $T = <$T>::NEG_INFINITY;
            #[inline(always)]
            fn fused(self, factor: $T, addend: $T) -> $T {
                self.mul_add(factor, addend)
            }
            #[inline(always)]
            fn root(self) -> $T {
                self.sqrt()
            }
            #[inline(always)]
            fn exponential(self) -> $T {
                $exp(self)
            }
            #[inline(always)]
            fn exponential_or_zero(self) -> $T {
                $exp_or_zero(self)
            }
            #[inline(always)]
            fn logarithm(self) -> $T {
                $ln(self)
            }
            #[inline(always)]
            fn tanh(self) -> $T {
                $tanh(self)
            }
            #[inline(always)]
            fn widened(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn finite(self) -> bool {
                self.abs() < <$T>::INFINITY
            }
        }
    };
}
float!(f32, math::exp, math::exp_or_zero, math::ln, math::tanh);
float!(f64, f64::exp, f64::exp, f64::ln, f64::tanh);

/// The number of partial sums in a reduction. Element `i` goes to lane `i % LANES`, and lanes are
/// added as a tree. SIMD of every width and a GPU's warp can follow this order, so they get the
/// same bits.
pub(crate) const LANES: usize = 32;

/// The sum of the lanes: the upper half onto the lower half, until one is left.
#[inline(always)]
pub(crate) fn tree_sum<T: Float>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        for (low, &mut high) in low.iter_mut().zip(high.iter_mut()) {
            *low = *low + high;
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum over `x` in lanes: off by at most (len / LANES + 5) roundings.
#[inline(always)]
pub(crate) fn lane_sum<T: Float>(x: &[T]) -> T {
    lane_sum_of(x, |x| x)
}

/// As above, for a function of each element.
#[inline(always)]
pub(crate) fn lane_sum_of<T: Float, S: Float>(x: &[T], of: impl Fn(T) -> S) -> S {
    let mut lanes = [S::ZERO; LANES];
    let (blocks, tail) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = *lane + of(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = *lane + of(x);
    }
    tree_sum(lanes)
}

/// The sum of products, fused, in lanes.
#[inline(always)]
pub(crate) fn lane_dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane = a.fused(b, *lane);
        }
    }
    for ((lane, &a), &b) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
        *lane = a.fused(b, *lane);
    }
    tree_sum(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_sum_is_exact_on_small_whole_numbers_of_every_count() {
        for count in [0usize, 1, 31, 32, 33, 64, 100, 1000] {
            let x: Vec<f32> = (0..count).map(|i| i as f32).collect();
            assert_eq!(
                lane_sum(&x),
                (count * count.saturating_sub(1) / 2) as f32,
                "{count}"
            );
        }
    }
}
