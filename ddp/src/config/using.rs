//! What `ddp-train eval` and `ddp-train predict` are asked for, checked.

use std::path::PathBuf;

use super::check::{threads, timeout};
use crate::cli::{EvalFlags, PredictFlags, UsingFlags};
use crate::error::Result;

/// A model to use, and on what.
#[derive(Clone, Debug, PartialEq)]
pub struct UseConfig {
    /// What both commands have.
    pub using: UsingFlags,
    /// Where the labels are, of `eval`.
    pub labels: Option<String>,
    /// The file to write, of `predict`.
    pub out: Option<PathBuf>,
}

impl UseConfig {
    /// Of `eval`.
    pub fn eval(flags: EvalFlags) -> Result<UseConfig> {
        UseConfig { using: flags.using, labels: flags.labels, out: None }.check()
    }

    /// Of `predict`.
    pub fn predict(flags: PredictFlags) -> Result<UseConfig> {
        UseConfig { using: flags.using, labels: None, out: Some(flags.out) }.check()
    }

    fn check(self) -> Result<UseConfig> {
        timeout(self.using.timeout_s)?;
        threads(self.using.threads)?;
        Ok(self)
    }
}
