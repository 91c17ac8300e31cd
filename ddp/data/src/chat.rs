//! Conversations to train on: `.jsonl` or Parquet with messages, prompts and completions, or texts.
//!
//! A tokenizer's `template` writes messages as text, and `record` finds what of it is trained.
//! `convert` turns a file once into tokens, in the cache; `pack` puts several conversations into a
//! row, and `rows` are the dataset.

mod convert;
mod pack;
mod record;
mod rows;
mod template;

use std::path::Path;

use serde_json::Value;

pub(crate) use self::convert::{ChatFile, Coder, Document};
pub(crate) use self::rows::ChatRows;
pub(crate) use self::template::Template;
use crate::error::{Error, Result};
use crate::task::LossOn;

ddp_kernels::choices! {
    /// Whether several conversations share a row.
    pub enum Packing {
        /// If the model has rotary positions
        Auto = "auto",
        /// Several in a row, apart in attention and positions
        On = "on",
        /// One in a row, about as long as the longest of its batch
        Off = "off",
    }
}

/// Writes conversations for a model to answer, as the chat template of its tokenizer does.
pub struct ChatWriter(Coder);

impl ChatWriter {
    /// With the tokenizer in this folder.
    pub fn open(folder: &Path) -> Result<ChatWriter> {
        Ok(ChatWriter(Coder::open(folder, LossOn::Assistant)?))
    }

    /// The tokens of these messages and of the beginning of an answer.
    pub fn prompt(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let wrong = |why| Error::Usage(format!("the conversation: {why}"));
        self.0.prompt(messages).map_err(wrong)
    }

    /// The token that ends an answer.
    pub fn end(&self) -> u32 {
        self.0.end
    }
}

/// The token of an element of a row's inputs, and the position in the row at which its document
/// begins; 0 in rows of plain tokens.
pub fn token_and_start(input: i64) -> (u32, usize) {
    (input as u32, (input >> 32) as usize)
}
