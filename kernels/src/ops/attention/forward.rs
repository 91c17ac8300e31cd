//! Forward on the CPU: block by block of queries, over the blocks of keys; and row by row of new
//! tokens, over a cache.

use std::ops::Range;

use super::blocks::{
    BLOCK, Extent, RunningSoftmax, add_over_keys, cap_scores, finish, first_block, hide, padded,
    scores, soften,
};
use super::firsts::Firsts;
use super::rows::{HeadRows, Room};
use super::sizes::{HEAD_SIZE_MAX, Sizes};
use crate::Element;
use crate::ops::float::{Float, lane_sum};
use crate::ops::matmul::{Real, TileKernel};
use crate::ops::stored::{self, Stored};
use crate::simd::multiversion;
use crate::threads::{self, PARALLEL_MIN, Shares};

/// The operands of a forward pass.
pub(super) struct Forward<'a, S: Stored> {
    pub(super) sizes: Sizes,
    pub(super) firsts: Firsts<'a>,
    /// (B·T, heads·head_size)
    pub(super) out: Shares<'a, S>,
    /// (B·heads, T)
    pub(super) log_sum_exp: Shares<'a, S::Math>,
    /// (B·T, (heads + 2·kv_heads)·head_size)
    pub(super) qkv: &'a [S],
}

/// The buffers of a thread.
#[derive(Default)]
pub(super) struct ForwardBuffers<T> {
    v: Room<T>,
    q: Room<T>,
    scores: Room<T>,
    out: Room<T>,
}

/// The output of some blocks of queries, for the heads of q that share head `unit % kv_heads` of k
/// and v, in sequence `unit / kv_heads`.
///
/// # Safety
/// No other thread has these blocks. The processor has the instructions of `K`.
pub(super) unsafe fn piece<T: Real + Stored<Math = T>, K: TileKernel<T>>(
    work: &Forward<'_, T>,
    unit: usize,
    blocks: Range<usize>,
    rooms: &mut ForwardBuffers<T>,
) {
    let sizes = work.sizes;
    let (sequence, kv_head) = (unit / sizes.kv_heads, unit % sizes.kv_heads);
    let columns = sizes.columns();
    let of = |operand: usize| (work.qkv, columns[operand]);
    let keys_end = if sizes.causal {
        sizes.time.min(blocks.end * BLOCK)
    } else {
        sizes.time
    };
    let place = (sequence, kv_head);
    let k = HeadRows::new(of(1), sizes, place, 0..keys_end);
    let v = HeadRows::new(of(2), sizes, place, 0..keys_end).copy::<K>(&mut rooms.v);
    let block = rooms.scores.take(BLOCK * BLOCK);
    let sums = rooms.out.take(BLOCK * padded::<T, K>(sizes.head_size));
    let group = sizes.group();
    for q_head in kv_head * group..(kv_head + 1) * group {
        for q_block in blocks.clone() {
            let rows = q_block * BLOCK..sizes.time.min((q_block + 1) * BLOCK);
            let q = HeadRows::new(of(0), sizes, (sequence, q_head), rows.clone());
            let q = q.turn::<K>(&mut rooms.q);
            let mut running = RunningSoftmax::new();
            sums.fill(T::ZERO);
            let end = if sizes.causal { rows.end } else { sizes.time };
            let firsts = work.firsts.of_block(sizes, sequence, &rows);
            let first = first_block(&firsts, rows.len());
            for first_key in (first..end).step_by(BLOCK) {
                let extent = Extent {
                    keys: BLOCK.min(end - first_key),
                    queries: rows.len(),
                    diagonal: sizes.causal && first_key == rows.start,
                };
                // SAFETY: the caller's promise about the instructions.
                unsafe {
                    let k = k.from(first_key);
                    scores::<T, K>(block, k, q, extent, T::from_f64(sizes.scale));
                    cap_scores(block, sizes.cap);
                    hide(block, extent, first_key, &firsts);
                    extent
                        .parts()
                        .for_each(|part| soften(block, part, &mut running));
                    if first_key > first {
                        rescale(sums, &running.rescale);
                    }
                    add_over_keys::<T, K>(sums, block, (v, first_key), extent, T::ONE);
                }
            }
            finish(&mut running);
            // SAFETY: the caller's promise about the blocks.
            unsafe { work.write((sequence, q_head), rows, sums, &running) };
        }
    }
}

/// Multiplies the rows of a block by these factors.
pub(super) fn rescale<T: Real>(sums: &mut [T], factors: &[T; BLOCK]) {
    let width = sums.len() / BLOCK;
    for (row, &factor) in sums.chunks_mut(width).zip(factors) {
        if factor != T::ONE {
            row.iter_mut().for_each(|sum| *sum = *sum * factor);
        }
    }
}

impl<T: Real, S: Stored<Math = T>> Forward<'_, S> {
    /// Writes a block's sums and logarithms, as `finish` left them.
    ///
    /// # Safety
    /// No other thread has these rows of this head.
    pub(super) unsafe fn write(
        &self,
        (sequence, head): (usize, usize),
        rows: Range<usize>,
        sums: &[T],
        running: &RunningSoftmax<T>,
    ) {
        let (time, heads, head_size) = (self.sizes.time, self.sizes.heads, self.sizes.head_size);
        let line = (sequence * heads + head) * time;
        // SAFETY: the rows of this head, by the caller's promise.
        let logs = unsafe { self.log_sum_exp.part(line + rows.start..line + rows.end) };
        let width = sums.len() / BLOCK;
        for (index, row) in rows.enumerate() {
            logs[index] = running.largest[index];
            let factor = running.sum[index];
            let start = ((sequence * time + row) * heads + head) * head_size;
            // SAFETY: the columns of this head in this row, by the caller's promise.
            let out = unsafe { self.out.part(start..start + head_size) };
            for (out, &sum) in out.iter_mut().zip(&sums[index * width..]) {
                *out = S::rounded(sum * factor);
            }
        }
    }
}

/// The operands of attention of new tokens to earlier ones, whose keys and values are in a cache:
/// for generating text token by token. R rows of `time` tokens are new.
pub(super) struct Cached<'a, S> {
    pub(super) sizes: Sizes,
    /// R
    pub(super) rows: usize,
    /// (R, heads·head_size)
    pub(super) out: Shares<'a, S>,
    /// (T, 2·kv_heads·head_size)
    pub(super) cache: &'a [S],
    /// (R, (heads + 2·kv_heads)·head_size)
    pub(super) qkv: &'a [S],
}

/// All heads, divided among the threads. Each row is computed independently, so its bits do not
/// depend on how many rows are given at a time.
pub(super) fn run_cached<S: Stored>(work: &Cached<'_, S>) {
    let (sizes, scale) = (work.sizes, S::Math::from_f64(work.sizes.scale));
    let (time, heads, head_size) = (sizes.time, sizes.heads, sizes.head_size);
    let (width, kv_width) = (heads * head_size, 2 * sizes.kv_heads * head_size);
    let elements = work.rows.saturating_mul(time).saturating_mul(width);
    let pieces = if elements < PARALLEL_MIN { 1 } else { heads };
    threads::run(pieces, |piece| {
        let mut weights = vec![S::Math::ZERO; time];
        for head in threads::cut(heads, 1, pieces, piece) {
            let key = head / sizes.group() * head_size;
            for row in 0..work.rows {
                let end = time - work.rows + row + 1;
                let seen = end.min(sizes.window.unwrap_or(end));
                let q = &work.qkv[row * (width + kv_width) + head * head_size..][..head_size];
                let start = row * width + head * head_size;
                // SAFETY: each piece has its own heads.
                let out = unsafe { work.out.part(start..start + head_size) };
                let first = (end - seen) * kv_width + key;
                let [keys, values] = [first, first + kv_width / 2].map(|at| &work.cache[at..]);
                let scales = (scale, sizes.cap.unwrap_or(0.0));
                attend(out, &mut weights[..seen], q, keys, values, kv_width, scales);
            }
        }
    });
}

multiversion! {
    /// `out = softmax(scale · q·kᵀ) · v` for one row of a head. `weights` are overwritten; there is
    /// one for each key. Keys and values are `stride` apart. A cap of 0 is none.
    fn attend[S: Stored](
        out: &mut [S],
        weights: &mut [S::Math],
        q: &[S],
        keys: &[S],
        values: &[S],
        stride: usize,
        scales: (S::Math, f64),
    ) {
        let (scale, cap) = scales;
        let mut largest = S::Math::NEG_INFINITY;
        for (weight, key) in weights.iter_mut().zip(keys.chunks(stride)) {
            *weight = scale * stored::lane_dot(q, &key[..q.len()]);
            if cap != 0.0 {
                let ratio = *weight * S::Math::from_f64(1.0 / cap);
                *weight = S::Math::from_f64(cap) * ratio.tanh();
            }
            largest = if *weight > largest { *weight } else { largest };
        }
        for weight in weights.iter_mut() {
            *weight = (*weight - largest).exponential_or_zero();
        }
        let share = S::Math::ONE / lane_sum(weights);
        let mut sums = [S::Math::ZERO; HEAD_SIZE_MAX];
        let sums = &mut sums[..out.len()];
        for (weight, value) in weights.iter().zip(values.chunks(stride)) {
            for (sum, &value) in sums.iter_mut().zip(value) {
                *sum = weight.fused(value.wide(), *sum);
            }
        }
        for (out, &sum) in out.iter_mut().zip(sums.iter()) {
            *out = S::rounded(sum * share);
        }
    }
}
