//! `.safetensors` files as data. Their header is checked by the reader that checkpoints use.

use super::array::ArrayPlace;
use super::contents::Contents;
use super::format::{DataFile, Format, Holds};
use super::io::{MappedReader, reading};
use crate::element::Element;
use crate::error::Result;
use crate::safetensors::Header;

pub(super) static SAFETENSORS: Format = Format {
    name: "a .safetensors file",
    endings: &[".safetensors"],
    // The length of the header, then its first bracket.
    begins: |file| match (file.start.first_chunk(), file.start.get(8)) {
        (Some(length), Some(b'{')) => u64::from_le_bytes(*length) <= file.bytes,
        _ => false,
    },
    must_begin: None,
    holds: Holds::Arrays(open),
};

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let (path, mapped) = (file.path, file.map()?);
    let header = Header::read(&mut MappedReader::new(&mapped), mapped.len());
    let header = header.map_err(reading(path))?;
    let header = header.map_err(|why| file.bad(why))?;
    let mut contents = Contents::default();
    for entry in &header.entries {
        // Their names are ours in capitals.
        let Some(element) = Element::named(&entry.dtype.to_ascii_lowercase()) else {
            let why = format!("elements of type {} are not read", entry.dtype);
            contents.others.push((entry.name.clone(), why));
            continue;
        };
        let place = ArrayPlace {
            key: &entry.name,
            offset: header.data_start + entry.start,
            element,
            big_endian: false,
            shape: &entry.shape,
        };
        contents.add(&mapped, file.name, &place);
    }
    contents.checked(path)
}
