//! The flat `.bin` file: arrays as they are in memory, and a small JSON header. Converted files are
//! kept in this format, and any program can write it.
//!
//! ```text
//! byte 0    "DDPFLAT1"
//! byte 8    u64   where the header begins
//! byte 16   u64   how many bytes it has
//! byte 24   u32   its CRC-32
//! byte 28         zeros up to byte 64
//! byte 64         arrays and the header in any order, without overlap;
//!                 each array begins at a multiple of 64 bytes
//! ```
//!
//! Numbers are little-endian, arrays row-major. The header is JSON:
//!
//! ```text
//! {"arrays": [{"name": "features", "element": "f32", "shape": [1000, 784],
//!              "offset": 64, "xxh3": "00d5b3a1c2e4f607"}],
//!  "classes": ["cat", "dog"], "columns": ["width", …], "source": "pets.csv"}
//! {"arrays": [{"name": "tokens", "element": "u16", "shape": [100000], "offset": 64, "xxh3": …}],
//!  "vocabulary": 50257, "end_of_text": 50256, "tokenizer": "…", "source": "…"}
//! ```
//!
//! `element` is one of u8, i8, u16, i16, u32, i32, u64, i64, bool, f16, bf16, f32, f64. `xxh3` (of
//! an array's bytes, 64 bits in hexadecimal), `classes`, `columns` and `source` are optional. A
//! file with a `vocabulary` holds tokens, which are below it; `end_of_text`, optional, is the token
//! after each document, and `tokenizer`, optional, a hash of the vocabulary. Our writer puts the
//! header at the end, since it does not know the number of rows before, and writes the first bytes
//! last, so that an unfinished file is refused.

use std::collections::HashSet;
use std::fs::File;
use std::hash::Hasher as _;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::mapped::Mapped;
use flate2::Crc;
use twox_hash::XxHash3_64;

use crate::error::{Error, Result, bail, ensure};
use crate::files::array::{ArrayPlace, NumberType};
use crate::files::cache;
use crate::files::format::{Contents, Format, Holds, PLAIN};
use crate::files::io::{map, refuse, writing};
use crate::task::TOKENS_MAX;

pub use super::format::{About, Entry};

pub(super) static FLAT: Format = Format {
    name: "a flat .bin file",
    endings: &[".bin"],
    begins: |file| file.start.starts_with(MAGIC),
    holds: Holds::Arrays(|file| {
        cache::checked(file.path, file.cache_dir, || verify(file.path))?;
        open(file.path, file.name)
    }),
    ..PLAIN
};

/// The first bytes of every file.
const MAGIC: &[u8] = b"DDPFLAT1";
/// Arrays begin at multiples of this.
const ALIGNMENT: u64 = 64;
/// Longer headers are refused: 100,000 classes with long names take about 10 MB.
const HEADER_BYTES_MAX: u64 = 64 << 20;
/// Bytes hashed at a time.
const PIECE_BYTES: usize = 1 << 20;

/// The arrays of the file at `path`, called `file` in messages.
pub fn open(path: &Path, file: &str) -> Result<Contents> {
    let mapped = map(path)?;
    let mut contents = Contents::default();
    let header = header(&mapped).map_err(|why| refuse(path, why))?;
    for entry in &header.arrays {
        let place = ArrayPlace::new(&entry.name, entry.offset, entry.element, &entry.shape);
        contents.add(&mapped, file, &place);
    }
    contents.about = header;
    contents.checked(path)
}

/// Whether a file begins as flat files do.
pub(super) fn begins(mapped: &Mapped) -> bool {
    let mut first = [0; MAGIC.len()];
    mapped.read(0, &mut first).is_ok() && first == *MAGIC
}

/// Compares every array with the checksum in the header. Reads the whole file.
pub fn verify(path: &Path) -> Result<()> {
    let bad = |why: String| refuse(path, why);
    let mapped = map(path)?;
    let mut piece = vec![0; PIECE_BYTES];
    for entry in header(&mapped).map_err(bad)?.arrays {
        let (name, Some(expected)) = (&entry.name, &entry.xxh3) else {
            continue;
        };
        let mut hash = XxHash3_64::new();
        let end = entry.end().map_err(bad)?;
        for offset in (entry.offset..end).step_by(PIECE_BYTES) {
            let piece = &mut piece[..(end - offset).min(PIECE_BYTES as u64) as usize];
            let read = mapped.read(offset, piece);
            read.map_err(|error| refuse(path, error))?;
            hash.write(piece);
        }
        let got = format!("{:016x}", hash.finish());
        if got != *expected {
            return Err(bad(format!(
                "the checksum of {name}: expected {expected}, got {got}: it is damaged; help: \
                 write or copy it again"
            )));
        }
    }
    Ok(())
}

/// The header, if everything that it claims is in the file.
fn header(mapped: &Mapped) -> Result<About, String> {
    let length = mapped.len();
    ensure!(
        length >= ALIGNMENT,
        "expected at least {ALIGNMENT} bytes, got {length}"
    );
    let read =
        |start, bytes: &mut [u8]| mapped.read(start, bytes).map_err(|error| error.to_string());
    let mut first = [0; ALIGNMENT as usize];
    read(0, &mut first)?;
    if !first.starts_with(MAGIC) {
        let got = first[..8].escape_ascii();
        bail!(
            "expected a flat .bin file, which begins with \"DDPFLAT1\", got \"{got}\"; help: numbers without a header \
             do not say what they are: save them with np.save; if they are u16 tokens, as nanoGPT writes them, give \
             tokens:FILE"
        );
    }
    let number = |at: usize| u64::from_le_bytes(first[at..at + 8].try_into().expect("eight bytes"));
    let (start, bytes, crc) = (number(8), number(16), number(24));
    let end = start.saturating_add(bytes);
    ensure!(
        start >= ALIGNMENT && end <= length && bytes <= HEADER_BYTES_MAX,
        "it claims a header of {bytes} bytes from byte {start} on, in a file of {length}: it is damaged"
    );
    ensure!(
        crc >> 32 == 0 && first[32..].iter().all(|&byte| byte == 0),
        "bytes 28 to 63: expected zeros: it is damaged or of a later version"
    );
    let mut json = vec![0; bytes as usize];
    read(start, &mut json)?;
    let got = crc_of(&json);
    ensure!(
        u64::from(got) == crc,
        "the CRC-32 of its header: expected {crc:08x}, got {got:08x}: it is damaged"
    );
    let header: About = serde_json::from_slice(&json)
        .map_err(|error| format!("its header cannot be read: {error}"))?;
    check_names(&header, length)?;
    let vocabulary = header.vocabulary.unwrap_or(1) as u64;
    ensure!(
        (1..=TOKENS_MAX).contains(&vocabulary),
        "its vocabulary: expected from 1 to {TOKENS_MAX} tokens, got {vocabulary}"
    );
    let end = header.end_of_text.unwrap_or(0);
    ensure!(
        (end as u64) < vocabulary || header.end_of_text.is_none(),
        "its end_of_text: expected a token below its vocabulary of {vocabulary}, got {end}"
    );
    Ok(header)
}

fn crc_of(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Checks that arrays, columns and classes have different names, and that arrays are in the file.
fn check_names(header: &About, length: u64) -> Result<(), String> {
    for entry in &header.arrays {
        let (name, element, shape) = (&entry.name, entry.element, &entry.shape);
        let end = entry.end()?;
        ensure!(
            end <= length,
            "its header claims {name}, {element}{shape:?}, up to byte {end}, but the file has {length} bytes: it is cut \
             short or damaged"
        );
    }
    let arrays = header.arrays.iter().map(|entry| &entry.name).collect();
    let [columns, classes] = [&header.columns, &header.classes].map(|names| names.iter().flatten());
    let (columns, classes): (Vec<_>, Vec<_>) = (columns.collect(), classes.collect());
    for (what, names) in [
        ("arrays", arrays),
        ("columns", columns),
        ("classes", classes),
    ] {
        let mut seen = HashSet::new();
        if let Some(twice) = names.into_iter().find(|name| !seen.insert(*name)) {
            bail!("two of its {what} are called {twice:?}");
        }
    }
    Ok(())
}

impl Entry {
    /// The first byte after the array.
    fn end(&self) -> Result<u64, String> {
        let (name, shape, offset) = (&self.name, &self.shape, self.offset);
        let times = |bytes: u64, &dim: &usize| bytes.checked_mul(dim as u64);
        let bytes = shape.iter().try_fold(self.element.bytes() as u64, times);
        let end = bytes.and_then(|bytes| offset.checked_add(bytes));
        end.ok_or_else(|| format!("{name}: shape {shape:?} at byte {offset} is beyond any file"))
    }
}

/// Writes a flat file: one array after another, each in pieces.
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    position: u64,
    arrays: Vec<Entry>,
    /// Of the current array.
    hash: XxHash3_64,
}

impl Writer {
    /// Begins the array `name` of rows of this shape. Rows are counted as they are written.
    pub fn begin(&mut self, name: &str, element: NumberType, row_shape: &[usize]) -> Result<()> {
        self.end_array();
        let gap = self.position.next_multiple_of(ALIGNMENT) - self.position;
        self.put(&[0; ALIGNMENT as usize][..gap as usize])?;
        self.arrays.push(Entry {
            name: name.to_string(),
            element,
            shape: [&[0], row_shape].concat(),
            offset: self.position,
            xxh3: None,
        });
        self.hash = XxHash3_64::new();
        Ok(())
    }

    /// Appends bytes, little-endian, to the current array.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        heartbeat::beat(Work::ConvertsData);
        self.hash.write(bytes);
        self.put(bytes)
    }

    /// Appends numbers to the current array. `to_bytes` gives their little-endian bytes.
    pub fn write_numbers<T: Copy, const SIZE: usize>(
        &mut self,
        numbers: &[T],
        to_bytes: impl Fn(T) -> [u8; SIZE],
    ) -> Result<()> {
        let mut piece = [0; 4096];
        for numbers in numbers.chunks(4096 / SIZE) {
            let piece = &mut piece[..numbers.len() * SIZE];
            for (number, into) in numbers.iter().zip(piece.as_chunks_mut().0) {
                *into = to_bytes(*number);
            }
            self.write(piece)?;
        }
        Ok(())
    }

    /// Writes the header and syncs the file.
    fn finish(mut self, about: About) -> Result<()> {
        self.end_array();
        let header = About {
            arrays: std::mem::take(&mut self.arrays),
            ..about
        };
        let json = serde_json::to_vec(&header);
        let json = json.map_err(|error| Error::Internal(format!("a flat header: {error}")))?;
        let bytes = json.len() as u64;
        if bytes > HEADER_BYTES_MAX {
            let source = header.source.map_or(self.path.clone(), PathBuf::from);
            let what = "the names of its arrays, columns and classes";
            return Err(refuse(
                &source,
                format!(
                    "{what}: expected at most {HEADER_BYTES_MAX} bytes, got {bytes}; help: give shorter names"
                ),
            ));
        }
        let (start, crc) = (self.position.to_le_bytes(), crc_of(&json).to_le_bytes());
        let first = [MAGIC, &start, &bytes.to_le_bytes(), &crc].concat();
        self.put(&json)?;
        let path = self.path;
        let file = self.file.into_inner();
        let mut file = file.map_err(|error| writing(&path)(error.into_error()))?;
        let finish = (|| {
            // What the first bytes promise is on the disk before they are.
            file.sync_data()?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&first)?;
            file.sync_all()
        })();
        finish.map_err(writing(&path))
    }

    /// Completes the entry of the current array.
    fn end_array(&mut self) {
        let Some(entry) = self.arrays.last_mut().filter(|entry| entry.xxh3.is_none()) else {
            return;
        };
        let numbers: usize = entry.shape[1..].iter().product();
        let row_bytes = (entry.element.bytes() * numbers) as u64;
        let bytes = self.position - entry.offset;
        assert!(
            bytes.is_multiple_of(row_bytes),
            "{bytes} bytes of {} are not whole rows of {row_bytes}",
            entry.name
        );
        entry.shape[0] = (bytes / row_bytes) as usize;
        entry.xxh3 = Some(format!("{:016x}", self.hash.finish()));
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(writing(&self.path))?;
        self.position += bytes.len() as u64;
        Ok(())
    }
}

/// Makes a flat file at `path`, where none may be, with what `fill` writes.
pub fn write(path: &Path, fill: impl FnOnce(&mut Writer) -> Result<About>) -> Result<()> {
    let file = File::create_new(path).map_err(writing(path))?;
    let mut writer = Writer {
        path: path.into(),
        file: BufWriter::with_capacity(PIECE_BYTES, file),
        position: 0,
        arrays: Vec::new(),
        hash: XxHash3_64::new(),
    };
    writer.put(&[0; ALIGNMENT as usize])?;
    let about = fill(&mut writer)?;
    writer.finish(about)
}

#[cfg(test)]
mod tests;
