//! The commands, and what each was asked to do.

use clap::Subcommand;

use crate::config::Config;
use crate::export::{self, ExportFlags};
use crate::flags::bench::Bench;
use crate::flags::tools::{
    self, CompareFlags, DoctorFlags, InspectFlags, ReportFlags, WarmUpFlags, WatchFlags,
};
use crate::flags::verify::{self, VerifyFlags};
use crate::flags::{PlaceFlags, RankFlags};
use crate::show_tokens::{self, ShowTokensFlags};
use crate::tokenize::{self, TokenizeFlags};
use crate::using::chat::{self, ChatFlags};
use crate::using::eval::{self, EvalFlags};
use crate::using::generate::{self, GenerateFlags};
use crate::using::predict::{self, PredictFlags};

/// What a command line asks for.
#[derive(Subcommand, Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// Evaluate a saved model on labelled data
    #[command(after_help = eval::EXAMPLES, max_term_width = 120)]
    Eval(EvalFlags),
    /// Write a saved model's prediction for each row
    #[command(after_help = predict::EXAMPLES, max_term_width = 120)]
    Predict(PredictFlags),
    /// Continue texts with a saved transformer
    #[command(after_help = generate::EXAMPLES, max_term_width = 120)]
    Generate(GenerateFlags),
    /// Talk with a saved transformer
    #[command(after_help = chat::EXAMPLES, max_term_width = 120)]
    Chat(ChatFlags),
    /// Write a saved model for other programs
    #[command(after_help = export::EXAMPLES, max_term_width = 120)]
    Export(ExportFlags),
    /// Turn texts into files of tokens
    #[command(after_help = tokenize::EXAMPLES, max_term_width = 120)]
    Tokenize(TokenizeFlags),
    /// Show the tokens of data, and which of them are trained
    #[command(name = "show-tokens", after_help = show_tokens::EXAMPLES, max_term_width = 120)]
    ShowTokens(ShowTokensFlags),
    /// Describe a checkpoint, a model or a run
    #[command(after_help = tools::INSPECT_EXAMPLES, max_term_width = 120)]
    Inspect(InspectFlags),
    /// Make a run's report.html again, or a page of several runs
    #[command(after_help = tools::REPORT_EXAMPLES, max_term_width = 120)]
    Report(ReportFlags),
    /// Find the first step and layer in which two runs differ
    #[command(after_help = tools::COMPARE_EXAMPLES, max_term_width = 120)]
    Compare(CompareFlags),
    /// Repeat steps of a run that somebody else trained, and check what it claims
    #[command(after_help = verify::EXAMPLES, max_term_width = 120)]
    Verify(Box<VerifyFlags>),
    /// Show a run live in the terminal
    #[command(after_help = tools::WATCH_EXAMPLES, max_term_width = 120)]
    Watch(WatchFlags),
    /// Check that this machine has what training needs
    Doctor(DoctorFlags),
    /// Compile the GPU kernels before a run needs them
    #[command(name = "warm-up")]
    WarmUp(WarmUpFlags),
    /// Measure this machine; one line of JSON on standard output
    #[command(subcommand)]
    Bench(Bench),
    /// Start the ranks of another host's launcher, which speaks to it
    #[command(hide = true)]
    HostAgent,
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
pub(crate) const HOST_AGENT: &str = "host-agent";

impl Command {
    /// The ranks of a command that computes and does not train.
    fn ranks(&self) -> Option<&RankFlags> {
        match self {
            Command::Eval(flags) => Some(&flags.using.ranks),
            Command::Predict(flags) => Some(&flags.using.ranks),
            Command::Verify(flags) => Some(&flags.ranks),
            Command::Bench(bench) => Some(&bench.common().ranks),
            _ => None,
        }
    }

    /// Where a command that does not train starts ranks.
    pub(super) fn places(&self) -> Option<&PlaceFlags> {
        match self {
            Command::Doctor(flags) => Some(&flags.places),
            other => Some(&other.ranks()?.places),
        }
    }

    /// The settings of a command that takes some of a run's.
    pub(crate) fn config(&self) -> Option<&Config> {
        match self {
            Command::Train(config) | Command::DryRun(config) => Some(config),
            other => Some(&other.ranks()?.settings),
        }
    }

    /// What it does, for people.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Command::HostAgent => HOST_AGENT,
            Command::Train(_) => "train",
            Command::DryRun(_) => "--dry-run",
            Command::Eval(_) => "eval",
            Command::Predict(_) => "predict",
            Command::Generate(_) => "generate",
            Command::Chat(_) => "chat",
            Command::Export(_) => "export",
            Command::Tokenize(_) => "tokenize",
            Command::ShowTokens(_) => "show-tokens",
            Command::Inspect(_) => "inspect",
            Command::Report(_) => "report",
            Command::Compare(_) => "compare",
            Command::Verify(_) => "verify",
            Command::Watch(_) => "watch",
            Command::Doctor(_) => "doctor",
            Command::WarmUp(_) => "warm-up",
            Command::Bench(_) => "bench",
            Command::Show(_) => "print a text, as for --help or --print-config",
        }
    }
}
