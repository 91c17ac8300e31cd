//! Attention of new tokens to those before them, whose keys and values are in a cache: what makes
//! text token by token. On the CPU only. Each row is computed on its own, so its bits do not depend
//! on how many rows come at a time.

use super::sizes::Sizes;
use crate::ops::float::{Float, lane_dot, lane_sum};
use crate::simd::multiversion;
use crate::threads::{self, PARALLEL_MIN, Shares};

/// The operands: R rows of `time` tokens are new.
pub(super) struct Work<'a, T> {
    pub(super) sizes: Sizes,
    /// R
    pub(super) rows: usize,
    /// (R, heads·head_size)
    pub(super) out: Shares<'a, T>,
    /// (T, 2·kv_heads·head_size)
    pub(super) cache: &'a [T],
    /// (R, (heads + 2·kv_heads)·head_size)
    pub(super) qkv: &'a [T],
}

/// All heads, cut among the threads.
pub(super) fn run<T: Float>(work: &Work<'_, T>) {
    let (sizes, scale) = (work.sizes, T::from_f64(work.sizes.scale));
    let (time, heads, head_size) = (sizes.time, sizes.heads, sizes.head_size);
    let (width, kv_width) = (heads * head_size, 2 * sizes.kv_heads * head_size);
    let elements = work.rows.saturating_mul(time).saturating_mul(width);
    let pieces = if elements < PARALLEL_MIN { 1 } else { heads };
    threads::run(pieces, |piece| {
        let mut weights = vec![T::ZERO; time];
        for head in threads::cut(heads, 1, pieces, piece) {
            let key = head / sizes.group() * head_size;
            for row in 0..work.rows {
                let seen = time - work.rows + row + 1;
                let q = &work.qkv[row * (width + kv_width) + head * head_size..][..head_size];
                let start = row * width + head * head_size;
                // SAFETY: each piece has its own heads.
                let out = unsafe { work.out.part(start..start + head_size) };
                let [keys, values] = [key, key + kv_width / 2].map(|first| &work.cache[first..]);
                attend(out, &mut weights[..seen], q, keys, values, kv_width, scale);
            }
        }
    });
}

multiversion! {
    /// `out = softmax(scale · q·kᵀ) · v` for one row of a head. `weights` are overwritten; there is
    /// one for each key. Keys and values are `stride` apart.
    fn attend[T: Float](
        out: &mut [T],
        weights: &mut [T],
        q: &[T],
        keys: &[T],
        values: &[T],
        stride: usize,
        scale: T,
    ) {
        let mut largest = T::NEG_INFINITY;
        for (weight, key) in weights.iter_mut().zip(keys.chunks(stride)) {
            *weight = scale * lane_dot(q, &key[..q.len()]);
            largest = if *weight > largest { *weight } else { largest };
        }
        for weight in weights.iter_mut() {
            *weight = (*weight - largest).exponential_or_zero();
        }
        let share = T::ONE / lane_sum(weights);
        out.fill(T::ZERO);
        for (weight, value) in weights.iter().zip(values.chunks(stride)) {
            for (out, &value) in out.iter_mut().zip(value) {
                *out = weight.fused(value, *out);
            }
        }
        for out in out.iter_mut() {
            *out = *out * share;
        }
    }
}
