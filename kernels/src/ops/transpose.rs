//! transpose: a transposed view written out row by row, in any dtype: what `contiguous()` does.

use crate::cuda::launch::BLOCK_THREADS;
use crate::cuda::{Grid, Source};
use crate::dtype::with_element;
use crate::error::{Result, Site};
use crate::ops::call::Call;
use crate::ops::cast::EVERY_DTYPE;
use crate::ops::fill::kernel_for_width;
use crate::{Element, Tensor, threads};

static SOURCE: Source = Source::new("transpose.cu", include_str!("transpose.cu"));
const KERNELS: [&str; 4] = ["transpose_1", "transpose_2", "transpose_4", "transpose_8"];
/// Rows and columns of the square that is moved at once: it stays in the CPU's first cache, and is a GPU block's share.
const TILE: usize = 32;

/// Writes `x`, a transposed view, to the row-major `out` of the same shape and dtype, for `op`.
pub(crate) fn write_transposed(out: &Tensor, x: &Tensor, op: &'static str, at: Site) -> Result<()> {
    let mut call = Call::new(op);
    call.at = at;
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let [rows, columns] = call.dims(x, "[rows, columns]")?;
    let placed = call.place(x, &EVERY_DTYPE)?;
    let dtype = placed.tensor(x).dtype();
    {
        let [mut lent_out, lent_x] = placed.enter([out, x])?;
        match placed.launcher()? {
            _ if rows * columns == 0 => {}
            Some(gpu) => {
                let kernel = gpu.kernel(&SOURCE, kernel_for_width(KERNELS, dtype.bytes()))?;
                let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
                let kernel = kernel.output(&lent_out).reads(&lent_x).count(rows).count(columns);
                // A block each, as long as there is room; further tiles are taken by the same blocks.
                kernel.launch(Grid::elements(tiles * BLOCK_THREADS as usize))?;
            }
            None => with_element!(dtype, T => {
                transpose_copy::<T>(lent_out.elements_mut(), lent_x.elements(), rows, columns);
            }),
        }
    }
    placed.finish()
}

/// `out[r][c] = x[c][r]` for an `out` of `rows` × `columns`.
fn transpose_copy<T: Element>(out: &mut [T], x: &[T], rows: usize, columns: usize) {
    threads::split_mut(out, TILE * columns, |first, out| {
        let first_row = first / columns;
        for row_block in (0..out.len() / columns).step_by(TILE) {
            for column_block in (0..columns).step_by(TILE) {
                for row in row_block..(row_block + TILE).min(out.len() / columns) {
                    for column in column_block..(column_block + TILE).min(columns) {
                        out[row * columns + column] = x[column * rows + first_row + row];
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device};

    #[test]
    fn every_dtype_and_shape_is_written_out_as_the_transpose() {
        // Around a tile, one row, one column, none, and large enough for several threads.
        for (rows, columns) in [(0, 3), (1, 5), (5, 1), (31, 33), (32, 32), (64, 65), (301, 217)] {
            for dtype in DType::ALL {
                // 0 to 126, which every dtype holds.
                let numbers: Vec<u8> = (0..rows * columns).map(|index| (index % 127) as u8).collect();
                let x = Tensor::from_slice(&numbers, &[columns, rows], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let got = x.t().unwrap().contiguous().unwrap();
                let got = got.to_dtype(DType::U8).unwrap().to_vec::<u8>().unwrap();
                let expected: Vec<u8> = (0..rows)
                    .flat_map(|row| (0..columns).map(move |column| column * rows + row))
                    .map(|index| numbers[index])
                    .collect();
                assert_eq!(got, expected, "{dtype} [{rows}, {columns}]");
            }
        }
    }
}
