//! Files of tokens: formats of tokens (`llm_c.rs`, `text.rs`), nanoGPT's without a header, and
//! arrays of whole numbers in any other format, our own shards among them. All of them give a
//! `TokenFile`, which is read in place unless the file is compressed.
//!
//! Our shards are flat files with an array `tokens` and a vocabulary (`flat.rs`).

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use super::array::Array;
use super::flat::{self, About, FLAT};
use super::format::{Contents, DataFile, Holds, TokenFile, whole_file};
use super::formats::format;
use super::io::{map, refuse};
use super::llm_c;
use crate::element::Element;
use crate::error::{Result, bail, ensure};
use ddp_kernels::files as disk;

/// Whether the file at `path` is one of tokens by what it says itself.
pub(crate) fn says_tokens(path: &Path) -> Result<bool> {
    let format = format(path)?;
    Ok(match format.holds {
        Holds::Tokens(_) => true,
        _ if !format.is(&FLAT) => false,
        _ => flat::open(path, "").is_ok_and(|file| file.about.vocabulary.is_some()),
    })
}

/// The tokens of the file at `path`. `stated` is their type where the file has no header; without
/// it they are u16, and refused if they look like something else.
pub fn open(path: &Path, stated: Option<Element>, cache_dir: Option<&Path>) -> Result<TokenFile> {
    let (mapped, format, name) = (map(path)?, format(path)?, path.display().to_string());
    let file = match format.holds {
        Holds::Tokens(open) => open(&DataFile {
            path,
            name: &name,
            cache_dir,
        })?,
        Holds::Table(_) => {
            return Err(refuse(
                path,
                "expected tokens, got a table; help: give .bin, .txt, or a one-dimensional array of integers",
            ));
        }
        _ if format.is(&FLAT) && !flat::begins(&mapped) => without_header(path, &mapped, stated)?,
        _ => array(path, cache_dir)?,
    };
    let got = file.tokens.element();
    if stated.is_some_and(|stated| stated != got) {
        let why = "expected tokens without a header, whose type type= states, got";
        return Err(refuse(path, format!("{why} {got}; help: leave out type=")));
    }
    Ok(file)
}

/// As nanoGPT writes them.
fn without_header(path: &Path, mapped: &Arc<Mapped>, stated: Option<Element>) -> Result<TokenFile> {
    let tokens = whole_file(path, mapped, stated.unwrap_or(Element::U16), 0)?;
    if stated.is_none() {
        llm_c::check_no_header(mapped).map_err(|why| refuse(path, why))?;
        check_not_u32(path, &tokens)?;
    }
    Ok(TokenFile::new(tokens, "without a header", None))
}

/// The array `tokens` of a file, or its only one.
fn array(path: &Path, cache_dir: Option<&Path>) -> Result<TokenFile> {
    let contents = super::open(path, cache_dir)?;
    of_array(&contents).map_err(|why| refuse(path, why))
}

fn of_array(contents: &Contents) -> Result<TokenFile, String> {
    let array = match (contents.find("tokens")?, &contents.arrays[..]) {
        (Some(array), _) | (None, [array]) => array,
        (None, arrays) => {
            let names: Vec<_> = arrays.iter().map(Array::key).collect();
            bail!(
                "expected one array, or one called tokens, got {}",
                names.join(", ")
            );
        }
    };
    let (element, about) = (array.element(), &contents.about);
    let shape = [&[array.rows() as usize], array.row_shape()].concat();
    ensure!(
        shape.len() == 1 && !element.is_float() && element != Element::Bool,
        "expected tokens, a one-dimensional array of integers, got {element}{shape:?}"
    );
    let mut file = TokenFile::new(array.clone(), "an array", about.vocabulary);
    file.coding.end_of_text = about.end_of_text;
    file.coding.tokenizer = about.tokenizer.clone();
    Ok(file)
}

/// Numbers below this are tiny: the upper halves of u32 tokens are, in vocabularies of 4 million.
const TINY: i64 = 64;

/// An error if nearly all numbers at odd places are tiny and many others are not, as if the tokens
/// were u32, or i64: of those three in four 16-bit numbers are 0.
fn check_not_u32(path: &Path, array: &Array) -> Result<()> {
    let mut first = vec![0; array.rows().min(4096) as usize];
    array.read_i64(0, &mut first)?;
    let pairs = first.as_chunks::<2>().0;
    let tiny = |half: usize| pairs.iter().filter(|pair| pair[half] < TINY).count();
    let (all, low, high) = (pairs.len(), tiny(0), tiny(1));
    ensure!(
        all < 32 || high * 10 < all * 9 || low * 4 > all * 3,
        Data,
        "cannot read {}: expected u16 tokens without a header, got numbers of which every second one is small, as in u32 \
         tokens or wider ones ({high} of {all} at odd places are below {TINY}, {low} at even places); help: give \
         tokens:FILE,type=u32 if they are u32, type=u16 if they are u16, or save them with np.save, as int64 must be",
        path.display()
    );
    Ok(())
}

/// Puts a shard with these tokens, one part after the other, in the place of `path`. `about` says
/// their vocabulary.
pub(crate) fn write_shard(path: &Path, about: About, parts: &[impl AsRef<[u32]>]) -> Result<()> {
    let vocabulary = about.vocabulary.unwrap_or(1);
    // The narrower type that holds all tokens.
    let element = match vocabulary <= 1 << 16 {
        true => Element::U16,
        false => Element::U32,
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!(".unfinished-{}-{name}", std::process::id()));
    let written = flat::write(&aside, |writer| {
        writer.begin("tokens", element, &[])?;
        for tokens in parts.iter().map(AsRef::as_ref) {
            let bad = tokens.iter().find(|&&token| token as usize >= vocabulary);
            ensure!(
                bad.is_none(),
                Data,
                "{}: expected tokens below the vocabulary of {vocabulary}, got {}",
                path.display(),
                bad.unwrap_or(&0)
            );
            match element {
                Element::U16 => {
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

#[cfg(test)]
mod tests;
