//! `.safetensors` files, as data and for checkpoints. The header is eight bytes of length, then
//! JSON that says where each tensor is.
//!
//! The crate `safetensors` parses the JSON. Its length is bounded and compared with the size of the
//! file before it is read. Our writer keeps the order of tensors and sorts the metadata, so that
//! equal models give equal files.

use std::collections::BTreeMap;
use std::io::{self, Read};

use safetensors::tensor::Metadata;
use serde_json::{Map, Value, json};

use super::array::ArrayPlace;
use super::format::{Contents, DataFile, Format, Holds, PLAIN};
use super::io::{MappedReader, reading};
use crate::error::{Result, ensure};

pub(super) static SAFETENSORS: Format = Format {
    name: "a .safetensors file",
    endings: &[".safetensors"],
    // The length of the header, then its first bracket.
    begins: |file| match (file.start.first_chunk(), file.start.get(8)) {
        (Some(length), Some(b'{')) => u64::from_le_bytes(*length) <= file.bytes,
        _ => false,
    },
    holds: Holds::Arrays(open),
    ..PLAIN
};

fn open(file: &DataFile<'_>) -> Result<Contents> {
    let (path, mapped) = (file.path, file.map()?);
    let header = Header::read(
        &mut MappedReader::new(&mapped, 0..mapped.len()),
        mapped.len(),
    );
    let header = header.map_err(reading(path))?;
    let header = header.map_err(|why| file.bad(why))?;
    let mut contents = Contents::default();
    for entry in &header.entries {
        // Their names are ours in capitals.
        let Ok(element) = entry.dtype.to_ascii_lowercase().parse() else {
            let why = format!("elements of type {} are not read", entry.dtype);
            contents.others.push((entry.name.clone(), why));
            continue;
        };
        let offset = header.data_start + entry.start;
        let place = ArrayPlace::new(&entry.name, offset, element, &entry.shape);
        contents.add(&mapped, file.name, &place);
    }
    contents.checked(path)
}

/// Longer headers are refused. A thousand tensors take about 0.1 MB.
const HEADER_BYTES_MAX: u64 = 16 << 20;
const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// What a file holds.
#[derive(Debug, PartialEq)]
pub struct Header {
    /// The tensors, in the order of their data.
    pub entries: Vec<TensorEntry>,
    /// Where the data begin in the file.
    pub data_start: u64,
    /// Texts by name.
    pub metadata: BTreeMap<String, String>,
}

/// One tensor of a file.
#[derive(Debug, PartialEq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Its type, as the format names it: `F32`.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its first byte, counted from the beginning of the data.
    pub start: u64,
    /// The first byte after it.
    pub end: u64,
}

impl TensorEntry {
    /// How many numbers it has.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Header {
    /// The header of these f32 tensors, one after another, with names and layouts as PyTorch has
    /// them.
    pub fn of<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Header {
        Header::with_metadata(tensors, [("format".to_string(), "pt".to_string())].into())
    }

    /// The header of these f32 tensors, one after another, with these metadata.
    pub fn with_metadata<'a>(
        tensors: impl Iterator<Item = (&'a str, &'a [usize])>,
        metadata: BTreeMap<String, String>,
    ) -> Header {
        let mut next = 0;
        let entry = |(name, shape): (&str, &[usize])| {
            let start = next;
            next += 4 * shape.iter().product::<usize>() as u64;
            TensorEntry {
                name: name.into(),
                dtype: "F32".into(),
                shape: shape.to_vec(),
                start,
                end: next,
            }
        };
        let mut header = Header {
            entries: tensors.map(entry).collect(),
            data_start: 0,
            metadata,
        };
        header.data_start = header.to_bytes().len() as u64;
        header
    }

    /// Makes the tensors bf16 instead of f32.
    pub fn become_bf16(&mut self) {
        for entry in &mut self.entries {
            entry.dtype = "BF16".into();
            (entry.start, entry.end) = (entry.start / 2, entry.end / 2);
        }
        self.data_start = self.to_bytes().len() as u64;
    }

    /// The length and the JSON.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut map = Map::new();
        map.insert(METADATA.into(), json!(self.metadata));
        for entry in &self.entries {
            let (shape, data_offsets) = (&entry.shape, [entry.start, entry.end]);
            map.insert(
                entry.name.clone(),
                json!({ "dtype": entry.dtype, "shape": shape, "data_offsets": data_offsets }),
            );
        }
        let mut json = Value::Object(map).to_string();
        // Data begin at a multiple of eight, so that a mapped file can be read in place.
        while !json.len().is_multiple_of(8) {
            json.push(' ');
        }
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes
    }

    /// Reads and checks the header of a file of `length` bytes. The outer error is the system's,
    /// the inner one says what is wrong with the contents.
    pub fn read(file: &mut impl Read, length: u64) -> io::Result<Result<Header, String>> {
        let mut first = [0; LENGTH_BYTES as usize];
        if length < LENGTH_BYTES {
            return Ok(Err(format!(
                "expected a safetensors file of at least {LENGTH_BYTES} bytes, got {length}"
            )));
        }
        file.read_exact(&mut first)?;
        // A pickle's protocol number is followed by an opcode, a length below 65536 by zeros.
        let is_pickle = matches!(first, [0x80, 2..=5, 1..=255, ..]);
        if first.starts_with(b"PK\x03\x04") || is_pickle {
            let text = "it is a file of torch.save, which can run programs when it is read; help: \
                        safetensors.torch.save_file(torch.load(…, weights_only=True), …)";
            return Ok(Err(text.into()));
        }
        let header_bytes = u64::from_le_bytes(first);
        let most = HEADER_BYTES_MAX.min(length - LENGTH_BYTES);
        if header_bytes > most {
            return Ok(Err(format!(
                "the size of its header: expected at most {most} bytes, got {header_bytes}: it is damaged, cut short, or no \
                 safetensors file"
            )));
        }
        let mut json = vec![0; header_bytes as usize];
        file.read_exact(&mut json)?;
        let data_start = LENGTH_BYTES + header_bytes;
        Ok(
            parse(&json, length - data_start).map(|(entries, metadata)| Header {
                entries,
                data_start,
                metadata,
            }),
        )
    }

    /// The size of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.data_start + self.entries.last().map_or(0, |entry| entry.end)
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// The tensors of a header, if they fill exactly `data_bytes` bytes of data, and the metadata.
pub fn parse(
    json: &[u8],
    data_bytes: u64,
) -> Result<(Vec<TensorEntry>, BTreeMap<String, String>), String> {
    let parsed: Metadata =
        serde_json::from_slice(json).map_err(|error| format!("its header is damaged: {error}"))?;
    let got = parsed.data_len() as u64;
    ensure!(
        got == data_bytes,
        "its tensors take {got} bytes, but it has {data_bytes} bytes of data: it is cut short or damaged"
    );
    let entry = |name: String| {
        let info = parsed.info(&name)?;
        let (start, end) = info.data_offsets;
        Some(TensorEntry {
            name,
            dtype: info.dtype.to_string(),
            shape: info.shape.clone(),
            start: start as u64,
            end: end as u64,
        })
    };
    let entries = parsed.offset_keys().into_iter().filter_map(entry).collect();
    let metadata = parsed.metadata().clone().unwrap_or_default();
    Ok((entries, metadata.into_iter().collect()))
}
