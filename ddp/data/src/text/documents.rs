//! The documents of files: a text is one, a line of `.jsonl` is one, and so is a row of `.parquet`.
//!
//! A long text comes in pieces, so that it need not fit into memory and all cores have work. It is
//! split at beginnings of lines where the split does not change the tokens.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, ErrorKind, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use ddp_kernels::panics;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use serde_json::{Map, Value};

use crate::error::{Error, Result, bail};
use crate::files::io::{Bounded, reading, refuse, unpacking, unreadable};
use crate::files::json_lines_help;
use crate::files::tokens::{BYTE_ORDER_MARK, check_encoding};
use crate::setting::{FIELD, LOSSY};
use crate::text::tokenizer::Encoder;

/// The most text that is not cut: a document of `.jsonl` or `.parquet`, or a text that the
/// tokenizer does not let be cut.
const UNCUT_BYTES_MAX: usize = 1 << 30;
/// Places where a cut is tried before a piece grows.
const CUTS_TRIED: usize = 16;

/// A part of a document, or all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPiece {
    /// Its text.
    pub text: String,
    /// Whether the document ends with it.
    pub(crate) ends_document: bool,
}

/// How files are read.
#[derive(Clone, Copy)]
pub struct ReadOptions<'a> {
    /// The field of `.jsonl` or the column of `.parquet` that has the text.
    pub field: &'a str,
    /// Whether bytes that are not UTF-8 are replaced by U+FFFD.
    pub lossy: bool,
    /// A text is cut only where this gives the same tokens; without it, at any line.
    pub encoder: Option<&'a Encoder>,
    /// Texts are cut into pieces of about this size.
    pub piece_bytes: usize,
    /// Counts bytes read from files.
    pub read_bytes: &'a AtomicU64,
    /// The reader of `.parquet`, if the program has one.
    pub columns: Option<ReadTexts>,
}

/// Gives the texts of a column of a table to a sink. A null is an empty text.
pub type ReadTexts = fn(&Path, &str, TextSink<'_>) -> Result<()>;
/// What takes the texts of a column, with the place of each for messages.
pub type TextSink<'a> = &'a mut dyn FnMut(&[u8], &dyn Fn() -> String) -> Result<()>;

/// What takes pieces.
type Sink<'a> = &'a mut dyn FnMut(TextPiece) -> Result<()>;

/// Gives all documents of the file at `path` to `sink`.
pub fn documents(path: &Path, options: &ReadOptions<'_>, sink: Sink<'_>) -> Result<()> {
    let about = fs::metadata(path).map_err(reading(path))?;
    if about.is_dir() {
        let why = "expected a file, got a folder; help: give its files, as in FOLDER/*.txt";
        return Err(refuse(path, why));
    }
    let mut file = TextFile {
        path,
        options,
        sink,
    };
    let name = path.to_string_lossy().to_ascii_lowercase();
    let (name, packed) = packing(&name);
    let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    if ends(&[".parquet", ".pq"]) {
        return match packed {
            None => file.rows(about.len()),
            Some(packed) => Err(file.bad(format!(
                "expected .parquet without {packed}; help: unpack it first"
            ))),
        };
    }
    let Some((bytes, start)) = unmarked(path, options.read_bytes)? else {
        return file.give(String::new(), true);
    };
    if ends(&[".json"]) {
        let mut first = Vec::new();
        let taken = bytes.take(1024).read_to_end(&mut first);
        taken.map_err(|error| unreadable(path, error))?;
        let help = json_lines_help(first.trim_ascii_start().starts_with(b"["));
        return Err(file.bad(format!(
            "expected a text or .jsonl, got .json; help: {help}"
        )));
    }
    if ends(&[".jsonl", ".ndjson"]) {
        file.field_of_lines(bytes, start)
    } else {
        file.text(bytes, start)
    }
}

/// Gives the lines of the `.jsonl` file at `path` to `each` with their numbers, but not the empty
/// ones.
pub(crate) fn json_lines(path: &Path, each: &mut dyn FnMut(u64, &str) -> Result<()>) -> Result<()> {
    let read_bytes = &AtomicU64::new(0);
    let options = &ReadOptions {
        field: "",
        lossy: false,
        encoder: None,
        piece_bytes: 0,
        read_bytes,
        columns: None,
    };
    let mut file = TextFile {
        path,
        options,
        sink: &mut |_| Ok(()),
    };
    let Some((bytes, start)) = unmarked(path, read_bytes)? else {
        return Ok(());
    };
    file.lines(bytes, start, |_, number, line| each(number, line))
}

/// The unpacked bytes of a file without a byte order mark, and where they start; None if there are
/// none.
fn unmarked<'a>(path: &Path, read: &'a AtomicU64) -> Result<Option<(impl Read + 'a, u64)>> {
    let mut bytes = reader(path, read)?;
    let mut first = Vec::new();
    let taken = (&mut bytes).take(4096).read_to_end(&mut first);
    if taken.map_err(|error| unreadable(path, error))? == 0 {
        return Ok(None);
    }
    check_encoding(path, &first)?;
    let start = BYTE_ORDER_MARK.len() * usize::from(first.starts_with(&BYTE_ORDER_MARK));
    first.drain(..start);
    Ok(Some((Cursor::new(first).chain(bytes), start as u64)))
}

/// A file that is read.
struct TextFile<'a> {
    path: &'a Path,
    options: &'a ReadOptions<'a>,
    sink: Sink<'a>,
}

impl TextFile<'_> {
    fn bad(&self, why: impl Into<String>) -> Error {
        refuse(self.path, why.into())
    }

    /// Hands out a piece.
    fn give(&mut self, text: String, ends_document: bool) -> Result<()> {
        (self.sink)(TextPiece {
            text,
            ends_document,
        })
    }

    /// A text from byte `start` on, in pieces.
    fn text(&mut self, mut bytes: impl Read, start: u64) -> Result<()> {
        let piece_bytes = self.options.piece_bytes;
        // The first byte that is not text yet.
        let mut at_byte = start;
        let (mut chunk, mut pending, mut size) = (Vec::new(), String::new(), piece_bytes);
        loop {
            // Whole chunks, however few bytes a read gives: cuts depend on the text alone.
            let mut next = (&mut bytes).take(piece_bytes as u64 / 4);
            let read = next.read_to_end(&mut chunk);
            let is_end = read.map_err(|error| unreadable(self.path, error))? == 0;
            // The next chunk may complete the character that this one ends in.
            let whole = chunk.len() - if is_end { 0 } else { begun_bytes(&chunk) };
            pending.push_str(&self.decode(&chunk[..whole], at_byte)?);
            chunk.drain(..whole);
            at_byte += whole as u64;
            if is_end {
                return self.give(pending, true);
            }
            if pending.len() < size {
                continue;
            }
            let Some(at) = self.cut(&pending) else {
                size = pending.len() + piece_bytes;
                self.check_uncut(size, || "the text".into())?;
                continue;
            };
            let rest = pending.split_off(at);
            size = piece_bytes;
            self.give(std::mem::replace(&mut pending, rest), false)?;
        }
    }

    /// The last beginning of a line where `text` may be cut.
    fn cut(&self, text: &str) -> Option<usize> {
        let starts = text.rmatch_indices('\n').map(|(at, _)| at + 1);
        let is_word = |at: &usize| text[*at..].starts_with(|first: char| !first.is_whitespace());
        let mut starts = starts.filter(is_word).take(CUTS_TRIED);
        let encoder = self.options.encoder;
        starts.find(|&at| encoder.is_none_or(|encoder| encoder.may_cut(text, at)))
    }

    /// Gives the lines of `.jsonl` from byte `start` on to `each` with their numbers, but not the
    /// empty ones.
    fn lines(
        &mut self,
        bytes: impl Read,
        start: u64,
        mut each: impl FnMut(&mut Self, u64, &str) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = BufReader::with_capacity(1 << 18, bytes);
        let (mut line, mut start) = (Vec::new(), start);
        for number in 1.. {
            line.clear();
            let most = UNCUT_BYTES_MAX as u64 + 1;
            let read = bytes.by_ref().take(most).read_until(b'\n', &mut line);
            let count = read.map_err(|error| unreadable(self.path, error))?;
            if count == 0 {
                break;
            }
            self.check_uncut(count, || format!("line {number}"))?;
            let text = self.decode(&line, start)?;
            start += count as u64;
            if !text.trim().is_empty() {
                each(self, number, text.trim_end())?;
            }
        }
        Ok(())
    }

    /// A document in each line.
    fn field_of_lines(&mut self, bytes: impl Read, start: u64) -> Result<()> {
        self.lines(bytes, start, |file, number, line| {
            let text = field(line, file.options.field);
            let text = text.map_err(|why| file.bad(format!("line {number}: {why}")))?;
            file.give(text, true)
        })
    }

    /// The rows of a column of a `.parquet` of this many bytes.
    fn rows(&mut self, bytes: u64) -> Result<()> {
        let (path, options) = (self.path, self.options);
        let why = "this program does not read Parquet; help: write .jsonl";
        let texts = options.columns.ok_or_else(|| self.bad(why))?;
        texts(path, options.field, &mut |bytes, place| {
            let valid = std::str::from_utf8(bytes);
            let at = valid.map_or_else(|error| error.valid_up_to(), str::len);
            if valid.is_err() && !options.lossy {
                return Err(refuse(
                    path,
                    format!("{}, byte {at}: {}", place(), not_utf_8()),
                ));
            }
            let text = String::from_utf8_lossy(bytes).into_owned();
            self.give(text, true)
        })?;
        options.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn check_uncut(&self, bytes: usize, what: impl Fn() -> String) -> Result<()> {
        if bytes > UNCUT_BYTES_MAX {
            return Err(self.bad(format!(
                "{} is longer than {UNCUT_BYTES_MAX} bytes, which are tokenized at once; help: \
                 write shorter documents, a line each, as .jsonl",
                what()
            )));
        }
        Ok(())
    }

    /// The bytes as text; `start` is the place of the first in the unpacked file.
    fn decode<'b>(&self, bytes: &'b [u8], start: u64) -> Result<Cow<'b, str>> {
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.into()),
            Err(_) if self.options.lossy => Ok(String::from_utf8_lossy(bytes)),
            Err(error) => {
                let at = start + error.valid_up_to() as u64;
                Err(self.bad(format!("byte {at}: {}", not_utf_8())))
            }
        }
    }
}

fn not_utf_8() -> String {
    format!(
        "expected UTF-8, got other bytes; help: convert the file (if it is Latin-1: iconv -f latin1 -t utf8), \
                         or make its tokens with tokenize and {LOSSY}, which replaces them by U+FFFD"
    )
}

/// How many bytes at the end are the beginning of a character.
fn begun_bytes(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last();
    let invalid = last.map_or(&[][..], |last| last.invalid());
    match std::str::from_utf8(invalid) {
        Err(error) if error.error_len().is_none() => invalid.len(),
        _ => 0,
    }
}

/// The object in a line of `.jsonl`.
pub(crate) fn object(line: &str) -> Result<Map<String, Value>, String> {
    let object = serde_json::from_str(line).or_else(|_| serde_json::from_str(&without_nan(line)));
    object.map_err(|error: serde_json::Error| {
        let why = format!("expected a JSON object: {error}");
        why.replace(" at line 1 column ", " in column ")
    })
}

/// The text in this field of an object.
fn field(line: &str, name: &str) -> Result<String, String> {
    let mut object = object(line)?;
    let others: Vec<_> = object.keys().take(20).cloned().collect();
    let (got, help) = match object.remove(name) {
        Some(Value::String(text)) => return Ok(text),
        Some(_) => ("another value".to_string(), format!("name another {FIELD}")),
        None => (
            format!("[{}]", others.join(", ")),
            format!("name one of these as {FIELD}"),
        ),
    };
    bail!("expected a text in the field {name:?}, got {got}; help: {help}, or correct the line")
}

/// A line of JSON with 0 for the numbers of Python that JSON does not have.
fn without_nan(line: &str) -> String {
    let (mut is_text, mut all) = (false, String::new());
    for part in line.split_inclusive('"') {
        all += &if is_text {
            part.into()
        } else {
            part.replace("NaN", "0").replace("Infinity", "0")
        };
        let before = part.trim_end_matches('"').bytes().rev();
        let is_escaped = before.take_while(|byte| *byte == b'\\').count() % 2 == 1;
        is_text = !is_text || is_escaped;
    }
    all
}

/// The name without the ending of a compressed file, and how it is compressed.
fn packing(name: &str) -> (&str, Option<&'static str>) {
    let mut endings = [".gz", ".zst"].into_iter();
    let found = endings.find_map(|ending| Some((name.strip_suffix(ending)?, Some(ending))));
    found.unwrap_or((name, None))
}

/// The unpacked bytes of the file at `path`. `read` counts those of the file.
fn reader<'a>(path: &Path, read: &'a AtomicU64) -> Result<Box<dyn Read + 'a>> {
    let inner = File::open(path).map_err(reading(path))?;
    let bytes = inner.metadata().map_err(reading(path))?.len();
    let file = BufReader::with_capacity(1 << 18, Counted { inner, read });
    let name = path.to_string_lossy().to_ascii_lowercase();
    Ok(match packing(&name).1 {
        Some(".gz") => unpacking(file, bytes),
        Some(_) => Box::new(Bounded::new(Zstd::new(file), bytes)),
        None => Box::new(file),
    })
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
        if expected.is_some() && expected != got {
            return Err(damaged("a checksum in it does not match"));
        }
        Ok(())
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
