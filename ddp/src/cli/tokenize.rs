//! The flags of `ddp-train tokenize`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use ddp_kernels::threads::COUNT_MAX;

use crate::config::When;
use crate::data::spec::TOKENS_MAX;
use crate::flags::whole;

/// Printed after the help of `tokenize`.
pub(super) const EXAMPLES: &str = "\
Examples:
  ddp-train tokenize books/*.txt --train-bpe 8192 --val-split 0.05 --out books
  ddp-train tokenize web.jsonl.zst --tokenizer gpt2/tokenizer.json --out web
  ddp-train --model gpt --data books --val-data books/val

A text is one document, a line of .jsonl is one, a row of .parquet is one. OUT gets shards of tokens, tokenizer.json and, \
with --val-split, the folder val; it appears when all is done. After a kill the same command continues where it was.";

/// A byte-level vocabulary has 256 bytes and the end of documents.
const BPE_MIN: usize = 257;

/// The flags of `tokenize`.
#[derive(Args, Clone, Debug, PartialEq)]
#[command(group = ArgGroup::new("vocabulary").required(true))]
pub struct TokenizeFlags {
    /// Texts, .jsonl or .parquet; .gz and .zst are unpacked
    #[arg(value_name = "FILES", required = true)]
    pub files: Vec<PathBuf>,
    /// bytes, or a tokenizer.json of Hugging Face
    #[arg(long, value_name = "TOKENIZER", group = "vocabulary")]
    pub tokenizer: Option<PathBuf>,
    /// Learn a byte-level BPE vocabulary of N tokens from the texts instead
    #[arg(long, value_name = "N", group = "vocabulary")]
    #[arg(value_parser = whole(BPE_MIN..=TOKENS_MAX as usize))]
    pub train_bpe: Option<usize>,
    /// New folder to write
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
    /// The field of .jsonl, or the column of .parquet, that has the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub field: String,
    /// The special token after each document
    /// [default: a usual one of the tokenizer, such as <|endoftext|>]
    #[arg(long, value_name = "TOKEN")]
    pub end_token: Option<String>,
    /// The share of documents that is held out, at random
    #[arg(long, value_name = "FRACTION", default_value = "0", value_parser = share)]
    pub val_split: f64,
    /// Replace bytes that are not UTF-8 by U+FFFD
    #[arg(long)]
    pub lossy: bool,
    /// Threads that tokenize [default: all cores]
    #[arg(long, value_name = "N", value_parser = whole(1..=COUNT_MAX))]
    pub threads: Option<usize>,
    /// When to show progress on standard error
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = crate::flags::choice::<When>())]
    pub progress: When,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok();
    let share = share.filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| "expected a number, at least 0 and less than 1 (20% is 0.2)".into())
}
