//! The command line: flags as people write them, their help, and what they become.
//!
//! Every flag of training is optional here, so that flags can be laid over a file; the defaults are settled in `config.rs`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgAction, Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use crate::config::{
    Activation, AddmmConfig, AllreduceConfig, BenchOperation, Config, DeviceChoice, FloatType, GraphChoice, List,
    LogLevel, MlpBenchConfig, ModelKind, OptimizerKind, Overlap, Precision, ProductShape, Resident, Schedule, Sweep,
    When,
};
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
    /// To print this text (help, the version) and end well.
    Show(String),
}

/// Reads a command line, the program's name first. What is wrong with it is an `Error::Usage`.
pub fn parse(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Command> {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let text = error.to_string();
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                    Ok(Command::Show(format!("{}\n", text.trim_end())))
                }
                // Whoever reports errors says that it is one.
                _ => Err(Error::Usage(text.strip_prefix("error: ").unwrap_or(&text).trim_end().to_string())),
            };
        }
    };
    match cli.command {
        None => Ok(Command::Train(Box::new(Config::resolve(cli.flags)?))),
        Some(Mode::Train(flags)) => Ok(Command::Train(Box::new(Config::resolve(*flags)?))),
        Some(Mode::Bench { what: Bench::Mlp(flags) }) => Ok(Command::BenchMlp(MlpBenchConfig::resolve(flags)?)),
        Some(Mode::Bench { what: Bench::Addmm(flags) }) => Ok(Command::BenchAddmm(AddmmConfig::resolve(flags)?)),
        Some(Mode::Bench { what: Bench::Allreduce(flags) }) => {
            Ok(Command::BenchAllreduce(AllreduceConfig::resolve(flags)?))
        }
    }
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

Exit codes: 0 done, 2 wrong flags, 65 bad data, 70 internal, 71 out of memory, 74 files, 76 loss not finite,
77 a rank lost or hung, 78 ranks disagree";

#[derive(Parser, Debug)]
#[command(name = "ddp-train", bin_name = "ddp-train", version, about = ABOUT, after_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true, disable_help_flag = true)]
#[command(max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Option<Mode>,
    #[command(flatten)]
    flags: Flags,
    /// Print help
    // The short form for both spellings: a table that is read at a glance.
    #[arg(short, long, global = true, action = ArgAction::HelpShort)]
    help: Option<bool>,
}

#[derive(Subcommand, Debug)]
enum Mode {
    /// Train: what happens without a command, too
    #[command(after_help = EXAMPLES, max_term_width = 120)]
    Train(Box<Flags>),
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

const MODEL: &str = "Model";
const DATA: &str = "Data";
const LENGTH: &str = "Batches and length";
const OPTIMIZATION: &str = "Optimization";
const MACHINE: &str = "Machine";
const RANKS: &str = "Between ranks";
const OUTPUT: &str = "Output";

/// The flags of training, as they were written. In a TOML file the same names without the dashes in front.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Flags {
    /// Family of models [default: mlp]
    #[arg(long, value_name = "NAME", help_heading = MODEL)]
    pub model: Option<ModelKind>,
    /// Widths of the hidden layers; none for a linear model [default: 256,128]
    #[arg(long, value_name = "WIDTHS", help_heading = MODEL, allow_hyphen_values = true)]
    pub hidden: Option<List<usize>>,
    /// Between the layers [default: relu]
    #[arg(long, value_name = "NAME", help_heading = MODEL)]
    pub activation: Option<Activation>,
    /// Probability of dropping an element behind an activation [default: 0]
    #[arg(long, value_name = "P", help_heading = MODEL, value_parser = number, allow_negative_numbers = true)]
    pub dropout: Option<f64>,
    /// Layers or parameters to leave as they are, by name: 0 or 2.bias, with commas between [default: none]
    #[arg(long, value_name = "NAMES", help_heading = MODEL)]
    pub freeze: Option<List<String>>,

    /// What to train on: glyphs, synthetic:classification, synthetic:regression or synthetic:row-number, with options
    /// behind it, as in glyphs,rows=50000 (rows, held-out, seed; features, classes or outputs, noise)
    /// [default: glyphs,rows=20000,held-out=2000,seed=0]
    #[arg(long, value_name = "SPEC", help_heading = DATA, value_parser = spec)]
    pub data: Option<DataSpec>,

    /// Rows of a step, over all ranks [default: 128]
    #[arg(long, value_name = "ROWS", help_heading = LENGTH, value_parser = whole, allow_negative_numbers = true)]
    pub batch_size: Option<u64>,
    /// Most rows of a rank that go through the model at a time [default: all of them]
    #[arg(long, value_name = "ROWS", help_heading = LENGTH, value_parser = count, allow_negative_numbers = true)]
    pub micro_batch: Option<usize>,
    /// Steps to train for, 0 to save the untrained model; instead of --epochs
    #[arg(long, value_name = "N", help_heading = LENGTH, value_parser = whole, allow_negative_numbers = true)]
    pub steps: Option<u64>,
    /// Times to go through the data [default: 5]
    #[arg(long, value_name = "N", help_heading = LENGTH, value_parser = whole, allow_negative_numbers = true)]
    pub epochs: Option<u64>,
    /// Leave out an epoch's last batch where it is short [default: false]
    #[arg(long, value_name = "BOOL", help_heading = LENGTH, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub drop_last: Option<bool>,

    /// Rule of the update [default: adamw]
    #[arg(long, value_name = "NAME", help_heading = OPTIMIZATION)]
    pub optimizer: Option<OptimizerKind>,
    /// Peak of the learning rate [default: 0.001 for adamw, 0.1 for sgd]
    #[arg(long, value_name = "RATE", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Where the schedule ends [default: 0]
    #[arg(long, value_name = "RATE", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub min_lr: Option<f64>,
    /// How the learning rate goes on after the warm-up [default: cosine]
    #[arg(long, value_name = "NAME", help_heading = OPTIMIZATION)]
    pub schedule: Option<Schedule>,
    /// Steps up to the peak [default: a tenth of all, at most 100]
    #[arg(long, value_name = "N", help_heading = OPTIMIZATION, value_parser = whole, allow_negative_numbers = true)]
    pub warmup_steps: Option<u64>,
    /// Decay of matrices; vectors do not decay [default: 0.01 for adamw, 0 for sgd]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub weight_decay: Option<f64>,
    /// Of adamw: memory of the gradients' mean [default: 0.9]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub beta1: Option<f64>,
    /// Of adamw: memory of their squares' mean [default: 0.999]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub beta2: Option<f64>,
    /// Of adamw: what is added to the root [default: 1e-8]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub eps: Option<f64>,
    /// Of sgd: how much of the last update goes on [default: 0.9]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub momentum: Option<f64>,
    /// Largest norm of all gradients together; 0 turns clipping off [default: 0]
    #[arg(long, value_name = "NORM", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub grad_clip: Option<f64>,
    /// Part of the target that all classes share [default: 0]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub label_smoothing: Option<f64>,
    /// A weight for each class, with commas between [default: none]
    #[arg(long, value_name = "WEIGHTS", help_heading = OPTIMIZATION, allow_hyphen_values = true)]
    pub class_weights: Option<List<f64>>,
    /// What everything random in training derives from [default: 0]
    #[arg(long, value_name = "N", help_heading = OPTIMIZATION, value_parser = whole, allow_negative_numbers = true)]
    pub seed: Option<u64>,

    /// Where to train: cpu, cuda (each rank on GPUs of its own), cuda:N (one rank alone, on that one), or auto: cuda if
    /// every rank can, else cpu [default: auto]
    #[arg(long, value_name = "DEVICE", help_heading = MACHINE)]
    pub device: Option<DeviceChoice>,
    /// GPUs of each rank, over which the layers are split: for a model that is too large for one [default: 1]
    #[arg(long, value_name = "N", help_heading = MACHINE, value_parser = count, allow_negative_numbers = true)]
    pub devices_per_rank: Option<usize>,
    /// Let several ranks have the same GPU where there are too few: for tests, never for speed [default: false]
    #[arg(long, value_name = "BOOL", help_heading = MACHINE, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub share_gpus: Option<bool>,
    /// In what the model computes: tf32 and bf16 need a GPU; parameters, gradients and moments are kept in f32 in any case
    /// [default: f32]
    #[arg(long, value_name = "TYPE", help_heading = MACHINE)]
    pub dtype: Option<Precision>,
    /// Keep all data in the GPU's memory and gather batches there; auto does where they fit [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = MACHINE)]
    pub data_on_device: Option<Resident>,
    /// On a GPU: capture a step once, and launch it as a whole from then on [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = MACHINE)]
    pub graph: Option<GraphChoice>,
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", help_heading = MACHINE, value_parser = count, allow_negative_numbers = true)]
    pub threads: Option<usize>,

    /// Size of a bucket of gradients, in MB: what is reduced at a time [default: 4]
    #[arg(long, value_name = "MB", help_heading = RANKS, value_parser = number, allow_negative_numbers = true)]
    pub bucket_mb: Option<f64>,
    /// Type in which gradients travel [default: f32]
    #[arg(long, value_name = "TYPE", help_heading = RANKS)]
    pub reduce_dtype: Option<FloatType>,
    /// What ranks divide among them in place of each keeping all of it (ZeRO): 0 nothing, 1 the optimizer's moments
    /// [default: 0]
    #[arg(long, value_name = "LEVEL", help_heading = RANKS, value_parser = whole, allow_negative_numbers = true)]
    pub zero: Option<u64>,
    /// Reduce gradients beside the backward pass, while it runs [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = RANKS)]
    pub overlap: Option<Overlap>,
    /// Seconds that a rank waits for the others before the job ends with code 77 [default: 600]
    #[arg(long, value_name = "S", help_heading = RANKS, value_parser = number, allow_negative_numbers = true)]
    pub timeout_s: Option<f64>,

    /// Folder of this run; it must not hold a run already [default: out]
    #[arg(long, value_name = "DIR", help_heading = OUTPUT)]
    pub out: Option<PathBuf>,
    /// Steps between evaluations on held-out rows; 0 for only at the end [default: an epoch]
    #[arg(long, value_name = "N", help_heading = OUTPUT, value_parser = whole, allow_negative_numbers = true)]
    pub eval_every: Option<u64>,
    /// Steps between lines of the record [default: 10]
    #[arg(long, value_name = "N", help_heading = OUTPUT, value_parser = whole, allow_negative_numbers = true)]
    pub log_every: Option<u64>,
    /// When progress is shown [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = OUTPUT)]
    pub progress: Option<When>,
    /// What is logged on standard error [default: info]
    #[arg(long, value_name = "LEVEL", help_heading = OUTPUT)]
    pub log_level: Option<LogLevel>,
}

/// The flags of `bench mlp`.
#[derive(Args, Clone, Debug)]
pub struct MlpBenchFlags {
    /// Widths: the input's, the hidden ones, the classes
    #[arg(long, value_name = "WIDTHS", default_value = "784,1024,1024,10", hide_default_value = false)]
    pub layers: List<usize>,
    /// Rows of a step, over all ranks
    #[arg(long, value_name = "ROWS", default_value = "128", value_parser = whole, allow_negative_numbers = true)]
    pub batch: u64,
    /// In what the model computes; its values, gradients and moments are f32 in any case
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub dtype: Precision,
    /// Size of a bucket of gradients, in MB
    #[arg(long, value_name = "MB", default_value = "4", value_parser = number, allow_negative_numbers = true)]
    pub bucket_mb: f64,
    /// Type in which gradients travel
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub reduce_dtype: FloatType,
    /// What is kept once over all ranks, in place of once a rank: 0 nothing, 1 the optimizer's moments
    #[arg(long, value_name = "LEVEL", default_value = "0", value_parser = whole, allow_negative_numbers = true)]
    pub zero: u64,
    /// Reduce gradients beside the backward pass, while it runs
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub overlap: Overlap,
    /// On a GPU: capture a step once, and launch it as a whole from then on
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub graph: GraphChoice,
    /// What all have.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// The flags of `bench addmm`.
#[derive(Args, Clone, Debug)]
pub struct AddmmFlags {
    /// Rows of the input
    #[arg(long, value_name = "ROWS", default_value = "2048", value_parser = count, allow_negative_numbers = true)]
    pub m: usize,
    /// Outputs of a row
    #[arg(long, value_name = "OUTPUTS", default_value = "2048", value_parser = count, allow_negative_numbers = true)]
    pub n: usize,
    /// Inputs of a row: what is summed over
    #[arg(long, value_name = "INPUTS", default_value = "2048", value_parser = count, allow_negative_numbers = true)]
    pub k: usize,
    /// Several shapes in turn, as MxNxK with commas between; instead of --m, --n and --k
    #[arg(long, value_name = "SHAPES", conflicts_with_all = ["m", "n", "k"])]
    pub shapes: Option<List<ProductShape>>,
    /// Type of the numbers; tf32 and bf16 on a GPU alone
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub dtype: Precision,
    /// What all have.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// The flags of `bench allreduce`.
#[derive(Args, Clone, Debug)]
pub struct AllreduceFlags {
    /// MB (10⁶ bytes) of the tensor that each rank has: of reduce_scatter and all_gather, the slices of all ranks together
    #[arg(long, value_name = "MB", default_value = "7.4", value_parser = number, allow_negative_numbers = true)]
    pub mb: f64,
    /// Several sizes, from MB to MB by doubling; instead of --mb
    #[arg(long, value_name = "FROM:TO", conflicts_with = "mb")]
    pub sweep: Option<Sweep>,
    /// What the ranks do with it
    #[arg(long, value_name = "NAME", default_value = "all_reduce")]
    pub operation: BenchOperation,
    /// Type of the numbers
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub dtype: FloatType,
    /// On a GPU: many calls captured once, and launched as a whole
    #[arg(long)]
    pub captured: bool,
    /// What all have.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// The flags that all benches have.
#[derive(Args, Clone, Debug)]
pub struct BenchFlags {
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Where: auto, cpu, cuda (each rank has a GPU of its own) or cuda:N (one rank alone)
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
    /// Let several ranks have the same GPU: to see that it works, never for speed
    #[arg(long)]
    pub share_gpus: bool,
    /// How long to measure, in all; of several shapes or sizes, each
    #[arg(long, value_name = "S", default_value = "5", value_parser = number, allow_negative_numbers = true)]
    pub seconds: f64,
    /// In how many rounds, of which the median counts
    #[arg(long, value_name = "N", default_value = "5", value_parser = whole, allow_negative_numbers = true)]
    pub rounds: u64,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "600", value_parser = number, allow_negative_numbers = true)]
    pub timeout_s: f64,
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
