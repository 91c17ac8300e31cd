//! `.npy` files, numpy's format: `Tensor::load_npy`, `Tensor::save_npy`, and the same from bytes or
//! a stream.
//!
//! Files are untrusted. The header is parsed strictly (`header.rs`), and its claims are compared
//! with the bytes present before anything is allocated; from a stream, only what arrives is kept.
//! Pickled objects are never read. Elements go straight into the tensor's memory; a file in Fortran
//! order is converted to row-major. Saving writes numpy's bytes exactly and never leaves half a
//! file (`replace.rs`).

mod file;
mod header;
mod replace;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::panic::Location;
use std::path::Path;

use self::file::{bad, check_regular};
use self::header::{Header, MAGIC};
use crate::dtype::with_element;
use crate::error::{Error, Result, Site, TensorInfo};
use crate::storage::Origin;
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Shape, Tensor};

/// The longest header that is read. numpy's have 118 bytes, except for long structured dtypes.
const HEADER_BYTES_MAX: usize = 64 << 10;

impl Tensor {
    /// The array in the `.npy` file at `path`, on `device`: f2, f4, f8, u1, i4, i8 in either byte
    /// order, and b1 as U8. Row-major, whatever the file's order. On another device than the CPU
    /// this is an upload.
    #[track_caller]
    pub fn load_npy(path: impl AsRef<Path>, device: Device) -> Result<Tensor> {
        let (path, at) = (path.as_ref(), Location::caller());
        device.check_usable("load_npy", at)?;
        let (file, length_bytes) = open_regular(path)?;
        Source {
            reader: file,
            bytes_left: Some(length_bytes),
            path,
            device,
            op: "load_npy",
            at,
        }
        .read()
    }

    /// Writes the tensor to `path` as an `.npy` file with the bytes that numpy would write. From a
    /// GPU this is a download. A transposed view is written in Fortran order.
    #[track_caller]
    pub fn save_npy(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, at) = (path.as_ref(), Location::caller());
        let Some(descr) = header::descr(self.dtype()) else {
            return Err(Error::Operand {
                op: "save_npy",
                operand: Box::new(self.as_operand("x")),
                expected: "a dtype that .npy files have: f32, f16, f64, u8, i32 or i64".into(),
                help: "save it as .to_dtype(DType::F32), which holds every bf16 exactly".into(),
                at,
            });
        };
        // Saving is a use: the tensor was not made only to be moved here.
        self.storage().mark_used();
        let here = transfer::on_host(self, "save_npy", at)?;
        // As in numpy, an array that is the same in both orders (a row, a column, empty) is
        // row-major.
        let fortran_order = self.is_transposed() && self.shape().iter().all(|&dim| dim > 1);
        let header = header::written(descr, fortran_order, self.shape());
        let borrow = here.borrow("x", false, "save_npy", at)?;
        replace::replace(path, |file| {
            file.write_all(&header)?;
            file.write_all(borrow.elements::<u8>())
        })
    }
}

/// The start of an `.npy` file of this dtype and shape. The elements follow, row-major and
/// little-endian. None for a dtype that numpy does not have.
pub fn header(dtype: DType, shape: &[usize]) -> Option<Vec<u8>> {
    header::descr(dtype).map(|descr| header::written(descr, false, shape))
}

/// The array in the bytes of an `.npy` file, on `device`.
#[track_caller]
pub fn parse(bytes: &[u8], device: Device) -> Result<Tensor> {
    let (path, at) = (Path::new("<bytes in memory>"), Location::caller());
    device.check_usable("npy::parse", at)?;
    Source {
        reader: bytes,
        bytes_left: Some(bytes.len() as u64),
        path,
        device,
        op: "npy::parse",
        at,
    }
    .read()
}

/// The array that `reader` gives as an `.npy` file, to its end, on `device`: for pipes and sockets,
/// whose length is unknown. Briefly takes twice the array's memory; `load_npy` does not.
#[track_caller]
pub fn read(reader: impl Read, device: Device) -> Result<Tensor> {
    let (path, at) = (Path::new("<stream>"), Location::caller());
    device.check_usable("npy::read", at)?;
    Source {
        reader,
        bytes_left: None,
        path,
        device,
        op: "npy::read",
        at,
    }
    .read()
}

/// What the header of an `.npy` file says, for readers that leave the elements in the file.
#[derive(Clone, Copy, Debug)]
pub struct Described<S> {
    /// The meaning of the dtype's text.
    pub stored: S,
    /// Whether the first index varies fastest.
    pub fortran_order: bool,
    /// The array's shape.
    pub shape: Shape,
    /// Where the elements begin: how many bytes were read.
    pub data_start: u64,
}

/// Reads only the header of an `.npy` file from `reader`; errors call it `path`. `stored_as` gives
/// the meaning of the dtype's text (`<f4`), or what is wrong with it.
#[track_caller]
pub fn describe<S>(
    reader: impl Read,
    path: &Path,
    stored_as: impl Fn(&[u8]) -> std::result::Result<S, String>,
) -> Result<Described<S>> {
    let (device, at) = (Device::Cpu, Location::caller());
    let mut source = Source {
        reader,
        bytes_left: None,
        path,
        device,
        op: "npy::describe",
        at,
    };
    let (text, data_start) = source.header_text()?;
    let (stored, fortran_order, shape) =
        header::parse_with(&text, stored_as).map_err(|problem| source.bad(problem))?;
    Ok(Described {
        stored,
        fortran_order,
        shape,
        data_start,
    })
}

/// Opens a regular file and returns its length. Opening a FIFO does not wait for its other end.
fn open_regular(path: &Path) -> Result<(File, u64)> {
    let failed = |source| Error::Io {
        path: path.to_path_buf(),
        doing: "opening",
        source,
    };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    check_regular(path, &metadata)?;
    Ok((file, metadata.len()))
}

/// The source of an array.
struct Source<'a, R> {
    reader: R,
    /// How many bytes are left, if known.
    bytes_left: Option<u64>,
    /// Its name in errors.
    path: &'a Path,
    /// The device to load it to.
    device: Device,
    op: &'static str,
    at: Site,
}

impl<R: Read> Source<'_, R> {
    fn read(mut self) -> Result<Tensor> {
        let header = self.header()?;
        if self.device != Device::Cpu {
            // Before the elements are read, to the host first.
            let info = TensorInfo {
                name: None,
                dtype: header.stored.dtype,
                shape: header.shape,
                device: Device::Cpu,
            };
            transfer::check(self.op, &info, self.device, Asked::Explicitly, self.at)?;
        }
        let tensor = self.elements(&header)?;
        let mut borrow = tensor.borrow("tensor", true, self.op, self.at)?;
        let bytes = borrow.elements_mut::<u8>();
        if header.stored.swapped {
            swap_bytes(bytes, header.stored.dtype.bytes());
        }
        if header.stored.boolean
            && let Some(index) = bytes.iter().position(|&byte| byte > 1)
        {
            return Err(self.bad(format!(
                "element {index} of its bool array is {}, not 0 or 1",
                bytes[index]
            )));
        }
        drop(borrow);
        let tensor = if header.fortran_order {
            self.row_major(tensor)?
        } else {
            tensor
        };
        tensor.to_at(self.device, self.op, self.at)
    }

    fn bad(&self, problem: String) -> Error {
        bad(self.path, problem)
    }

    fn header(&mut self) -> Result<Header> {
        let (text, _) = self.header_text()?;
        Header::parse(&text).map_err(|problem| self.bad(problem))
    }

    /// The text of the header, and how many bytes its end is from the start.
    fn header_text(&mut self) -> Result<(Vec<u8>, u64)> {
        let mut start = [0; MAGIC.len() + 2];
        let got = self.fill(&mut start)?;
        if !start[..got].starts_with(&MAGIC[..got.min(MAGIC.len())]) {
            let hint = match start {
                [b'P', b'K', 3, 4, ..] => {
                    " This is a zip archive, perhaps an .npz: save each array with np.save."
                }
                [0x80, ..] => {
                    " This may be a pickle, which is never read here: save the array with np.save."
                }
                _ => "",
            };
            let got = start[..got].escape_ascii();
            return Err(self.bad(format!(
                "it begins with \"{got}\"; expected \"\\x93NUMPY\".{hint}"
            )));
        }
        self.all_of(got, start.len(), "magic and version")?;
        let mut length = [0; 4];
        let length_size = match start[MAGIC.len()..] {
            [1, 0] => 2,
            [2 | 3, 0] => 4,
            [major, minor] => {
                return Err(self.bad(format!(
                    "it has version {major}.{minor}; supported are 1.0, 2.0 and 3.0"
                )));
            }
            _ => unreachable!("two bytes of version"),
        };
        let got = self.fill(&mut length[..length_size])?;
        self.all_of(got, length_size, "header's length")?;
        let header_bytes = u32::from_le_bytes(length) as usize;
        if header_bytes > HEADER_BYTES_MAX {
            return Err(self.bad(format!(
                "its header claims {header_bytes} bytes; at most {HEADER_BYTES_MAX} are read"
            )));
        }
        let mut text = vec![0; header_bytes];
        let got = self.fill(&mut text)?;
        self.all_of(got, header_bytes, "header")?;
        Ok((text, (start.len() + length_size + header_bytes) as u64))
    }

    fn all_of(&self, got: usize, expected: usize, what: &str) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        Err(self.bad(format!(
            "it ends within its {what}: expected {expected} bytes, got {got}"
        )))
    }

    /// Fills `buffer` as far as possible and returns how far.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let got = filled(&mut self.reader, buffer).map_err(|source| self.failed(source))?;
        if let Some(left) = &mut self.bytes_left {
            *left = left.saturating_sub(got as u64);
        }
        Ok(got)
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Io {
            path: self.path.to_path_buf(),
            doing: "reading",
            source,
        }
    }

    /// The elements in the file's order.
    fn elements(&mut self, header: &Header) -> Result<Tensor> {
        let expected = header.data_bytes();
        let Some(left) = self.bytes_left else {
            return self.elements_of_a_stream(header);
        };
        if left != expected as u64 {
            return Err(self.misclaimed(header, &format!("{left} bytes follow it")));
        }
        let tensor = self.allocate(header)?;
        let got = self.fill(
            tensor
                .borrow("tensor", true, self.op, self.at)?
                .elements_mut(),
        )?;
        if got < expected {
            return Err(self.misclaimed(
                header,
                &format!("the file shrank to {got} bytes of it while it was read"),
            ));
        }
        Ok(tensor)
    }

    /// The header of a stream may claim anything, so memory is taken only for what has arrived.
    fn elements_of_a_stream(&mut self, header: &Header) -> Result<Tensor> {
        let expected = header.data_bytes();
        let mut arrived = Vec::new();
        let taken = self
            .reader
            .by_ref()
            .take(expected as u64)
            .read_to_end(&mut arrived);
        taken.map_err(|source| self.failed(source))?;
        if arrived.len() < expected {
            return Err(self.misclaimed(header, &format!("{} bytes follow it", arrived.len())));
        }
        if self.fill(&mut [0])? > 0 {
            return Err(self.misclaimed(header, "more bytes follow it"));
        }
        let tensor = self.allocate(header)?;
        tensor
            .borrow("tensor", true, self.op, self.at)?
            .elements_mut()
            .copy_from_slice(&arrived);
        Ok(tensor)
    }

    fn misclaimed(&self, header: &Header, but: &str) -> Error {
        let (dtype, shape, bytes) = (header.stored.dtype, header.shape, header.data_bytes());
        self.bad(format!(
            "the header claims {dtype}{shape} = {bytes} bytes, but {but}"
        ))
    }

    fn allocate(&self, header: &Header) -> Result<Tensor> {
        Tensor::allocate(
            header.shape,
            header.stored.dtype,
            Device::Cpu,
            Origin::HostData,
            self.op,
            self.at,
        )
    }

    /// The tensor whose elements are in `columns`, with the first index varying fastest.
    fn row_major(&self, columns: Tensor) -> Result<Tensor> {
        let shape = *columns.shape();
        if columns.count() == 0 || shape.iter().filter(|&&dim| dim > 1).count() < 2 {
            return Ok(columns);
        }
        let rows = Tensor::allocate(
            shape,
            columns.dtype(),
            Device::Cpu,
            Origin::HostData,
            self.op,
            self.at,
        )?;
        let x = columns.borrow("x", false, self.op, self.at)?;
        let mut out = rows.borrow("out", true, self.op, self.at)?;
        with_element!(columns.dtype(), T => reverse_axes::<T>(out.elements_mut(), x.elements(), &shape));
        drop(out);
        Ok(rows)
    }
}

/// Reads until `buffer` is full or the reader ends, and returns how much that is.
fn filled(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match reader.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Reverses the bytes of every element of `size` bytes.
fn swap_bytes(bytes: &mut [u8], size: usize) {
    fn each<const SIZE: usize>(bytes: &mut [u8]) {
        bytes
            .as_chunks_mut::<SIZE>()
            .0
            .iter_mut()
            .for_each(|element| element.reverse());
    }
    match size {
        2 => each::<2>(bytes),
        4 => each::<4>(bytes),
        _ => each::<8>(bytes),
    }
}

/// `out[i, j, …, k] = x[k, …, j, i]` for a non-empty `out` of at least two dimensions `dims`. For
/// each index of the middle dimensions it transposes a matrix, in square blocks that fit the L1
/// cache.
fn reverse_axes<T: Element>(out: &mut [T], x: &[T], dims: &[usize]) {
    const BLOCK: usize = 32;
    let [rows, middle @ .., columns] = dims else {
        unreachable!("at least two dimensions")
    };
    let (rows, columns) = (*rows, *columns);
    let middle_count: usize = middle.iter().product();
    for index in 0..middle_count {
        // The middle index, read as row-major for `out`, is written as column-major for `x`.
        let (mut rest, mut x_index, mut stride) = (index, 0, middle_count);
        for &dim in middle.iter().rev() {
            stride /= dim;
            x_index += rest % dim * stride;
            rest /= dim;
        }
        for row_block in (0..rows).step_by(BLOCK) {
            for column_block in (0..columns).step_by(BLOCK) {
                for row in row_block..(row_block + BLOCK).min(rows) {
                    for column in column_block..(column_block + BLOCK).min(columns) {
                        out[(row * middle_count + index) * columns + column] =
                            x[(column * middle_count + x_index) * rows + row];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
