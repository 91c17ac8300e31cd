//! Arrays in people's files: `.npy`, `.npz`, IDX, `.safetensors` and the flat `.bin` of our own (`flat.rs`), read where they lie.
//!
//! A file is untrusted. `open` reads headers alone, and checks what they claim against the bytes that are there before anything is
//! allocated for it; what is wrong is one error that names the file, exit code 65. Pickled objects are never read. What cannot be mapped as it is
//! (compressed, or with columns where rows are read) is converted once into the cache.

pub(crate) mod array;
pub(crate) mod cache;
mod csv;
pub(crate) mod flat;
pub(crate) mod gzip;
mod idx;
mod kind;
mod npy;
mod npz;
mod parquet;
mod safetensors;
pub(crate) mod table;

use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use self::array::Place;
pub(crate) use self::array::{Array, Element};
pub(crate) use self::kind::{Kind, kind};
use crate::error::{Error, Result};

/// What a file holds: its arrays by name, and what it says besides.
#[derive(Clone, Debug, Default)]
pub(crate) struct Contents {
    /// Those that have rows, in the order of the file. At least one.
    pub(crate) arrays: Vec<Array>,
    /// The names of the others, and why each cannot be used.
    pub(crate) others: Vec<(String, String)>,
    /// What its classes are called.
    pub(crate) classes: Option<Vec<String>>,
    /// What its features are called.
    pub(crate) columns: Option<Vec<String>>,
}

impl Contents {
    /// The array of this name, if there is one that can be used. One that cannot be is an error that says why.
    pub(crate) fn find(&self, key: &str) -> Result<Option<&Array>, String> {
        match self.others.iter().find(|(name, _)| name == key) {
            Some((name, why)) => Err(format!("{name}: {why}")),
            None => Ok(self.arrays.iter().find(|array| array.key() == key)),
        }
    }

    /// Adds an array, or why it is none.
    fn add(&mut self, mapped: &Arc<Mapped>, file: &str, place: &Place<'_>) {
        match Array::new(mapped, file, place) {
            Ok(array) => self.arrays.push(array),
            Err(why) => self.others.push((place.key.to_string(), why)),
        }
    }

    /// A file without any array that can be used is an error: that of its first.
    fn checked(self, path: &Path) -> Result<Contents> {
        if !self.arrays.is_empty() {
            return Ok(self);
        }
        Err(refuse(
            path,
            match self.others.first() {
                None => "it holds no arrays".into(),
                Some((name, why)) if name.is_empty() => why.clone(),
                Some((name, why)) => format!("{name}: {why}"),
            },
        ))
    }
}

/// The arrays of the file at `path`, of whatever format it is. `cache_dir` is where a converted copy goes if it has to be made.
pub(crate) fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    match kind(path)? {
        Kind::Npy => npy::open(path, &path.display().to_string(), cache_dir),
        Kind::Npz => npz::open(path, cache_dir),
        Kind::Idx => idx::open(path, &path.display().to_string()),
        Kind::Safetensors => safetensors::open(path),
        Kind::Flat => flat::open(path),
        Kind::Gzip => open_packed(path, cache_dir),
        other => Err(refuse(path, format!("it is {}, which has no arrays to read", other.name()))),
    }
}

/// The array of a file that is compressed: unpacked once, then read like any other.
fn open_packed(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let unpacked = gzip::unpacked(path, cache_dir, claimed_bytes)?;
    let file = path.display().to_string();
    match kind(&unpacked)? {
        Kind::Npy => npy::open(&unpacked, &file, cache_dir),
        Kind::Idx => idx::open(&unpacked, &file),
        other => Err(refuse(path, format!("it has {} in it: .gz of .npy, IDX and .csv is read", other.name()))),
    }
}

/// How many bytes an `.npy` or IDX file has in all, by its first bytes, or what is wrong with them; `None` where it takes more of them to tell.
pub(crate) fn claimed_bytes(start: &[u8]) -> Result<Option<u64>, String> {
    const NPY: &[u8] = b"\x93NUMPY";
    match start.first() {
        None => Ok(None),
        Some(0) => match idx::Header::parse(start)? {
            None => Ok(None),
            Some(header) => {
                header.bytes().map(Some).ok_or_else(|| "its header claims more bytes than there can be".into())
            }
        },
        Some(_) if NPY.starts_with(start) => Ok(None),
        Some(_) => match npy::header(start) {
            Ok(header) => Ok(Some(npy::bytes(&header))),
            Err(_) if start.starts_with(NPY) && npy::ends_early(start) => Ok(None),
            Err(why) => Err(why),
        },
    }
}

/// Maps a file that is there to be read.
fn map(path: &Path) -> Result<Arc<Mapped>> {
    Mapped::open(path).map(Arc::new).map_err(|error| unreadable(path, error))
}

/// The system did not let us at a file.
fn unreadable(path: &Path, source: io::Error) -> Error {
    if source.kind() == io::ErrorKind::InvalidInput {
        return refuse(path, source.to_string());
    }
    let way_out = "Check that it is there and may be read".into();
    Error::Io { action: "read", path: path.to_path_buf(), source, way_out }
}

/// A file that is not what it should be.
fn refuse(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Data(format!("cannot read {}: {why}", path.display()))
}

/// A part of a mapped file, read from some place on.
struct Reading<'a> {
    mapped: &'a Mapped,
    position: u64,
    end: u64,
}

impl Reading<'_> {
    fn of(mapped: &Mapped) -> Reading<'_> {
        Reading::part(mapped, 0..mapped.len())
    }

    fn part(mapped: &Mapped, part: Range<u64>) -> Reading<'_> {
        Reading { mapped, position: part.start, end: part.end }
    }
}

impl Read for Reading<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(usize::try_from(self.end.saturating_sub(self.position)).unwrap_or(usize::MAX));
        self.mapped.read(self.position, &mut into[..count])?;
        self.position += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
