//! The header of a safetensors file: eight bytes of length, then JSON that says where each tensor is.
//!
//! Everything in it is a claim of somebody else's, checked against the size of the file before anything is allocated.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Longer headers are refused: a thousand tensors take about 0.1 MB.
const HEADER_BYTES_MAX: u64 = 16 << 20;
/// The header's length comes first.
const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// What a file holds. Data and models are read by it.
#[derive(Debug, PartialEq)]
pub(crate) struct Header {
    /// In the order of their data.
    pub(crate) entries: Vec<Entry>,
    /// Where the data begin in the file.
    pub(crate) data_start: u64,
    /// What the file says besides: names and texts.
    pub(crate) metadata: BTreeMap<String, String>,
}

/// One tensor of a file.
#[derive(Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Bytes from the beginning of the data.
    pub(crate) start: u64,
    /// The same, of the first byte behind it.
    pub(crate) end: u64,
}

/// As it stands in the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl Entry {
    /// How many numbers it has.
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Header {
    /// Of a file with these f32 tensors, one after the other.
    pub(crate) fn of<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Header {
        // It tells other programs whose names and layouts these are.
        Header::with_metadata(tensors, [("format".to_string(), "pt".to_string())].into())
    }

    /// The same, with these metadata.
    pub(crate) fn with_metadata<'a>(
        tensors: impl Iterator<Item = (&'a str, &'a [usize])>,
        metadata: BTreeMap<String, String>,
    ) -> Header {
        let mut start = 0;
        let place = |(name, shape): (&str, &[usize])| {
            let end = start + 4 * shape.iter().product::<usize>() as u64;
            let entry = Entry { name: name.into(), dtype: "F32".into(), shape: shape.to_vec(), start, end };
            start = end;
            entry
        };
        let mut header = Header { entries: tensors.map(place).collect(), data_start: 0, metadata };
        header.data_start = header.to_bytes().len() as u64;
        header
    }

    /// The length and the JSON.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
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

    /// Reads and checks the header of a file of `length` bytes. The outer error is the system's, the inner one says what is
    /// wrong with the contents.
    pub(crate) fn read(file: &mut impl Read, length: u64) -> io::Result<Result<Header, String>> {
        if length < LENGTH_BYTES {
            return Ok(Err(format!("it has {length} bytes, less than the header of a safetensors file")));
        }
        let mut first = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut first)?;
        // A pickle's protocol is followed by an instruction, a length below 65536 by zeros.
        let is_pickle = matches!(first, [0x80, 2..=5, 1..=255, ..]);
        if first.starts_with(b"PK\x03\x04") || is_pickle {
            let text = "it is a file of torch.save, whose format can run programs, and is not read. Convert it with \
                        safetensors.torch.save_file(torch.load(…, weights_only=True), …)";
            return Ok(Err(text.into()));
        }
        let header_bytes = u64::from_le_bytes(first);
        let most = HEADER_BYTES_MAX.min(length - LENGTH_BYTES);
        if header_bytes > most {
            let text = format!(
                "its header claims {header_bytes} bytes, and at most {most} can be: it is damaged, cut \
                                short, or no safetensors file"
            );
            return Ok(Err(text));
        }
        let mut json = vec![0; header_bytes as usize];
        file.read_exact(&mut json)?;
        let data_start = LENGTH_BYTES + header_bytes;
        let parsed = parse(&json, length - data_start);
        Ok(parsed.map(|(entries, metadata)| Header { entries, data_start, metadata }))
    }

    /// How long the whole file is.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.data_start + self.entries.last().map_or(0, |entry| entry.end)
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// The tensors of a header before `data_bytes` bytes of data, if they fill these exactly, and the metadata.
pub(crate) fn parse(json: &[u8], data_bytes: u64) -> Result<(Vec<Entry>, BTreeMap<String, String>), String> {
    let Parsed { tensors: map, metadata } =
        serde_json::from_slice(json).map_err(|error| format!("its header cannot be read: {error}"))?;
    let mut entries: Vec<Entry> = map
        .into_iter()
        .map(|(name, Written { dtype, shape, data_offsets: [start, end] })| Entry { name, dtype, shape, start, end })
        .collect();
    entries.sort_by_key(|entry| (entry.start, entry.end));
    let mut next = 0;
    for entry in &entries {
        let Entry { name, dtype, shape, start, end } = entry;
        let element =
            element_bytes(dtype).ok_or_else(|| format!("{name} has the dtype {dtype:?}, which is not known"))?;
        let bytes = shape.iter().try_fold(element, |bytes, &length| bytes.checked_mul(length as u64));
        if *start != next || end.checked_sub(*start) != bytes || bytes.is_none() {
            return Err(format!(
                "{name} of shape {shape:?} in {dtype} claims bytes {start} to {end}, where {next} to {} would be right",
                bytes.and_then(|bytes| next.checked_add(bytes)).map_or("nowhere".to_string(), |end| end.to_string())
            ));
        }
        next = *end;
    }
    if next != data_bytes {
        return Err(format!("its tensors take {next} bytes, and it has {data_bytes}: it is cut short or damaged"));
    }
    Ok((entries, metadata))
}

fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" => Some(8),
        _ => None,
    }
}

/// The tensors by name. A name that comes twice is an error: which of the two would be meant?
struct Parsed {
    tensors: BTreeMap<String, Written>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Parsed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Parsed, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Parsed;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
                let (mut tensors, mut metadata) = (BTreeMap::new(), None);
                while let Some(name) = map.next_key::<String>()? {
                    let is_new = match name == METADATA {
                        true => metadata.replace(map.next_value()?).is_none(),
                        false => tensors.insert(name.clone(), map.next_value()?).is_none(),
                    };
                    if !is_new {
                        return Err(A::Error::custom(format!("{name} comes twice")));
                    }
                }
                Ok(Parsed { tensors, metadata: metadata.unwrap_or_default() })
            }
        }
        deserializer.deserialize_map(Read)
    }
}
