//! Files compressed with gzip. Tables are read while they are unpacked; arrays are unpacked into
//! the cache once, then mapped.
//!
//! A few bytes can unpack to more than a disk holds: what compresses better than data do is
//! refused.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use ddp_kernels::heartbeat::{self, Work};
use flate2::bufread::MultiGzDecoder;

use super::cache;
use super::format::{DataFile, Format, Holds, PLAIN};
use super::io::{append, reading, refuse, writing};
use crate::error::{Error, Result};

pub(super) static GZIP: Format = Format {
    name: "a file compressed with gzip",
    begins: |file| file.start.starts_with(b"\x1f\x8b"),
    holds: Holds::Packed(unpacked),
    ..PLAIN
};

/// Deflate packs at most this many bytes into one.
pub(super) const RATIO_MAX: u64 = 1032;
/// Rows of zeros come near deflate's own limit; real data pack 5 to 20 bytes into one.
const USUAL_RATIO_MAX: u64 = 250;
/// The ratio is not checked before this much has been unpacked.
const UNPACKED_BYTES_MIN: u64 = 256 << 20;

/// Whether a file's name ends in `.gz`.
pub(crate) fn is_packed(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("gz"))
}

/// The bytes of a file, unpacked if its name ends in `.gz`.
pub(super) fn reader(path: &Path) -> Result<Box<dyn Read>> {
    let file = File::open(path).map_err(reading(path))?;
    if !is_packed(path) {
        return Ok(Box::new(file));
    }
    let bytes = file.metadata().map_err(reading(path))?.len();
    Ok(unpacking(BufReader::with_capacity(1 << 18, file), bytes))
}

/// The unpacked bytes of a stream of this many packed ones.
pub(crate) fn unpacking<'a>(packed: impl BufRead + 'a, bytes: u64) -> Box<dyn Read + 'a> {
    Box::new(Bounded::new(MultiGzDecoder::new(packed), bytes))
}

/// A stream of at most `left` bytes; more are an error.
pub(crate) struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R> Bounded<R> {
    /// What a file of this many bytes unpacks to.
    pub(crate) fn new(inner: R, packed_bytes: u64) -> Bounded<R> {
        let left = (USUAL_RATIO_MAX * packed_bytes).max(UNPACKED_BYTES_MIN);
        Bounded { inner, left }
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        heartbeat::beat(Work::ConvertsData);
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            let text = format!(
                "it unpacks to more than {USUAL_RATIO_MAX} times its size, like a decompression bomb; \
                 help: if you trust it, unpack it first"
            );
            io::Error::new(ErrorKind::InvalidData, text)
        })?;
        Ok(count)
    }
}

/// The error of a failure to unpack: bad data, or a file that cannot be read.
pub(crate) fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof => refuse(
            path,
            format!("{error}; help: check the file with gzip -t or zstd -t, or get it again"),
        ),
        _ => reading(path)(error),
    }
}

/// The unpacked array of a file, in the cache.
pub(super) fn unpacked(file: &DataFile<'_>) -> Result<PathBuf> {
    let path = file.path;
    cache::converted(path, file.cache_dir, "unpacked", |to| {
        let bad = |error| unreadable(path, error);
        let (mut packed, mut start) = (reader(path)?, [0; 8]);
        packed.read_exact(&mut start).map_err(bad)?;
        // Before all of something else is unpacked.
        if !start.starts_with(b"\x93NUMPY") && !start.starts_with(&[0, 0]) {
            let got = start.escape_ascii();
            let what = format!("expected .npy, IDX or .csv in a .gz file, got \"{got}\"…");
            return Err(refuse(path, what));
        }
        let mut out = File::create_new(to).map_err(writing(to))?;
        append((to, &mut out), (&start[..]).chain(packed), bad)?;
        out.sync_all().map_err(writing(to))
    })
}

#[cfg(test)]
mod tests;
