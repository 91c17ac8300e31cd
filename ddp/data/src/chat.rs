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

pub(crate) use self::convert::{ChatFile, Coder, Document};
pub use self::record::LossOn;
pub(crate) use self::rows::ChatRows;
pub(crate) use self::template::Template;

ddp_kernels::choices! {
    /// Whether several conversations share a row.
    pub enum Packing {
        /// If the model has rotary positions
        Auto = "auto",
        /// Several in a row, apart in attention and positions
        On = "on",
        /// One in a row, padded to the context
        Off = "off",
    }
}

/// The token of an element of a row's inputs, and the position in the row at which its document
/// begins; 0 in rows of plain tokens.
pub fn token_and_start(input: i64) -> (u32, usize) {
    (input as u32, (input >> 32) as usize)
}
