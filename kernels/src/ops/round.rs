//! bf16 on the CPU: to f32, in which it is computed, and back, rounded once.

use crate::dtype::{bf16, bf16_nearest, bf16_wide};
use crate::simd::multiversion;
use crate::threads;

/// As in `elementwise.rs`.
const GRAIN: usize = 1024;

multiversion! {
    /// `out = x`.
    pub(crate) fn widen[](out: &mut [f32], x: &[bf16]) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = bf16_wide(x);
        }
    }
}

multiversion! {
    /// `out = x`, rounded.
    pub(crate) fn round[](out: &mut [bf16], x: &[f32]) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = bf16_nearest(x);
        }
    }
}

/// A copy in f32, made by all threads.
pub(crate) fn wide(x: &[bf16]) -> Vec<f32> {
    let mut wide = vec![0.0; x.len()];
    threads::split_mut(&mut wide, GRAIN, |first, part| widen(part, &x[first..]));
    wide
}

/// `out = x`, rounded by all threads.
pub(crate) fn narrow(out: &mut [bf16], x: &[f32]) {
    threads::split_mut(out, GRAIN, |first, part| round(part, &x[first..]));
}
