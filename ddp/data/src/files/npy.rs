//! `.npy` files, read in place: numpy's bools, integers and floats in either byte order. The header
//! is parsed by the strict parser of the tensor library.
//!
//! In Fortran order a row is scattered over the whole file; such an array is converted once, a
//! block of rows at a time.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;
use ddp_kernels::npy::{Described, describe};

use super::array::{Array, ArrayPlace, WIDTH_MAX};
use super::format::{Contents, DataFile, Format, Holds};
use super::io::{MappedReader, refuse};
use super::{cache, flat};
use crate::element::Element;
use crate::error::{Result, bail, ensure};

/// Rows are transposed in blocks of about this size.
const BLOCK_BYTES: usize = 16 << 20;

pub(super) static NPY: Format = Format {
    name: "an .npy file",
    endings: &[".npy"],
    begins: |file| file.start.starts_with(b"\x93NUMPY"),
    must_begin: None,
    holds: Holds::Arrays(open),
};

/// What a header says.
pub(super) type Header = Described<Stored>;

/// The elements of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    element: Element,
    big_endian: bool,
}

/// The header at the beginning of a stream, or what is wrong with it.
pub(super) fn header(reader: impl Read) -> Result<Header, String> {
    describe(reader, Path::new(""), stored_as).map_err(|error| match error {
        ddp_kernels::Error::BadFile { problem, .. } => problem,
        ddp_kernels::Error::Io { source, .. } => source.to_string(),
        other => other.to_string(),
    })
}

/// An error if a file with this header does not have `actual` bytes.
pub(super) fn check_bytes(header: &Header, actual: u64) -> Result<(), String> {
    let (element, shape) = (header.stored.element, header.shape);
    // A shape's elements fit the address space at eight bytes each.
    let claimed = header.data_start + shape.count() as u64 * element.bytes() as u64;
    ensure!(
        claimed == actual,
        "its header claims {element}{shape} = {claimed} bytes with the header, but it has {actual}"
    );
    Ok(())
}

/// Adds the array `key` with this header, which begins at byte `start` of a mapped file. In Fortran
/// order a row is scattered over the whole file: such an array is converted.
pub(super) fn add(
    contents: &mut Contents,
    file: &DataFile<'_>,
    (mapped, start): (&Arc<Mapped>, u64),
    header: &Header,
    key: &str,
) -> Result<()> {
    let is_scattered =
        header.fortran_order && header.shape.iter().filter(|&&dim| dim > 1).count() > 1;
    if !is_scattered {
        let (offset, element) = (start + header.data_start, header.stored.element);
        let mut place = ArrayPlace::new(key, offset, element, header.shape.dims());
        place.big_endian = header.stored.big_endian;
        contents.add(mapped, file.name, &place);
        return Ok(());
    }
    // Checked before the file is read to look for its converted copy.
    if let Err(why) = check_convertible(header) {
        contents.others.push((key.to_string(), why));
        return Ok(());
    }
    let asked = format!("npy {key:?} at {start}, by rows");
    let made = cache::converted(mapped.path(), file.cache_dir, &asked, |made| {
        flat::write(made, |writer| {
            write_by_rows(mapped, start, header, key, writer)?;
            Ok(flat::About::from_source(file.name))
        })
    })?;
    contents.arrays.extend(flat::open(&made, file.name)?.arrays);
    Ok(())
}

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let mapped = file.map()?;
    let bad = |why| file.bad(why);
    let header = header(MappedReader::new(&mapped)).map_err(bad)?;
    check_bytes(&header, mapped.len()).map_err(bad)?;
    let mut contents = Contents::default();
    add(&mut contents, file, (&mapped, 0), &header, "")?;
    contents.checked(Path::new(file.name))
}

/// An error if an array cannot be data, even after a conversion.
fn check_convertible(header: &Header) -> Result<(), String> {
    Array::check_shape(header.shape.dims())?;
    let row_shape = header.shape.dims().get(1..).unwrap_or_default();
    let width = row_shape.iter().product::<usize>();
    ensure!(
        width <= WIDTH_MAX,
        "expected at most {WIDTH_MAX} numbers a row, got {width} (shape {row_shape:?}); the first dimension counts rows"
    );
    Ok(())
}

/// Appends an array in Fortran order, whose header is at byte `start` of `mapped`, to `writer`: by
/// rows, little-endian. Element `(r, i, …, k)` is at index `r + rows · (i + … · k)`.
fn write_by_rows(
    mapped: &Mapped,
    start: u64,
    header: &Header,
    key: &str,
    writer: &mut flat::Writer,
) -> Result<()> {
    let [rows, row_shape @ ..] = header.shape.dims() else {
        unreachable!("an array without dimensions is contiguous")
    };
    let cut = |error: io::Error| refuse(mapped.path(), error);
    let element = header.stored.element;
    let (size, columns) = (element.bytes(), row_shape.iter().product::<usize>());
    writer.begin(key, element, row_shape)?;
    let block_rows = (BLOCK_BYTES / (columns * size)).clamp(1, *rows);
    let mut block = vec![0; block_rows * columns * size];
    let mut column = vec![0; block_rows * size];
    for first in (0..*rows).step_by(block_rows) {
        let count = block_rows.min(rows - first);
        for index in 0..columns {
            let column = &mut column[..count * size];
            let element_index = fortran_index(index, row_shape) * rows + first;
            let offset = start + header.data_start + (element_index * size) as u64;
            mapped.read(offset, column).map_err(cut)?;
            for (row, number) in column.chunks_exact_mut(size).enumerate() {
                if header.stored.big_endian {
                    number.reverse();
                }
                let at = (row * columns + index) * size;
                block[at..at + size].copy_from_slice(number);
            }
        }
        writer.write(&block[..count * columns * size])?;
    }
    Ok(())
}

/// The index in Fortran order of the element with this index in C order.
fn fortran_index(index: usize, shape: &[usize]) -> usize {
    let (mut rest, mut result, mut stride) = (index, 0, shape.iter().product::<usize>());
    for &dim in shape.iter().rev() {
        stride /= dim;
        result += rest % dim * stride;
        rest /= dim;
    }
    result
}

/// The elements that a dtype means.
fn stored_as(descr: &[u8]) -> Result<Stored, String> {
    let (order, kind) = match descr {
        [order @ (b'<' | b'>' | b'=' | b'|'), kind @ ..] => (*order, kind),
        kind => (b'=', kind),
    };
    let element = match kind {
        b"b1" | b"?" => Element::Bool,
        [
            letter @ (b'u' | b'i' | b'f'),
            size @ (b'1' | b'2' | b'4' | b'8'),
        ] => {
            let name = format!("{}{}", char::from(*letter), 8 * (size - b'0'));
            let element = Element::named(&name);
            element.ok_or_else(|| unsupported(descr, Some(*letter)))?
        }
        _ => return Err(unsupported(descr, kind.first().copied())),
    };
    let big_endian = match order {
        b'<' => false,
        b'>' => true,
        b'=' => cfg!(target_endian = "big"),
        _ if element.bytes() == 1 => false,
        _ => bail!(
            "the byte order of its dtype '{}': expected < or >, got |",
            descr.escape_ascii()
        ),
    };
    Ok(Stored {
        element,
        big_endian,
    })
}

fn unsupported(descr: &[u8], kind: Option<u8>) -> String {
    let shown = descr[..descr.len().min(40)].escape_ascii();
    let (what, help) = match kind {
        Some(b'O') => (
            ", Python objects: a pickle, which can run programs when it is read",
            "np.save(path, np.array(a.tolist(), dtype='float32'))",
        ),
        Some(b'U' | b'S' | b'a') => (
            ", texts",
            "save classes as numbers: np.unique(a, return_inverse=True)[1]",
        ),
        _ => (
            "",
            "np.save(path, a.astype('float32')), with both parts of complex numbers, and bfloat16 and times as numbers",
        ),
    };
    format!(
        "expected bool, integers of 1 to 8 bytes or floats of 2 to 8 bytes, got dtype '{shown}'{what}; help: {help}"
    )
}
