//! What a command line asks for.

use std::time::Duration;

use super::compare::CompareFlags;
use super::doctor::DoctorFlags;
use super::export::ExportFlags;
use super::generate::GenerateFlags;
use super::inspect::InspectFlags;
use super::report::ReportFlags;
use super::tokenize::TokenizeFlags;
use super::using::{EvalFlags, PredictFlags};
use super::watch::WatchFlags;
use crate::bench::Bench;
use crate::config::Config;
use crate::flags::PlaceFlags;

/// What a command line asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Start ranks that do what a command asks for.
    Start(StartRanks),
    /// Start the ranks of another host's launcher.
    HostAgent,
    /// Train.
    Train(Box<Config>),
    /// Check a run and estimate its memory and time.
    DryRun(Box<Config>),
    /// Evaluate a saved model.
    Eval(EvalFlags),
    /// Write a saved model's predictions.
    Predict(PredictFlags),
    /// Continue texts with a saved model.
    Generate(GenerateFlags),
    /// Write a saved model for other programs.
    Export(ExportFlags),
    /// Turn texts into files of tokens.
    Tokenize(TokenizeFlags),
    /// Describe a file or folder.
    Inspect(InspectFlags),
    /// Make the report of a run again, compare runs, or export metrics.
    Report(ReportFlags),
    /// Find where two runs part.
    Compare(CompareFlags),
    /// Show a run in the terminal.
    Watch(WatchFlags),
    /// Examine this machine.
    Doctor(DoctorFlags),
    /// Measure this machine.
    Bench(Bench),
    /// Print this text: help, the version, settings, completions.
    Show(String),
}

/// The command of a process that starts ranks for another host's launcher.
pub const HOST_AGENT: &str = "host-agent";

/// The ranks to start, and what for.
#[derive(Clone, Debug, PartialEq)]
pub struct StartRanks {
    /// How many, and where.
    pub places: PlaceFlags,
    /// How often to start again after a rank was lost.
    pub restarts: u32,
    /// How long ranks have to save after a signal.
    pub grace: Duration,
    /// What each rank does.
    pub command: Box<Command>,
}

impl Command {
    /// What it does, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Command::Start(start) => start.command.name(),
            Command::HostAgent => HOST_AGENT,
            Command::Train(_) => "train",
            Command::DryRun(_) => "--dry-run",
            Command::Eval(_) => "eval",
            Command::Predict(_) => "predict",
            Command::Generate(_) => "generate",
            Command::Export(_) => "export",
            Command::Tokenize(_) => "tokenize",
            Command::Inspect(_) => "inspect",
            Command::Report(_) => "report",
            Command::Compare(_) => "compare",
            Command::Watch(_) => "watch",
            Command::Doctor(_) => "doctor",
            Command::Bench(_) => "bench",
            Command::Show(_) => "print a text, as for --help or --print-config",
        }
    }
}
