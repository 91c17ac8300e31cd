//! `ddp-train tokenize`: turns texts into files of tokens.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{ArgGroup, Args};
use ddp_comm::World;
use ddp_kernels::threads::{self, COUNT_MAX};

use crate::config::When;
use crate::data::TOKENS_MAX;
use crate::data::text::{self, ShardSizes, Side, TokenizeOptions, Tokenized, TokenizerChoice};
use crate::error::Result;
use crate::flags::{check_alone, choice, parsed, whole};
use crate::progress::Progress;
use crate::shown::{shown, significant};
use crate::tables;
use crate::units::count;
use ddp_tools::output::{Say, warn_unprinted};

/// Printed after the help of `tokenize`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train tokenize books/*.txt --train-bpe 8192 --val-split 0.05 --out books
  ddp-train tokenize web.jsonl.zst --tokenizer gpt2/tokenizer.json --out web
  ddp-train --model gpt --data books --val-data books/val

A text is one document; so is a line of .jsonl or a row of .parquet. OUT gets shards of tokens, tokenizer.json and, with \
--val-split, the folder val; it appears when everything is written. If killed, the same command continues where it was.";

/// A byte-level vocabulary has 256 bytes and the end of documents.
const BPE_MIN: usize = 257;

/// The flags of `tokenize`.
#[derive(Args, Clone, Debug, PartialEq)]
#[command(group = ArgGroup::new("vocabulary").required(true))]
pub(crate) struct TokenizeFlags {
    /// Texts, .jsonl or .parquet; .gz and .zst are unpacked
    #[arg(value_name = "FILES", required = true)]
    pub files: Vec<PathBuf>,
    /// bytes, or a Hugging Face tokenizer.json
    #[arg(long, value_name = "TOKENIZER", group = "vocabulary")]
    pub tokenizer: Option<PathBuf>,
    /// Learn a byte-level BPE vocabulary of N tokens from the texts instead
    #[arg(long, value_name = "N", group = "vocabulary")]
    #[arg(value_parser = whole(BPE_MIN..=TOKENS_MAX as usize))]
    pub(crate) train_bpe: Option<usize>,
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
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = choice::<When>())]
    pub progress: When,
}

fn share(text: &str) -> Result<f64, String> {
    let expected = "expected a number, at least 0 and less than 1 (20% is 0.2)";
    parsed(text, |share| (0.0..1.0).contains(share), || expected.into())
}

/// Writes a folder of shards.
pub(crate) fn tokenize(flags: &TokenizeFlags, world: &World, say: Say<'_>) -> Result<()> {
    check_alone("tokenize", world)?;
    let options = TokenizeOptions {
        files: flags.files.clone(),
        tokenizer: match (&flags.tokenizer, flags.train_bpe) {
            (_, Some(size)) => TokenizerChoice::Learned(size),
            (Some(path), None) if path != Path::new("bytes") => TokenizerChoice::File(path.clone()),
            _ => TokenizerChoice::Bytes,
        },
        end_token: flags.end_token.clone(),
        field: flags.field.clone(),
        lossy: flags.lossy,
        val_split: flags.val_split,
        out: flags.out.clone(),
        sizes: ShardSizes::default(),
        columns: Some(tables::texts),
    };
    threads::set_count(flags.threads.unwrap_or_else(|| world.default_threads()))?;
    let mut progress = Progress::of_files(flags.progress);
    let began = Instant::now();
    let done = text::tokenize(&options, &mut |at| {
        let what = if at.is_learning {
            "learning the vocabulary"
        } else {
            "tokenizing"
        };
        progress.read(what, at.read_bytes, at.file_bytes);
    });
    drop(progress);
    let done = done?;
    let out = shown(&flags.out.to_string_lossy());
    let [train, val] = done.sides;
    let vocabulary = count(done.vocabulary as u64);
    let mut summary = format!("{out}: {}, vocabulary {vocabulary}\n", describe(train));
    if val.shards > 0 {
        summary += &format!("{out}/val: {}\n", describe(val));
    }
    summary += &describe_work(&done, began.elapsed().as_secs_f64());
    warn_unprinted(say(&summary));
    Ok(())
}

fn describe(side: Side) -> String {
    let (tokens, documents) = (count(side.tokens), count(side.documents));
    format!(
        "tokens {tokens}, documents {documents}, shards {}",
        side.shards
    )
}

/// What was done this time.
fn describe_work(done: &Tokenized, seconds: f64) -> String {
    let mb = done.text_bytes as f64 / 1e6;
    let (size, rate) = (significant(mb, 3), significant(mb / seconds, 3));
    let mut text = format!("{size} MB of text in {seconds:.1} s: {rate} MB/s");
    let known = done.known_shards as u64;
    let empty = done.empty_documents;
    let skipped = "documents without text, skipped";
    for (what, count) in [("shards that were there", known), (skipped, empty)] {
        if count > 0 {
            text += &format!("; {what}: {count}");
        }
    }
    text
}
