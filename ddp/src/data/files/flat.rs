//! The flat `.bin` file: arrays as they lie in memory, and a small header. What is converted is kept in it, and any program can write one.
//!
//! ```text
//! byte 0    "DDPFLAT1"
//! byte 8    u64   where the header begins
//! byte 16   u64   how many bytes it has
//! byte 24   u32   its CRC-32
//! byte 28         zeros up to byte 64
//! byte 64         arrays and the header, in any order, without overlap; each array at a multiple of 64 bytes
//! ```
//!
//! Numbers are little-endian, arrays row-major. The header is JSON:
//!
//! ```text
//! {"arrays": [{"name": "features", "element": "f32", "shape": [1000, 784], "offset": 64, "xxh3": "00d5b3a1c2e4f607"}],
//!  "classes": ["cat", "dog"], "columns": ["width", …], "source": "pets.csv"}
//! ```
//!
//! `element` is one of u8, i8, u16, i16, u32, i32, u64, i64, bool, f16, bf16, f32, f64. `xxh3` (of an array's bytes, 64 bits in
//! hexadecimal), `classes`, `columns` and `source` may be missing. Our writer puts the header at the end: rows need not be counted before they are written. The
//! first bytes are written last, so that half a file is none.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use flate2::Crc;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::array::Place;
use super::{Contents, Element, map, refuse};
use crate::error::{Error, Result};

/// What every file begins with.
pub(super) const MAGIC: &[u8] = b"DDPFLAT1";
/// Where arrays may begin, and at multiples of what.
const ALIGNMENT: u64 = 64;
/// Where our writer puts the first array.
pub(super) const FIRST_ARRAY: u64 = ALIGNMENT;
/// Longer headers are refused: a hundred thousand classes of long names take about 10 MB.
const HEADER_BYTES_MAX: u64 = 64 << 20;
/// Bytes that are hashed at a time.
const PIECE_BYTES: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    arrays: Vec<Entry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    classes: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    columns: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    element: String,
    shape: Vec<usize>,
    offset: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    xxh3: Option<String>,
}

/// What a file says besides its arrays.
#[derive(Clone, Debug, Default)]
pub(crate) struct About {
    /// What classes are called.
    pub(crate) classes: Option<Vec<String>>,
    /// What features are called.
    pub(crate) columns: Option<Vec<String>>,
    /// What it was made from.
    pub(crate) source: Option<String>,
}

/// The arrays of the file at `path`.
pub(crate) fn open(path: &Path) -> Result<Contents> {
    open_as(path, &path.display().to_string())
}

/// As `open`, of a file that people know as `file`.
pub(super) fn open_as(path: &Path, file: &str) -> Result<Contents> {
    let mapped = map(path)?;
    let mut contents = Contents::default();
    let header = header(&mapped).map_err(|why| refuse(path, why))?;
    for Entry { name, element, shape, offset, .. } in &header.arrays {
        let Some(element) = Element::named(element) else {
            return Err(refuse(path, format!("{name} has the element {element:?}, which is not known")));
        };
        contents.add(&mapped, file, &Place { key: name, offset: *offset, element, big_endian: false, shape });
    }
    (contents.classes, contents.columns) = (header.classes, header.columns);
    contents.checked(path)
}

/// Compares every array with the checksum that was written with it. Reads the whole file.
pub(crate) fn verify(path: &Path) -> Result<()> {
    let mapped = map(path)?;
    let header = header(&mapped).map_err(|why| refuse(path, why))?;
    let mut piece = vec![0; PIECE_BYTES];
    for entry in &header.arrays {
        let Some(expected) = &entry.xxh3 else { continue };
        let mut hash = Xxh3::new();
        let mut left = bytes_of(entry).map_err(|why| refuse(path, why))?;
        while left > 0 {
            let now = left.min(PIECE_BYTES as u64);
            let piece = &mut piece[..now as usize];
            let offset = end_of(entry).map_err(|why| refuse(path, why))? - left;
            mapped.read(offset, piece).map_err(|error| refuse(path, error))?;
            hash.update(piece);
            left -= now;
        }
        let got = format!("{:016x}", hash.digest());
        if got != *expected {
            return Err(refuse(path, format!("{} is damaged: its checksum is {got}, expected {expected}", entry.name)));
        }
    }
    Ok(())
}

/// The header, if all that it claims is in the file.
fn header(mapped: &ddp_kernels::mapped::Mapped) -> Result<Header, String> {
    let mut first = [0; ALIGNMENT as usize];
    if mapped.len() < ALIGNMENT {
        return Err(format!("it has {} bytes: a flat .bin file has at least {ALIGNMENT}", mapped.len()));
    }
    mapped.read(0, &mut first).map_err(|error| error.to_string())?;
    if !first.starts_with(MAGIC) {
        return Err(format!(
            "it begins with \"{}\": expected \"DDPFLAT1\". Numbers without a header do not say what they are: save them with np.save",
            first[..8].escape_ascii()
        ));
    }
    let number = |at: usize| u64::from_le_bytes(first[at..at + 8].try_into().expect("eight bytes"));
    let (start, bytes, crc) = (number(8), number(16), number(24));
    let end = start.checked_add(bytes).filter(|&end| start >= ALIGNMENT && end <= mapped.len());
    let Some(end) = end.filter(|_| bytes <= HEADER_BYTES_MAX) else {
        let length = mapped.len();
        return Err(format!(
            "it claims a header of {bytes} bytes from byte {start} on, in a file of {length}: it is damaged"
        ));
    };
    if first[28..].iter().any(|&byte| byte != 0) {
        return Err("bytes 28 to 63 are not zero: it is damaged, or of a later version".into());
    }
    let mut json = vec![0; bytes as usize];
    mapped.read(start, &mut json).map_err(|error| error.to_string())?;
    let mut sum = Crc::new();
    sum.update(&json);
    if u64::from(sum.sum()) != crc {
        return Err(format!("its header is damaged: its CRC-32 is {:08x}, expected {crc:08x}", sum.sum()));
    }
    let header: Header =
        serde_json::from_slice(&json).map_err(|error| format!("its header cannot be understood: {error}"))?;
    check_places(&header, start..end, mapped.len())?;
    Ok(header)
}

/// Names come once, and nothing lies where something else does.
fn check_places(header: &Header, own: std::ops::Range<u64>, length: u64) -> Result<(), String> {
    let mut names: Vec<&str> = header.arrays.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("{} comes twice", pair[0]));
    }
    let mut places = vec![(own.start, own.end, "the header")];
    for entry in &header.arrays {
        let Entry { name, element, shape, offset, .. } = entry;
        let end = end_of(entry)?;
        if end > length {
            return Err(format!(
                "its header claims {name}, {element}{shape:?}, up to byte {end}, but the file has {length} bytes: it is cut short or \
                 damaged"
            ));
        }
        if *offset < ALIGNMENT || !offset.is_multiple_of(ALIGNMENT) {
            return Err(format!(
                "{name} begins at byte {offset}: expected a multiple of {ALIGNMENT}, after the first {ALIGNMENT}"
            ));
        }
        places.push((*offset, end, name));
    }
    places.sort_unstable();
    match places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(format!("{} and {} overlap", pair[0].2, pair[1].2)),
        None => Ok(()),
    }
}

fn bytes_of(entry: &Entry) -> Result<u64, String> {
    let Entry { name, element, shape, .. } = entry;
    let size =
        Element::named(element).ok_or_else(|| format!("{name} has the element {element:?}, which is not known"))?;
    let product = shape.iter().try_fold(size.bytes() as u64, |bytes, &dim| bytes.checked_mul(dim as u64));
    product.ok_or_else(|| format!("{name} has the shape {shape:?}: more bytes than there can be"))
}

fn end_of(entry: &Entry) -> Result<u64, String> {
    let end = entry.offset.checked_add(bytes_of(entry)?);
    end.ok_or_else(|| format!("{} begins at byte {}, beyond any file", entry.name, entry.offset))
}

/// Writes a flat file, one array after another, in pieces.
pub(crate) struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    position: u64,
    arrays: Vec<Entry>,
    /// Of the array that is being written.
    hash: Xxh3,
}

impl Writer {
    /// A new file at `path`, where there must be none.
    fn create(path: &Path) -> Result<Writer> {
        let made = OpenOptions::new().write(true).create_new(true).open(path).map_err(failed("make", path))?;
        let file = BufWriter::with_capacity(PIECE_BYTES, made);
        let mut writer = Writer { path: path.into(), file, position: 0, arrays: Vec::new(), hash: Xxh3::new() };
        writer.put(&[0; ALIGNMENT as usize])?;
        Ok(writer)
    }

    /// Begins the array `name`, of rows of this shape. Rows are counted as they come.
    pub(crate) fn begin(&mut self, name: &str, element: Element, row_shape: &[usize]) -> Result<()> {
        self.end_array();
        let gap = self.position.next_multiple_of(ALIGNMENT) - self.position;
        self.put(&[0; ALIGNMENT as usize][..gap as usize])?;
        let shape = [&[0], row_shape].concat();
        let (name, element, offset) = (name.to_string(), element.name().to_string(), self.position);
        self.arrays.push(Entry { name, element, shape, offset, xxh3: None });
        self.hash.reset();
        Ok(())
    }

    /// The next bytes of the array that was begun, little-endian, in pieces of any length.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.put(bytes)
    }

    /// As `write`, of numbers.
    pub(crate) fn write_f32(&mut self, values: &[f32]) -> Result<()> {
        self.write_each(values, |value| value.to_le_bytes())
    }

    /// As `write`, of numbers.
    pub(crate) fn write_f64(&mut self, values: &[f64]) -> Result<()> {
        self.write_each(values, |value| value.to_le_bytes())
    }

    /// As `write`, of numbers.
    pub(crate) fn write_i64(&mut self, values: &[i64]) -> Result<()> {
        self.write_each(values, |value| value.to_le_bytes())
    }

    fn write_each<T: Copy, const SIZE: usize>(&mut self, values: &[T], bytes: impl Fn(T) -> [u8; SIZE]) -> Result<()> {
        let mut piece = [0; 4096];
        for values in values.chunks(4096 / SIZE) {
            let piece = &mut piece[..values.len() * SIZE];
            for (value, into) in values.iter().zip(piece.as_chunks_mut().0) {
                *into = bytes(*value);
            }
            self.write(piece)?;
        }
        Ok(())
    }

    /// Writes the header and makes the file durable.
    fn finish(mut self, about: About) -> Result<()> {
        self.end_array();
        let About { classes, columns, source } = about;
        let header = Header { arrays: std::mem::take(&mut self.arrays), classes, columns, source };
        let json = serde_json::to_vec(&header)
            .map_err(|error| Error::Internal(format!("a header cannot be JSON: {error}")))?;
        if json.len() as u64 > HEADER_BYTES_MAX {
            let source = header.source.map_or(self.path.clone(), PathBuf::from);
            let bytes = json.len();
            let what = "the names of its arrays, columns and classes take";
            return Err(refuse(
                &source,
                format!("{what} {bytes} bytes: at most {HEADER_BYTES_MAX} are read. Give shorter names"),
            ));
        }
        let mut crc = Crc::new();
        crc.update(&json);
        let (start, bytes) = (self.position.to_le_bytes(), (json.len() as u64).to_le_bytes());
        let first = [MAGIC, &start, &bytes, &crc.sum().to_le_bytes()].concat();
        self.put(&json)?;
        let path = self.path;
        let mut file = self.file.into_inner().map_err(|error| failed("write", &path)(error.into_error()))?;
        let finish = (|| {
            // What the first bytes promise is there before they are.
            file.sync_data()?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&first)?;
            file.sync_all()
        })();
        finish.map_err(failed("write", &path))
    }

    /// The array that was begun has as many rows as came.
    fn end_array(&mut self) {
        let Some(entry) = self.arrays.last_mut().filter(|entry| entry.xxh3.is_none()) else { return };
        let size = Element::named(&entry.element).map_or(1, Element::bytes);
        let row_bytes = (size * entry.shape[1..].iter().product::<usize>()) as u64;
        let bytes = self.position - entry.offset;
        assert!(bytes.is_multiple_of(row_bytes), "{bytes} bytes of {} are no whole rows of {row_bytes}", entry.name);
        entry.shape[0] = (bytes / row_bytes) as usize;
        entry.xxh3 = Some(format!("{:016x}", self.hash.digest()));
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(failed("write", &self.path))?;
        self.position += bytes.len() as u64;
        Ok(())
    }
}

/// How many bytes of a header a text takes in a list.
pub(super) fn text_bytes(text: &str) -> usize {
    // A text can always be JSON.
    serde_json::to_string(text).map_or(usize::MAX, |json| json.len() + 1)
}

/// A new flat file at `path`, with what `fill` gives it.
pub(crate) fn write(path: &Path, fill: impl FnOnce(&mut Writer) -> Result<About>) -> Result<()> {
    let mut writer = Writer::create(path)?;
    let about = fill(&mut writer)?;
    writer.finish(about)
}

/// Turns what the system said into an error that names the file.
fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    let way_out = "Check the folder's permissions and the space left on its disk, or give another --cache-dir".into();
    move |source| Error::Io { action, path, source, way_out }
}

#[cfg(test)]
mod tests;
