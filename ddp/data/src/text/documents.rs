//! The documents of files: a text is one, a line of `.jsonl` is one, and so is a row of `.parquet`.
//!
//! A long text comes in pieces, so that it need not fit into memory and all cores have work. It is
//! cut at beginnings of lines where the tokenizer gives the same tokens with and without the cut.

use std::borrow::Cow;
use std::fs;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value};

use super::encoder::gap_refusal;
use super::unpack::{packing, reader, unreadable};
use crate::error::Result;
use crate::files::io::{reading, refuse};
use crate::files::parquet;
use crate::files::tokens::BYTE_ORDER_MARK;

/// The most text that is not cut: a document of `.jsonl` or `.parquet`, or a text that the
/// tokenizer does not let be cut.
const UNCUT_BYTES_MAX: usize = 1 << 30;
/// Places where a cut is tried before a piece grows.
const CUTS_TRIED: usize = 16;

/// A part of a document, or all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its text.
    pub text: String,
    /// Whether the document ends with it.
    pub ends_document: bool,
}

/// How files are read.
#[derive(Clone, Copy)]
pub struct ReadOptions<'a> {
    /// The field of `.jsonl` or the column of `.parquet` that has the text.
    pub field: &'a str,
    /// Whether bytes that are not UTF-8 are replaced by U+FFFD.
    pub lossy: bool,
    /// Whether a text may be cut at this byte.
    pub may_cut: &'a (dyn Fn(&str, usize) -> bool + Sync),
    /// Texts are cut into pieces of about this size.
    pub piece_bytes: usize,
    /// Where the tokenizer would give up on a text.
    pub gap: &'a (dyn Fn(&str) -> Option<usize> + Sync),
    /// Counts the bytes read from files.
    pub read: &'a AtomicU64,
    /// Counts the byte-order marks that were dropped.
    pub marks: &'a AtomicU64,
}

/// What takes pieces.
type Sink<'a> = &'a mut dyn FnMut(Piece) -> Result<()>;

/// Gives all documents of the file at `path` to `sink`.
pub fn documents(path: &Path, options: &ReadOptions<'_>, sink: Sink<'_>) -> Result<()> {
    let about = fs::metadata(path).map_err(reading(path))?;
    if about.is_dir() {
        let why = "expected a file, got a folder; help: give its files, as in FOLDER/*.txt";
        return Err(refuse(path, why));
    }
    let name = path.to_string_lossy().to_ascii_lowercase();
    let (name, packed) = packing(&name);
    let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    if ends(&[".parquet", ".pq"]) {
        return match packed {
            None => rows(path, options, sink),
            Some(packed) => Err(refuse(
                path,
                format!("expected .parquet without {packed}; help: unpack it first"),
            )),
        };
    }
    if ends(&[".json"]) {
        let why = "expected a text or .jsonl, got .json; help: rename it to .jsonl if each line is \
                   an object, to .txt to take it as it is";
        return Err(refuse(path, why));
    }
    let mut bytes = reader(path, options.read)?;
    let mut first = Vec::new();
    let count = BYTE_ORDER_MARK.len();
    let read = (&mut bytes).take(count as u64).read_to_end(&mut first);
    if read.map_err(|error| unreadable(path, error))? == 0 {
        return sink(Piece {
            text: String::new(),
            ends_document: true,
        });
    }
    let mut start = 0;
    if first == BYTE_ORDER_MARK {
        first.clear();
        start = count as u64;
        options.marks.fetch_add(1, Ordering::Relaxed);
    }
    let bytes = Cursor::new(first).chain(bytes);
    match ends(&[".jsonl", ".ndjson"]) {
        true => lines(path, (bytes, start), options, sink),
        false => text(path, (bytes, start), options, sink),
    }
}

/// A text from byte `start` on, in pieces.
fn text(
    path: &Path,
    (bytes, start): (impl Read, u64),
    options: &ReadOptions<'_>,
    sink: Sink<'_>,
) -> Result<()> {
    let (mut bytes, mut at_byte) = (bytes, start);
    let mut decoder = Decoder::new(path, options.lossy, start);
    let mut give = |text: String, ends_document| {
        if let Some(at) = (options.gap)(&text) {
            return Err(refuse(path, gap_refusal(at_byte + at as u64)));
        }
        at_byte += text.len() as u64;
        sink(Piece {
            text,
            ends_document,
        })
    };
    let piece_bytes = options.piece_bytes;
    let (mut pending, mut size) = (String::new(), piece_bytes);
    let mut chunk = Vec::new();
    loop {
        // Whole chunks, however few bytes a read gives: cuts depend on the text alone.
        chunk.clear();
        let read = (&mut bytes)
            .take(piece_bytes as u64 / 4)
            .read_to_end(&mut chunk);
        if read.map_err(|error| unreadable(path, error))? == 0 {
            break;
        }
        decoder.push(&chunk, &mut pending)?;
        if pending.len() < size {
            continue;
        }
        let Some(at) = cut(&pending, options.may_cut) else {
            size = pending.len() + piece_bytes;
            check_uncut(path, size, || "the text".into())?;
            continue;
        };
        let rest = pending.split_off(at);
        size = piece_bytes;
        give(std::mem::replace(&mut pending, rest), false)?;
    }
    decoder.finish(&mut pending)?;
    give(pending, true)
}

/// The last beginning of a line where `text` may be cut.
fn cut(text: &str, may_cut: &dyn Fn(&str, usize) -> bool) -> Option<usize> {
    let starts = text.rmatch_indices('\n').map(|(at, _)| at + 1);
    let is_word = |at: &usize| text[*at..].starts_with(|first: char| !first.is_whitespace());
    let mut starts = starts.filter(is_word).take(CUTS_TRIED);
    starts.find(|&at| may_cut(text, at))
}

/// The lines of `.jsonl` from byte `start` on, each an object with a text.
fn lines(
    path: &Path,
    (bytes, start): (impl Read, u64),
    options: &ReadOptions<'_>,
    sink: Sink<'_>,
) -> Result<()> {
    let mut bytes = BufReader::with_capacity(1 << 18, bytes);
    let (mut line, mut start) = (Vec::new(), start);
    for number in 1.. {
        line.clear();
        let most = UNCUT_BYTES_MAX as u64 + 1;
        let read = bytes.by_ref().take(most).read_until(b'\n', &mut line);
        let count = read.map_err(|error| unreadable(path, error))?;
        if count == 0 {
            break;
        }
        check_uncut(path, count, || format!("line {number}"))?;
        let text = decode(path, &line, start, options.lossy)?;
        start += count as u64;
        if text.trim().is_empty() {
            continue;
        }
        let bad = |why: String| refuse(path, format!("line {number}: {why}"));
        let object: Map<String, Value> = serde_json::from_str(&text)
            .map_err(|error| bad(format!("expected a JSON object: {error}")))?;
        let text = field(object, options.field).map_err(bad)?;
        if let Some(at) = (options.gap)(&text) {
            return Err(bad(gap_refusal(at as u64)));
        }
        sink(Piece {
            text,
            ends_document: true,
        })?;
    }
    Ok(())
}

/// The text in this field.
fn field(mut object: Map<String, Value>, name: &str) -> Result<String, String> {
    let others: Vec<_> = object.keys().take(20).cloned().collect();
    let (got, help) = match object.remove(name) {
        Some(Value::String(text)) => return Ok(text),
        Some(_) => ("another value".to_string(), "name another `field`"),
        None => (
            format!("[{}]", others.join(", ")),
            "name one of these as `field`",
        ),
    };
    Err(format!(
        "expected a text in the field {name:?}, got {got}; help: {help}, or correct the line"
    ))
}

/// The rows of a column of `.parquet`.
fn rows(path: &Path, options: &ReadOptions<'_>, sink: Sink<'_>) -> Result<()> {
    parquet::texts(path, options.field, &mut |bytes, place| {
        let text = match options.lossy {
            true => String::from_utf8_lossy(bytes).into_owned(),
            false => std::str::from_utf8(bytes)
                .map_err(|error| {
                    let at = error.valid_up_to();
                    refuse(path, format!("{}, byte {at}: {NOT_UTF_8}", place()))
                })?
                .to_string(),
        };
        if let Some(at) = (options.gap)(&text) {
            let why = gap_refusal(at as u64);
            return Err(refuse(path, format!("{}, {why}", place())));
        }
        sink(Piece {
            text,
            ends_document: true,
        })
    })?;
    let bytes = fs::metadata(path).map_err(reading(path))?.len();
    options.read.fetch_add(bytes, Ordering::Relaxed);
    Ok(())
}

fn check_uncut(path: &Path, bytes: usize, what: impl Fn() -> String) -> Result<()> {
    if bytes <= UNCUT_BYTES_MAX {
        return Ok(());
    }
    let what = what();
    Err(refuse(
        path,
        format!(
            "{what} is longer than {UNCUT_BYTES_MAX} bytes, which are tokenized at once; help: \
             write shorter documents, a line each, as .jsonl"
        ),
    ))
}

const NOT_UTF_8: &str = "expected UTF-8, got other bytes; help: convert the file (iconv -t UTF-8), \
                         or give `lossy` to replace them by U+FFFD";

/// The bytes as text; `start` is the place of the first in the unpacked file.
fn decode<'a>(path: &Path, bytes: &'a [u8], start: u64, lossy: bool) -> Result<Cow<'a, str>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.into()),
        Err(_) if lossy => Ok(String::from_utf8_lossy(bytes)),
        Err(error) => {
            let at = start + error.valid_up_to() as u64;
            Err(refuse(path, format!("byte {at}: {NOT_UTF_8}")))
        }
    }
}

/// Decodes a text that comes in chunks, which may end within a character.
struct Decoder<'a> {
    path: &'a Path,
    lossy: bool,
    /// The beginning of a character at the end of the last chunk.
    left: Vec<u8>,
    /// The place of `left` in the unpacked file.
    start: u64,
}

impl Decoder<'_> {
    fn new(path: &Path, lossy: bool, start: u64) -> Decoder<'_> {
        Decoder {
            path,
            lossy,
            left: Vec::new(),
            start,
        }
    }

    fn push(&mut self, chunk: &[u8], into: &mut String) -> Result<()> {
        self.left.extend_from_slice(chunk);
        // All but the beginning of a character, which the next chunk may complete.
        let whole = match self.left.utf8_chunks().last() {
            Some(last) if is_begun(last.invalid()) => self.left.len() - last.invalid().len(),
            _ => self.left.len(),
        };
        into.push_str(&decode(
            self.path,
            &self.left[..whole],
            self.start,
            self.lossy,
        )?);
        self.left.drain(..whole);
        self.start += whole as u64;
        Ok(())
    }

    /// The end of the text, where a character may be missing its end.
    fn finish(self, into: &mut String) -> Result<()> {
        into.push_str(&decode(self.path, &self.left, self.start, self.lossy)?);
        Ok(())
    }
}

/// Whether these bytes are the beginning of a character.
fn is_begun(bytes: &[u8]) -> bool {
    let error = std::str::from_utf8(bytes).err();
    error.is_some_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}
