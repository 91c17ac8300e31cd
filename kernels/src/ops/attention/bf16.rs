//! Attention of bf16 on the CPU: as in f32, but its products are matmuls of bf16 with sums in f32,
//! and between them weights and gradients of scores are rounded to bf16.
//!
//! Blocks are whole: rows that do not exist, and weights that are masked, are zeros.

use std::ops::Range;

use super::backward::{Backward, Sweep};
use super::blocks::{
    BLOCK, Extent, RunningSoftmax, cap_scores, finish, first_block, hide, soften, soften_backward,
};
use super::forward::{Forward, rescale};
use super::sizes::{ColumnLayout, Sizes};
use crate::dtype::bf16;
use crate::ops::matmul::Matrix;
use crate::ops::matmul::bf16::add_product;
use crate::ops::round::round;

/// The buffers of a thread.
#[derive(Default)]
pub(super) struct Bf16Buffers {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    dout: Vec<bf16>,
    weights: Weights,
    gradients: Weights,
    /// The output or dq of a block of queries, and dk and dv of all keys.
    sums: [Vec<f32>; 3],
}

/// A block `[key][query]`, as it is computed and as a matmul reads it.
#[derive(Default)]
struct Weights {
    wide: Vec<f32>,
    rounded: Vec<bf16>,
}

impl Weights {
    /// `scale · left·rightᵀ` of rows of keys and of queries.
    fn score(&mut self, left: Matrix<'_, bf16>, right: Matrix<'_, bf16>, scale: f32) {
        self.wide.resize(BLOCK * BLOCK, 0.0);
        self.rounded.resize(BLOCK * BLOCK, bf16::ZERO);
        add_product(&mut self.wide, left, right.t(), (scale, 0.0));
    }

    /// `[key][query]`, of which those that do not count are zeros.
    fn round(&mut self, extent: Extent) -> Matrix<'_, bf16> {
        extent
            .parts()
            .for_each(|part| part.clear_rest(&mut self.wide));
        round(&mut self.rounded, &self.wide);
        Matrix::new(&self.rounded, BLOCK, BLOCK, false)
    }
}

/// Rows of a head, one after another, up to whole blocks.
fn gather(
    room: &mut Vec<bf16>,
    (elements, columns): (&[bf16], ColumnLayout),
    sizes: Sizes,
    (sequence, head): (usize, usize),
    rows: Range<usize>,
) {
    let width = sizes.head_size;
    room.clear();
    for row in rows {
        let start = (sequence * sizes.time + row) * columns.stride + columns.first + head * width;
        room.extend_from_slice(&elements[start..start + width]);
    }
    room.resize(room.len().next_multiple_of(BLOCK * width), bf16::ZERO);
}

/// `sums`, filled with zeros.
fn zeros(sums: &mut Vec<f32>, len: usize) {
    sums.clear();
    sums.resize(len, 0.0);
}

/// The rows of a block.
fn block(rows: &[bf16], first: usize, width: usize) -> Matrix<'_, bf16> {
    Matrix::new(&rows[first * width..][..BLOCK * width], BLOCK, width, false)
}

/// As `forward::piece`.
///
/// # Safety
/// No other thread has these blocks.
pub(super) unsafe fn forward(
    work: &Forward<'_, bf16>,
    unit: usize,
    blocks: Range<usize>,
    rooms: &mut Bf16Buffers,
) {
    let sizes = work.sizes;
    let (width, scale) = (sizes.head_size, sizes.scale as f32);
    let place = (unit / sizes.kv_heads, unit % sizes.kv_heads);
    let [q_columns, k, v] = sizes.columns().map(|columns| (work.qkv, columns));
    let keys = if sizes.causal {
        sizes.time.min(blocks.end * BLOCK)
    } else {
        sizes.time
    };
    gather(&mut rooms.k, k, sizes, place, 0..keys);
    gather(&mut rooms.v, v, sizes, place, 0..keys);
    for q_head in place.1 * sizes.group()..(place.1 + 1) * sizes.group() {
        for q_block in blocks.clone() {
            let rows = q_block * BLOCK..sizes.time.min((q_block + 1) * BLOCK);
            let of_head = (place.0, q_head);
            gather(&mut rooms.q, q_columns, sizes, of_head, rows.clone());
            let q = block(&rooms.q, 0, width);
            let (mut running, [sums, ..]) = (RunningSoftmax::new(), &mut rooms.sums);
            zeros(sums, BLOCK * width);
            let end = if sizes.causal { rows.end } else { sizes.time };
            let firsts = work.firsts.of_block(sizes, place.0, &rows);
            let first = first_block(&firsts, rows.len());
            for first_key in (first..end).step_by(BLOCK) {
                let extent = Extent {
                    keys: BLOCK.min(end - first_key),
                    queries: rows.len(),
                    diagonal: sizes.causal && first_key == rows.start,
                };
                let weights = &mut rooms.weights;
                weights.score(block(&rooms.k, first_key, width), q, scale);
                cap_scores(&mut weights.wide, sizes.cap);
                hide(&mut weights.wide, extent, first_key, &firsts);
                extent
                    .parts()
                    .for_each(|part| soften(&mut weights.wide, part, &mut running));
                if first_key > first {
                    rescale(sums, &running.rescale);
                }
                let v = block(&rooms.v, first_key, width);
                add_product(sums, weights.round(extent).t(), v, (1.0, 1.0));
            }
            finish(&mut running);
            // SAFETY: the caller's promise about the blocks.
            unsafe { work.write(of_head, rows, sums, &running) };
        }
    }
}

/// As `backward::piece`.
///
/// # Safety
/// No other thread writes what this sweep writes.
pub(super) unsafe fn backward(
    work: &Backward<'_, bf16>,
    unit: usize,
    sweep: &Sweep,
    rooms: &mut Bf16Buffers,
) {
    let sizes = work.sizes;
    let (width, scale) = (sizes.head_size, sizes.scale as f32);
    let place = (unit / sizes.kv_heads, unit % sizes.kv_heads);
    let rows_of = |blocks: &Range<usize>| blocks.start * BLOCK..sizes.time.min(blocks.end * BLOCK);
    let keys = rows_of(&sweep.keys);
    let [stride, ..] = sizes.widths();
    let dout_columns = (work.dout, ColumnLayout { first: 0, stride });
    let [q_columns, k, v] = sizes.columns().map(|columns| (work.qkv, columns));
    gather(&mut rooms.k, k, sizes, place, keys.clone());
    gather(&mut rooms.v, v, sizes, place, keys.clone());
    let [dq, dk, dv] = &mut rooms.sums;
    zeros(dk, rooms.k.len());
    zeros(dv, rooms.k.len());
    for q_head in place.1 * sizes.group()..(place.1 + 1) * sizes.group() {
        for q_block in sweep.queries.clone() {
            let rows = rows_of(&(q_block..q_block + 1));
            let of_head = (place.0, q_head);
            gather(&mut rooms.q, q_columns, sizes, of_head, rows.clone());
            gather(&mut rooms.dout, dout_columns, sizes, of_head, rows.clone());
            let (q, dout) = (block(&rooms.q, 0, width), block(&rooms.dout, 0, width));
            let inverse = sizes.cap.map_or(0.0, |cap| 1.0 / cap) as f32;
            let lines = [work.log_sum_exp, work.delta].map(|of| work.line(of, of_head, &rows));
            zeros(dq, BLOCK * width);
            let end = if sizes.causal {
                keys.end.min(rows.end)
            } else {
                keys.end
            };
            let firsts = work.firsts.of_block(sizes, place.0, &rows);
            let start = keys.start.max(first_block(&firsts, rows.len()));
            for first_key in (start..end).step_by(BLOCK) {
                let extent = Extent {
                    keys: BLOCK.min(end - first_key),
                    queries: rows.len(),
                    diagonal: sizes.causal && first_key == rows.start,
                };
                let index = first_key - keys.start;
                let (k, v) = (block(&rooms.k, index, width), block(&rooms.v, index, width));
                let (weights, gradients) = (&mut rooms.weights, &mut rooms.gradients);
                weights.score(k, q, scale);
                cap_scores(&mut weights.wide, sizes.cap);
                hide(&mut weights.wide, extent, first_key, &firsts);
                gradients.score(v, dout, 1.0);
                for part in extent.parts() {
                    let lines = (&lines[0], &lines[1]);
                    soften_backward(&mut weights.wide, &mut gradients.wide, part, lines, inverse);
                }
                let gradients = gradients.round(extent);
                if sweep.dkv {
                    let of_block = index * width..(index + BLOCK) * width;
                    let weights = weights.round(extent);
                    add_product(&mut dv[of_block.clone()], weights, dout, (1.0, 1.0));
                    add_product(&mut dk[of_block], gradients, q, (scale, 1.0));
                }
                if sweep.dq {
                    add_product(dq, gradients.t(), k, (scale, 1.0));
                }
            }
            if sweep.dq {
                // SAFETY: the caller's promise.
                unsafe { work.write(0, of_head, rows, dq) };
            }
        }
    }
    if sweep.dkv {
        // SAFETY: the caller's promise.
        unsafe {
            work.write(1, place, keys.clone(), dk);
            work.write(2, place, keys, dv);
        }
    }
}
