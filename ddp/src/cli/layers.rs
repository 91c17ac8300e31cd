//! Settings of training from flags, the environment (`DDP_BATCH_SIZE=64`) and a TOML file
//! (`batch-size = 64`). Flags win over the environment, and both over the file. A higher layer also
//! drops what cannot be combined with its settings: `--steps` drops `epochs` of the file.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, PossibleValuesParser, ValueParser};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, FromArgMatches};
use serde::de::DeserializeSeed;
use toml::{Table, Value};

use super::command::Command;
use super::meant::meant;
use crate::config::{Config, Form, MODEL, ReadConfig, SETTINGS, Setting, as_flag, find};
use crate::error::{Error, Result, refuse, with_flags};
use crate::first_values::FirstValues;
use crate::models::ModelSpec;
use crate::record::CONFIG_FILE;
use crate::shown::{is_unseen, shown};

/// The flags of training that were given: one flag for each setting.
#[derive(Clone, Debug, Default)]
pub struct SettingFlags(Vec<(&'static Setting, OsString)>);

impl Args for SettingFlags {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(SETTINGS.iter().map(flag))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |setting: &'static Setting| {
            let name = setting.name();
            let values = matches.try_get_raw(name).ok()??;
            let is_flag = matches.value_source(name) == Some(ValueSource::CommandLine);
            Some((setting, values.last().filter(|_| is_flag)?.to_os_string()))
        };
        Ok(SettingFlags(SETTINGS.iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = SettingFlags::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The flag of a setting.
pub(super) fn flag(setting: &'static Setting) -> Arg {
    let name = setting.name();
    let help = with_flags(&setting.help);
    let help = match &setting.default {
        serde_json::Value::Null => help,
        serde_json::Value::String(none) if none.is_empty() => help,
        default => format!("{help} [default: {}]", as_flag(default)),
    };
    let value = |(name, help): &(&'static str, &'static str)| PossibleValue::new(*name).help(*help);
    let parser = if setting.choices.is_empty() {
        ValueParser::os_string()
    } else {
        PossibleValuesParser::new(setting.choices.iter().map(value)).into()
    };
    let flag = Arg::new(name)
        .long(name)
        .value_name(setting.value_name)
        .help_heading(setting.group.as_str())
        .help(help)
        .value_parser(parser)
        .allow_negative_numbers(true);
    match setting.form {
        Form::One => flag,
        Form::List => flag.allow_hyphen_values(true),
        Form::Switch => flag.num_args(0..=1).default_missing_value("true"),
    }
}

/// Where settings come from, and what to do with them instead of training.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct LayerFlags {
    /// Read settings from this TOML file (or DDP_CONFIG), as in batch-size = 64; the environment
    /// (DDP_BATCH_SIZE=64) wins over it, and flags over both
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub config: Option<PathBuf>,
    /// Print every setting as TOML with its origin, and exit
    #[arg(long, help_heading = HEADING)]
    pub print_config: bool,
    /// Check everything, print the memory and disk space (on GPUs also the time) that the
    /// run will take, and exit
    #[arg(long, help_heading = HEADING)]
    pub dry_run: bool,
}

const HEADING: &str = "Settings";

/// The prefix of our environment variables.
const PREFIX: &str = "DDP_";

/// Variables for the flags of `LayerFlags`.
const CONFIG: &str = "DDP_CONFIG";
const PRINT_CONFIG: &str = "DDP_PRINT_CONFIG";
const DRY_RUN: &str = "DDP_DRY_RUN";

/// Variables that are no settings: of other parts, and what other programs use.
const OTHERS: [&str; 7] = [
    "DDP_JOB",
    "DDP_JOB_SECRET",
    "DDP_SSH",
    "DDP_KERNEL_CACHE",
    "DDP_SIMD",
    "DDP_TRAIN",
    "DDP_PATH",
];

/// Settings that exclude each other: in a higher layer, one drops the other below.
const EXCLUSIVE: [[&str; 2]; 3] = [
    ["steps", "epochs"],
    ["val-data", "val-split"],
    ["batch-size", "batch-tokens"],
];

/// Where a setting comes from. Later ones win.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(super) enum Layer {
    File,
    Variable,
    Flag,
}

/// Settings from several origins.
#[derive(Default)]
pub(super) struct Layers {
    pub(super) config: Config,
    /// Where settings come from, with the name of the file, variable or flag.
    origins: BTreeMap<String, (Layer, String)>,
    /// What `--init-from` names, if the model follows from it.
    first_values: Option<FirstValues>,
}

impl Layers {
    /// Sets `setting` from the text of a flag or variable.
    pub(super) fn set(
        &mut self,
        setting: &Setting,
        text: &OsStr,
        origin: (Layer, String),
    ) -> Result<()> {
        let name = setting.name();
        let context = match &origin {
            (Layer::Variable, variable) => format!("{variable} in the environment: --{name}"),
            _ => format!("--{name}"),
        };
        let Some(text) = text.to_str() else {
            let help = "give another, or rename the file or folder";
            return Err(refuse(&context, text.display(), "a name in UTF-8", help));
        };
        let family = self.config.model.name();
        let set = setting.set(&mut self.config, text);
        set.map_err(|message| Error::Usage(format!("{context} '{text}': {message}")))?;
        if self.config.model.name() != family {
            // Another model family starts from its defaults.
            let is_of_a_model = |name: &str| find(name).is_some_and(|one| !one.families.is_empty());
            self.origins.retain(|name, _| !is_of_a_model(name));
        }
        self.take_over(name, origin);
        Ok(())
    }

    pub(super) fn set_flags(&mut self, flags: &SettingFlags) -> Result<()> {
        for (setting, value) in &flags.0 {
            let origin = (Layer::Flag, format!("--{}", setting.name()));
            self.set(setting, value, origin)?;
        }
        Ok(())
    }

    /// Records where a setting comes from, and drops what it excludes in lower layers.
    fn take_over(&mut self, name: &str, origin: (Layer, String)) {
        let pair = EXCLUSIVE.iter().find(|pair| pair.contains(&name));
        for other in pair.into_iter().flatten().filter(|other| **other != name) {
            let below = self.origins.get(*other);
            let is_below = below.is_some_and(|(layer, _)| *layer < origin.0);
            if let Some(other) = find(other).filter(|_| is_below) {
                other.reset(&mut self.config);
                self.origins.remove(other.name());
            }
        }
        self.origins.insert(name.to_string(), origin);
    }

    /// Takes the `text` of a TOML file, the lowest layer.
    fn read_file(&mut self, path: &Path, text: &str) -> Result<()> {
        let refused = |error: toml::de::Error| {
            // The parser names types of Rust.
            let error = error
                .to_string()
                .replace("expected f64", "expected a number");
            let error = error.replace("expected u64", "expected a whole number");
            let error = error.replace("expected usize", "expected a whole number");
            let path = path.display();
            Error::Usage(format!("--config {path}: {}", error.trim_end()))
        };
        let names = toml::from_str::<Table>(text).map_err(refused)?;
        let refused = |error| {
            let unknown = names.keys().filter(|name| find(name).is_none());
            match unknown.filter_map(|name| meant(name)).next() {
                Some(here) => Error::Usage(format!("{}; help: as a flag, {here}", refused(error))),
                None => refused(error),
            }
        };
        let first = self.first_values.as_ref();
        let base = first.map_or_else(ModelSpec::default, |first| first.model.clone());
        let table = toml::Deserializer::parse(text).map_err(refused)?;
        self.config = ReadConfig(base).deserialize(table).map_err(refused)?;
        for (name, value) in names {
            // Keys of `[model]` are settings, too, but for its name.
            let of_model = value.as_table().into_iter().flatten().map(|(name, _)| name);
            for name in of_model.filter(|name| *name != "name").chain([&name]) {
                self.take_over(name, (Layer::File, path.display().to_string()));
            }
        }
        Ok(())
    }

    /// Reads the environment. Unknown variables that resemble ours are refused.
    fn read_environment(&mut self, variables: &[(OsString, OsString)]) -> Result<()> {
        // The model comes first: it decides which other settings there are.
        let model = variable(MODEL);
        let (first, rest): (Vec<_>, Vec<_>) = variables
            .iter()
            .partition(|(name, _)| name == model.as_str());
        for (name, value) in first.into_iter().chain(rest) {
            let name = name.to_string_lossy().into_owned();
            match SETTINGS.iter().find(|one| variable(one.name()) == name) {
                Some(setting) => self.set(setting, value, (Layer::Variable, name))?,
                None => check_unknown(&name)?,
            }
        }
        Ok(())
    }

    /// Checks the settings. An error about one that is not a flag says where it is set.
    fn check(&self) -> Result<()> {
        self.config.check().map_err(|error| {
            let text = error.to_string();
            let name = text
                .strip_prefix('`')
                .and_then(|text| text.split('`').next());
            match name.and_then(|name| self.origins.get_key_value(name)) {
                Some((name, (layer, origin))) if *layer != Layer::Flag => {
                    Error::Usage(format!("{text} (`{name}` is set in {origin})"))
                }
                _ => error,
            }
        })
    }

    /// Every setting as TOML with its origin, then those that are not set.
    fn describe(&self) -> Result<String> {
        let mut text = String::from(
            "# Read back by --config. Flags win over DDP_… variables, and these over the file.\n",
        );
        let values = Table::try_from(self.config.settled())
            .map_err(|error| Error::Internal(format!("settings do not fit TOML: {error}")))?;
        let mut unset = String::new();
        let apply = |setting: &&Setting| setting.applies_to(&self.config.model);
        for name in SETTINGS.iter().filter(apply).map(Setting::name) {
            let origin = self.origins.get(name).map(|(_, origin)| origin.as_str());
            match values.get(name) {
                Some(value) => {
                    let origin = shown(origin.unwrap_or("default")).to_string();
                    text += &format!("{name} = {}  # {origin}\n", on_one_line(value));
                }
                None => unset += &format!("# {name} is not set\n"),
            }
        }
        Ok(text + &unset)
    }
}

/// A value in TOML on one line, so that a comment can follow, with invisible characters escaped.
fn on_one_line(value: &Value) -> String {
    match value {
        Value::String(text) => in_quotes(text),
        Value::Array(values) => format!(
            "[{}]",
            values
                .iter()
                .map(on_one_line)
                .collect::<Vec<_>>()
                .join(", ")
        ),
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

/// Printed after the help of `resume`.
pub(super) const RESUME_EXAMPLES: &str = "\
Examples:
  ddp-train resume out                           to its end, from its newest checkpoint
  ddp-train resume out --ranks 4                 on other ranks
  ddp-train resume out --steps 2000 --override   longer; without --override if --schedule is constant

As ddp-train --config DIR/config.toml --out DIR --resume auto. Flags change settings of the run; those that change its results \
need --override. So does another number of steps, unless the run has --schedule constant and the --warmup-steps that it had. \
Start it in the folder where the run was started, if its paths are relative.";

/// The run in `folder`, continued with its settings, but for those that flags and the environment
/// change.
pub(super) fn resume(
    folder: &Path,
    mut flags: SettingFlags,
    mut how: LayerFlags,
) -> Result<Command> {
    let file = folder.join(CONFIG_FILE);
    if !file.is_file() {
        return Err(Error::Usage(format!(
            "resume {}: expected the folder of a run, which has {CONFIG_FILE}, got none; help: \
             give what its --out was",
            folder.display()
        )));
    }
    if flags.0.iter().any(|(setting, _)| setting.name() == "out") {
        return Err(Error::Usage(format!(
            "resume {0}: --out cannot be given: it is {0}; help: leave it out, or start a new run \
             with --config {1} --out FOLDER",
            folder.display(),
            file.display()
        )));
    }
    how.config.get_or_insert(file);
    // First, so that a --resume CHECKPOINT wins.
    let own = [("out", folder.as_os_str()), ("resume", OsStr::new("auto"))];
    let own = own.map(|(name, value)| (find(name).expect("a setting"), value.to_os_string()));
    flags.0.splice(0..0, own);
    train(&flags, &how)
}

/// The run that flags, the environment and a file ask for.
pub(super) fn train(flags: &SettingFlags, how: &LayerFlags) -> Result<Command> {
    let is_ours = |name: &OsString| name.as_encoded_bytes().starts_with(PREFIX.as_bytes());
    let variables = std::env::vars_os().filter(|(name, _)| is_ours(name));
    layered(flags, how, variables.collect())
}

fn layered(
    flags: &SettingFlags,
    how: &LayerFlags,
    variables: Vec<(OsString, OsString)>,
) -> Result<Command> {
    let how = how_also(how, &variables)?;
    let mut layers = Layers::default();
    // Once: it may be a pipe.
    let text = how.config.as_ref().map(|path| {
        std::fs::read_to_string(path).map_err(|source| Error::Io {
            action: "read",
            path: path.clone(),
            source,
            help: "--config takes a TOML file, as --print-config writes it".into(),
        })
    });
    let text = text.transpose()?;
    if let Some(path) = how.config.as_ref().filter(|path| is_pipe(path))
        && text.as_deref() == Some("")
    {
        return Err(Error::Usage(format!(
            "--config {}: expected settings, got an empty pipe; help: write them to a file: \
             --ranks reads them again for each rank",
            path.display()
        )));
    }
    if let Some(first) = first_values(flags, &variables, text.as_deref())? {
        layers.config.model = first.model.clone();
        layers.first_values = Some(first);
    }
    if let Some((path, text)) = how.config.as_ref().zip(text) {
        layers.read_file(path, &text)?;
    }
    layers.read_environment(&variables)?;
    layers.set_flags(flags)?;
    if let Some(first) = layers.first_values.take() {
        first.settle(&mut layers.config)?;
    }
    layers.check()?;
    if how.print_config {
        return Ok(Command::Show(layers.describe()?));
    }
    let config = Box::new(layers.config);
    Ok(if how.dry_run {
        Command::DryRun(config)
    } else {
        Command::Train(config)
    })
}

fn is_pipe(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}

/// What `--init-from` names. It is read before other settings, which start from its model.
fn first_values(
    flags: &SettingFlags,
    variables: &[(OsString, OsString)],
    text: Option<&str>,
) -> Result<Option<FirstValues>> {
    const NAME: &str = "init-from";
    let flag = flags.0.iter().find(|(setting, _)| setting.name() == NAME);
    let name = variable(NAME);
    let set = variables.iter().find(|(known, _)| *known == *name);
    // Mistakes in the file are reported when all of it is read.
    let in_file = || {
        let table: Table = toml::from_str(text?).ok()?;
        Some(OsString::from(table.get(NAME)?.as_str()?))
    };
    let flag = flag.map(|(_, path)| path.clone());
    let path = flag
        .or_else(|| set.map(|(_, path)| path.clone()))
        .or_else(in_file);
    path.map_or(Ok(None), |path| FirstValues::of(Path::new(&path)))
}

/// `how`, with what the environment says; a --config flag wins over DDP_CONFIG.
fn how_also(how: &LayerFlags, variables: &[(OsString, OsString)]) -> Result<LayerFlags> {
    let variable = |name: &str| {
        variables
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value)
    };
    let is_set = |name: &str| match variable(name)
        .map(|value| value.to_string_lossy())
        .as_deref()
    {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(Error::Usage(format!(
            "{name} in the environment: expected true or false, got {other:?}"
        ))),
    };
    Ok(LayerFlags {
        config: how
            .config
            .clone()
            .or_else(|| variable(CONFIG).map(PathBuf::from)),
        print_config: how.print_config | is_set(PRINT_CONFIG)?,
        dry_run: how.dry_run | is_set(DRY_RUN)?,
    })
}

/// Refuses a variable whose name is nearly that of a setting, or what another program calls one.
fn check_unknown(name: &str) -> Result<()> {
    let how = [CONFIG, PRINT_CONFIG, DRY_RUN];
    if OTHERS.contains(&name) || how.contains(&name) || name.starts_with("DDP_TEST_") {
        return Ok(());
    }
    // What starts ranks elsewhere may set DDP_WORLD_SIZE and the like.
    let here = meant(name.trim_start_matches(PREFIX)).filter(|here| here.starts_with("write"));
    if let Some(here) = here {
        return Err(Error::Usage(format!(
            "{name} in the environment: no such setting; help: as a flag, {here}; unset {name} if \
             another program uses it"
        )));
    }
    let near = |known: &str| {
        // In short names two letters are too many: DDP_RANK, DDP_PORT and DDP_LOG belong to others.
        let most = if known.len().min(name.len()) < PREFIX.len() + 6 {
            1
        } else {
            2
        };
        let distance = strsim::levenshtein(name, known);
        (distance <= most).then(|| (distance, known.to_string()))
    };
    let known = SETTINGS.iter().map(|setting| variable(setting.name()));
    let known = known.chain(how.map(String::from));
    match known.filter_map(|known| near(&known)).min() {
        Some((_, known)) => Err(Error::Usage(format!(
            "{name} in the environment: no such setting; help: write {known} if that was meant, \
             else unset {name}"
        ))),
        None => Ok(()),
    }
}

/// The variable of a setting: `DDP_BATCH_SIZE` of `batch-size`.
pub(super) fn variable(name: &str) -> String {
    format!("{PREFIX}{}", name.replace('-', "_").to_uppercase())
}

#[cfg(test)]
mod tests;
