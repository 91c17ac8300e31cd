//! Files of tokens: formats of tokens (`llm_c.rs`, `nanogpt.rs`, `text.rs`), and arrays of whole
//! numbers in any other format, our own shards among them. All of them give a `TokenFile`, which is
//! read in place unless the file is compressed.
//!
//! Our shards are flat files with an array `tokens` and a vocabulary (`flat.rs`).

use std::fs;
use std::path::Path;

use super::array::Array;
use super::flat::{self, About, FLAT};
use super::format::{Contents, DataFile, Holds, TokenFile};
use super::formats::{format, format_of_tokens};
use super::io::refuse;
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
    let (format, name) = (format_of_tokens(path)?, path.display().to_string());
    let mut file = DataFile::new(path, &name, cache_dir);
    file.stated = stated;
    let tokens = match format.holds {
        Holds::Tokens(read) => read(&file)?,
        Holds::Arrays(_) if format.is_table() => {
            let why = "expected tokens, got a table; help: give .bin, .txt, or a one-dimensional array of integers";
            return Err(refuse(path, why));
        }
        _ => {
            let contents = super::open(path, cache_dir)?;
            of_array(&contents).map_err(|why| refuse(path, why))?
        }
    };
    let got = tokens.tokens.element();
    if stated.is_some_and(|stated| stated != got) {
        let why = "expected tokens without a header, whose type type= states, got";
        return Err(refuse(path, format!("{why} {got}; help: leave out type=")));
    }
    Ok(tokens)
}

/// The array `tokens` of a file, or its only one.
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
