//! dropout: `out = x / (1 − p)` for the elements that are kept, 0 for the others, each of which is
//! dropped with probability p.
//!
//! Which elements are dropped is a pure function of the seed, the layer, the step, the sample (its
//! row in the global batch) and the column; it depends neither on the rank that holds the sample
//! nor on how the batch is split. So any number of ranks drops the same elements, and backward is
//! the same call on dy: nothing has to be saved for it.

use crate::error::Result;
use crate::launch::{CuFile, Grid, args};
use crate::ops::call::{FLOATS_AND_BF16, OpCall, Slot};
use crate::ops::cast::copy_on;
use crate::ops::elementwise::GRAIN;
use crate::ops::float::Float;
use crate::ops::stored::{Stored, with_stored};
use crate::random::philox4x32;
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("dropout.cu", include_str!("dropout.cu"));

/// The end of the global rows.
const ROWS_MAX: i64 = 1 << 40;
/// The end of the layers.
const LAYERS_MAX: u32 = 1 << 16;
/// The most columns: four for each counter of 32 bits.
const COLUMNS_MAX: usize = 1 << 34;

/// Which elements are dropped.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey<'a> {
    /// The run's seed. It may be that of a `Random`, which uses other counters.
    pub seed: u64,
    /// Which dropout layer of the model, below 2¹⁶: each has its own pattern.
    pub layer: u32,
    /// i64 (2): the step, 0 to 2³² − 1, and the global row of the first row of `x`; rows stay below
    /// 2⁴⁰. It is in device memory so that a captured step can be replayed at another position.
    pub position: &'a Tensor,
}

/// [`dropout_into`] with a new output.
#[track_caller]
pub fn dropout(x: &Tensor, probability: f64, key: &DropoutKey<'_>) -> Result<Tensor> {
    let out = x.empty_like()?;
    dropout_into(&out, x, probability, key)?;
    Ok(out)
}

/// `out = x` with each element dropped with `probability` (0 up to but not 1; 0 copies) and the
/// others scaled to keep the mean. A dropped element is 0 even where `x` is NaN. `x` is (B, …), one
/// row for each sample; `out` may be `x`.
///
/// An element is kept when a uniform multiple of 2⁻²⁴ is at least `probability`.
///
/// A position out of range is an error on the CPU. On a GPU only the kernel reads it: it makes all
/// of `out` NaN, which `mark_nonfinite` finds (unless `probability` is 0).
///
/// Backward: the same call with dy for `x`.
#[track_caller]
pub fn dropout_into(
    out: &Tensor,
    x: &Tensor,
    probability: f64,
    key: &DropoutKey<'_>,
) -> Result<()> {
    let mut call = OpCall::new("dropout");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let position = call.reads("position", key.position);
    call.may_be_in_place(x, out);
    call.elementwise(&[out, x])?;
    call.has_shape(
        position,
        &[2],
        "[the step, the global row of the first row]",
    )?;
    call.has_dtype(position, &[DType::I64])?;
    let [rows, columns] = check(&call, x, probability, key.layer)?;
    let mut pattern = Pattern {
        key: [key.seed as u32, (key.seed >> 32) as u32],
        step: 0,
        layer: key.layer,
        // An exact product. Rounding up makes "at least the probability" a comparison of integers.
        kept_from: (probability * f64::from(1 << 24)).ceil() as i32,
    };
    let scale = 1.0 / (1.0 - probability);
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x, position] = placed.enter([out, x, position])?;
        if let Some(gpu) = placed.gpu() {
            if probability == 0.0 {
                return copy_on(&gpu, &out, &x);
            }
            // A thread handles the columns of 16 bytes.
            let grid = Grid::elements(rows * columns.div_ceil(16 / out.dtype.bytes()));
            let ([key_0, key_1], from) = (pattern.key, pattern.kept_from);
            let scale = scale as f32;
            let args = args![
                out, x, position, rows, columns, scale, from, key.layer, key_0, key_1
            ];
            return gpu.launch(&SOURCE, ("dropout", out.dtype), grid, args);
        }
        let &[step, first_row] = position.elements::<i64>() else {
            unreachable!("its shape is [2]")
        };
        let fits = first_row >= 0 && first_row.saturating_add(rows as i64) <= ROWS_MAX;
        let Some(step) = u32::try_from(step).ok().filter(|_| fits) else {
            let expected = "a step from 0 to 4294967295 and rows from 0 to 2⁴⁰ − 1";
            let got = format!("[{step}, {first_row}] for {rows} rows");
            return Err(placed.call.value("position", expected, got));
        };
        pattern.step = step;
        if probability == 0.0 {
            if let Some(x) = x.unless_in_place::<u8>() {
                threads::copy(out.elements_mut::<u8>(), x);
            }
            return Ok(());
        }
        with_stored!(placed.dtype, S => {
            let (out, x) = (out.elements_mut::<S>(), x.unless_in_place());
            let scale = <S as Stored>::Math::from_f64(scale);
            drop_rows(out, x, columns, first_row as u64, pattern, scale);
        });
        Ok(())
    })
}

/// Checks everything but the position. Gives the rows of `x` and its columns.
fn check(call: &OpCall<'_>, x: Slot, probability: f64, layer: u32) -> Result<[usize; 2]> {
    let [rows, features @ ..] = call.tensor(x).shape().dims() else {
        let help = "reshape it to [1] for a single number";
        return Err(call.operand_error(x, "[rows, …], one row a sample", help));
    };
    let columns = features.iter().product::<usize>();
    if columns > COLUMNS_MAX {
        let expected = format!("at most {COLUMNS_MAX} columns");
        return Err(call.operand_error(x, expected, "reshape it to more rows"));
    }
    if !(0.0..1.0).contains(&probability) {
        return Err(call.value("probability", "0 up to but not 1", probability));
    }
    if layer >= LAYERS_MAX {
        return Err(call.value("layer", format!("below {LAYERS_MAX}"), layer));
    }
    Ok([*rows, columns])
}

/// What decides which elements are dropped, besides row and column.
#[derive(Clone, Copy)]
struct Pattern {
    key: [u32; 2],
    step: u32,
    layer: u32,
    /// An element is kept when its 24 random bits are at least this.
    kept_from: i32,
}

impl Pattern {
    /// The counter of columns 4 `block` to 4 `block` + 3, unique for each (step, layer, row,
    /// block). The third word holds 8 bits of the row, 16 of the layer, and a mark that a `Random`
    /// of the same seed uses only from its 2³¹-th draw on.
    #[inline(always)]
    fn counter(self, row: u64, block: u32) -> [u32; 4] {
        [
            block,
            row as u32,
            1 << 31 | self.layer << 8 | (row >> 32) as u32,
            self.step,
        ]
    }
}

fn drop_rows<S: Stored>(
    out: &mut [S],
    x: Option<&[S]>,
    columns: usize,
    first_row: u64,
    pattern: Pattern,
    scale: S::Math,
) {
    threads::split_mut(out, GRAIN, |first, out| {
        // One block more than a grain needs, since a part may begin inside a block.
        let mut bits = [[0; 4]; GRAIN / 4 + 1];
        let mut done = 0;
        while done < out.len() {
            let (row, column) = ((first + done) / columns, (first + done) % columns);
            let part_len = (columns - column).min(GRAIN).min(out.len() - done);
            let part = &mut out[done..done + part_len];
            if let Some(x) = x {
                part.copy_from_slice(&x[first + done..][..part_len]);
            }
            let skipped = column % 4;
            let blocks = &mut bits[..(skipped + part_len).div_ceil(4)];
            draw(pattern, first_row + row as u64, (column / 4) as u32, blocks);
            keep(
                part,
                &blocks.as_flattened()[skipped..skipped + part_len],
                pattern.kept_from,
                scale,
            );
            done += part_len;
        }
    });
}

multiversion! {
    fn draw[](pattern: Pattern, row: u64, first_block: u32, out: &mut [[u32; 4]]) {
        for (index, out) in out.iter_mut().enumerate() {
            *out = philox4x32(pattern.counter(row, first_block.wrapping_add(index as u32)), pattern.key);
        }
    }
}

multiversion! {
    fn keep[S: Stored](out: &mut [S], bits: &[u32], kept_from: i32, scale: S::Math) {
        for (out, &bits) in out.iter_mut().zip(bits) {
            let kept = out.wide() * scale;
            *out = S::rounded(if (bits >> 8) as i32 >= kept_from { kept } else { S::Math::ZERO });
        }
    }
}

#[cfg(test)]
mod tests;
