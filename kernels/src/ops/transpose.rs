//! transpose: writes a transposed view out row by row, in any dtype, for `contiguous()`.

use crate::dtype::with_element;
use crate::error::{Caller, Result};
use crate::launch::{BLOCK_THREADS, Grid, Source, args};
use crate::ops::call::{Call, EVERY_DTYPE};
use crate::ops::fill::kernel_for_width;
use crate::storage::Origin;
use crate::{Element, Tensor, threads};

static SOURCE: Source = Source::new("transpose.cu", include_str!("transpose.cu"));
const KERNELS: [&str; 4] = ["transpose_1", "transpose_2", "transpose_4", "transpose_8"];
/// Rows and columns of the square that is moved at once: it fits into the CPU's first cache, and is
/// the share of a GPU block.
const TILE: usize = 32;

impl Tensor {
    /// This tensor if it is row-major, else a row-major copy on the same device.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        self.contiguous_at(Caller::new("contiguous"))
    }

    pub(crate) fn contiguous_at(&self, by: Caller) -> Result<Tensor> {
        if !self.is_transposed() {
            return Ok(self.clone());
        }
        let (dtype, device) = (self.dtype(), self.device());
        let copy = Tensor::allocate(*self.shape(), dtype, device, Origin::Computed, by)?;
        write_transposed(&copy, self, by)?;
        Ok(copy.with_name_of(self))
    }
}

/// Writes `x` (R, C), a transposed view, to the row-major `out` (R, C) of the same dtype.
fn write_transposed(out: &Tensor, x: &Tensor, by: Caller) -> Result<()> {
    let mut call = Call::by(by);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let [rows, columns] = call.dims(x, "[rows, columns]")?;
    call.run(x, &EVERY_DTYPE, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.launcher() {
            let name = kernel_for_width(KERNELS, x.dtype);
            let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
            // A block for each tile, as long as there is room; then blocks loop over tiles.
            let grid = Grid::elements(tiles * BLOCK_THREADS as usize);
            return gpu.launch(&SOURCE, name, grid, args![out, x, rows, columns]);
        }
        with_element!(x.dtype, T => {
            transpose_copy::<T>(out.elements_mut(), x.elements(), rows, columns);
        });
        Ok(())
    })
}

/// `out[r][c] = x[c][r]` for an `out` of `rows` × `columns`.
fn transpose_copy<T: Element>(out: &mut [T], x: &[T], rows: usize, columns: usize) {
    if columns == 0 {
        return;
    }
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
        for (rows, columns) in [
            (0, 3),
            (1, 5),
            (5, 1),
            (31, 33),
            (32, 32),
            (64, 65),
            (301, 217),
        ] {
            for dtype in DType::ALL {
                // 0 to 126, which every dtype holds.
                let numbers: Vec<u8> = (0..rows * columns)
                    .map(|index| (index % 127) as u8)
                    .collect();
                let x = Tensor::from_slice(&numbers, &[columns, rows], Device::Cpu)
                    .unwrap()
                    .to_dtype(dtype)
                    .unwrap();
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
