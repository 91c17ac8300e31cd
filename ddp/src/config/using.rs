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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command};
    use crate::config::{DeviceChoice, LogLevel};

    fn parse(line: &str) -> Result<Command> {
        cli::parse(std::iter::once("ddp-train").chain(line.split_ascii_whitespace()))
    }

    #[test]
    fn every_flag_arrives() {
        let common = "--checkpoint run --data rows.csv --batch-size 7 --device cuda:1 --share-gpus --threads 3 --cache-dir kept --timeout-s 5 \
                      --log-level warn";
        let Ok(Command::Eval(config)) = parse(&format!("eval {common} --labels kind --json")) else { panic!("eval") };
        let using = &config.using;
        assert_eq!((using.checkpoint.to_str(), using.data.to_string().as_str()), (Some("run"), "rows.csv"));
        assert_eq!((using.batch_size, using.device, using.share_gpus), (7, DeviceChoice::CudaAt(1), true));
        assert_eq!((using.threads, using.cache_dir.as_deref()), (Some(3), Some(Path::new("kept"))));
        assert_eq!((using.timeout_s, using.log_level), (5.0, LogLevel::Warn));
        assert_eq!((config.labels.as_deref(), config.json, &config.predictions), (Some("kind"), true, &None));

        let line = format!("predict {common} --out a.CSV --probabilities --logits --overwrite");
        let Ok(Command::Predict(config)) = parse(&line) else { panic!("predict") };
        let (out, format) = ("a.CSV".into(), PredictionsFormat::Csv);
        let expected = Predictions { out, format, probabilities: true, logits: true, overwrite: true };
        assert_eq!((&config.using, config.predictions), (using, Some(expected)));
        let Ok(Command::Predict(config)) = parse("predict --checkpoint run --data glyphs --out a.npy") else {
            panic!("predict")
        };
        let expected = (512, DeviceChoice::Auto, None, PredictionsFormat::Npy);
        let using = config.using;
        assert_eq!((using.batch_size, using.device, using.threads, config.predictions.unwrap().format), expected);
    }
}
