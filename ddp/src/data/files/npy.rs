//! `.npy` files, read where they lie: numpy's bools, integers and floats in either byte order. The header is understood by the strict parser
//! of the tensor library.
//!
//! An array in Fortran order has a row scattered over the whole file. It is converted once, a block of rows at a time.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;
use ddp_kernels::npy::{Described, describe};

use super::array::{Array, Place};
use super::{Contents, Element, Reading, cache, flat, map, refuse};
use crate::data::stack::WIDTH_MAX;
use crate::error::{Error, Result};

/// Rows are turned round in blocks of about so many bytes.
const BLOCK_BYTES: usize = 16 << 20;

/// Longer headers are refused by the parser.
pub(super) const HEADER_BYTES_MAX: usize = 64 << 10;

/// What a header says.
pub(super) type Header = Described<Stored>;

/// What the numbers of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) element: Element,
    pub(super) big_endian: bool,
}

/// The header at the beginning of what `reader` gives, or what is wrong with it.
pub(super) fn header(reader: impl Read) -> Result<Header, String> {
    describe(reader, Path::new(""), stored_as).map_err(|error| match error {
        ddp_kernels::Error::BadFile { problem, .. } => problem,
        ddp_kernels::Error::Io { source, .. } => source.to_string(),
        other => other.to_string(),
    })
}

/// Whether the first bytes of a file end before its header does.
pub(super) fn ends_early(start: &[u8]) -> bool {
    match start {
        [_, _, _, _, _, _, 1, _, low, high, ..] => start.len() < 10 + usize::from(u16::from_le_bytes([*low, *high])),
        [_, _, _, _, _, _, 2 | 3, _, a, b, c, d, ..] => {
            let bytes = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
            bytes <= HEADER_BYTES_MAX && start.len() - 12 < bytes
        }
        _ => start.len() < 12,
    }
}

/// How long a file with this header is, if it claims nothing impossible.
pub(super) fn bytes(header: &Header) -> u64 {
    // A shape's elements fit the machine at eight bytes each.
    header.data_start + header.shape.count() as u64 * header.stored.element.bytes() as u64
}

/// Whether rows are not in one piece.
pub(super) fn is_scattered(header: &Header) -> bool {
    header.fortran_order && header.shape.iter().filter(|&&dim| dim > 1).count() > 1
}

/// Where the array of the name `key` is whose header begins at `start` of a file.
pub(super) fn place<'a>(header: &'a Header, key: &'a str, start: u64) -> Place<'a> {
    let Stored { element, big_endian } = header.stored;
    Place { key, offset: start + header.data_start, element, big_endian, shape: header.shape.dims() }
}

/// The array of the file at `path`, which people know as `file`.
pub(super) fn open(path: &Path, file: &str, cache_dir: Option<&Path>) -> Result<Contents> {
    let (mapped, shown) = (map(path)?, Path::new(file));
    let header = header(Reading::of(&mapped)).map_err(|why| refuse(shown, why))?;
    let (claimed, shape) = (bytes(&header), header.shape);
    if claimed != mapped.len() {
        let Stored { element, .. } = header.stored;
        return Err(refuse(
            shown,
            format!(
                "its header claims {element}{shape} = {claimed} bytes with the header, but the file has {}",
                mapped.len()
            ),
        ));
    }
    if is_scattered(&header) {
        // Checked before a copy is made, and before all of it is read to find one that was made before.
        Array::new(&mapped, file, &place(&header, "", 0)).map_err(|why| refuse(shown, why))?;
        check_width(&header).map_err(|why| refuse(shown, why))?;
        let made = cache::converted(path, cache_dir, "npy, by rows", |made| {
            cache::check_room(made, claimed)?;
            flat::write(made, |writer| {
                by_rows(&mapped, 0, &header, "", writer)?;
                Ok(flat::About { source: Some(file.to_string()), ..flat::About::default() })
            })
        })?;
        return flat::open_as(&made, file);
    }
    let mut contents = Contents::default();
    contents.add(&mapped, file, &place(&header, "", 0));
    contents.checked(shown)
}

/// Whether rows are such as can be trained on: of others not even one is put together.
pub(super) fn check_width(header: &Header) -> Result<(), String> {
    let row_shape = header.shape.dims().get(1..).unwrap_or_default();
    // Its elements, with those of all rows, are no more than can be addressed.
    match row_shape.iter().product::<usize>() {
        width if width <= WIDTH_MAX => Ok(()),
        width => Err(format!(
            "expected at most {WIDTH_MAX} numbers a row, got {width} (shape {row_shape:?}). The first dimension counts rows"
        )),
    }
}

/// Appends the array whose header is at `start` of `mapped`, in Fortran order, to `writer` by rows and in little-endian: element
/// `(r, i, …, k)` lies at `r + rows · (i + … · k)`.
pub(super) fn by_rows(
    mapped: &Arc<Mapped>,
    start: u64,
    header: &Header,
    key: &str,
    writer: &mut flat::Writer,
) -> Result<()> {
    let [rows, row_shape @ ..] = header.shape.dims() else {
        unreachable!("an array without dimensions is not scattered")
    };
    let Stored { element, big_endian } = header.stored;
    let (size, columns) = (element.bytes(), row_shape.iter().product::<usize>());
    let from = start + header.data_start;
    writer.begin(key, element, row_shape)?;
    let block_rows = (BLOCK_BYTES / (columns * size)).clamp(1, *rows);
    let (mut block, mut column) = (vec![0; block_rows * columns * size], vec![0; block_rows * size]);
    for first in (0..*rows).step_by(block_rows) {
        let count = block_rows.min(rows - first);
        for index in 0..columns {
            let column = &mut column[..count * size];
            let offset = from + ((reversed(index, row_shape) * rows + first) * size) as u64;
            mapped.read(offset, column).map_err(|error| cut(mapped, &error))?;
            for (row, number) in column.chunks_exact_mut(size).enumerate() {
                if big_endian {
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

/// The place in Fortran order of the element that has the place `index` in C order.
fn reversed(index: usize, shape: &[usize]) -> usize {
    let (mut rest, mut place, mut stride) = (index, 0, shape.iter().product::<usize>());
    for &dim in shape.iter().rev() {
        stride /= dim;
        place += rest % dim * stride;
        rest /= dim;
    }
    place
}

fn cut(mapped: &Mapped, error: &std::io::Error) -> Error {
    refuse(mapped.path(), error)
}

/// What a dtype's text means.
fn stored_as(descr: &[u8]) -> Result<Stored, String> {
    let (order, kind) = match descr {
        [order @ (b'<' | b'>' | b'=' | b'|'), kind @ ..] => (*order, kind),
        kind => (b'=', kind),
    };
    let element = match kind {
        b"b1" | b"?" => Element::Bool,
        b"u1" => Element::U8,
        b"i1" => Element::I8,
        b"u2" => Element::U16,
        b"i2" => Element::I16,
        b"u4" => Element::U32,
        b"i4" => Element::I32,
        b"u8" => Element::U64,
        b"i8" => Element::I64,
        b"f2" => Element::F16,
        b"f4" => Element::F32,
        b"f8" => Element::F64,
        _ => return Err(unsupported(descr, kind.first().copied())),
    };
    let big_endian = match order {
        b'<' => false,
        b'>' => true,
        b'=' => cfg!(target_endian = "big"),
        _ if element.bytes() == 1 => false,
        _ => return Err(format!("its dtype '{}' has no byte order: expected < or >, got |", descr.escape_ascii())),
    };
    Ok(Stored { element, big_endian })
}

fn unsupported(descr: &[u8], kind: Option<u8>) -> String {
    let shown = descr[..descr.len().min(40)].escape_ascii();
    let why = match kind {
        Some(b'O') => {
            "its elements are Python objects: a pickle, which can run programs when it is read, and is not read here. Save numbers: \
             np.save(path, np.array(a.tolist(), dtype='float32'))"
        }
        Some(b'U' | b'S' | b'a') => {
            "its elements are texts. Save classes as numbers: np.unique(a, return_inverse=True)[1]"
        }
        Some(b'V') => {
            "its elements are raw bytes. If these are bfloat16, widen them before saving: a.astype('float32')"
        }
        Some(b'c') => "its elements are complex. Save both parts: np.stack([a.real, a.imag], axis=-1)",
        Some(b'M' | b'm') => "its elements are times. Save them as numbers: a.astype('int64')",
        _ => {
            "supported are bool, integers of 1 to 8 bytes and floats of 2 to 8 bytes: np.save(path, a.astype('float32'))"
        }
    };
    format!("its dtype is '{shown}': {why}")
}
