//! `.npy` files, read in place: numpy's bools, integers and floats in either byte order. The header
//! is parsed by the strict parser of the tensor library.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;
use ddp_kernels::npy::{Described, describe};

use super::array::ArrayPlace;
use super::format::{Contents, DataFile, Format, Holds, PLAIN};
use super::io::MappedReader;
use crate::element::Element;
use crate::error::{Result, bail, ensure};

pub(super) static NPY: Format = Format {
    name: "an .npy file",
    endings: &[".npy"],
    begins: |file| file.start.starts_with(b"\x93NUMPY"),
    holds: Holds::Arrays(open),
    ..PLAIN
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

/// Adds the array `key` with this header, which begins at byte `start` of a mapped file.
pub(super) fn add(
    contents: &mut Contents,
    file: &str,
    (mapped, start): (&Arc<Mapped>, u64),
    header: &Header,
    key: &str,
) {
    let long_dims = header.shape.iter().filter(|&&dim| dim > 1).count();
    if header.fortran_order && long_dims > 1 {
        let why = "expected an array in C order, got Fortran order, which scatters each row over the file; help: \
                   np.save(path, np.ascontiguousarray(x))";
        return contents.others.push((key.to_string(), why.into()));
    }
    let (offset, element) = (start + header.data_start, header.stored.element);
    let mut place = ArrayPlace::new(key, offset, element, header.shape.dims());
    place.big_endian = header.stored.big_endian;
    contents.add(mapped, file, &place);
}

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let mapped = file.map()?;
    let bad = |why| file.bad(why);
    let header = header(MappedReader::new(&mapped)).map_err(bad)?;
    check_bytes(&header, mapped.len()).map_err(bad)?;
    let mut contents = Contents::default();
    add(&mut contents, file.name, (&mapped, 0), &header, "");
    contents.checked(Path::new(file.name))
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
            name.parse()
                .map_err(|_| unsupported(descr, Some(*letter)))?
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
