//! Backward on the CPU: scores are computed again, block by block.
//!
//! With P the softmax's weights and S the scores: dv = Pᵀ·dout, dP = dout·vᵀ, dS = P ∘ (dP − delta)
//! with delta = Σ dout ∘ out of each row, dq = scale dS·k, dk = scale dSᵀ·q. Elements of dq add
//! blocks of keys in order; those of dk and dv add heads, and in each blocks of queries, in order.

use std::ops::Range;

use super::blocks::{
    BLOCK, Extent, add_over_keys, add_over_queries, cap_scores, first_block, hide, padded, scores,
    soften_backward,
};
use super::firsts::Firsts;
use super::rows::{HeadRows, Lines, Room};
use super::sizes::{ColumnLayout, Sizes};
use crate::ops::matmul::{Real, TileKernel};
use crate::ops::stored::{self, Stored};
use crate::simd::multiversion;
use crate::threads::{self, Shares};

/// The operands of a backward pass.
pub(super) struct Backward<'a, S: Stored> {
    pub(super) sizes: Sizes,
    pub(super) firsts: Firsts<'a>,
    /// (B·T, (heads + 2·kv_heads)·head_size)
    pub(super) dqkv: Shares<'a, S>,
    /// (B·heads, T)
    pub(super) delta: &'a [S::Math],
    /// (B·T, heads·head_size)
    pub(super) dout: &'a [S],
    /// (B·heads, T)
    pub(super) log_sum_exp: &'a [S::Math],
    /// (B·T, (heads + 2·kv_heads)·head_size)
    pub(super) qkv: &'a [S],
}

/// Which blocks of queries meet which blocks of keys, and what that is for.
#[derive(Clone)]
pub(super) struct Sweep {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// Whether dq of these queries is written: then the keys are all they attend to.
    pub(super) dq: bool,
    /// Whether dk and dv of these keys are written: then the queries are all that attend to them.
    pub(super) dkv: bool,
}

/// The buffers of a thread.
#[derive(Default)]
pub(super) struct BackwardBuffers<T> {
    k: Room<T>,
    q: [Room<T>; 2],
    dout: [Room<T>; 2],
    scores: Room<T>,
    gradients: Room<T>,
    dq: Room<T>,
    dk: Room<T>,
    dv: Room<T>,
}

/// `delta[head][time] = Σ dout ∘ out` of the head's columns.
pub(super) fn write_delta<S: Stored>(delta: &mut [S::Math], dout: &[S], out: &[S], sizes: Sizes) {
    let (time, heads) = (sizes.time, sizes.heads);
    let width = heads * sizes.head_size;
    let pieces = threads::pieces_of(dout.len());
    let delta = Shares::new(delta);
    threads::run(pieces, |index| {
        for row in threads::cut(sizes.batch * time, 1, pieces, index) {
            let [dout, out] = [dout, out].map(|of| &of[row * width..(row + 1) * width]);
            let heads_of = dout
                .chunks(sizes.head_size)
                .zip(out.chunks(sizes.head_size));
            for (head, (dout, out)) in heads_of.enumerate() {
                let at = (row / time * heads + head) * time + row % time;
                // SAFETY: each pair of row and head has its own element; a row is in one piece.
                unsafe { delta.part(at..at + 1)[0] = dot(dout, out) };
            }
        }
    });
}

multiversion! {
    fn dot[S: Stored](a: &[S], b: &[S]) -> S::Math {
        stored::lane_dot(a, b)
    }
}

/// One sweep for the heads of q that share head `unit % kv_heads` of k and v, in sequence `unit /
/// kv_heads`.
///
/// # Safety
/// No other thread writes what this sweep writes. The processor has the instructions of `K`.
pub(super) unsafe fn piece<T: Real + Stored<Math = T>, K: TileKernel<T>>(
    work: &Backward<'_, T>,
    unit: usize,
    sweep: &Sweep,
    rooms: &mut BackwardBuffers<T>,
) {
    let sizes = work.sizes;
    let place = (unit / sizes.kv_heads, unit % sizes.kv_heads);
    let rows_of = |blocks: &Range<usize>| blocks.start * BLOCK..sizes.time.min(blocks.end * BLOCK);
    let keys = rows_of(&sweep.keys);
    let [stride, ..] = sizes.widths();
    let dout_columns = ColumnLayout { first: 0, stride };
    let [q, k, v] = sizes.columns().map(|columns| (work.qkv, columns));
    let k = HeadRows::new(k, sizes, place, keys.clone());
    let keys_of = SweepKeys {
        first: keys.start,
        end: keys.end,
        k,
        v: HeadRows::new(v, sizes, place, keys.clone()),
        k_copied: k.copy::<K>(&mut rooms.k),
    };
    let width = padded::<T, K>(sizes.head_size);
    let mut sums = GradientSums {
        scores: rooms.scores.take(BLOCK * BLOCK),
        gradients: rooms.gradients.take(BLOCK * BLOCK),
        dq: rooms.dq.take(BLOCK * width),
        dk: rooms.dk.take(sweep.keys.len() * BLOCK * width),
        dv: rooms.dv.take(sweep.keys.len() * BLOCK * width),
    };
    sums.dk.fill(T::ZERO);
    sums.dv.fill(T::ZERO);
    let group = sizes.group();
    for q_head in place.1 * group..(place.1 + 1) * group {
        for q_block in sweep.queries.clone() {
            let rows = rows_of(&(q_block..q_block + 1));
            let [q_turned, q_copied] = &mut rooms.q;
            let [dout_turned, dout_copied] = &mut rooms.dout;
            let of_head = (place.0, q_head);
            let q = HeadRows::new(q, sizes, of_head, rows.clone());
            let dout = (work.dout, dout_columns);
            let dout = HeadRows::new(dout, sizes, of_head, rows.clone());
            let queries = Queries {
                q: q.turn::<K>(q_turned),
                q_copied: q.copy::<K>(q_copied),
                dout: dout.turn::<K>(dout_turned),
                dout_copied: dout.copy::<K>(dout_copied),
                log_sum_exp: work.line(work.log_sum_exp, of_head, &rows),
                delta: work.line(work.delta, of_head, &rows),
                firsts: work.firsts.of_block(sizes, place.0, &rows),
            };
            // SAFETY: the caller's promises.
            unsafe {
                over_keys::<T, K>(sizes, sweep, &rows, &keys_of, &queries, &mut sums);
                if sweep.dq {
                    work.write(0, of_head, rows, sums.dq);
                }
            }
        }
    }
    if sweep.dkv {
        // SAFETY: the caller's promise.
        unsafe {
            work.write(1, place, keys.clone(), sums.dk);
            work.write(2, place, keys, sums.dv);
        }
    }
}

/// A sweep's keys.
struct SweepKeys<'a, T> {
    first: usize,
    end: usize,
    k: HeadRows<'a, T>,
    v: HeadRows<'a, T>,
    k_copied: Lines<'a, T>,
}

/// Panels of a block of queries.
struct Queries<'a, T> {
    q: Lines<'a, T>,
    q_copied: Lines<'a, T>,
    dout: Lines<'a, T>,
    dout_copied: Lines<'a, T>,
    log_sum_exp: [T; BLOCK],
    delta: [T; BLOCK],
    firsts: [u32; BLOCK],
}

/// A block of scores, one of their gradients, and sums: dq of a block of queries, dk and dv of all
/// keys of the sweep.
struct GradientSums<'a, T> {
    scores: &'a mut [T],
    gradients: &'a mut [T],
    dq: &'a mut [T],
    dk: &'a mut [T],
    dv: &'a mut [T],
}

/// One block of queries, whose rows are `rows`, with each block of keys.
///
/// # Safety
/// The processor has the instructions of `K`.
unsafe fn over_keys<T: Real, K: TileKernel<T>>(
    sizes: Sizes,
    sweep: &Sweep,
    rows: &Range<usize>,
    keys: &SweepKeys<'_, T>,
    queries: &Queries<'_, T>,
    sums: &mut GradientSums<'_, T>,
) {
    let (scale, width) = (T::from_f64(sizes.scale), sums.dq.len());
    let inverse = T::from_f64(sizes.cap.map_or(0.0, |cap| 1.0 / cap));
    sums.dq.fill(T::ZERO);
    let end = if sizes.causal {
        keys.end.min(rows.end)
    } else {
        keys.end
    };
    let start = keys.first.max(first_block(&queries.firsts, rows.len()));
    for first_key in (start..end).step_by(BLOCK) {
        let extent = Extent {
            keys: BLOCK.min(end - first_key),
            queries: rows.len(),
            diagonal: sizes.causal && first_key == rows.start,
        };
        let index = first_key - keys.first;
        let of_block = index / BLOCK * width..(index / BLOCK + 1) * width;
        // SAFETY: the caller's promise.
        unsafe {
            let (k, v) = (keys.k.from(index), keys.v.from(index));
            scores::<T, K>(sums.scores, k, queries.q, extent, scale);
            cap_scores(sums.scores, sizes.cap);
            hide(sums.scores, extent, first_key, &queries.firsts);
            scores::<T, K>(sums.gradients, v, queries.dout, extent, T::ONE);
            for part in extent.parts() {
                let lines = (&queries.log_sum_exp, &queries.delta);
                soften_backward(sums.scores, sums.gradients, part, lines, inverse);
            }
            if sweep.dkv {
                let (dk, dv) = (&mut sums.dk[of_block.clone()], &mut sums.dv[of_block]);
                add_over_queries::<T, K>(dv, sums.scores, queries.dout_copied, extent, T::ONE);
                add_over_queries::<T, K>(dk, sums.gradients, queries.q_copied, extent, scale);
            }
            if sweep.dq {
                let k = (keys.k_copied, index);
                add_over_keys::<T, K>(sums.dq, sums.gradients, k, extent, scale);
            }
        }
    }
}

impl<T: Real, S: Stored<Math = T>> Backward<'_, S> {
    /// The elements for some rows of (B·heads, T).
    pub(super) fn line(
        &self,
        of: &[T],
        (sequence, head): (usize, usize),
        rows: &Range<usize>,
    ) -> [T; BLOCK] {
        let start = (sequence * self.sizes.heads + head) * self.sizes.time;
        let mut line = [T::ZERO; BLOCK];
        line[..rows.len()].copy_from_slice(&of[start + rows.start..start + rows.end]);
        line
    }

    /// Writes rows of a head of dq, dk or dv.
    ///
    /// # Safety
    /// No other thread has these rows of this head.
    pub(super) unsafe fn write(
        &self,
        operand: usize,
        (sequence, head): (usize, usize),
        rows: Range<usize>,
        sums: &[T],
    ) {
        let (columns, head_size) = (self.sizes.columns()[operand], self.sizes.head_size);
        let width = sums.len() / rows.len().next_multiple_of(BLOCK);
        for (row, sums) in rows.zip(sums.chunks(width)) {
            let row = (sequence * self.sizes.time + row) * columns.stride;
            let start = row + columns.first + head * head_size;
            // SAFETY: the columns of this head in this row, by the caller's promise.
            let to = unsafe { self.dqkv.part(start..start + head_size) };
            S::keep(to, &sums[..head_size]);
        }
    }
}
