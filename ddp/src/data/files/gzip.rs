//! Files that gzip has packed. Tables are read as they are unpacked; arrays are unpacked into the cache once, to be mapped.
//!
//! A few bytes can unpack to more than a disk holds. So an array is unpacked as far as its own header claims and no further, and not at all where
//! the claim is more than gzip can pack into the file or than the disk has room for; a table that packs better than tables do is refused.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::cache::{self, Wanted, reading, writing};
use super::refuse;
use crate::error::{Error, Result};

/// Deflate packs no more than so many bytes into one.
const RATIO_MAX: u64 = 1032;
/// Rows of nothing but zeros come near deflate's own limit; real tables pack five to twenty bytes into one.
const TABLE_RATIO_MAX: u64 = 250;
/// Before so much has been unpacked nothing is said of the ratio.
const TABLE_BYTES_MIN: u64 = 256 << 20;
/// Headers of arrays are at most so long, with what stands before them.
const HEADER_BYTES_MAX: usize = (64 << 10) + 16;

/// Whether a file's name says that it is packed.
pub(crate) fn is_packed(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gz"))
}

/// The bytes of a table, unpacked where its name says so.
pub(super) fn table(path: &Path) -> Result<Box<dyn Read>> {
    let file = File::open(path).map_err(reading(path))?;
    if !is_packed(path) {
        return Ok(Box::new(file));
    }
    let bytes = file.metadata().map_err(reading(path))?.len();
    let most = (TABLE_RATIO_MAX * bytes).max(TABLE_BYTES_MIN);
    Ok(Box::new(Bounded { inner: unpacking(file), left: most }))
}

/// No more bytes than these come out of `table`, or it is an error.
pub(super) fn table_bytes_at_most(path: &Path) -> Result<u64> {
    let bytes = std::fs::metadata(path).map_err(reading(path))?.len();
    Ok(if is_packed(path) { bytes.saturating_mul(RATIO_MAX) } else { bytes })
}

fn unpacking(file: File) -> MultiGzDecoder<BufReader<File>> {
    MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file))
}

/// Says no where more comes than is plausible.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            let text = format!(
                "more than {TABLE_RATIO_MAX} times its size comes out of it, as out of a gzip bomb. If it is a table all the same, \
                 unpack it with gunzip"
            );
            io::Error::new(ErrorKind::InvalidData, text)
        })?;
        Ok(count)
    }
}

/// Turns a failure to unpack into an error: bad data, or a file that cannot be read.
pub(super) fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof => {
            refuse(path, format!("{error}. Check the file with gzip -t, or get it again"))
        }
        _ => reading(path)(error),
    }
}

/// The unpacked array of a file, in the cache. `claimed` says how many bytes the array has in all by its first bytes, or `None` where it needs
/// more of them.
pub(crate) fn unpacked(
    path: &Path,
    cache_dir: Option<&Path>,
    claimed: fn(&[u8]) -> Result<Option<u64>, String>,
) -> Result<PathBuf> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = if stem.is_empty() || stem == cache::ENTRY { "data".into() } else { stem };
    let wanted = Wanted { source: path, name: &name, request: "unpacked" };
    cache::find_or_make(&cache::usual_folders(path, cache_dir), &wanted, |to| unpack(path, to, claimed))
}

fn unpack(path: &Path, to: &Path, claimed: fn(&[u8]) -> Result<Option<u64>, String>) -> Result<()> {
    let bad = |what: String| refuse(path, what);
    let file = File::open(path).map_err(reading(path))?;
    let packed_bytes = file.metadata().map_err(reading(path))?.len();
    let mut reader = unpacking(file);
    let (start, total) = read_header(&mut reader, path, claimed)?;
    if total / RATIO_MAX > packed_bytes {
        return Err(bad(format!(
            "its header claims {total} bytes, more than gzip can pack into its {packed_bytes}. It is damaged or a gzip bomb"
        )));
    }
    cache::check_room(to, total)?;
    let mut out = File::create_new(to).map_err(writing(to))?;
    out.write_all(&start[..start.len().min(usize::try_from(total).unwrap_or(usize::MAX))]).map_err(writing(to))?;
    let (mut got, mut buffer) = (start.len() as u64, vec![0; 1 << 20]);
    while got <= total {
        let count = match reader.read(&mut buffer) {
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
        _ if got < total => Err(bad(format!("its header claims {total} bytes, but {got} come out of it"))),
        _ => Err(bad(format!("its header claims {total} bytes, but more come out of it"))),
    }
}

/// Reads as many bytes as it takes to know the size of what is packed, and gives both.
fn read_header(
    reader: &mut impl Read,
    path: &Path,
    claimed: fn(&[u8]) -> Result<Option<u64>, String>,
) -> Result<(Vec<u8>, u64)> {
    let bad = |what: String| refuse(path, what);
    let mut start = Vec::new();
    loop {
        if let Some(total) = claimed(&start).map_err(bad)? {
            return Ok((start, total));
        }
        if start.len() > HEADER_BYTES_MAX {
            return Err(bad("what is packed in it has no header that ends".into()));
        }
        let before = start.len();
        let piece = reader.take((before as u64).max(256)).read_to_end(&mut start);
        piece.map_err(|error| unreadable(path, error))?;
        if start.len() == before {
            return Err(bad(format!("what is packed in it ends within its header, after {before} bytes")));
        }
    }
}

#[cfg(test)]
mod tests;
