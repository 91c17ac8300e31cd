//! The flags of `ddp-train generate`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use crate::flags::Taken;
use crate::flags::{number, whole};

/// Printed after the help of `generate`.
pub(super) const EXAMPLES: &str = "\
Examples:
  ddp-train generate --checkpoint out --prompt 'Once upon a time'
  ddp-train generate --checkpoint gpt2 --prompt 'The answer is' --temperature 0 --max-tokens 20
  ddp-train generate --checkpoint out --prompts prompts.txt --seed 7 >answers.jsonl

The text goes to standard output as it is made, without the prompt. With --prompts, a line of JSON for each prompt: prompt, text, \
tokens, and why the text ended. It is made on the CPU. The same seed gives the same text, for any number of threads.";

/// The flags of `generate`.
#[derive(Args, Clone, Debug, PartialEq)]
#[command(group = ArgGroup::new("text").required(true))]
pub struct GenerateFlags {
    /// Folder of a checkpoint, of a run (its best checkpoint by validation, else its newest) or of
    /// Hugging Face
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// The text to continue; if it is empty, the model begins a document
    #[arg(long, value_name = "TEXT", group = "text")]
    pub prompt: Option<String>,
    /// A file with a prompt a line
    #[arg(long, value_name = "FILE", group = "text")]
    pub prompts: Option<PathBuf>,
    /// The most tokens to make
    #[arg(long, value_name = "N", default_value = "200", value_parser = whole(1..=usize::MAX), allow_negative_numbers = true)]
    pub max_tokens: usize,
    /// What logits are divided by: less than 1 prefers probable tokens, 0 takes the most probable
    /// one
    #[arg(long, value_name = "T", default_value = "0.8", value_parser = number(0.0..=1e6), allow_negative_numbers = true)]
    pub temperature: f64,
    /// Choose among the K most probable tokens [default: all]
    #[arg(long, value_name = "K", value_parser = whole(1..=usize::MAX), allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Choose among the most probable tokens whose probabilities add up to P
    #[arg(long, value_name = "P", default_value = "1", value_parser = share, allow_negative_numbers = true)]
    pub top_p: f64,
    /// Seed of the random numbers that choose tokens
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// End the text before this one
    #[arg(long, value_name = "TEXT", default_value = "")]
    #[arg(hide_default_value = true)]
    pub stop: String,
    /// tokenizer.json of Hugging Face, or bytes, for a model that has none
    #[arg(long, value_name = "TOKENIZER")]
    pub tokenizer: Option<PathBuf>,
    /// Its CPU threads.
    #[command(flatten)]
    pub settings: Taken,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok();
    let share = share.filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0, up to 1".into())
}
