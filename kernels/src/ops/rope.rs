//! rope: rotary positions, as in Hugging Face's Llama. Of the first A columns of each head, element
//! i of the first half and element i of the second are a point in the plane, which is turned by the
//! angle t · f(i) at position t, where f(i) is base^(−2i/A) in Llama. Backward turns back.
//!
//! Letters: R rows (tokens), T positions, D size of a head, A columns of it that are turned, W
//! columns of a row.

use crate::error::{Caller, Result};
use crate::launch::{BLOCK_THREADS, BLOCKS_MAX, CuFile, Grid, args};
use crate::ops::call::{FLOATS_AND_BF16, OpCall};
use crate::ops::float::Float;
use crate::ops::stored::{Stored, with_stored};
use crate::simd::multiversion;
use crate::threads::{self, Shares};
use crate::{DType, Device, Element, Tensor};

pub(super) static SOURCE: CuFile = CuFile::new("rope.cu", include_str!("rope.cu"));

/// How fast the points of the first `columns` columns of a head turn in Llama, (A/2): base^(−2i/A).
/// `base` is 10 000 there.
#[track_caller]
pub fn rope_frequencies(columns: usize, base: f64) -> Result<Vec<f64>> {
    let by = Caller::new("rope_frequencies");
    if !columns.is_multiple_of(2) {
        return Err(by.value("columns", "an even number", columns));
    }
    if !(base > 0.0 && base.finite()) {
        return Err(by.value("base", "a finite number above 0", base));
    }
    let of = |i: usize| base.powf(-2.0 * i as f64 / columns as f64);
    Ok((0..columns / 2).map(of).collect())
}

/// The table for [`rope_into`], f32 (T, A): in row t the cosines of the angles t · `frequencies`
/// (A/2), then the sines, both times `scale`. They are computed in f64 and rounded once.
///
/// Backward: none; it is not trained.
#[track_caller]
pub fn rope_table(
    positions: usize,
    frequencies: &[f64],
    scale: f64,
    device: Device,
) -> Result<Tensor> {
    let columns = 2 * frequencies.len();
    let mut table = Vec::with_capacity(positions * columns);
    for position in 0..positions {
        let angles = || frequencies.iter().map(|it| position as f64 * it);
        table.extend(angles().map(|angle| (scale * angle.cos()) as f32));
        table.extend(angles().map(|angle| (scale * angle.sin()) as f32));
    }
    Tensor::from_slice(&table, &[positions, columns], device)
}

/// `out = x` with the first A columns of the first `heads` heads of each row turned: those of
/// queries and keys, if a row has values after them. Heads and their size are `[heads, D]`.
/// `out` and `x` (R, W), W >= `heads` D, of one dtype, and `out` may be `x`; `table` f32 (T, A),
/// from [`rope_table`], A <= D; row r is at position r mod T, R a multiple of T.
#[track_caller]
pub fn rope_into(out: &Tensor, x: &Tensor, table: &Tensor, heads: [usize; 2]) -> Result<()> {
    rotate_into(
        OpCall::new("rope"),
        [("out", out), ("x", x)],
        table,
        heads,
        1.0,
    )
}

/// `dx = dout` with the same heads turned back; `dx` may be `dout`.
#[track_caller]
pub fn rope_backward_into(
    dx: &Tensor,
    dout: &Tensor,
    table: &Tensor,
    heads: [usize; 2],
) -> Result<()> {
    let call = OpCall::new("rope_backward");
    rotate_into(call, [("dx", dx), ("dout", dout)], table, heads, -1.0)
}

fn rotate_into<'a>(
    mut call: OpCall<'a>,
    [out, x]: [(&'static str, &'a Tensor); 2],
    table: &'a Tensor,
    [heads, head_size]: [usize; 2],
    direction: f32,
) -> Result<()> {
    let out = call.writes(out.0, out.1);
    let x = call.reads(x.0, x.1);
    let table = call.reads("table", table);
    call.may_be_in_place(x, out);
    call.elementwise(&[x, out])?;
    let [rows, columns] = call.dims::<2>(x, "[tokens, columns]")?;
    let [positions, turned] = call.dims::<2>(table, "[positions, turned columns]")?;
    call.has_dtype(table, &[DType::F32])?;
    call.row_major(table)?;
    if !turned.is_multiple_of(2) || turned > head_size {
        let expected = format!("an even number of columns, at most {head_size}");
        return Err(call.operand_error(table, expected, "use rope_table"));
    }
    if !rows.is_multiple_of(positions) {
        let expected =
            format!("as many rows as positions in a sequence, which divide {rows} tokens");
        return Err(call.operand_error(table, expected, "slice it to the sequence's length"));
    }
    if heads.saturating_mul(head_size) > columns {
        let expected = format!("at most {columns} columns in heads of {head_size}");
        return Err(call.value("heads", expected, heads));
    }
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x, table] = placed.enter([out, x, table])?;
        if let Some(gpu) = placed.gpu() {
            let args = args![
                out, x, table, rows, columns, heads, head_size, turned, positions, direction
            ];
            let blocks = rows.min(BLOCKS_MAX);
            // A thread turns four points, and as many half a head further on.
            let of_row = (heads * turned).div_ceil(8 * BLOCK_THREADS as usize);
            let loads = rows.div_ceil(blocks.max(1)) * of_row;
            let grid = Grid::blocks(blocks, BLOCK_THREADS, loads);
            return gpu.launch(&SOURCE, ("rope", out.dtype), grid, args);
        }
        let table = table.elements::<f32>();
        with_stored!(placed.dtype, S => {
            let (count, x) = (out.count, x.unless_in_place::<S>());
            let out = Shares::new(out.elements_mut::<S>());
            threads::split(count, columns.max(1), |range| {
                // SAFETY: `split` hands out ranges of whole rows that do not overlap.
                let out = unsafe { out.part(range.clone()) };
                if let Some(x) = x {
                    out.copy_from_slice(&x[range.clone()]);
                }
                let first = range.start.checked_div(columns).unwrap_or(0);
                for (row, out) in (first..).zip(out.chunks_exact_mut(columns.max(1))) {
                    let angles = &table[row % positions * turned..][..turned];
                    let out = &mut out[..heads * head_size];
                    turn(out, angles, (head_size, f64::from(direction)));
                }
            });
        });
        Ok(())
    })
}

multiversion! {
    /// Turns the first columns of the heads of a row. `angles` are cosines, then sines.
    fn turn[S: Stored](row: &mut [S], angles: &[f32], of: (usize, f64)) {
        let (head_size, direction) = of;
        let half = angles.len() / 2;
        let (cosines, sines) = angles.split_at(half);
        for head in row.chunks_exact_mut(head_size.max(1)) {
            let (left, right) = head[..2 * half].split_at_mut(half);
            let points = left.iter_mut().zip(right);
            for ((x, y), (&cosine, &sine)) in points.zip(cosines.iter().zip(sines)) {
                let cosine = S::Math::from_f64(cosine.into());
                let sine = S::Math::from_f64(direction) * S::Math::from_f64(sine.into());
                let (a, b) = (x.wide(), y.wide());
                *x = S::rounded(a.fused(cosine, S::Math::ZERO - b * sine));
                *y = S::rounded(b.fused(cosine, a * sine));
            }
        }
    }
}

#[cfg(test)]
mod tests;
