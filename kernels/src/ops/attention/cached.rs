//! Attention of new tokens to those before them, whose keys and values are in a cache: what makes
//! text token by token. On the CPU only. Each row is computed on its own, so its bits do not depend
//! on how many rows come at a time.

use super::sizes::Sizes;
use crate::ops::float::{Float, LANES, lane_sum, tree_sum};
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
    let Sizes {
        time,
        heads,
        kv_heads,
        head_size,
        ..
    } = work.sizes;
    let scale = T::from_f64(work.sizes.scale);
    let (width, kv_width) = (heads * head_size, 2 * kv_heads * head_size);
    let elements = work.rows.saturating_mul(time).saturating_mul(width);
    let pieces = if elements < PARALLEL_MIN { 1 } else { heads };
    threads::run(pieces, |piece| {
        let mut weights = vec![T::ZERO; time];
        for head in threads::cut(heads, 1, pieces, piece) {
            let key = head / (heads / kv_heads) * head_size;
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
            *weight = scale * dot(q, &key[..q.len()]);
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

/// The sum of products, in lanes.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = a.fused(b, *lane);
        }
    }
    for (lane, (a, &b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *lane = a.fused(b, *lane);
    }
    tree_sum(lanes)
}

#[cfg(test)]
mod tests {
    use crate::ops::testing::{cpu_of, random_f32};
    use crate::ops::{Attention, Qkv, attention_cached_into, attention_into};
    use crate::{DType, Device, Tensor};

    /// The outputs for all rows of `qkv`, `at_a_time` rows at a time.
    fn cached(attention: &Attention, qkv: &Tensor, at_a_time: usize) -> Vec<f32> {
        let &Attention {
            time,
            heads,
            kv_heads,
            head_size,
            ..
        } = attention;
        let empty = |columns| Tensor::full(&[time, columns], f64::NAN, DType::F32, Device::Cpu);
        let (out, cache) = (
            empty(heads * head_size).unwrap(),
            empty(2 * kv_heads * head_size).unwrap(),
        );
        for start in (0..time).step_by(at_a_time) {
            let end = time.min(start + at_a_time);
            let [out, qkv] = [&out, qkv].map(|tensor| tensor.slice(start..end).unwrap());
            let so_far = Attention {
                time: end,
                ..*attention
            };
            attention_cached_into(&out, &cache.slice(0..end).unwrap(), &qkv, &so_far).unwrap();
        }
        out.to_vec().unwrap()
    }

    #[test]
    fn rows_at_a_time_give_the_bits_of_all_at_once_and_what_training_gives() {
        for (time, [heads, kv_heads, head_size]) in [
            (1, [2, 2, 5]),
            (40, [4, 2, 40]),
            (200, [2, 1, 64]),
            (97, [3, 3, 8]),
        ] {
            let causal = true;
            let attention = Attention {
                time,
                heads,
                kv_heads,
                head_size,
                causal,
                scale: None,
            };
            let columns = (heads + 2 * kv_heads) * head_size;
            let qkv = cpu_of(&random_f32(time * columns, 1), &[time, columns]);
            let once = cached(&attention, &qkv, time);
            assert_eq!(cached(&attention, &qkv, 1), once);
            assert_eq!(cached(&attention, &qkv, 7), once);
            let out = cpu_of(&vec![f32::NAN; once.len()], &[time, heads * head_size]);
            let sums = cpu_of(&vec![0f32; heads * time], &[heads, time]);
            attention_into(&out, &sums, Qkv::Packed(&qkv), &attention).unwrap();
            let apart = out.to_vec::<f32>().unwrap().into_iter().zip(once);
            let apart = apart.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-5, "{time} {heads}: {apart}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let attention = Attention {
            time: 2,
            heads: 2,
            kv_heads: 1,
            head_size: 4,
            causal: true,
            scale: None,
        };
        let refused = |attention: Attention, rows: usize, expected: &str| {
            let (out, cache) = (
                cpu_of(&vec![0f32; rows * 8], &[rows, 8]),
                cpu_of(&[0f32; 16], &[2, 8]),
            );
            let qkv = cpu_of(&vec![0f32; rows * 16], &[rows, 16]);
            let error = attention_cached_into(&out, &cache, &qkv, &attention).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        };
        refused(attention, 3, "at most 2 rows");
        refused(
            Attention {
                kv_heads: 3,
                ..attention
            },
            1,
            "a divisor of heads",
        );
        refused(
            Attention {
                causal: false,
                ..attention
            },
            1,
            "later tokens",
        );
        refused(
            Attention {
                head_size: 0,
                ..attention
            },
            1,
            "head_size",
        );
        refused(
            Attention {
                time: 1,
                ..attention
            },
            1,
            "[time, 2·kv_heads·head_size]",
        );
    }
}
