//! Opening files, also those compressed with gzip, and naming them in errors.
//!
//! A few bytes can unpack to more than a disk holds: a file that compresses better than data can is
//! refused.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::files::{FileError, limit_help};
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::mapped::Mapped;
use flate2::bufread::MultiGzDecoder;

use crate::error::{Error, Result};
use crate::setting::CACHE_DIR;

/// Maps a file for reading.
pub(crate) fn map(path: &Path) -> Result<Arc<Mapped>> {
    let failed = reading(path);
    Mapped::open(path).map(Arc::new).map_err(failed)
}

/// The error for a file with wrong content.
pub fn refuse(path: &Path, why: impl fmt::Display) -> Error {
    Error::Data(format!("cannot read {}: {why}", path.display()))
}

/// The error of a file that the system does not let us read.
pub fn reading(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| match source.kind() {
        ErrorKind::InvalidInput => refuse(path, source),
        _ => failed("read", path, source, "check that it exists and may be read"),
    }
}

/// The error of a file in the cache that cannot be written.
pub fn writing(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let help = format!(
        "check the folder's permissions and the space left on its disk, or set {CACHE_DIR} to another folder"
    );
    move |source| failed("write", path, source, &help)
}

fn failed(action: &'static str, path: &Path, source: io::Error, help: &str) -> Error {
    Error::Io(FileError {
        action,
        path: path.to_path_buf(),
        help: limit_help(&source).unwrap_or(help).into(),
        source,
    })
}

/// Appends all that `from` gives to the file at `path`, and returns how many bytes that is. `bad`
/// makes the error of what cannot be read.
pub(super) fn append(
    (path, out): (&Path, &mut File),
    mut from: impl Read,
    bad: impl Fn(io::Error) -> Error,
) -> Result<u64> {
    let (mut buffer, mut bytes) = (vec![0; 1 << 20], 0);
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(count) => {
                out.write_all(&buffer[..count]).map_err(writing(path))?;
                bytes += count as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(bad(error)),
        }
    }
}

/// A part of a mapped file, read as a stream.
pub(crate) struct MappedReader<'a> {
    mapped: &'a Mapped,
    position: u64,
    end: u64,
}

impl MappedReader<'_> {
    /// The bytes in `part`.
    pub(crate) fn new(mapped: &Mapped, part: Range<u64>) -> MappedReader<'_> {
        MappedReader {
            mapped,
            position: part.start,
            end: part.end,
        }
    }
}

impl Read for MappedReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_sub(self.position);
        let count = into.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.mapped.read(self.position, &mut into[..count])?;
        self.position += count as u64;
        heartbeat::beat(Work::ConvertsData);
        Ok(count)
    }
}

impl Seek for MappedReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, offset) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::End(offset) => (self.end, offset),
            SeekFrom::Current(offset) => (self.position, offset),
        };
        let position = base.checked_add_signed(offset);
        self.position = position.ok_or(ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// Deflate packs at most this many bytes into one.
pub const RATIO_MAX: u64 = 1032;
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
pub fn reader(path: &Path) -> Result<Box<dyn Read>> {
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

/// The encoding, other than UTF-8, whose byte-order mark begins a text.
pub fn other_encoding(start: &[u8]) -> Option<&'static str> {
    match start {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => Some("UTF-32"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("UTF-16"),
        _ => None,
    }
}

/// The error of a failure to unpack: bad data, or a file that cannot be read.
pub fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof => refuse(
            path,
            format!(
                "{error}: it is damaged, cut short, or followed by other bytes, which gzip -t reports and gzip -d ignores; \
                 help: get it again, or unpack it (gzip -d, zstd -d) and pack it anew"
            ),
        ),
        _ => reading(path)(error),
    }
}

#[cfg(test)]
mod tests;
