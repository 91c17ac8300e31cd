//! The command line: flags as people write them, their help, and what they become.
//!
//! `train.rs` has the flags of training, and each other command a file with its own.

mod bench;
mod doctor;
mod inspect;
mod layers;
mod report;
mod train;
mod using;

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, Parser, Subcommand};

pub use self::bench::{AddmmFlags, AllreduceFlags, BenchFlags, MlpBenchFlags};
pub use self::doctor::DoctorFlags;
pub use self::inspect::InspectFlags;
pub use self::layers::LayerFlags;
pub use self::report::ReportFlags;
pub use self::train::Flags;
pub use self::using::{EvalFlags, PredictFlags, UsingFlags};
use crate::config::{AddmmConfig, AllreduceConfig, Config, MlpBenchConfig, UseConfig};
use crate::data::DataSpec;
use crate::error::{Error, Result};

/// What a command line asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// To train.
    Train(Box<Config>),
    /// To measure training steps.
    BenchMlp(MlpBenchConfig),
    /// To measure products.
    BenchAddmm(AddmmConfig),
    /// To measure what ranks bring each other.
    BenchAllreduce(AllreduceConfig),
    /// To check a run and say what it will take.
    DryRun(Box<Config>),
    /// To say how good a saved model is.
    Eval(UseConfig),
    /// To write what a saved model says of rows.
    Predict(UseConfig),
    /// To say what is in a file or folder.
    Inspect(InspectFlags),
    /// To make a run's report again.
    Report(ReportFlags),
    /// To look at this machine.
    Doctor(DoctorFlags),
    /// To print this text (help, the version) and end well.
    Show(String),
}

/// Reads a command line, the program's name first. What is wrong with it is an `Error::Usage`.
pub fn parse(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Command> {
    let words: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let cli = match Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => {
            let text = error.to_string();
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                    Ok(Command::Show(format!("{}\n", text.trim_end())))
                }
                // Whoever reports errors says that it is one.
                _ => {
                    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
                    Err(Error::Usage(format!("{}{text}", of_variable(&error, &words))))
                }
            };
        }
    };
    match cli.command {
        None => layers::train(cli.flags, &cli.layers),
        Some(Mode::Train { flags, layers }) => layers::train(*flags, &layers),
        Some(Mode::Eval(flags)) => Ok(Command::Eval(UseConfig::eval(flags)?)),
        Some(Mode::Predict(flags)) => Ok(Command::Predict(UseConfig::predict(flags)?)),
        Some(Mode::Inspect(flags)) => Ok(Command::Inspect(flags)),
        Some(Mode::Report(flags)) => Ok(Command::Report(flags)),
        Some(Mode::Doctor(flags)) => Ok(Command::Doctor(flags)),
        Some(Mode::Completions { shell }) => Ok(Command::Show(layers::completions(shell))),
        Some(Mode::Bench { what: Bench::Mlp(flags) }) => Ok(Command::BenchMlp(MlpBenchConfig::resolve(flags)?)),
        Some(Mode::Bench { what: Bench::Addmm(flags) }) => Ok(Command::BenchAddmm(AddmmConfig::resolve(flags)?)),
        Some(Mode::Bench { what: Bench::Allreduce(flags) }) => {
            Ok(Command::BenchAllreduce(AllreduceConfig::resolve(flags)?))
        }
    }
}

/// Where a value that cannot be stands in the environment and not in `words`: `DDP_DEVICE in the environment: `.
fn of_variable(error: &clap::Error, words: &[OsString]) -> String {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return String::new() };
    let flag = argument.split([' ', '=', '[']).next().unwrap_or_default();
    let name = layers::variable(flag.trim_start_matches('-'));
    let is_given = words.iter().any(|word| word.to_string_lossy().split('=').next() == Some(flag));
    if is_given || std::env::var_os(&name).is_none() { String::new() } else { format!("{name} in the environment: ") }
}

const ABOUT: &str = "Trains a model on the ranks of an MPI job, or on one process without MPI.";

const EXAMPLES: &str = "\
Examples:
  ddp-train                                  digits drawn by code, on one process
  mpirun -n 2 ddp-train --out two            the same batches, shared by two ranks
  ddp-train --epochs 20 --lr 3e-4 --hidden 1024,1024 --dropout 0.1
  ddp-train --data synthetic:regression,features=32,outputs=2 --optimizer sgd --lr 0.05
  mpirun -n 2 ddp-train bench mlp --layers 784,1024,1024,10 --batch 128
  mpirun -n 2 ddp-train bench allreduce --sweep 0.001:64
  ddp-train bench addmm --shapes 2048x2048x2048,128x1024x784

OUT/metrics.jsonl is the record of a run, OUT/config.toml what it was, OUT/checkpoints/ its model.

Exit codes: 0 done, 2 wrong flags, 65 bad data, 69 doctor found something bad,
70 internal, 71 out of memory, 74 files, 75 stopped as asked and saved,
76 loss not finite, 77 a rank lost or hung, 78 ranks disagree, 130 Ctrl-C twice

Settings of training are read from the environment, too: DDP_BATCH_SIZE=64.
Other commands read those that their help names.";

#[derive(Parser, Debug)]
#[command(name = "ddp-train", bin_name = "ddp-train", version, about = ABOUT, after_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true, disable_help_flag = true)]
#[command(max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Option<Mode>,
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    layers: LayerFlags,
    /// Print help
    // The short form for both spellings: a table that is read at a glance.
    #[arg(short, long, global = true, action = ArgAction::HelpShort)]
    help: Option<bool>,
}

#[derive(Subcommand, Debug)]
enum Mode {
    /// Train: what happens without a command, too
    #[command(after_help = EXAMPLES, max_term_width = 120)]
    Train {
        #[command(flatten)]
        flags: Box<Flags>,
        #[command(flatten)]
        layers: LayerFlags,
    },
    /// Say how good a saved model is on data with labels
    #[command(after_help = using::EVAL_EXAMPLES, max_term_width = 120)]
    Eval(EvalFlags),
    /// Write what a saved model says of each row
    #[command(after_help = using::PREDICT_EXAMPLES, max_term_width = 120)]
    Predict(PredictFlags),
    /// Say what is in a checkpoint, a model, a run or a dataset
    #[command(after_help = inspect::EXAMPLES, max_term_width = 120)]
    Inspect(InspectFlags),
    /// Make a run's report.html again
    Report(ReportFlags),
    /// Look at this machine: is all there that training needs?
    Doctor(DoctorFlags),
    /// Print what a shell reads to complete command lines, as in: source <(ddp-train completions bash)
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Measure this machine; one line of JSON on standard output
    Bench {
        #[command(subcommand)]
        what: Bench,
    },
}

#[derive(Subcommand, Debug)]
enum Bench {
    /// Training steps of a perceptron with ReLU, cross-entropy and AdamW
    Mlp(MlpBenchFlags),
    /// Products with a bias, as the forward pass of a linear layer makes them
    Addmm(AddmmFlags),
    /// Sums of a tensor over all ranks, or another collective
    Allreduce(AllreduceFlags),
}

fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "expected a whole number, 0 or more, as in 128".to_string())
}

fn count(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a whole number, 1 or more, as in 4".to_string())
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "expected a number, as in 0.001 or 1e-3".to_string())
}

fn spec(text: &str) -> Result<DataSpec, String> {
    // The flag and its value stand before it already.
    let shorten = |error: Error| error.to_string().trim_start_matches(&format!("--data {text}: ")).to_string();
    text.parse().map_err(shorten)
}

#[cfg(test)]
mod tests;
