//! Files that hold tokens: texts, whose bytes are tokens; those of llm.c, with a header of 256 i32,
//! of which the first are magic number, version and count; those of nanoGPT, which are numbers
//! without a header; and our own shards, flat files with an array `tokens` and a vocabulary
//! (`flat.rs`). All numbers are little-endian.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::files as disk;
use ddp_kernels::mapped::Mapped;

use crate::error::{Result, ensure};
use crate::files::array::{Array, ArrayPlace, NumberType};
use crate::files::flat::{self, About};
use crate::files::format::{DataFile, Format, Holds, PLAIN, TokenFile};
use crate::files::io::{other_encoding, refuse};

/// Puts a shard with these tokens, one part after the other, in the place of `path`. `about` says
/// their vocabulary.
pub(crate) fn write_shard(path: &Path, about: About, parts: &[impl AsRef<[u32]>]) -> Result<()> {
    let vocabulary = about.vocabulary.unwrap_or(1);
    // The narrower type that holds all tokens.
    let element = if vocabulary <= 1 << 16 {
        NumberType::U16
    } else {
        NumberType::U32
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!(".unfinished-{}-{name}", std::process::id()));
    let written = flat::write(&aside, |writer| {
        writer.begin("tokens", element, &[])?;
        for tokens in parts.iter().map(AsRef::as_ref) {
            let bad = tokens.iter().find(|&&token| token as usize >= vocabulary);
            ensure!(
                bad.is_none(),
                "{}: expected tokens below the vocabulary of {vocabulary}, got {}; help: give the vocabulary of their tokenizer",
                path.display(),
                bad.unwrap_or(&0)
            );
            match element {
                NumberType::U16 => {
                    writer.write_numbers(tokens, |token| (token as u16).to_le_bytes())?;
                }
                _ => writer.write_numbers(tokens, u32::to_le_bytes)?,
            }
        }
        Ok(about)
    });
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&aside);
    }
    written.and_then(|()| Ok(disk::rename(&aside, path)?))
}

pub(super) static TEXT: Format = Format {
    name: "a text",
    endings: &[".txt"],
    holds: Holds::Tokens(open_text),
    ..PLAIN
};

/// What some editors write before a text: U+FEFF in UTF-8.
pub(crate) const BYTE_ORDER_MARK: [u8; 3] = *b"\xef\xbb\xbf";

/// The bytes of a text in UTF-8, or in another encoding that includes ASCII.
fn open_text(file: &DataFile<'_>) -> Result<TokenFile> {
    let mapped = &file.map()?;
    let mut first = vec![0; mapped.len().min(4096) as usize];
    let read = mapped.read(0, &mut first);
    read.map_err(|error| file.bad(error.to_string()))?;
    check_encoding(file.path, &first)?;
    let mark = BYTE_ORDER_MARK.len();
    let has_mark = first.len() > mark && first.starts_with(&BYTE_ORDER_MARK);
    let offset = if has_mark { mark as u64 } else { 0 };
    let tokens = whole_file(file.path, mapped, NumberType::U8, offset)?;
    let mut text = TokenFile::new(tokens, "bytes of a text", Some(256));
    text.coding.are_bytes = true;
    Ok(text)
}

/// Refuses a text whose first bytes have the mark of another encoding, or a zero.
pub(crate) fn check_encoding(path: &Path, first: &[u8]) -> Result<()> {
    let has_zero = first.contains(&0);
    let encoding = other_encoding(first);
    match encoding.or(has_zero.then_some("NUL bytes, as UTF-16 has")) {
        None => Ok(()),
        Some(got) => Err(refuse(
            path,
            format!(
                "expected UTF-8, got {got}; help: save the file as UTF-8 (iconv -f {} -t UTF-8)",
                encoding.unwrap_or("UTF-16")
            ),
        )),
    }
}

pub(super) static LLM_C: Format = Format {
    name: "tokens of llm.c",
    begins: |file| TokensHeader::of(file.start).is_some(),
    holds: Holds::Tokens(open_llm_c),
    ..PLAIN
};

const HEADER_BYTES: u64 = 256 * 4;

/// One of llm.c's headers.
#[derive(Debug)]
struct TokensHeader {
    magic: u32,
    version: u32,
    element: NumberType,
    /// For people.
    name: &'static str,
    /// Of the tokenizer, which the header does not say.
    vocabulary: usize,
}

static HEADERS: [TokensHeader; 2] = [
    TokensHeader {
        magic: 20240520,
        version: 1,
        element: NumberType::U16,
        name: "GPT-2 tokens of llm.c",
        vocabulary: 50_257,
    },
    TokensHeader {
        magic: 20240801,
        version: 7,
        element: NumberType::U32,
        name: "Llama 3 tokens of llm.c",
        vocabulary: 128_256,
    },
];

impl TokensHeader {
    /// That of a file with these first bytes. As u16 they are not GPT-2 tokens, so a file without a
    /// header does not begin with them.
    fn of(start: &[u8]) -> Option<&'static TokensHeader> {
        let magic = u32::from_le_bytes(*start.first_chunk()?);
        HEADERS.iter().find(|format| format.magic == magic)
    }
}

/// Refuses a file that begins as llm.c's do, with zeros after 64 bytes of its header, but with
/// another magic number.
fn check_no_header(mapped: &Mapped) -> Result<(), String> {
    let mut header = [0; HEADER_BYTES as usize];
    let is_read = mapped.len() >= HEADER_BYTES && mapped.read(0, &mut header).is_ok();
    let magic = u32::from_le_bytes(*header.first_chunk().expect("1024 bytes"));
    ensure!(
        !is_read || magic == 0 || header[64..].iter().any(|&byte| byte != 0),
        "expected tokens, got a header of {HEADER_BYTES} bytes as llm.c writes, with the unknown magic number {magic}; help: \
         write the file again with llm.c's scripts, or give tokens:FILE,type=u16 if these bytes are tokens"
    );
    Ok(())
}

fn open_llm_c(file: &DataFile<'_>) -> Result<TokenFile> {
    tokens(&file.map()?, file.name).map_err(|why| file.bad(why))
}

fn tokens(mapped: &Arc<Mapped>, name: &str) -> Result<TokenFile, String> {
    let length = mapped.len();
    ensure!(
        length >= HEADER_BYTES,
        "expected llm.c's header of {HEADER_BYTES} bytes, got a file of {length}: it is cut short"
    );
    let mut start = [0; 12];
    let read = mapped.read(0, &mut start);
    read.map_err(|error| error.to_string())?;
    let word = |index: usize| u32::from_le_bytes(start.as_chunks().0[index]);
    let format = TokensHeader::of(&start).ok_or("it changed while it was read")?;
    let (version, count) = (word(1), word(2));
    ensure!(
        version == format.version,
        "expected version {} of llm.c's magic number {}, got {version}; help: write the file again with llm.c's \
         scripts",
        format.version,
        format.magic
    );
    let shape = [count as usize];
    let place = ArrayPlace::new("", HEADER_BYTES, format.element, &shape);
    let array = Array::new(mapped, name, &place)?;
    let expected = HEADER_BYTES + u64::from(count) * format.element.bytes() as u64;
    ensure!(
        length == expected,
        "its header says {count} tokens of type {}: expected {expected} bytes, got {length}: it is damaged",
        format.element
    );
    Ok(TokenFile::new(array, format.name, Some(format.vocabulary)))
}

/// Not in the list of formats: a file without a header holds tokens only if the user asks for
/// tokens.
pub(super) static NANOGPT: Format = Format {
    name: "tokens without a header",
    holds: Holds::Tokens(open_plain),
    ..PLAIN
};

fn open_plain(file: &DataFile<'_>) -> Result<TokenFile> {
    let mapped = file.map()?;
    let stated = file.stated.unwrap_or(NumberType::U16);
    let tokens = whole_file(file.path, &mapped, stated, 0)?;
    if file.stated.is_none() {
        check_no_header(&mapped).map_err(|why| file.bad(why))?;
    }
    check_type(&tokens, file.stated.is_some())?;
    Ok(TokenFile::new(tokens, "without a header", None))
}

/// Numbers below this are tiny: the upper halves of u32 tokens are, in vocabularies of 4 million.
const TINY: i64 = 64;

/// Whether nearly all numbers at odd positions are below `limit` and many others are not, as if
/// each number were half of a wider one.
fn every_second_is_below<T: PartialOrd>(limit: T, numbers: &[T]) -> bool {
    let pairs = numbers.as_chunks::<2>().0;
    let below = |half: usize| pairs.iter().filter(|pair| pair[half] < limit).count();
    let (all, low, high) = (pairs.len(), below(0), below(1));
    all >= 32 && high * 10 >= all * 9 && low * 4 <= all * 3
}

/// How many distinct tokens show whether bytes are swapped. The lower halves of so many numbers are
/// spread, and their upper halves are few and small because low numbers are frequent.
const TELLING: usize = 32;

/// An error if the first tokens look as if they were of a wider type, or big-endian.
fn check_type(array: &Array, is_stated: bool) -> Result<()> {
    let (element, name) = (array.element, array.name());
    let limit = if is_stated { 1 } else { TINY };
    let help = "give tokens:FILE,type=u32 if they are u32, type=u16 if they are u16, or save them with np.save, as \
                int64 must be";
    let mut first = vec![0; array.rows().min(4096) as usize];
    array.read_i64(0, &mut first)?;
    ensure!(
        !every_second_is_below(limit, &first),
        "cannot read {name}: expected {element} tokens without a header, got numbers of which every second one is \
         below {limit}, as in u32 tokens or wider ones; help: {help}"
    );
    first.sort_unstable();
    first.dedup();
    let bits = 4 * element.bytes();
    let half = |of: fn(i64, usize) -> i64| -> (i64, usize) {
        let mut halves: Vec<i64> = first.iter().map(|token| of(*token, bits)).collect();
        let sum = halves.iter().sum();
        halves.sort_unstable();
        halves.dedup();
        (sum, halves.len())
    };
    let (upper, uppers) = half(|token, bits| token >> bits);
    let (lower, lowers) = half(|token, bits| token & ((1 << bits) - 1));
    ensure!(
        first.len() < TELLING || upper <= 2 * lower || uppers <= lowers,
        "cannot read {name}: expected little-endian {element} tokens without a header, got numbers whose bytes seem to \
         be swapped; help: write them as '<u2' or '<u4', or with np.save, which keeps their order of bytes"
    );
    Ok(())
}

/// All bytes of a file from `offset` on as numbers of this type.
fn whole_file(path: &Path, mapped: &Arc<Mapped>, of: NumberType, offset: u64) -> Result<Array> {
    let (bytes, size) = (mapped.len() - offset, of.bytes() as u64);
    if !bytes.is_multiple_of(size) {
        let what = format!("expected tokens of {size} bytes ({of}) without a header");
        let why = "it is cut short or of another format";
        return Err(refuse(path, format!("{what}, got {bytes} bytes: {why}")));
    }
    let shape = [(bytes / size) as usize];
    let place = ArrayPlace::new("", offset, of, &shape);
    let array = Array::new(mapped, &path.display().to_string(), &place);
    array.map_err(|why| refuse(path, why))
}

#[cfg(test)]
mod tests;
