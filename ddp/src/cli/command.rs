//! What a command line asks for.

use std::time::Duration;

use ddp_comm::spawn::HostList;

use clap::Subcommand;

use super::compare::{self, CompareFlags};
use super::doctor::DoctorFlags;
use super::export::{self, ExportFlags};
use super::generate::{self, GenerateFlags};
use super::inspect::{self, InspectFlags};
use super::report::{self, ReportFlags};
use super::tokenize::{self, TokenizeFlags};
use super::using::{self, EvalFlags, PredictFlags};
use super::watch::{self, WatchFlags};
use crate::bench::Bench;
use crate::config::Config;
use crate::flags::{PlaceFlags, RankFlags};

/// What a command line asks for.
#[derive(Subcommand, Clone, Debug, PartialEq)]
pub enum Command {
    /// Evaluate a saved model on labelled data
    #[command(after_help = using::EVAL_EXAMPLES, max_term_width = 120)]
    Eval(EvalFlags),
    /// Write a saved model's prediction for each row
    #[command(after_help = using::PREDICT_EXAMPLES, max_term_width = 120)]
    Predict(PredictFlags),
    /// Continue texts with a saved transformer
    #[command(after_help = generate::EXAMPLES, max_term_width = 120)]
    Generate(GenerateFlags),
    /// Write a saved model for other programs
    #[command(after_help = export::EXAMPLES, max_term_width = 120)]
    Export(ExportFlags),
    /// Turn texts into files of tokens
    #[command(after_help = tokenize::EXAMPLES, max_term_width = 120)]
    Tokenize(TokenizeFlags),
    /// Describe a checkpoint, a model, a run or a dataset
    #[command(after_help = inspect::EXAMPLES, max_term_width = 120)]
    Inspect(InspectFlags),
    /// Make a run's report.html again, a page of several runs, or a CSV file of metrics
    #[command(after_help = report::EXAMPLES, max_term_width = 120)]
    Report(ReportFlags),
    /// Find the first step, and the layer, in which two runs part
    #[command(after_help = compare::EXAMPLES, max_term_width = 120)]
    Compare(CompareFlags),
    /// Show a run live in the terminal
    #[command(after_help = watch::EXAMPLES, max_term_width = 120)]
    Watch(WatchFlags),
    /// Check that this machine has what training needs
    Doctor(DoctorFlags),
    /// Measure this machine; one line of JSON on standard output
    #[command(subcommand)]
    Bench(Bench),
    /// Start the ranks of another host's launcher, which speaks to it
    #[command(hide = true)]
    HostAgent,
    /// Start ranks that do what a command asks for.
    #[command(skip)]
    Start(StartRanks),
    /// Train.
    #[command(skip)]
    Train(Box<Config>),
    /// Check a run and estimate its memory and time.
    #[command(skip)]
    DryRun(Box<Config>),
    /// Print this text: help, the version, settings, completions.
    #[command(skip)]
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
    /// With how many ranks the job continues when it loses some.
    pub min_ranks: Option<usize>,
    /// Hosts that take over the ranks of a lost one.
    pub spares: Option<HostList>,
    /// How long ranks have to save after a signal.
    pub grace: Duration,
    /// What each rank does.
    pub command: Box<Command>,
}

impl Command {
    /// The ranks of a command that computes and does not train.
    pub(crate) fn ranks(&self) -> Option<&RankFlags> {
        match self {
            Command::Eval(flags) => Some(&flags.using.ranks),
            Command::Predict(flags) => Some(&flags.using.ranks),
            Command::Bench(bench) => Some(bench.ranks()),
            _ => None,
        }
    }

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
