//! The bytes of a file of text, unpacked if its name ends in `.gz` or `.zst`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use ddp_kernels::panics;
use flate2::read::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::error::{Error, Result};
use crate::files::gzip::Bounded;
use crate::files::io::{reading, refuse};

/// The name without the ending of a compressed file, and how it is compressed.
pub(super) fn packing(name: &str) -> (&str, Option<&'static str>) {
    let found = [".gz", ".zst"]
        .into_iter()
        .find_map(|ending| Some((name.strip_suffix(ending)?, Some(ending))));
    found.unwrap_or((name, None))
}

/// The unpacked bytes of the file at `path`. `read` counts those of the file.
pub(super) fn reader<'a>(path: &Path, read: &'a AtomicU64) -> Result<Box<dyn Read + 'a>> {
    let inner = File::open(path).map_err(reading(path))?;
    let bytes = inner.metadata().map_err(reading(path))?.len();
    let file = BufReader::with_capacity(1 << 18, Counted { inner, read });
    let name = path.to_string_lossy().to_ascii_lowercase();
    Ok(match packing(&name).1 {
        Some(".gz") => Box::new(Bounded::new(MultiGzDecoder::new(file), bytes)),
        Some(_) => Box::new(Bounded::new(Zstd::new(file), bytes)),
        None => Box::new(file),
    })
}

/// The error of a file that cannot be read or unpacked.
pub(super) fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof => refuse(
            path,
            format!("{error}; help: unpack it to check it, or get it again"),
        ),
        _ => reading(path)(error),
    }
}

struct Counted<'a, R> {
    inner: R,
    read: &'a AtomicU64,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// The frames of a `.zst` file, one after the other, each compared with its checksum.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    is_in_frame: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> Zstd<R> {
        Zstd {
            source,
            decoder: FrameDecoder::new(),
            is_in_frame: false,
        }
    }

    /// Goes to the next frame; false at the end of the file.
    fn begin_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            let begun = guarded(|| self.decoder.reset(&mut self.source));
            match begun? {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(damaged("it is cut short"));
                    }
                }
                Err(error) => return Err(damaged(error)),
            }
        }
        Ok(false)
    }

    fn check_frame(&self) -> io::Result<()> {
        let expected = self.decoder.get_checksum_from_data();
        let got = self.decoder.get_calculated_checksum();
        match expected.is_some() && expected != got {
            true => Err(damaged("a checksum in it does not match")),
            false => Ok(()),
        }
    }
}

/// A damaged file may make the crate panic.
fn guarded<T>(decode: impl FnOnce() -> T) -> io::Result<T> {
    panics::caught(decode).ok_or_else(|| damaged("its reader gave up"))
}

fn damaged(why: impl std::fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("zstd: {why}"))
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(into);
            }
            if self.is_in_frame && !self.decoder.is_finished() {
                let some = BlockDecodingStrategy::UptoBytes(into.len());
                let decoded = guarded(|| self.decoder.decode_blocks(&mut self.source, some));
                decoded?.map_err(damaged)?;
                continue;
            }
            if self.is_in_frame {
                self.check_frame()?;
            }
            self.is_in_frame = self.begin_frame()?;
            if !self.is_in_frame {
                return Ok(0);
            }
        }
    }
}
