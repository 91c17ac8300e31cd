//! Files of tokens: llm.c's, nanoGPT's without a header, texts as their bytes, and arrays of whole
//! numbers in any other format. All are read in place, unless they are compressed.
//!
//! Our own shards are flat files with an array `tokens` and a vocabulary (`flat.rs`).

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use super::array::{Array, ArrayPlace};
use super::contents::Contents;
use super::flat::{self, About, FLAT};
use super::format::Holds;
use super::formats::{TEXT, format};
use super::io::{map, refuse};
use super::llm_c::{self, LLM_C};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::spec::TokensSpec;
use ddp_kernels::files as disk;

/// What the tokens of a file are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coding {
    /// The format, for people.
    pub format: &'static str,
    /// Tokens are below this, if the file says so.
    pub vocabulary: Option<usize>,
    /// The token after each document, if the file says so.
    pub end_of_text: Option<usize>,
    /// A hash of the vocabulary, if the file says so.
    pub tokenizer: Option<String>,
    /// Whether each token is a byte of a text.
    pub are_bytes: bool,
}

impl Coding {
    fn new(format: &'static str, vocabulary: Option<usize>) -> Coding {
        Coding {
            format,
            vocabulary,
            end_of_text: None,
            tokenizer: None,
            are_bytes: false,
        }
    }
}

/// Whether the file at `path` is one of tokens by what it says itself.
pub fn says_tokens(path: &Path) -> bool {
    format(path).is_ok_and(|format| match format.holds {
        Holds::Tokens => true,
        _ if !format.is(&FLAT) => false,
        _ => flat::open(path, "").is_ok_and(|file| file.vocabulary.is_some()),
    })
}

/// The file at `path` as data: without a header, as nanoGPT's tokens, it needs `tokens:`.
pub fn shown(path: &Path) -> String {
    let is_flat = format(path).is_ok_and(|format| format.is(&FLAT));
    let is_plain = is_flat && map(path).is_ok_and(|mapped| !flat::begins(&mapped));
    let prefix = if is_plain { "tokens:" } else { "" };
    format!("{prefix}{}", path.display())
}

/// The tokens of the file at `path`, an array of rows of one number. With a `spec` a file holds
/// tokens though it may not say so itself.
pub fn open(
    path: &Path,
    spec: Option<&TokensSpec>,
    cache_dir: Option<&Path>,
) -> Result<(Array, Coding)> {
    let mapped = map(path)?;
    match format(path)? {
        llm_c if llm_c.is(&LLM_C) => {
            let (array, format) = llm_c::open(path, &mapped)?;
            Ok((array, Coding::new(format.name, Some(format.vocabulary))))
        }
        text if text.is(&TEXT) => {
            let coding = Coding {
                are_bytes: true,
                ..Coding::new("bytes of a text", Some(256))
            };
            let mut start = [0; BYTE_ORDER_MARK.len()];
            let is_read = mapped.len() > 3 && mapped.read(0, &mut start).is_ok();
            let has_mark = is_read && start == BYTE_ORDER_MARK;
            let offset = if has_mark { start.len() as u64 } else { 0 };
            Ok((whole_file(path, &mapped, Element::U8, offset)?, coding))
        }
        flat if flat.is(&FLAT) && spec.is_some() && !flat::begins(&mapped) => {
            let stated = spec.and_then(|spec| spec.token_type);
            let array = whole_file(path, &mapped, stated.unwrap_or(Element::U16), 0)?;
            if stated.is_none() {
                llm_c::check_no_header(&mapped).map_err(|why| refuse(path, why))?;
                check_not_u32(path, &array)?;
            }
            Ok((array, Coding::new("without a header", None)))
        }
        table if table.is_table() => Err(refuse(
            path,
            "expected tokens, got a table; help: give .bin, .txt, or a one-dimensional array of integers",
        )),
        _ => of_arrays(path, super::open(path, cache_dir)?, spec.is_some()),
    }
}

/// What some editors write before a text: U+FEFF in UTF-8.
pub(crate) const BYTE_ORDER_MARK: [u8; 3] = *b"\xef\xbb\xbf";

/// All bytes of a file from `offset` on as numbers of this type.
fn whole_file(path: &Path, mapped: &Arc<Mapped>, element: Element, offset: u64) -> Result<Array> {
    let (bytes, size) = (mapped.len() - offset, element.bytes() as u64);
    if !bytes.is_multiple_of(size) {
        return Err(refuse(
            path,
            format!(
                "expected tokens of {size} bytes ({element}) without a header, got {bytes} bytes: it is cut short or of \
                 another format"
            ),
        ));
    }
    let place = ArrayPlace {
        key: "",
        offset,
        element,
        big_endian: false,
        shape: &[(bytes / size) as usize],
    };
    let array = Array::new(mapped, &path.display().to_string(), &place);
    array.map_err(|why| refuse(path, why))
}

/// Numbers below this are tiny: the upper halves of u32 tokens are, in vocabularies of 4 million.
const TINY: i64 = 64;

/// An error if every second number is 0 or nearly all of them are tiny, and the others are not, as
/// if the tokens were u32 or wider.
fn check_not_u32(path: &Path, array: &Array) -> Result<()> {
    let mut first = vec![0; array.rows().min(4096) as usize];
    array.read_i64(0, &mut first)?;
    let (low, high): (Vec<_>, Vec<_>) =
        first.chunks_exact(2).map(|pair| (pair[0], pair[1])).unzip();
    let below = |most: i64, of: &[i64]| of.iter().filter(|&&token| token < most).count();
    let (zero_high, zero_low) = (below(1, &high), below(1, &low));
    let (tiny_high, tiny_low) = (below(TINY, &high), below(TINY, &low));
    let all = high.len();
    let are_zero = zero_high == all && zero_low < all;
    let are_tiny = tiny_high * 10 >= all * 9 && tiny_low * 2 < all;
    // The upper half of each i64 token is two zeros.
    let is_i64 = |four: &[i64]| four[2..] == [0, 0];
    let are_i64 = first.chunks_exact(4).all(is_i64) && first.iter().any(|token| *token != 0);
    if all < 32 || !(are_zero || are_tiny || are_i64) {
        return Ok(());
    }
    Err(refuse(
        path,
        format!(
            "expected u16 tokens without a header, got numbers of which every second one is small, as in u32 tokens or \
             wider ones ({tiny_high} of {all} at odd places are below {TINY}, {tiny_low} at even places); help: give \
             tokens:FILE,type=u32 if they are u32, type=u16 if they are u16, or save them with np.save, as int64 must be"
        ),
    ))
}

/// The array `tokens` of a file, or its only one.
fn of_arrays(path: &Path, contents: Contents, are_tokens: bool) -> Result<(Array, Coding)> {
    let Contents {
        vocabulary,
        end_of_text,
        ref tokenizer,
        ..
    } = contents;
    if vocabulary.is_none() && !are_tokens {
        return Err(refuse(
            path,
            "expected a file of tokens, got one of arrays; help: give tokens:FILE if its array is one of tokens",
        ));
    }
    let named = contents.find("tokens").map_err(|why| refuse(path, why))?;
    let array = match (named, &contents.arrays[..]) {
        (Some(array), _) | (None, [array]) => array,
        (None, arrays) => {
            let names: Vec<_> = arrays.iter().map(Array::key).collect();
            let what = "expected one array, or one called tokens";
            return Err(refuse(path, format!("{what}, got {}", names.join(", "))));
        }
    };
    let element = array.element();
    if !array.row_shape().is_empty() || element.is_float() || element == Element::Bool {
        let shape = [&[array.rows() as usize], array.row_shape()].concat();
        return Err(refuse(
            path,
            format!("expected tokens, a one-dimensional array of integers, got {element}{shape:?}"),
        ));
    }
    let coding = Coding {
        end_of_text,
        tokenizer: tokenizer.clone(),
        ..Coding::new("an array", vocabulary)
    };
    Ok((array.clone(), coding))
}

/// Writes tokens to a shard.
pub struct ShardWriter<'a> {
    path: &'a Path,
    vocabulary: usize,
    writer: &'a mut flat::Writer,
}

impl ShardWriter<'_> {
    /// Appends tokens.
    pub fn write(&mut self, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.vocabulary;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::Data(format!(
                "{}: expected tokens below the vocabulary of {vocabulary}, got {token}",
                self.path.display()
            )));
        }
        match element_of(vocabulary) {
            Element::U16 => self
                .writer
                .write_numbers(tokens, |token| (token as u16).to_le_bytes()),
            _ => self.writer.write_numbers(tokens, u32::to_le_bytes),
        }
    }
}

/// What a shard says besides its tokens.
#[derive(Clone, Debug, Default)]
pub struct ShardAbout {
    /// Tokens are below this.
    pub vocabulary: usize,
    /// The token after each document.
    pub end_of_text: Option<usize>,
    /// A hash of the vocabulary.
    pub tokenizer: Option<String>,
    /// What it is made from.
    pub source: Option<String>,
}

/// Puts a shard with the tokens that `fill` writes in the place of `path`.
pub fn write_shard(
    path: &Path,
    about: ShardAbout,
    fill: impl FnOnce(&mut ShardWriter<'_>) -> Result<()>,
) -> Result<()> {
    let vocabulary = about.vocabulary;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!(".unfinished-{}-{name}", std::process::id()));
    let written = flat::write(&aside, |writer| {
        writer.begin("tokens", element_of(vocabulary), &[])?;
        fill(&mut ShardWriter {
            path,
            vocabulary,
            writer,
        })?;
        Ok(About {
            vocabulary: Some(vocabulary),
            end_of_text: about.end_of_text,
            tokenizer: about.tokenizer,
            source: about.source,
            ..About::default()
        })
    });
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&aside);
    }
    written.and_then(|()| Ok(disk::rename(&aside, path)?))
}

/// The narrower of u16 and u32 that holds all tokens.
fn element_of(vocabulary: usize) -> Element {
    match vocabulary <= 1 << 16 {
        true => Element::U16,
        false => Element::U32,
    }
}

#[cfg(test)]
mod tests;
