//! IDX, the format of MNIST's files: two zeros, a byte that says what the numbers are, the number of dimensions, each dimension in four bytes,
//! then the numbers. Everything in it has the byte that counts most first.

use std::path::Path;

use super::array::Place;
use super::{Contents, Element, map, refuse};
use crate::error::Result;

/// As many dimensions as shapes have here.
const RANK_MAX: usize = 8;

/// What a header says.
pub(super) struct Header {
    element: Element,
    shape: Vec<usize>,
}

impl Header {
    /// The header at the beginning of `start`, or what is wrong with it; `None` where `start` ends within it.
    pub(super) fn parse(start: &[u8]) -> Result<Option<Header>, String> {
        let Some((&[zero, nought, element, rank], dims)) = start.split_first_chunk() else { return Ok(None) };
        if (zero, nought) != (0, 0) {
            return Err(format!(
                "it begins with \"{}\": expected two zeros, as IDX files do",
                start[..4].escape_ascii()
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
                return Err(format!("its type is 0x{other:02x}: expected one of 0x08, 0x09, 0x0b, 0x0c, 0x0d, 0x0e"));
            }
        };
        let rank = usize::from(rank);
        if rank == 0 || rank > RANK_MAX {
            return Err(format!("it claims {rank} dimensions: expected 1 to {RANK_MAX}"));
        }
        let Some(dims) = dims.get(..4 * rank) else { return Ok(None) };
        let shape = dims.as_chunks().0.iter().map(|dim| u32::from_be_bytes(*dim) as usize).collect();
        Ok(Some(Header { element, shape }))
    }

    fn data_start(&self) -> u64 {
        4 + 4 * self.shape.len() as u64
    }

    /// How long a file with this header is, as far as it can be told.
    pub(super) fn bytes(&self) -> Option<u64> {
        let data =
            self.shape.iter().try_fold(self.element.bytes() as u64, |bytes, &dim| bytes.checked_mul(dim as u64))?;
        data.checked_add(self.data_start())
    }
}

/// The array of the file at `path`, which people know as `file`.
pub(super) fn open(path: &Path, file: &str) -> Result<Contents> {
    let (mapped, shown) = (map(path)?, Path::new(file));
    let mut start = [0; 4 + 4 * RANK_MAX];
    let start = &mut start[..mapped.len().min(4 + 4 * RANK_MAX as u64) as usize];
    mapped.read(0, start).map_err(|error| refuse(shown, error))?;
    let header = Header::parse(start).map_err(|why| refuse(shown, why))?;
    let header =
        header.ok_or_else(|| refuse(shown, format!("it ends within its header: it has {} bytes", mapped.len())))?;
    let Header { element, shape } = &header;
    if header.bytes() != Some(mapped.len()) {
        let claimed = header.bytes().map_or("more bytes than there can be".into(), |bytes| format!("{bytes} bytes"));
        return Err(refuse(
            shown,
            format!(
                "its header claims {element}{shape:?}, {claimed} with the header, but the file has {}",
                mapped.len()
            ),
        ));
    }
    let mut contents = Contents::default();
    let place = Place { key: "", offset: header.data_start(), element: *element, big_endian: true, shape };
    contents.add(&mapped, file, &place);
    contents.checked(shown)
}
