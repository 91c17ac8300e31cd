//! The command line.
//!
//! `command.rs` has the commands, whose flags are in their own files; `train.rs` has the settings
//! of commands that train. `flags/` has what commands share, and the flags of ddp-tools' commands.

mod command;
mod train;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use ddp_data::files::is_table;
use ddp_data::words::pasted;
use ddp_tables::possible_labels;
use serde_json::json;

pub(crate) use self::command::Command;
pub(crate) use self::command::HOST_AGENT;
use self::train::LayerFlags;
use crate::about::{ProgramName, about};
use crate::config::model_names;
use crate::error::{Error, Result};
use crate::flags::layers::variable;
use crate::flags::meant::meant;
use crate::flags::{SettingFlags, StartFlags};

/// Reads a command line, the program's name first: the command, and the ranks to start for it.
/// Mistakes in it are an `Error::Usage`.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<(Command, StartFlags)> {
    let words: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let matches = command().try_get_matches_from(&words);
    let cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return Ok((shown_by_clap(&error, &words)?, StartFlags::default())),
    };
    let (command, start) = match cli.command.unwrap_or(Mode::Train(cli.train)) {
        Mode::Train(given) => (train::train(&given.flags, &given.layers)?, given.start),
        Mode::Resume { folder, given } => {
            let command = train::resume(&folder, given.flags, given.layers)?;
            (command, given.start)
        }
        Mode::Completions { shell } => (Command::Show(completions(shell)), StartFlags::default()),
        Mode::Settings => (Command::Show(listed()), StartFlags::default()),
        Mode::Other(command) => {
            match &*command {
                Command::Predict(flags) => flags.check()?,
                Command::Verify(flags) => flags.check()?,
                _ => {}
            }
            let start = command.places().map(StartFlags::at).unwrap_or_default();
            (*command, start)
        }
    };
    match command {
        Command::Show(_) => Ok((command, StartFlags::default())),
        _ => Ok((command, start)),
    }
}

/// Help and the version are texts to show; everything else is wrong usage.
fn shown_by_clap(error: &clap::Error, words: &[OsString]) -> Result<Command> {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // Examples name the program that everyone has.
            let text = text.trim_end().replace("ddp-train", about().name);
            Ok(Command::Show(format!("{text}\n")))
        }
        _ => {
            // The caller adds "error: ".
            let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
            let text = || format!("{}{text}", of_variable(error, words));
            let known = of_another_program(error, words);
            Err(Error::Usage(known.unwrap_or_else(text)))
        }
    }
}

/// The refusal of a command, or of a flag of training or its value, whose name here is known, and
/// of a file without a flag.
fn of_another_program(error: &clap::Error, words: &[OsString]) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let command = words.get(1)?.to_string_lossy();
    let stray = text(ContextKind::InvalidSubcommand).or(text(ContextKind::InvalidArg));
    if let Some(file) = stray.filter(|it| !it.starts_with('-') && Path::new(it).is_file()) {
        return Some(format!("{file}: expected a flag; help: {}", of_file(file)));
    }
    if text(ContextKind::InvalidSubcommand).is_some_and(|it| it == command) {
        let here = meant(&format!("command={command}"))?;
        return Some(format!("{command}: no such command; help: {here}"));
    }
    let flag = text(ContextKind::InvalidArg)?.split(['=', ' ']).next()?;
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    let (given, what) = match error.kind() {
        ErrorKind::UnknownArgument => (flag.to_string(), "flag"),
        ErrorKind::InvalidValue => (format!("{flag}={value}"), "value"),
        _ => return None,
    };
    let is_training = ["train", "resume"].contains(&&*command) || command.starts_with('-');
    let here = meant(&given).filter(|_| is_training)?;
    Some(format!("{given}: no such {what}; help: {here}"))
}

/// What to write for a file that is given without a flag.
fn of_file(file: &str) -> String {
    let path = Path::new(file);
    let labels = is_table(path).then(|| possible_labels(path).ok()).flatten();
    let labels = labels.unwrap_or_default();
    let labels: Vec<_> = labels.iter().map(|name| pasted([&**name])).collect();
    let data = format!("write --data {}", pasted([file]));
    match &labels[..] {
        [] => data,
        [label] => format!("{data} --labels {label}"),
        all => format!(
            "{data} --labels COLUMN; these could be labels: {}",
            all.join(", ")
        ),
    }
}

/// `DDP_DEVICE in the environment: ` if the wrong value comes from there and not from `words`.
fn of_variable(error: &clap::Error, words: &[OsString]) -> String {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else {
        return String::new();
    };
    let flag = argument.split([' ', '=', '[']).next().unwrap_or_default();
    let name = variable(flag.trim_start_matches('-'));
    let is_flag = |word: &OsString| word.to_string_lossy().split('=').next() == Some(flag);
    if words.iter().any(is_flag) || std::env::var_os(&name).is_none() {
        return String::new();
    }
    format!("{name} in the environment: ")
}

const ABOUT: &str =
    "Trains a model on one process, or on several ranks that --ranks, MPI or torchrun starts.";

const EXAMPLES: &str = "\
Examples:
  ddp-train                                  built-in digits, one process
  ddp-train --ranks 2 --out two              the same batches, divided between two ranks
  ddp-train --hosts node1:4,node2:4          four ranks on each of two hosts, over ssh
  mpirun -n 2 ddp-train --out two            the same, started by MPI
  ddp-train --epochs 20 --lr 3e-4 --hidden 1024,1024 --dropout 0.1
  ddp-train --data synthetic:regression,features=32,outputs=2 --optimizer sgd --lr 0.05
  mpirun -n 2 ddp-train bench mlp --layers 784,1024,1024,10 --batch 128
  mpirun -n 2 ddp-train bench allreduce --sweep 0.001:64
  ddp-train bench addmm --shapes 2048x2048x2048,128x1024x784

OUT/metrics.jsonl is the metrics log of a run, OUT/config.toml its settings, OUT/checkpoints/ its models.

Exit codes: 0 done, 1 compared runs differ, 2 wrong flags, 3 not as claimed, 4 cannot be told (verify), 65 bad data, 69 doctor found a problem,
70 internal error, 71 out of memory, 74 files, 75 stopped on request and saved,
76 loss not finite, 77 a rank lost or hung, 78 ranks disagree, 130 Ctrl-C twice,
143 SIGTERM to a command that does not train

-h shows the flags that most people use, --help all. Every setting can also be an environment
variable: DDP_BATCH_SIZE=64. The help of other flags names their variables.";

#[derive(Parser, Debug)]
#[command(about = ABOUT, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
#[command(max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Option<Mode>,
    #[command(flatten)]
    train: TrainFlags,
}

// The flags of commands that train. A doc comment would become their help.
#[derive(Args, Debug)]
struct TrainFlags {
    #[command(flatten)]
    flags: SettingFlags,
    #[command(flatten)]
    layers: LayerFlags,
    #[command(flatten)]
    start: StartFlags,
}

#[derive(Subcommand, Debug)]
enum Mode {
    /// Train; the default command
    #[command(after_help = EXAMPLES, max_term_width = 120)]
    Train(TrainFlags),
    /// Continue the run in a folder, with its settings
    #[command(after_help = train::RESUME_EXAMPLES, max_term_width = 120)]
    Resume {
        /// The folder of the run: what --out was
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        #[command(flatten)]
        given: TrainFlags,
    },
    #[command(flatten)]
    Other(Box<Command>),
    /// Print the flags of `train` as JSON: the Python package takes them as keywords
    #[command(hide = true)]
    Settings,
    /// Print a shell's completion script, as in: source <(ddp-train completions bash)
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// What `-h` shows of the flags that train; `--help` shows all.
const OFTEN: &str = "model data labels val-data val-split drop categorical missing normalize \
    batch-size steps epochs stop-after lr device resume out config ranks";

/// The whole command line.
fn command() -> clap::Command {
    let short = |flag: clap::Arg| {
        let is_often = |name| OFTEN.split(' ').any(|often| often == name);
        let is_shown = flag.get_long().is_none_or(is_often);
        flag.hide_short_help(!is_shown)
    };
    let ProgramName { name, version } = *about();
    let command = Cli::command().name(name).bin_name(name).version(version);
    let command = command.mut_args(short);
    let of_training = |command: clap::Command| command.mut_args(short);
    let command = command.mut_subcommand("train", of_training);
    command.mut_subcommand("resume", of_training)
}

/// The completion script for a shell.
fn completions(shell: clap_complete::Shell) -> String {
    let mut bytes = Vec::new();
    let name = about().name;
    clap_complete::generate(shell, &mut with_names(command()), name, &mut bytes);
    // clap_complete 4.6.11 takes the dash in a program's name for the end of it: the labels of
    // subcommands in its script for bash differ from the values that it compares them with.
    let label = name.replace('-', "__");
    let wrong = name.replace('-', "__subcmd__");
    let mut text = String::from_utf8_lossy(&bytes).replace(&wrong, &label);
    // Where a path stands it has nothing but flags: they would keep bash from completing files.
    let with_paths = "compare export inspect report resume show-tokens tokenize verify watch";
    for command in with_paths.split(' ') {
        let label = format!("{label}__subcmd__{command})\n");
        let files = "[[ ${cur} == -* || ${prev} == -* ]] || return 0\n";
        text = text.replace(&label, &(label.clone() + files));
    }
    text
}

/// The flags of training with their help and defaults as JSON, for the Python package.
fn listed() -> String {
    let mut command = command();
    let train = command.find_subcommand_mut("train").expect("a command");
    let about = |flag: &clap::Arg| {
        let help = flag.get_long_help().or(flag.get_help());
        let default = flag.get_default_values().first();
        let values = flag.get_possible_values();
        Some(json!({
            "name": flag.get_long()?,
            "group": flag.get_help_heading(),
            "help": help.map(ToString::to_string),
            "default": default.map(|default| default.to_string_lossy()),
            "choices": values.iter().map(|value| value.get_name()).collect::<Vec<_>>(),
        }))
    };
    let flags: Vec<_> = train.get_arguments().filter_map(about).collect();
    let listed = json!({ "reads_parquet": cfg!(feature = "parquet"), "flags": flags });
    format!("{listed}\n")
}

/// The command with the names that flags take beside other values, for completions.
fn with_names(command: clap::Command) -> clap::Command {
    let named = |flag: clap::Arg| {
        let names = match flag.get_id().as_str() {
            "model" => model_names(),
            "device" => vec!["auto", "cpu", "cuda"],
            "resume" => vec!["auto", "never"],
            "ranks" => vec!["auto"],
            _ => return flag,
        };
        // A default need not be one of the names.
        flag.default_value(None)
            .value_parser(PossibleValuesParser::new(names))
    };
    command.mut_args(named).mut_subcommands(with_names)
}

#[cfg(test)]
mod tests;
