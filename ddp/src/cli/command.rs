//! What a command line asks for.

use std::path::PathBuf;

use super::doctor::DoctorFlags;
use super::inspect::InspectFlags;
use super::using::{EvalFlags, PredictFlags};
use crate::bench::Bench;
use crate::config::Config;

/// What a command line asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Train.
    Train(Box<Config>),
    /// Check a run and estimate its memory and time.
    DryRun(Box<Config>),
    /// Evaluate a saved model.
    Eval(EvalFlags),
    /// Write a saved model's predictions.
    Predict(PredictFlags),
    /// Describe a file or folder.
    Inspect(InspectFlags),
    /// Make the report of the run in this folder again.
    Report(PathBuf),
    /// Examine this machine.
    Doctor(DoctorFlags),
    /// Measure this machine.
    Bench(Bench),
    /// Print this text: help, the version, settings, completions.
    Show(String),
}
