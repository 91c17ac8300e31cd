//! `.safetensors` files as data. Their header is checked by the reader that checkpoints use.

use std::path::Path;

use super::array::{ArrayPlace, Element};
use super::contents::Contents;
use super::io::{MappedReader, map, reading, refuse};
use crate::error::Result;
use crate::safetensors::Header;

pub(super) fn open(path: &Path) -> Result<Contents> {
    let mapped = map(path)?;
    let name = path.display().to_string();
    let header = Header::read(&mut MappedReader::new(&mapped), mapped.len());
    let header = header.map_err(reading(path))?;
    let header = header.map_err(|why| refuse(path, why))?;
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
        contents.add(&mapped, &name, &place);
    }
    contents.checked(path)
}
