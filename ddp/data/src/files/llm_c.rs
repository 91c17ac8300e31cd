//! llm.c's files of tokens: a header of 256 i32, of which the first are magic number, version and
//! count, then the tokens. All numbers are little-endian.

use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use super::array::{Array, ArrayPlace};
use super::format::{DataFile, Format, Holds, PLAIN, TokenFile};
use crate::element::Element;
use crate::error::{Result, ensure};

pub(super) static LLM_C: Format = Format {
    name: "tokens of llm.c",
    begins: |file| Header::of(file.start).is_some(),
    holds: Holds::Tokens(open),
    ..PLAIN
};

const HEADER_BYTES: u64 = 256 * 4;

/// One of llm.c's headers.
#[derive(Debug)]
struct Header {
    magic: u32,
    version: u32,
    element: Element,
    /// For people.
    name: &'static str,
    /// Of the tokenizer, which the header does not say.
    vocabulary: usize,
}

static HEADERS: [Header; 2] = [
    Header {
        magic: 20240520,
        version: 1,
        element: Element::U16,
        name: "GPT-2 tokens of llm.c",
        vocabulary: 50_257,
    },
    Header {
        magic: 20240801,
        version: 7,
        element: Element::U32,
        name: "Llama 3 tokens of llm.c",
        vocabulary: 128_256,
    },
];

impl Header {
    /// That of a file with these first bytes. As u16 they are not GPT-2 tokens, so a file without a
    /// header does not begin with them.
    fn of(start: &[u8]) -> Option<&'static Header> {
        let magic = u32::from_le_bytes(*start.first_chunk()?);
        HEADERS.iter().find(|format| format.magic == magic)
    }
}

/// Refuses a file that begins as llm.c's do, with zeros after 64 bytes of its header, but with
/// another magic number.
pub(super) fn check_no_header(mapped: &Mapped) -> Result<(), String> {
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

fn open(file: &DataFile<'_>) -> Result<TokenFile> {
    tokens(&file.map()?, file.name).map_err(|why| file.bad(why))
}

fn tokens(mapped: &Arc<Mapped>, name: &str) -> Result<TokenFile, String> {
    let length = mapped.len();
    ensure!(
        length >= HEADER_BYTES,
        "expected llm.c's header of {HEADER_BYTES} bytes, got a file of {length}: it is cut short"
    );
    let mut start = [0; 12];
    mapped
        .read(0, &mut start)
        .map_err(|error| error.to_string())?;
    let word = |index: usize| u32::from_le_bytes(start.as_chunks().0[index]);
    let format = Header::of(&start).ok_or("it changed while it was read")?;
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
