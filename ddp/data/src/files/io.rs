//! Opening files and naming them in errors.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::mapped::Mapped;

use crate::error::{Error, Result};
use crate::setting::CACHE_DIR;
use ddp_kernels::files::{FileError, limit_help};

/// Maps a file for reading.
pub(crate) fn map(path: &Path) -> Result<Arc<Mapped>> {
    let failed = reading(path);
    Mapped::open(path).map(Arc::new).map_err(failed)
}

/// The error of a file whose content is not what it should be.
pub(crate) fn refuse(path: &Path, why: impl fmt::Display) -> Error {
    Error::Data(format!("cannot read {}: {why}", path.display()))
}

/// The error of a file that the system does not let us read.
pub(crate) fn reading(path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| match source.kind() {
        ErrorKind::InvalidInput => refuse(path, source),
        _ => failed("read", path, source, "check that it exists and may be read"),
    }
}

/// The error of a file in the cache that cannot be written.
pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> Error {
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

/// The content of a file; `None` if it has more than `most` bytes.
pub(crate) fn read_up_to(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes).filter(|bytes| bytes.len() as u64 <= most))
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
    /// The whole file.
    pub(crate) fn new(mapped: &Mapped) -> MappedReader<'_> {
        MappedReader::part(mapped, 0..mapped.len())
    }

    /// The bytes in `part`.
    pub(crate) fn part(mapped: &Mapped, part: Range<u64>) -> MappedReader<'_> {
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
