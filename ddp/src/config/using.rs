//! What `ddp-train eval` and `ddp-train predict` are asked for, checked.

use std::path::{Path, PathBuf};

use super::check::{refuse, threads, timeout, whole};
use crate::cli::{EvalFlags, PredictFlags, UsingFlags};
use crate::error::Result;

/// A model to use, and on what.
#[derive(Clone, Debug, PartialEq)]
pub struct UseConfig {
    /// What both commands have.
    pub using: UsingFlags,
    /// Where the labels are, of `eval`.
    pub labels: Option<String>,
    /// Whether `eval` prints JSON.
    pub json: bool,
    /// What `predict` writes.
    pub predictions: Option<Predictions>,
}

/// A file of predictions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Predictions {
    /// Where.
    pub out: PathBuf,
    /// As what.
    pub format: PredictionsFormat,
    /// Whether with the probability of every class.
    pub probabilities: bool,
    /// Whether with the logit of every class.
    pub logits: bool,
    /// Whether one that is there is replaced.
    pub overwrite: bool,
}

/// The kinds of files of predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictionsFormat {
    /// Text, a line a row.
    Csv,
    /// numpy's.
    Npy,
}

/// The most rows that go through a model at a time.
const BATCH_MAX: u64 = 1 << 32;

impl UseConfig {
    /// Of `eval`.
    pub fn eval(flags: EvalFlags) -> Result<UseConfig> {
        UseConfig { using: flags.using, labels: flags.labels, json: flags.json, predictions: None }.check()
    }

    /// Of `predict`.
    pub fn predict(flags: PredictFlags) -> Result<UseConfig> {
        let PredictFlags { using, out, probabilities, logits, overwrite } = flags;
        let format = PredictionsFormat::of(&out)?;
        if format == PredictionsFormat::Npy && probabilities && logits {
            let expected = "--probabilities or --logits, since a .npy holds one array";
            return Err(refuse("--out", out.display(), expected, "Leave one of them out, or write a .csv"));
        }
        let predictions = Some(Predictions { out, format, probabilities, logits, overwrite });
        UseConfig { using, labels: None, json: false, predictions }.check()
    }

    fn check(self) -> Result<UseConfig> {
        whole("--batch-size", self.using.batch_size as u64, 1, BATCH_MAX)?;
        timeout(self.using.timeout_s)?;
        threads(self.using.threads)?;
        Ok(self)
    }
}

impl PredictionsFormat {
    /// As the name's ending says.
    fn of(path: &Path) -> Result<PredictionsFormat> {
        let ending = path.extension().map(|ending| ending.to_string_lossy().to_ascii_lowercase());
        match ending.as_deref() {
            Some("csv") => Ok(PredictionsFormat::Csv),
            Some("npy") => Ok(PredictionsFormat::Npy),
            _ => {
                let expected = "a name that ends in .csv or .npy";
                Err(refuse("--out", path.display(), expected, "As in --out answers.csv"))
            }
        }
    }
}
