//! IDX, the format of MNIST's files: two zeros, a byte for the type of elements, the number of
//! dimensions, each dimension in four bytes, then the elements. Everything is big-endian.

use std::path::Path;

use crate::error::{Result, bail, ensure};
use crate::files::array::{ArrayPlace, NumberType};
use crate::files::format::{Contents, DataFile, Format, Holds, PLAIN};

pub(super) static IDX: Format = Format {
    name: "an IDX file",
    endings: &[".idx", "-ubyte", ".ubyte", ".idx1", ".idx3"],
    begins: |file| matches!(file.start, [0, 0, 0x08 | 0x09 | 0x0b..=0x0e, 1..=8, ..]),
    holds: Holds::Arrays(open),
    ..PLAIN
};

/// The most dimensions of a shape here.
const RANK_MAX: usize = 8;

/// The element type and the shape in the header at the beginning of `start`, or what is wrong.
fn header(start: &[u8]) -> Result<(NumberType, Vec<usize>), String> {
    let cut = || format!("it ends within its header: it has {} bytes", start.len());
    let (&[first, second, element, rank], dims) = start.split_first_chunk().ok_or_else(cut)?;
    ensure!(
        (first, second) == (0, 0),
        "expected two zero bytes at the beginning of an IDX file, got \"{}\"",
        start[..4].escape_ascii()
    );
    let element = match element {
        0x08 => NumberType::U8,
        0x09 => NumberType::I8,
        0x0b => NumberType::I16,
        0x0c => NumberType::I32,
        0x0d => NumberType::F32,
        0x0e => NumberType::F64,
        other => {
            bail!("its type: expected 0x08, 0x09, 0x0b, 0x0c, 0x0d or 0x0e, got 0x{other:02x}")
        }
    };
    let rank = usize::from(rank);
    ensure!(
        (1..=RANK_MAX).contains(&rank),
        "expected 1 to {RANK_MAX} dimensions, got {rank}"
    );
    let dims = dims.get(..4 * rank).ok_or_else(cut)?.as_chunks().0.iter();
    Ok((
        element,
        dims.map(|dim| u32::from_be_bytes(*dim) as usize).collect(),
    ))
}

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let mapped = file.map()?;
    let mut start = [0; 4 + 4 * RANK_MAX];
    let start = &mut start[..mapped.len().min(4 + 4 * RANK_MAX as u64) as usize];
    let read = mapped.read(0, start);
    read.map_err(|error| file.bad(error.to_string()))?;
    let (element, shape) = header(start).map_err(|why| file.bad(why))?;
    let offset = 4 + 4 * shape.len() as u64;
    let times = |bytes: u64, &dim: &usize| bytes.checked_mul(dim as u64);
    let bytes = shape.iter().try_fold(element.bytes() as u64, times);
    let claimed = bytes.and_then(|bytes| bytes.checked_add(offset));
    let got = mapped.len();
    if claimed != Some(got) {
        let claimed = claimed.map_or("more than 2^64".into(), |bytes| bytes.to_string());
        return Err(file.bad(format!(
            "its header claims {element}{shape:?}, {claimed} bytes with the header, but the file has {got}"
        )));
    }
    let mut place = ArrayPlace::new("", offset, element, &shape);
    place.big_endian = true;
    let mut contents = Contents::default();
    contents.add(&mapped, file.name, &place);
    contents.checked(Path::new(file.name))
}
