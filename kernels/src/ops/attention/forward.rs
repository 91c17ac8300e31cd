//! Forward on the CPU: block by block of queries, over the blocks of keys.

use std::ops::Range;

use super::matmuls::{Extent, Head, Room, add_over_keys, padded, scores};
use super::sizes::Sizes;
use super::softmax::{BLOCK, Running, finish, soften};
use crate::ops::matmul::{Kernel, Real};
use crate::threads::Shares;

/// The operands of a forward pass.
pub(super) struct Forward<'a, T> {
    pub(super) sizes: Sizes,
    /// (B·T, heads·head_size)
    pub(super) out: Shares<'a, T>,
    /// (B·heads, T)
    pub(super) log_sum_exp: Shares<'a, T>,
    /// (B·T, (heads + 2·kv_heads)·head_size)
    pub(super) qkv: &'a [T],
}

/// The buffers of a thread.
#[derive(Default)]
pub(super) struct Rooms<T> {
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
pub(super) unsafe fn piece<T: Real, K: Kernel<T>>(
    work: &Forward<'_, T>,
    unit: usize,
    blocks: Range<usize>,
    rooms: &mut Rooms<T>,
) {
    let sizes = work.sizes;
    let (sequence, kv_head) = (unit / sizes.kv_heads, unit % sizes.kv_heads);
    let columns = sizes.columns();
    let head = |operand: usize, rows: Range<usize>, head: usize| {
        Head::new((work.qkv, columns[operand]), sizes, (sequence, head), rows)
    };
    let keys_end = match sizes.causal {
        true => sizes.time.min(blocks.end * BLOCK),
        false => sizes.time,
    };
    let k = head(1, 0..keys_end, kv_head);
    let v = head(2, 0..keys_end, kv_head).copy::<K>(&mut rooms.v);
    let block = rooms.scores.take(BLOCK * BLOCK);
    let sums = rooms.out.take(BLOCK * padded::<T, K>(sizes.head_size));
    let group = sizes.group();
    for q_head in kv_head * group..(kv_head + 1) * group {
        for q_block in blocks.clone() {
            let rows = q_block * BLOCK..sizes.time.min((q_block + 1) * BLOCK);
            let q = head(0, rows.clone(), q_head).turn::<K>(&mut rooms.q);
            let mut running = Running::new();
            sums.fill(T::ZERO);
            let end = if sizes.causal { rows.end } else { sizes.time };
            for first_key in (0..end).step_by(BLOCK) {
                let extent = Extent {
                    keys: BLOCK.min(end - first_key),
                    queries: rows.len(),
                    diagonal: sizes.causal && first_key == rows.start,
                };
                // SAFETY: the caller's promise about the instructions.
                unsafe {
                    let k = k.from(first_key);
                    scores::<T, K>(block, k, q, extent, T::from_f64(sizes.scale));
                    extent
                        .parts()
                        .for_each(|part| soften(block, part, &mut running));
                    if first_key > 0 {
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
fn rescale<T: Real>(sums: &mut [T], factors: &[T; BLOCK]) {
    let width = sums.len() / BLOCK;
    for (row, &factor) in sums.chunks_mut(width).zip(factors) {
        if factor != T::ONE {
            row.iter_mut().for_each(|sum| *sum = *sum * factor);
        }
    }
}

impl<T: Real> Forward<'_, T> {
    /// Writes a block's sums and logarithms, as `finish` left them.
    ///
    /// # Safety
    /// No other thread has these rows of this head.
    unsafe fn write(
        &self,
        (sequence, head): (usize, usize),
        rows: Range<usize>,
        sums: &[T],
        running: &Running<T>,
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
                *out = sum * factor;
            }
        }
    }
}
