//! embedding: the row of a table for each token, with a row for its position added, and the
//! gradients of both tables.
//!
//! The gradient of a token's row is the sum of the gradients at its occurrences. Rows are sorted by
//! token, and those of one token stay in order. Each `RUN` of sorted rows is summed token by token;
//! where a token's rows reach over several runs, the runs' sums are added in order. So the bits
//! depend on the tokens alone, also on a GPU (`embedding.cu`), which sorts without the host.
//!
//! Letters: R rows (tokens), V rows of the table (vocabulary), T positions, C columns.

use crate::error::Result;
use crate::launch::{BLOCK_THREADS, CuFile, GpuLaunch, Grid, args};
use crate::ops::call::{
    Buffer, EVERY_DTYPE, FLOATS_AND_BF16, OpCall, Slot, TARGET_DTYPES, Targets,
};
use crate::ops::create::{fill_all, zero_on};
use crate::ops::float::Float;
use crate::ops::linear::{add_rows, gpu};
use crate::ops::stored::{Stored, with_stored};
use crate::simd::multiversion;
use crate::threads::{self, Shares};
use crate::{DType, Tensor};

pub(super) static SOURCE: CuFile = CuFile::new("embedding.cu", include_str!("embedding.cu"));

/// Columns that a thread of a GPU adds: as in embedding.cu.
const PACK: usize = 4;
/// Sorted rows that are summed before their sums are added to others; as in embedding.cu.
const RUN: usize = 64;
/// Columns at a time: their sums stay in registers.
const COLUMN_BLOCK: usize = 64;
/// Rows that a block of threads sorts, and sorted parts that a pass merges; as in embedding.cu.
const PART: usize = 512;
const MERGED: usize = 16;
/// The most blocks of a grid's second dimension.
const COLUMN_BLOCKS_MAX: usize = 65_535;

/// Memory for [`embedding_backward_into`], whose contents mean nothing before and after.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingScratch<'a> {
    /// i64 (2, R): tokens and rows, sorted; a GPU merges from one half to the other.
    pub order: &'a Tensor,
    /// (`embedding_sums_of(R)`, C), of the table's gradient's dtype: sums of parts of a token.
    pub sums: &'a Tensor,
}

/// Rows of `EmbeddingScratch::sums` for this many rows.
pub fn embedding_sums_of(rows: usize) -> usize {
    2 * rows.div_ceil(RUN)
}

/// `out[r] = table[tokens[r]] + positions[r mod T]`: `out` (R, C), `table` (V, C), `positions`
/// (T, C) of one dtype, R a multiple of T; `tokens` u8, i32 or i64 (R).
///
/// A token outside of the table is an error on the CPU, before anything is written. A GPU makes its
/// row NaN, and reads nothing outside the table.
#[track_caller]
pub fn embedding_into(
    out: &Tensor,
    table: &Tensor,
    tokens: &Tensor,
    positions: Option<&Tensor>,
) -> Result<()> {
    let mut call = OpCall::new("embedding");
    let out = call.writes("out", out);
    let table = call.reads("table", table);
    let tokens = call.reads("tokens", tokens);
    let positions = call.reads_some("positions", positions);
    let [vocabulary, columns] = call.dims::<2>(table, "[vocabulary, columns]")?;
    let rows = check_tokens(&call, tokens, vocabulary)?;
    call.has_shape(out, &[rows, columns], "[tokens, columns of table]")?;
    call.same_dtype(out, table)?;
    let mut context = 0;
    if let Some(positions) = positions {
        context = check_positions(&call, positions, [rows, columns])?;
        call.same_dtype(positions, table)?;
    }
    call.all_row_major()?;
    call.run(table, &FLOATS_AND_BF16, |placed| {
        let [mut out, table, tokens] = placed.enter([out, table, tokens])?;
        let positions = placed.enter_some(positions)?;
        if let Some(gpu) = placed.gpu() {
            let width = tokens.dtype.bytes() as u32;
            let args = args![
                out, table, positions, tokens, width, rows, columns, vocabulary, context
            ];
            // The token, then its row.
            let grid = Grid::packs(out.count, out.dtype).rounds_of(2);
            return gpu.launch(&SOURCE, ("embedding", out.dtype), grid, args);
        }
        let tokens = Targets::of(&tokens);
        refuse_others(&placed.call, tokens, vocabulary)?;
        with_stored!(placed.dtype, S => {
            let (table, positions) = (table.elements(), positions.as_ref().map(Buffer::elements));
            threads::split_mut(out.elements_mut::<S>(), columns.max(1), |first, out| {
                if let Some(first) = first.checked_div(columns) {
                    look_up(out, first, columns, table, tokens, positions);
                }
            });
        });
        Ok(())
    })
}

/// Splits `codes` i64 (R), which say of each token what it is and where in its sequence its
/// document begins: the lower half goes to `tokens` i64 (R), the upper half to `begins` i32 (R).
///
/// Backward: none; integers have no gradient.
#[track_caller]
pub fn split_documents_into(tokens: &Tensor, begins: &Tensor, codes: &Tensor) -> Result<()> {
    let mut call = OpCall::new("split_documents");
    let (tokens, begins) = (call.writes("tokens", tokens), call.writes("begins", begins));
    let codes = call.reads("codes", codes);
    let [rows] = call.dims(codes, "[tokens]")?;
    for (slot, dtype) in [
        (codes, DType::I64),
        (tokens, DType::I64),
        (begins, DType::I32),
    ] {
        call.has_dtype(slot, &[dtype])?;
        call.has_shape(slot, &[rows], "[tokens]")?;
    }
    call.all_row_major()?;
    call.run(codes, &EVERY_DTYPE, |placed| {
        let [mut tokens, mut begins, codes] = placed.enter([tokens, begins, codes])?;
        if let Some(gpu) = placed.gpu() {
            let (args, grid) = (args![tokens, begins, codes, rows], Grid::elements(rows));
            return gpu.launch(&SOURCE, "split_documents", grid, args);
        }
        let outputs = tokens
            .elements_mut::<i64>()
            .iter_mut()
            .zip(begins.elements_mut::<i32>());
        for ((token, begin), &code) in outputs.zip(codes.elements::<i64>()) {
            (*token, *begin) = (code & i64::from(u32::MAX), (code >> 32) as i32);
        }
        Ok(())
    })
}

/// `dtable[v] = Σ dout[r]` over the rows r whose token is v. With `accumulate` the sum is added to
/// what is there. A token that no row has gets 0, or stays as it is. `dout` is (R, C), `dtable`
/// (V, C) of its dtype, or f32 if that is bf16, and `tokens` u8, i32 or i64 (R).
///
/// A token outside of the table is an error on the CPU; a GPU ignores its row.
#[track_caller]
pub fn embedding_backward_into(
    dtable: &Tensor,
    dout: &Tensor,
    tokens: &Tensor,
    scratch: EmbeddingScratch<'_>,
    accumulate: bool,
) -> Result<()> {
    let mut call = OpCall::new("embedding_backward");
    let dtable = call.updates("dtable", dtable);
    let dout = call.reads("dout", dout);
    let tokens = call.reads("tokens", tokens);
    let order = call.writes("order", scratch.order);
    let sums = call.writes("sums", scratch.sums);
    let [vocabulary, columns] = call.dims::<2>(dtable, "[vocabulary, columns]")?;
    let rows = check_tokens(&call, tokens, vocabulary)?;
    call.has_shape(dout, &[rows, columns], "[tokens, columns of dtable]")?;
    call.math_dtype(dtable, dout)?;
    call.has_shape(order, &[2, rows], "two numbers for each token")?;
    call.has_dtype(order, &[DType::I64])?;
    let meaning = "two rows for each 64 tokens";
    call.has_shape(sums, &[embedding_sums_of(rows), columns], meaning)?;
    call.same_dtype(sums, dtable)?;
    call.all_row_major()?;
    call.run(dout, &FLOATS_AND_BF16, |placed| {
        let [mut dtable, dout, tokens, mut order, sums] =
            placed.enter([dtable, dout, tokens, order, sums])?;
        if let Some(gpu) = placed.gpu() {
            let sizes = [rows, columns, vocabulary];
            return backward(
                &gpu,
                [&dtable, &dout, &tokens, &order, &sums],
                sizes,
                accumulate,
            );
        }
        let tokens = Targets::of(&tokens);
        refuse_others(&placed.call, tokens, vocabulary)?;
        let order = &mut order.elements_mut::<i64>()[..rows];
        for (row, number) in order.iter_mut().enumerate() {
            let token = tokens.class(row, None).unwrap_or_default();
            *number = ((token << 32) | row) as i64;
        }
        order.sort_unstable();
        with_stored!(placed.dtype, S => {
            let dtable = dtable.elements_mut();
            if !accumulate {
                fill_all(dtable, 0.0);
            }
            let of = Occurrences { order, dout: dout.elements::<S>(), columns };
            let dtable = Shares::new(dtable);
            let height = rows.max(1);
            threads::split(rows * columns, height * COLUMN_BLOCK, |range| {
                let (first, end) = (range.start / height, range.end / height);
                for first in (first..end).step_by(COLUMN_BLOCK) {
                    add_occurrences(&dtable, &of, first, end.min(first + COLUMN_BLOCK));
                }
            });
        });
        Ok(())
    })
}

/// `dpositions[t] = Σ dout[r]` over the rows r with t = r mod T, in order, or added to what is
/// there with `accumulate`. `dout` (R, C), `dpositions` (T, C) of its dtype, or f32 if that is
/// bf16; R is a multiple of T.
#[track_caller]
pub fn embedding_positions_backward_into(
    dpositions: &Tensor,
    dout: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let mut call = OpCall::new("embedding_positions_backward");
    let dpositions = call.updates("dpositions", dpositions);
    let dout = call.reads("dout", dout);
    let [rows, columns] = call.dims::<2>(dout, "[tokens, columns]")?;
    let context = check_positions(&call, dpositions, [rows, columns])?;
    call.math_dtype(dpositions, dout)?;
    call.all_row_major()?;
    call.run(dout, &FLOATS_AND_BF16, |placed| {
        let [mut dpositions, dout] = placed.enter([dpositions, dout])?;
        // A matrix with a row for each sequence: its columns are summed.
        if let Some(gpu) = placed.gpu() {
            let sizes = [rows.checked_div(context).unwrap_or(0), context * columns];
            return gpu::sum_rows(&gpu, &dpositions, &dout, sizes, accumulate);
        }
        with_stored!(placed.dtype, S => {
            add_rows(dpositions.elements_mut(), dout.elements::<S>(), gpu::ROW_BLOCK, accumulate)
        });
        Ok(())
    })
}

/// Checks `tokens` (R) and the sizes. Gives R.
fn check_tokens(call: &OpCall<'_>, tokens: Slot, vocabulary: usize) -> Result<usize> {
    /// Rows and tokens are numbered in i32.
    const MOST: usize = i32::MAX as usize;
    let [rows] = call.dims(tokens, "a token for each row")?;
    call.has_dtype(tokens, &TARGET_DTYPES)?;
    for (what, count) in [("rows of the table", vocabulary), ("tokens", rows)] {
        if count > MOST {
            return Err(call.value(what, format!("at most {MOST}"), count));
        }
    }
    Ok(rows)
}

/// Checks `positions` (T, C), T dividing R. Gives T.
fn check_positions(call: &OpCall<'_>, at: Slot, [rows, columns]: [usize; 2]) -> Result<usize> {
    let [context, _] = call.dims::<2>(at, "[positions, columns]")?;
    call.has_shape(at, &[context, columns], "[positions, columns of the table]")?;
    if !rows.is_multiple_of(context) {
        let expected =
            format!("as many rows as positions in a sequence, which divide {rows} tokens");
        return Err(call.operand_error(at, expected, "slice it to the sequence's length"));
    }
    Ok(context)
}

/// Refuses the first token outside of the table.
fn refuse_others(call: &OpCall<'_>, tokens: Targets<'_>, vocabulary: usize) -> Result<()> {
    let Some((row, token)) = tokens.first_bad(vocabulary, None) else {
        return Ok(());
    };
    let expected = format!("a token of the vocabulary, in 0..{vocabulary}");
    Err(call.value(format!("tokens[{row}]"), expected, token))
}

multiversion! {
    /// Rows of the output from row `first` on, whose tokens are all in the table.
    fn look_up[S: Stored](
        out: &mut [S],
        first: usize,
        columns: usize,
        table: &[S],
        tokens: Targets<'_>,
        positions: Option<&[S]>,
    ) {
        for (row, out) in (first..).zip(out.chunks_exact_mut(columns)) {
            let token = tokens.class(row, None).unwrap_or_default();
            let entry = &table[token * columns..][..columns];
            match positions {
                None => out.copy_from_slice(entry),
                Some(positions) => {
                    let position = &positions[row * columns % positions.len()..][..columns];
                    for ((out, &a), &b) in out.iter_mut().zip(entry).zip(position) {
                        *out = S::rounded(a.wide() + b.wide());
                    }
                }
            }
        }
    }
}

/// The rows that are added to the table's gradient.
struct Occurrences<'a, T> {
    /// (R), sorted: the token above, the row in the lower half
    order: &'a [i64],
    /// (R, C)
    dout: &'a [T],
    columns: usize,
}

impl<T> Occurrences<'_, T> {
    /// The token of sorted row `at`; None after the last.
    #[inline(always)]
    fn token(&self, at: usize) -> Option<usize> {
        self.order.get(at).map(|number| (number >> 32) as usize)
    }
}

multiversion! {
    /// Adds to columns `first..end` of the table's gradient, at most COLUMN_BLOCK. Other threads
    /// have the other columns.
    fn add_occurrences[S: Stored](
        dtable: &Shares<'_, S::Math>,
        of: &Occurrences<'_, S>,
        first: usize,
        end: usize,
    ) {
        let mut at = 0;
        while let Some(token) = of.token(at) {
            let mut total = [S::Math::ZERO; COLUMN_BLOCK];
            while of.token(at) == Some(token) {
                let mut sums = [S::Math::ZERO; COLUMN_BLOCK];
                let run_end = (at / RUN + 1) * RUN;
                while at < run_end && of.token(at) == Some(token) {
                    let row = of.order[at] as u32 as usize * of.columns;
                    for (sum, &x) in sums.iter_mut().zip(&of.dout[row + first..row + end]) {
                        *sum = *sum + x.wide();
                    }
                    at += 1;
                }
                for (total, sum) in total.iter_mut().zip(sums) {
                    *total = *total + sum;
                }
            }
            let entry = token * of.columns;
            // SAFETY: only this thread has these columns, and each token comes once.
            let entry = unsafe { dtable.part(entry + first..entry + end) };
            for (entry, total) in entry.iter_mut().zip(total) {
                *entry = *entry + total;
            }
        }
    }
}

/// Sorts the rows, sums each run of them, and joins the sums of tokens that reach over several.
fn backward(
    gpu: &GpuLaunch,
    [dtable, dout, tokens, order, sums]: [&Buffer<'_>; 5],
    [rows, columns, vocabulary]: [usize; 3],
    accumulate: bool,
) -> Result<()> {
    if !accumulate && dtable.count > 0 {
        zero_on(gpu, dtable)?;
    }
    let width = tokens.dtype.bytes() as u32;
    let mut passes = 0;
    while PART * MERGED.pow(passes) < rows {
        passes += 1;
    }
    // Each pass goes to the other half, the last one to the first half.
    let mut half = passes % 2;
    let sort = args![order, tokens, width, rows, vocabulary, u64::from(half)];
    let parts = Grid::blocks(rows.div_ceil(PART), BLOCK_THREADS, 1);
    gpu.launch(&SOURCE, "embedding_sort", parts, sort)?;
    for pass in 0..passes {
        let length = PART * MERGED.pow(pass);
        let merge = args![order, rows, length as u32, u64::from(half)];
        let searches = Grid::elements(rows).rounds_of(2 + length.ilog2() as usize);
        gpu.launch(&SOURCE, "embedding_merge", searches, merge)?;
        half = 1 - half;
    }
    let runs = rows.div_ceil(RUN);
    // The order, eight rows at a time, and the entry of each token, which may be another in
    // each row.
    let mut grid = Grid::blocks(runs, BLOCK_THREADS, 1 + RUN / 8 + RUN);
    let column_blocks = columns.div_ceil(PACK * BLOCK_THREADS as usize);
    grid.blocks[1] = column_blocks.min(COLUMN_BLOCKS_MAX) as u32;
    let add = args![dtable, sums, dout, order, rows, columns, vocabulary];
    gpu.launch(&SOURCE, ("embedding_add", dout.dtype), grid, add)?;
    let join = args![dtable, sums, order, rows, columns, vocabulary];
    // A token's last run is found by halving; all may be one token's.
    grid.dependent_loads = (2 + runs.next_power_of_two().ilog2() as usize) + runs.div_ceil(8);
    gpu.launch(&SOURCE, "embedding_join", grid, join)
}

#[cfg(test)]
mod tests;
