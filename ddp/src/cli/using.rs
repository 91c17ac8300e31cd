//! The flags of `ddp-train eval` and `ddp-train predict`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};

use crate::config::SettingValue;
use crate::data::DataSpec;
use crate::error::{Error, Result};
use crate::flags::{RankFlags, whole};
use crate::tasks::Format;

/// The most rows that go through a model at a time.
const BATCH_MAX: usize = 1 << 32;

/// Printed after the help of `eval`.
pub(super) const EVAL_EXAMPLES: &str = "\
Examples:
  ddp-train eval --checkpoint out --data test.npz
  ddp-train eval --checkpoint out/checkpoints/step-00000785 --data glyphs --json
  mpirun -n 4 ddp-train eval --checkpoint out --data test.csv --labels species

Normalization, columns, class names and the loss (class weights, label smoothing) are those of training. The result does not \
depend on the number of ranks. Of built-in data (glyphs, synthetic:…) the held-out rows are used, if there are any.";

/// Printed after the help of `predict`.
pub(super) const PREDICT_EXAMPLES: &str = "\
Examples:
  ddp-train predict --checkpoint out --data new.csv --out answers.csv
  ddp-train predict --checkpoint out --data new.npy --out answers.npy --probabilities
  mpirun -n 4 ddp-train predict --checkpoint out --data 'shards/*.npy' --out answers.csv --logits

A .csv has the columns row (from 0), prediction and probability; with --probabilities and --logits also p:CLASS and \
logit:CLASS. For regression: row and prediction (prediction:COLUMN for each of several, by number if the data gave no names).

A .npy holds each row's class as i64: its name if all names are whole numbers, else its index in the sorted names (from 0); \
with --probabilities or --logits f32 [rows, classes]; for regression f32 [rows, outputs].

The file does not depend on the number of ranks. Labels are not needed. Of built-in data (glyphs, synthetic:…) the held-out \
rows are used, if there are any.";

/// The flags of both commands.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct UsingFlags {
    /// Folder of a checkpoint, or of a run: its best checkpoint by validation, else its newest
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// Rows, in the form of --data in training
    #[arg(long, value_name = "SPEC", value_parser = DataSpec::read)]
    pub data: DataSpec,
    /// Rows that pass through the model at a time; of tokens, at most 16384 tokens
    #[arg(long, value_name = "ROWS", default_value = "512", value_parser = whole(1..=BATCH_MAX), allow_negative_numbers = true)]
    pub batch_size: usize,
    /// Its ranks.
    #[command(flatten)]
    pub ranks: RankFlags,
}

/// The flags of `eval`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct EvalFlags {
    /// The flags of both commands.
    #[command(flatten)]
    pub using: UsingFlags,
    /// Labels, in the form of --labels in training [default: the label it was trained on, by name]
    #[arg(long, value_name = "SPEC")]
    pub labels: Option<String>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The flags of `predict`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct PredictFlags {
    /// The flags of both commands.
    #[command(flatten)]
    pub using: UsingFlags,
    /// File to write: .npy or .csv
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(PredictionsFile::new))]
    pub out: PredictionsFile,
    /// Write the probability of every class
    #[arg(long)]
    pub probabilities: bool,
    /// Write the model's output for every class, before softmax
    #[arg(long)]
    pub logits: bool,
    /// Replace an existing file
    #[arg(long)]
    pub overwrite: bool,
}

impl PredictFlags {
    /// Refuses what does not fit into one array.
    pub(super) fn check(self) -> Result<PredictFlags> {
        let is_npy = self.out.format == Format::Npy;
        if is_npy && self.probabilities && self.logits {
            return Err(Error::Usage(format!(
                "--out {}: expected --probabilities or --logits, since a .npy holds one array; \
                 help: leave one of them out, or write a .csv",
                self.out.path.display()
            )));
        }
        Ok(self)
    }
}

/// A file of predictions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PredictionsFile {
    /// Its path.
    pub path: PathBuf,
    /// Its format, by the ending of its name.
    pub format: Format,
}

impl PredictionsFile {
    pub(crate) fn new(path: PathBuf) -> Result<PredictionsFile, String> {
        let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
        let format = match ending.to_str() {
            Some("csv") => Format::Csv,
            Some("npy") => Format::Npy,
            _ => return Err("expected a name that ends in .csv or .npy".into()),
        };
        Ok(PredictionsFile { path, format })
    }
}
