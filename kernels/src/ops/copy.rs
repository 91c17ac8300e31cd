//! Copies of tensors: `to`, `to_dtype`, `copy_from`, `to_vec`, `item`, and `contiguous`, which
//! writes a transposed view out row by row. Every transfer goes through `transfer.rs`.

use super::cast::cast;
use crate::dtype::with_element;
use crate::error::{Caller, Result};
use crate::launch::{BLOCK_THREADS, CuFile, Grid, args};
use crate::ops::call::{EVERY_DTYPE, OpCall};
use crate::ops::create::kernel_for_width;
use crate::storage::ContentsOrigin;
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Tensor, threads};

/// Where `to` moves a tensor: a device, or a device and a dtype.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    device: Device,
    dtype: Option<DType>,
}

impl From<Device> for Destination {
    fn from(device: Device) -> Destination {
        Destination {
            device,
            dtype: None,
        }
    }
}

impl From<(Device, DType)> for Destination {
    fn from((device, dtype): (Device, DType)) -> Destination {
        Destination {
            device,
            dtype: Some(dtype),
        }
    }
}

impl Tensor {
    /// This tensor on a device (`to(Device::Cuda(0))`), or on a device in a dtype
    /// (`to((device, DType::BF16))`). Itself if nothing changes, else a copy that keeps the name.
    /// With both, the narrower dtype crosses.
    #[track_caller]
    pub fn to(&self, destination: impl Into<Destination>) -> Result<Tensor> {
        let Destination { device, dtype } = destination.into();
        let (dtype, by) = (dtype.unwrap_or(self.dtype()), Caller::new("to"));
        if dtype.bytes() < self.dtype().bytes() {
            self.to_dtype(dtype)?.to_at(device, by)
        } else {
            self.to_at(device, by)?.to_dtype(dtype)
        }
    }

    pub(crate) fn to_at(&self, device: Device, by: Caller) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        transfer::cross(self, device, Asked::Explicitly, by)
    }

    /// This tensor in `dtype`: itself if it has that dtype, else a copy on the same device. Floats
    /// round to the nearest, ties to even; floats to integers truncate and saturate, NaN becomes 0.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        Ok(cast(self, dtype)?.with_name_of(self))
    }

    /// Copies the elements of `source` into this tensor: same dtype and shape, any two devices.
    #[track_caller]
    pub fn copy_from(&self, source: &Tensor) -> Result<()> {
        let by = Caller::new("copy_from");
        self.check_copy_from(source, by)?;
        if self.device().is_planned() {
            return Ok(());
        }
        transfer::copy_into(self, source, by)
    }

    /// The elements in order, as a vector of the Rust type of the tensor's dtype.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let by = Caller::new("to_vec");
        self.check_element::<T>(by)?;
        let here = transfer::on_host(self, by)?.contiguous_at(by)?;
        let borrow = here.enter("x", false, by)?;
        Ok(borrow.elements::<T>().to_vec())
    }

    /// The only element. On a GPU this waits for all earlier work, so use it for logging and not in
    /// an inner loop. The ledger counts every call with its line.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        let by = Caller::new("item");
        if self.count() != 1 {
            let help = "reduce it first (ops::sum, ops::mean), or read all of it with to_vec";
            return Err(self.misfit("item", "exactly one element", help));
        }
        transfer::scalar(self, by)
    }
}

pub(super) static SOURCE: CuFile = CuFile::new("transpose.cu", include_str!("transpose.cu"));
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
        let copy = Tensor::allocate(*self.shape(), dtype, device, ContentsOrigin::Computed, by)?;
        write_transposed(&copy, self, by)?;
        Ok(copy.with_name_of(self))
    }
}

/// Writes `x` (R, C), a transposed view, to the row-major `out` (R, C) of the same dtype.
fn write_transposed(out: &Tensor, x: &Tensor, by: Caller) -> Result<()> {
    let mut call = OpCall::by(by);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let [rows, columns] = call.dims(x, "[rows, columns]")?;
    call.run(x, &EVERY_DTYPE, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.gpu() {
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
