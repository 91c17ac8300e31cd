//! What a run's flags are laid over: the environment (`DDP_BATCH_SIZE=64`), and below it a TOML file (`batch-size = 64`). A setting of a
//! higher layer hides the same one below, and what it cannot go together with: `--steps` hides `epochs`.
//!
//! A variable is read as its flag would be, so that both take the same values and say the same of others.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser};
use toml::{Table, Value};

use super::{Cli, Command, Flags};
use crate::config::Config;
use crate::config::check::texts;
use crate::error::{Error, Result};
use crate::shown::{is_unseen, shown};

/// Where settings come from, and what is done with them in place of training.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct LayerFlags {
    /// Read settings from this TOML file (or DDP_CONFIG): flags' names without the dashes; the environment (DDP_BATCH_SIZE=64)
    /// wins over it, and flags over both
    #[arg(long, value_name = "FILE", help_heading = SETTINGS)]
    pub config: Option<PathBuf>,
    /// Print every setting as TOML with where it comes from, and train nothing
    #[arg(long, help_heading = SETTINGS)]
    pub print_config: bool,
    /// Check everything, say what memory and time the run will take, and train nothing
    #[arg(long, help_heading = SETTINGS)]
    pub dry_run: bool,
}

pub(super) const SETTINGS: &str = "Settings";

/// What variables of settings begin with.
const PREFIX: &str = "DDP_";

/// Variables that say what is done with settings, as the flags of `LayerFlags` do.
const CONFIG: &str = "DDP_CONFIG";
const PRINT_CONFIG: &str = "DDP_PRINT_CONFIG";
const DRY_RUN: &str = "DDP_DRY_RUN";

/// Variables of ours that are no settings.
const OTHERS: [&str; 4] = ["DDP_KERNEL_CACHE", "DDP_CUDA_INCLUDE", "DDP_LONG", "DDP_TRAIN"];

/// Of two settings in one row, the one in a higher layer hides the other below.
const EXCLUSIVE: [[&str; 2]; 2] = [["steps", "epochs"], ["val-data", "val-split"]];

/// Where a setting stands.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    File(PathBuf),
    Variable(String),
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File(path) => path.display().fmt(f),
            Origin::Variable(name) | Origin::Flag(name) => f.write_str(name),
        }
    }
}

/// Settings from several places, by name.
#[derive(Default)]
struct Layers {
    values: Table,
    origins: BTreeMap<String, Origin>,
}

impl Layers {
    /// Lays `flags` over what is there.
    fn lay(&mut self, flags: &Flags, origin: impl Fn(&str) -> Origin) -> Result<()> {
        let given = match Table::try_from(flags) {
            Ok(given) => given,
            // TOML lacks the largest whole numbers and names that are no UTF-8, and no setting may be one: the checks say which it is.
            Err(error) => {
                let Flags { out, cache_dir, init_from, .. } = flags;
                let paths = [("--out", out), ("--cache-dir", cache_dir), ("--init-from", init_from)];
                texts(paths.map(|(flag, path)| (flag, path.as_deref())))?;
                Config::resolve(flags.clone())?;
                return Err(Error::Internal(format!("settings cannot be written as TOML: {error}")));
            }
        };
        for (name, value) in given {
            let others = EXCLUSIVE.iter().filter(|pair| pair.contains(&name.as_str())).flatten();
            for other in others.filter(|&&other| other != name && self.is_below(other, &origin)).collect::<Vec<_>>() {
                self.values.remove(*other);
                self.origins.remove(*other);
            }
            self.origins.insert(name.clone(), origin(&name));
            self.values.insert(name, value);
        }
        Ok(())
    }

    /// Whether `name` stands in another layer than the one that `origin` is of.
    fn is_below(&self, name: &str, origin: &impl Fn(&str) -> Origin) -> bool {
        let layer = |origin: &Origin| std::mem::discriminant(origin);
        self.origins.get(name).is_some_and(|there| layer(there) != layer(&origin(name)))
    }

    /// The configuration. What is wrong with a setting that is no flag is said with where it stands.
    fn resolve(&self) -> Result<Config> {
        let flags: Flags = self
            .values
            .clone()
            .try_into()
            .map_err(|error| Error::Internal(format!("settings do not read back: {error}")))?;
        Config::resolve(flags).map_err(|error| {
            let text = error.to_string();
            let name = text.strip_prefix("--").and_then(|text| text.split([' ', ':']).next()).unwrap_or_default();
            match self.origins.get(name) {
                Some(origin @ (Origin::File(_) | Origin::Variable(_))) => {
                    Error::Usage(format!("{text} (--{name} is set in {origin})"))
                }
                _ => error,
            }
        })
    }

    /// Every setting of `config` as TOML, each with where it comes from, and those that are not set.
    fn describe(&self, config: &Config) -> Result<String> {
        let mut text =
            String::from("# Read back by --config. Flags win over DDP_… variables, and these over the file.\n");
        let values = Table::try_from(config)
            .map_err(|error| Error::Internal(format!("settings cannot be written as TOML: {error}")))?;
        for (name, value) in names().filter_map(|name| values.get(&name).map(|value| (name, value))) {
            let origin = self.origins.get(&name).map_or_else(|| "default".to_string(), Origin::to_string);
            text += &format!("{name} = {}  # {}\n", on_one_line(value), shown(&origin));
        }
        for name in names().filter(|name| !values.contains_key(name)) {
            text += &format!("# {name} is not set\n");
        }
        Ok(text)
    }
}

/// A value as TOML has it, on one line, so that a comment can stand behind it, and with nothing in it that a terminal would not show.
fn on_one_line(value: &Value) -> String {
    match value {
        Value::String(text) => in_quotes(text),
        Value::Array(values) => format!("[{}]", values.iter().map(on_one_line).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

fn in_quotes(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            other if is_unseen(other) => quoted += &format!("\\U{:08X}", u32::from(other)),
            other => quoted.push(other),
        }
    }
    quoted + "\""
}

/// The run that flags ask for, laid over the environment and a file.
pub(super) fn train(flags: Flags, how: &LayerFlags) -> Result<Command> {
    let variables = std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(PREFIX.as_bytes()));
    layered(&flags, how, variables.collect())
}

fn layered(flags: &Flags, how: &LayerFlags, variables: Vec<(OsString, OsString)>) -> Result<Command> {
    let how = how_also(how, &variables)?;
    let mut layers = Layers::default();
    if let Some(path) = &how.config {
        layers.lay(&of_file(path)?, |_| Origin::File(path.clone()))?;
    }
    let (from_variables, names) = of_variables(variables)?;
    layers.lay(&from_variables, |name| Origin::Variable(names.get(name).cloned().unwrap_or_else(|| variable(name))))?;
    layers.lay(flags, |name| Origin::Flag(format!("--{name}")))?;
    let config = layers.resolve()?;
    if how.print_config {
        return Ok(Command::Show(layers.describe(&config)?));
    }
    Ok(if how.dry_run { Command::DryRun(Box::new(config)) } else { Command::Train(Box::new(config)) })
}

/// What is done with settings, where the environment says it too: the file of a flag wins.
fn how_also(how: &LayerFlags, variables: &[(OsString, OsString)]) -> Result<LayerFlags> {
    let variable = |name: &str| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let is_set = |name: &str| match variable(name).map(|value| value.to_string_lossy()).as_deref() {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(Error::Usage(format!("{name} in the environment: expected true or false, got {other:?}"))),
    };
    Ok(LayerFlags {
        config: how.config.clone().or_else(|| variable(CONFIG).map(PathBuf::from)),
        print_config: how.print_config | is_set(PRINT_CONFIG)?,
        dry_run: how.dry_run | is_set(DRY_RUN)?,
    })
}

fn of_file(path: &Path) -> Result<Flags> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
        action: "read",
        path: path.to_path_buf(),
        source,
        way_out: "--config takes a TOML file, as --print-config writes it.".into(),
    })?;
    toml::from_str(&text)
        .map_err(|error| Error::Usage(format!("--config {}: {}", path.display(), error.to_string().trim_end())))
}

/// What variables say, and the variable of each setting.
fn of_variables(variables: Vec<(OsString, OsString)>) -> Result<(Flags, BTreeMap<String, String>)> {
    let by_variable: BTreeMap<String, String> = names().map(|name| (variable(&name), name)).collect();
    let (mut words, mut names) = (vec![OsString::from("ddp-train")], BTreeMap::new());
    for (name, value) in variables {
        let name = name.to_string_lossy().into_owned();
        let Some(flag) = by_variable.get(&name) else {
            check_unknown(&name, by_variable.keys())?;
            continue;
        };
        let mut word = OsString::from(format!("--{flag}="));
        word.push(value);
        words.push(word);
        names.insert(flag.clone(), name);
    }
    let flags = Cli::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        // What stands behind is about command lines.
        let text =
            text.split("\n\nUsage:").next().unwrap_or(text).split("\n\nFor more").next().unwrap_or(text).trim_end();
        let of =
            names.iter().find(|(flag, _)| text.contains(&format!("--{flag} ")) || text.contains(&format!("--{flag}'")));
        Error::Usage(of.map_or_else(
            || format!("in the environment: {text}"),
            |(_, name)| format!("{name} in the environment: {text}"),
        ))
    })?;
    Ok((flags.flags, names))
}

/// Refuses a variable that is almost a setting's: it was meant to be one.
fn check_unknown<'a>(name: &str, known: impl Iterator<Item = &'a String>) -> Result<()> {
    let how = [CONFIG, PRINT_CONFIG, DRY_RUN];
    if OTHERS.contains(&name) || how.contains(&name) || name.starts_with("DDP_TEST_") {
        return Ok(());
    }
    let near = |known: &str| {
        // Of a short name two letters are most of it: DDP_RANK, DDP_PORT and DDP_LOG are somebody else's.
        let most = if known.len().min(name.len()) < PREFIX.len() + 6 { 1 } else { 2 };
        let distance = distance(name, known);
        (distance <= most).then(|| (distance, known.to_string()))
    };
    match known.map(String::as_str).chain(how).filter_map(near).min() {
        Some((_, known)) => Err(Error::Usage(format!(
            "{name} in the environment: there is no such setting. Write {known} if that was meant, else unset {name}"
        ))),
        None => Ok(()),
    }
}

/// How many characters have to be put in, taken out or changed to make one of the other.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, character) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (place, &there) in other.iter().enumerate() {
            let cost = diagonal + usize::from(there != character);
            diagonal = row[place + 1];
            row[place + 1] = cost.min(row[place] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

/// The names of all settings, in the order of the help.
fn names() -> impl Iterator<Item = String> {
    let command = <Flags as Args>::augment_args(clap::Command::new("settings"));
    command.get_arguments().filter_map(|flag| flag.get_long().map(String::from)).collect::<Vec<_>>().into_iter()
}

/// `batch-size` as a variable: `DDP_BATCH_SIZE`.
pub(super) fn variable(name: &str) -> String {
    format!("{PREFIX}{}", name.replace('-', "_").to_uppercase())
}

/// What a shell reads to complete this program's command lines.
pub(super) fn completions(shell: clap_complete::Shell) -> String {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ddp-train", &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests;
