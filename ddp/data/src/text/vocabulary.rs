//! Which tokens a tokenizer has, as its `tokenizer.json` says. Every build reads this; only
//! encoding needs the crate `tokenizers`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use twox_hash::XxHash3_128;

use crate::error::{Result, bail, ensure};
use crate::files::io::{read_up_to, reading, refuse};
use crate::setting::{END_TOKEN, TOKENIZER};
use crate::spec::TOKENS_MAX;

/// The name of the file beside shards, in runs and in checkpoints.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Longer files are refused: vocabularies of 256,000 tokens take 20 to 35 MB.
const BYTES_MAX: u64 = 256 << 20;

/// The token after a document in vocabularies of our own.
pub(super) const END: &str = "<|endoftext|>";
/// What tokenizers call the token after a document.
const END_TOKENS: [&str; 4] = [END, "<|end_of_text|>", "</s>", "<eos>"];

/// The tokens of a tokenizer.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// The content of its file.
    pub file: Vec<u8>,
    /// How many different tokens there are.
    pub size: usize,
    /// A hash of all tokens and their numbers.
    pub hash: String,
    /// The numbers of special tokens, such as the end of a document.
    special: BTreeMap<String, u32>,
}

#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    vocab: Vocab,
}

/// A number for each token; Unigram lists tokens with their scores instead.
#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    Numbers(BTreeMap<String, u32>),
    List(Vec<(String, f64)>),
}

impl Vocabulary {
    /// That of the tokenizer in the file at `path`.
    pub fn read(path: &Path) -> Result<Vocabulary> {
        let bytes = read_up_to(path, BYTES_MAX).map_err(reading(path))?;
        let long =
            || format!("expected a tokenizer of at most {BYTES_MAX} bytes, got a longer file");
        let read = bytes.ok_or_else(long).and_then(Vocabulary::of_bytes);
        read.map_err(|why| refuse(path, why))
    }

    /// That of a tokenizer with this `tokenizer.json`.
    pub fn of_bytes(file: Vec<u8>) -> Result<Vocabulary, String> {
        let what = "expected a tokenizer.json of Hugging Face";
        let help =
            "help: save it with tokenizer.save(path), or save_pretrained of a fast tokenizer";
        let read: TokenizerJson =
            serde_json::from_slice(&file).map_err(|error| format!("{what}: {error}; {help}"))?;
        let mut tokens: Vec<(u32, String)> = match read.model.vocab {
            Vocab::Numbers(numbers) => numbers.into_iter().map(|(text, id)| (id, text)).collect(),
            Vocab::List(list) => (0..).zip(list.into_iter().map(|(text, _)| text)).collect(),
        };
        let added = read.added_tokens.iter();
        tokens.extend(added.map(|token| (token.id, token.content.clone())));
        tokens.sort_unstable();
        tokens.dedup();
        let size = tokens.last().map_or(0, |(id, _)| *id as usize + 1);
        ensure!(
            (1..=TOKENS_MAX).contains(&(size as u64)),
            "{what} with 1 to {TOKENS_MAX} tokens, got {size}; {help}"
        );
        let mut hash = XxHash3_128::new();
        for (id, text) in &tokens {
            hash.write(&id.to_le_bytes());
            hash.write(&(text.len() as u64).to_le_bytes());
            hash.write(text.as_bytes());
        }
        let special = read.added_tokens.into_iter().filter(|token| token.special);
        Ok(Vocabulary {
            file,
            size,
            hash: format!("{:032x}", hash.finish_128()),
            special: special.map(|token| (token.content, token.id)).collect(),
        })
    }

    /// One in which each byte is a token of this number, and 256 ends a document.
    pub fn bytes() -> Vocabulary {
        Vocabulary::of_bytes(include_bytes!("bytes.json").into()).expect("it has 257 tokens")
    }

    /// The token after each document: `named`, else one that usually is.
    pub fn end_of_text(&self, named: Option<&str>) -> Result<u32> {
        let mut names = END_TOKENS.into_iter();
        let found = match named {
            Some(name) => self.special.get(name),
            None => names.find_map(|name| self.special.get(name)),
        };
        let Some(found) = found else {
            let all: Vec<_> = self.special.keys().map(String::as_str).collect();
            let expected = named.map_or(END_TOKENS.join(", "), |name| format!("{name:?}"));
            let help = match all.is_empty() {
                true => "add one to the tokenizer, or give another tokenizer".to_string(),
                false => format!("name one of these as {END_TOKEN}"),
            };
            bail!(
                Usage,
                "{TOKENIZER}: expected a special token that ends documents ({expected}), got [{}]; help: {help}",
                all.join(", ")
            );
        };
        Ok(*found)
    }

    /// The text of a special token.
    pub fn special_text(&self, token: usize) -> Option<&str> {
        let mut all = self.special.iter();
        let found = all.find(|(_, id)| **id as usize == token);
        found.map(|(text, _)| text.as_str())
    }
}
