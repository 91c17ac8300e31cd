//! Files compressed with gzip. Tables are read while they are unpacked; arrays are unpacked into
//! the cache once, then mapped.
//!
//! A few bytes can unpack to more than a disk holds. An array is unpacked only as far as its own
//! header claims, and not at all if the claim is more than gzip can pack into the file or than the
//! disk has room for. A table that compresses better than tables do is refused.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::cache::{self, Wanted};
use super::io::{reading, refuse, writing};
use crate::error::{Error, Result};

/// Deflate packs at most this many bytes into one.
pub(super) const RATIO_MAX: u64 = 1032;
/// Rows of zeros come near deflate's own limit; real tables pack 5 to 20 bytes into one.
const TABLE_RATIO_MAX: u64 = 250;
/// The ratio of a table is not checked before this much has been unpacked.
const TABLE_BYTES_MIN: u64 = 256 << 20;
/// The longest header of an array, with what comes before it.
const HEADER_BYTES_MAX: usize = (64 << 10) + 16;

/// Whether a file's name ends in `.gz`.
pub(crate) fn is_packed(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("gz"))
}

/// The bytes of a table, unpacked if its name ends in `.gz`.
pub(super) fn table(path: &Path) -> Result<Box<dyn Read>> {
    let file = File::open(path).map_err(reading(path))?;
    if !is_packed(path) {
        return Ok(Box::new(file));
    }
    let bytes = file.metadata().map_err(reading(path))?.len();
    let left = (TABLE_RATIO_MAX * bytes).max(TABLE_BYTES_MIN);
    let inner = unpacking(file);
    Ok(Box::new(Bounded { inner, left }))
}

/// The most bytes that `table` can give.
pub(super) fn table_bytes_max(path: &Path) -> Result<u64> {
    let bytes = std::fs::metadata(path).map_err(reading(path))?.len();
    let ratio = if is_packed(path) { RATIO_MAX } else { 1 };
    Ok(bytes.saturating_mul(ratio))
}

fn unpacking(file: File) -> MultiGzDecoder<BufReader<File>> {
    MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file))
}

/// A stream of at most `left` bytes; more are an error.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            let text = format!(
                "it unpacks to more than {TABLE_RATIO_MAX} times its size, like a gzip bomb; \
                 help: if it is a table, unpack it with gunzip"
            );
            io::Error::new(ErrorKind::InvalidData, text)
        })?;
        Ok(count)
    }
}

/// The error of a failure to unpack: bad data, or a file that cannot be read.
pub(super) fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof => refuse(
            path,
            format!("{error}; help: check the file with gzip -t, or get it again"),
        ),
        _ => reading(path)(error),
    }
}

/// The unpacked array of a file, in the cache. `claimed` gives the size of an array from its first
/// bytes, or `None` if it needs more of them.
pub fn unpacked(
    path: &Path,
    cache_dir: Option<&Path>,
    claimed: fn(&[u8]) -> Result<Option<u64>, String>,
) -> Result<PathBuf> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let is_taken = stem.is_empty() || stem == cache::ENTRY;
    let wanted = Wanted {
        source: path,
        name: if is_taken { "data" } else { &stem },
        request: "unpacked",
    };
    let folders = cache::usual_folders(path, cache_dir);
    cache::find_or_make(&folders, &wanted, |to| unpack(path, to, claimed))
}

fn unpack(path: &Path, to: &Path, claimed: fn(&[u8]) -> Result<Option<u64>, String>) -> Result<()> {
    let bad = |what: String| refuse(path, what);
    let file = File::open(path).map_err(reading(path))?;
    let packed_bytes = file.metadata().map_err(reading(path))?.len();
    let mut reader = unpacking(file);
    let (start, total) = read_header(&mut reader, path, claimed)?;
    if total / RATIO_MAX > packed_bytes {
        return Err(bad(format!(
            "its header claims {total} bytes, more than gzip can pack into its {packed_bytes}: it is damaged or a gzip bomb"
        )));
    }
    cache::check_room(to, total)?;
    let mut out = File::create_new(to).map_err(writing(to))?;
    let (mut got, mut buffer) = (0, vec![0; 1 << 20]);
    let mut whole = start.chain(reader);
    while got <= total {
        let count = match whole.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(unreadable(path, error)),
        };
        got += count as u64;
        if got <= total {
            out.write_all(&buffer[..count]).map_err(writing(to))?;
        }
    }
    match got {
        _ if got == total => out.sync_all().map_err(writing(to)),
        _ if got < total => Err(bad(format!(
            "its header claims {total} bytes, but it unpacks to {got}"
        ))),
        _ => Err(bad(format!(
            "its header claims {total} bytes, but it unpacks to more"
        ))),
    }
}

/// Reads until the size of what is packed is known: the bytes read so far, and the size.
fn read_header(
    reader: &mut impl Read,
    path: &Path,
    claimed: fn(&[u8]) -> Result<Option<u64>, String>,
) -> Result<(io::Cursor<Vec<u8>>, u64)> {
    let bad = |what: String| refuse(path, what);
    let mut start = Vec::new();
    loop {
        if let Some(total) = claimed(&start).map_err(bad)? {
            return Ok((io::Cursor::new(start), total));
        }
        if start.len() > HEADER_BYTES_MAX {
            return Err(bad("the header of the array in it does not end".into()));
        }
        let before = start.len();
        let mut piece = reader.take((before as u64).max(256));
        let read = piece.read_to_end(&mut start);
        read.map_err(|error| unreadable(path, error))?;
        if start.len() == before {
            return Err(bad(format!(
                "the array in it ends within its header, after {before} bytes"
            )));
        }
    }
}

#[cfg(test)]
mod tests;
