//! `.safetensors` files as data. Their header is checked by the one parser that checkpoints have, too.

use std::fs::File;
use std::path::Path;

use super::array::Place;
use super::{Contents, Element, map, refuse, unreadable};
use crate::checkpoint::safetensors::Header;
use crate::error::Result;

pub(super) fn open(path: &Path) -> Result<Contents> {
    let mapped = map(path)?;
    let name = path.display().to_string();
    // Opened once more, for its header alone: if it is another file by now, its claims are compared with what was mapped.
    let mut file = File::open(path).map_err(|error| unreadable(path, error))?;
    let header = Header::read(&mut file, mapped.len()).map_err(|error| unreadable(path, error))?;
    let header = header.map_err(|why| refuse(path, why))?;
    let mut contents = Contents::default();
    for entry in &header.entries {
        let Some(element) = element(&entry.dtype) else {
            contents
                .others
                .push((entry.name.clone(), format!("its elements are {}, which are not read here", entry.dtype)));
            continue;
        };
        let offset = header.data_start + entry.start;
        contents.add(
            &mapped,
            &name,
            &Place { key: &entry.name, offset, element, big_endian: false, shape: &entry.shape },
        );
    }
    contents.checked(path)
}

fn element(dtype: &str) -> Option<Element> {
    Some(match dtype {
        "BOOL" => Element::Bool,
        "U8" => Element::U8,
        "I8" => Element::I8,
        "U16" => Element::U16,
        "I16" => Element::I16,
        "U32" => Element::U32,
        "I32" => Element::I32,
        "U64" => Element::U64,
        "I64" => Element::I64,
        "F16" => Element::F16,
        "BF16" => Element::BF16,
        "F32" => Element::F32,
        "F64" => Element::F64,
        _ => return None,
    })
}
