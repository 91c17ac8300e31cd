//! IDX, the format of MNIST's files: two zeros, a byte for the type of elements, the number of
//! dimensions, each dimension in four bytes, then the elements. Everything is big-endian.

use std::path::Path;

use super::array::ArrayPlace;
use super::contents::Contents;
use super::format::{DataFile, Format, Holds};
use crate::element::Element;
use crate::error::Result;

pub(super) static IDX: Format = Format {
    name: "an IDX file",
    endings: &[".idx", "-ubyte", ".ubyte", ".idx1", ".idx3"],
    begins: |file| matches!(file.start, [0, 0, 0x08 | 0x09 | 0x0b..=0x0e, 1..=8, ..]),
    must_begin: None,
    holds: Holds::Arrays(open),
};

/// The most dimensions of a shape here.
const RANK_MAX: usize = 8;

/// What a header says.
struct Header {
    element: Element,
    shape: Vec<usize>,
}

impl Header {
    /// The header at the beginning of `start`, or what is wrong with it; `None` if `start` ends
    /// within it.
    fn parse(start: &[u8]) -> Result<Option<Header>, String> {
        let Some((&[first, second, element, rank], dims)) = start.split_first_chunk() else {
            return Ok(None);
        };
        if (first, second) != (0, 0) {
            let got = start[..4].escape_ascii();
            return Err(format!(
                "expected two zero bytes at the beginning of an IDX file, got \"{got}\""
            ));
        }
        let element = match element {
            0x08 => Element::U8,
            0x09 => Element::I8,
            0x0b => Element::I16,
            0x0c => Element::I32,
            0x0d => Element::F32,
            0x0e => Element::F64,
            other => {
                let expected = "0x08, 0x09, 0x0b, 0x0c, 0x0d or 0x0e";
                return Err(format!("its type: expected {expected}, got 0x{other:02x}"));
            }
        };
        let rank = usize::from(rank);
        if rank == 0 || rank > RANK_MAX {
            return Err(format!("expected 1 to {RANK_MAX} dimensions, got {rank}"));
        }
        let Some(dims) = dims.get(..4 * rank) else {
            return Ok(None);
        };
        let dims = dims.as_chunks().0.iter();
        let shape = dims.map(|dim| u32::from_be_bytes(*dim) as usize).collect();
        Ok(Some(Header { element, shape }))
    }

    fn data_start(&self) -> u64 {
        4 + 4 * self.shape.len() as u64
    }

    /// The size of a file with this header; `None` if it does not fit 64 bits.
    fn bytes(&self) -> Option<u64> {
        let element_bytes = self.element.bytes() as u64;
        let mut dims = self.shape.iter();
        let data = dims.try_fold(element_bytes, |bytes, &dim| bytes.checked_mul(dim as u64))?;
        data.checked_add(self.data_start())
    }
}

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let mapped = file.map()?;
    let mut start = [0; 4 + 4 * RANK_MAX];
    let start = &mut start[..mapped.len().min(4 + 4 * RANK_MAX as u64) as usize];
    let read = mapped.read(0, start);
    read.map_err(|error| file.bad(error.to_string()))?;
    let header = Header::parse(start).map_err(|why| file.bad(why))?;
    let Some(header) = header else {
        let bytes = mapped.len();
        return Err(file.bad(format!("it ends within its header: it has {bytes} bytes")));
    };
    let Header { element, shape } = &header;
    if header.bytes() != Some(mapped.len()) {
        let claimed = match header.bytes() {
            Some(bytes) => format!("{bytes} bytes with the header"),
            None => "more than 2^64 bytes".into(),
        };
        return Err(file.bad(format!(
            "its header claims {element}{shape:?}, {claimed}, but the file has {}",
            mapped.len()
        )));
    }
    let place = ArrayPlace {
        key: "",
        offset: header.data_start(),
        element: *element,
        big_endian: true,
        shape,
    };
    let mut contents = Contents::default();
    contents.add(&mapped, file.name, &place);
    contents.checked(Path::new(file.name))
}
