//! gather_rows: chosen rows of a table in any dtype, moved as bytes. It makes batches of a dataset
//! that is kept on the device.
//!
//! Letters: N rows of the table, R rows chosen, F… the shape of a row.

use crate::error::Result;
use crate::launch::{BLOCK_THREADS, BLOCKS_MAX, CuFile, Grid, args};
use crate::ops::call::{EVERY_DTYPE, OpCall};
use crate::{DType, Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("gather.cu", include_str!("gather.cu"));
/// By the bytes that a thread moves at once, which are a power of two.
const KERNELS: [&str; 5] = [
    "gather_rows_1",
    "gather_rows_2",
    "gather_rows_4",
    "gather_rows_8",
    "gather_rows_16",
];
/// The most bytes that a thread moves at once.
const WORD_BYTES_MAX: usize = 16;

/// `out[r] = table[rows[r]]` for each r: `out` (R, F…) and `table` (N, F…) of one dtype, `rows` i64
/// (R). A row may be chosen more than once.
///
/// On the CPU an index outside the table is an error. A GPU sets every bit of that row of `out`
/// (NaN, 255, −1), and reads nothing outside the table.
///
/// Backward: none; for a table that is trained there is `embedding_into`.
#[track_caller]
pub fn gather_rows(out: &Tensor, table: &Tensor, rows: &Tensor) -> Result<()> {
    let mut call = OpCall::new("gather_rows");
    let out = call.writes("out", out);
    let table = call.reads("table", table);
    let rows = call.reads("rows", rows);
    call.has_dtype(rows, &[DType::I64])?;
    let [count] = call.dims(rows, "[rows chosen]")?;
    let Some((&table_rows, row)) = call.tensor(table).shape().dims().split_first() else {
        let expected = "at least one dimension, its rows";
        return Err(call.operand_error(table, expected, "reshape it to [rows, …]"));
    };
    let row_bytes = row.iter().product::<usize>() * call.tensor(table).dtype().bytes();
    let wanted: Vec<usize> = std::iter::once(count).chain(row.iter().copied()).collect();
    call.has_shape(out, &wanted, "a row of the table for each of rows")?;
    call.same_dtype(out, table)?;
    call.all_row_major()?;
    call.run(table, &EVERY_DTYPE, |placed| {
        let [mut out, table, rows] = placed.enter([out, table, rows])?;
        if let Some(gpu) = placed.gpu() {
            let word_bytes = word_bytes(out.address() | table.address(), row_bytes);
            let words = row_bytes / word_bytes;
            let name = KERNELS[word_bytes.trailing_zeros() as usize];
            let args = args![out, table, rows, count, words, table_rows];
            return gpu.launch(&SOURCE, name, grid(count, words), args);
        }
        let rows: &[i64] = rows.elements();
        // Before anything is written.
        let is_row = |row: i64| u64::try_from(row).is_ok_and(|row| row < table_rows as u64);
        if let Some(bad) = rows.iter().position(|&row| !is_row(row)) {
            let expected = format!("a row of the table, in 0..{table_rows}");
            return Err(placed
                .call
                .value(format!("rows[{bad}]"), expected, rows[bad]));
        }
        gather(out.elements_mut(), table.elements(), rows, row_bytes);
        Ok(())
    })
}

/// Copies the rows, each of which is in the table.
fn gather(out: &mut [u8], table: &[u8], rows: &[i64], row_bytes: usize) {
    if row_bytes == 0 {
        return;
    }
    threads::split_mut(out, row_bytes, |first, out| {
        for (&row, out) in rows[first / row_bytes..]
            .iter()
            .zip(out.chunks_exact_mut(row_bytes))
        {
            let start = row as usize * row_bytes;
            out.copy_from_slice(&table[start..start + row_bytes]);
        }
    });
}

/// The widest word that divides rows of `row_bytes` and their `addresses`, or-ed together.
fn word_bytes(addresses: u64, row_bytes: usize) -> usize {
    1 << (addresses | row_bytes as u64 | WORD_BYTES_MAX as u64).trailing_zeros()
}

/// Blocks for `count` rows of `words` words. A block has as many threads along a row as there are
/// words, up to its size, and several rows if they fit; there are at most BLOCKS_MAX blocks.
fn grid(count: usize, words: usize) -> Grid {
    let across = words.next_power_of_two().min(BLOCK_THREADS as usize);
    let down = BLOCK_THREADS as usize / across;
    let row_blocks = count.div_ceil(down).min(BLOCKS_MAX);
    // Few rows, each of many words: several blocks for each row.
    let column_blocks = words.div_ceil(across).min(BLOCKS_MAX / row_blocks.max(1));
    let column_blocks = column_blocks.max(words.min(1));
    Grid {
        blocks: [row_blocks as u32, column_blocks as u32, 1],
        threads: [across as u32, down as u32, 1],
        // A row's number, then its words.
        dependent_loads: count.div_ceil(down * row_blocks.max(1))
            * (1 + words.div_ceil(across * column_blocks.max(1))),
    }
}

#[cfg(test)]
mod tests;
