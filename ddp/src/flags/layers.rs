//! Settings of training from flags, the environment (`DDP_BATCH_SIZE=64`) and a TOML file
//! (`batch-size = 64`). Flags win over the environment, and both over the file. A higher layer also
//! drops what cannot be combined with its settings: `--steps` drops `epochs` of the file.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::builder::{PossibleValue, PossibleValuesParser, ValueParser};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, FromArgMatches};
use ddp_kernels::setting::{SettingName, spell_settings};
use serde::de::DeserializeSeed;
use toml::{Table, Value};

use super::meant::meant;
use crate::config::{Config, Form, MODEL, ReadConfig, SETTINGS, Setting, as_flag, find};
use crate::error::{Error, Result, refuse};
use crate::shown::{is_unseen, shown};

/// The flags of training that were given: one flag for each setting.
#[derive(Clone, Debug, Default)]
pub(crate) struct SettingFlags(pub(crate) Vec<(&'static Setting, OsString)>);

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
            let mut values = matches.try_get_raw(name).ok()??;
            let is_flag = matches.value_source(name) == Some(ValueSource::CommandLine);
            let value = values.next_back().filter(|_| is_flag)?;
            Some((setting, value.to_os_string()))
        };
        Ok(SettingFlags(SETTINGS.iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = SettingFlags::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Makes all messages of this process write the names of settings as flags.
pub(crate) fn spell_settings_as_flags() {
    // A family of one's own may have names with underscores.
    spell_settings(|name| format!("--{}", name.replace('_', "-")));
}

/// The help of a setting, with flags in place of the names in backquotes of other settings.
fn flags_in_help(help: &str) -> String {
    let part = |(at, part): (usize, &str)| match at % 2 {
        1 if find(part).is_some() => format!("--{part}"),
        1 => format!("`{part}`"),
        _ => part.to_string(),
    };
    help.split('`').enumerate().map(part).collect()
}

/// The flag of a setting.
pub(crate) fn flag(setting: &'static Setting) -> Arg {
    let name = setting.name();
    let help = flags_in_help(&setting.help);
    // The first sentence, and what follows from other settings.
    let (text, found) = help.split_at(help.rfind(" [default: ").unwrap_or(help.len()));
    let end = text.find("; ").into_iter().chain(text.find(". ")).min();
    let short = &text[..end.unwrap_or(text.len())];
    let default = match &setting.default {
        serde_json::Value::Null => String::new(),
        serde_json::Value::String(none) if none.is_empty() => String::new(),
        default => format!(" [default: {}]", as_flag(default)),
    };
    let short = format!("{short}{found}{default}");
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
        .help(short)
        .long_help(format!("{help}{default}"))
        .value_parser(parser)
        .allow_negative_numbers(true);
    match setting.form {
        Form::One => flag,
        Form::List => flag.allow_hyphen_values(true),
        Form::Switch => flag.num_args(0..=1).default_missing_value("true"),
    }
}

/// The prefix of our environment variables.
pub(crate) const PREFIX: &str = "DDP_";

/// The prefix of variables of a job.
const JOB: &str = "DDP_JOB_";

/// Variables that say where settings come from and what to do with them.
pub(crate) const CONFIG: &str = "DDP_CONFIG";
pub(crate) const PRINT_CONFIG: &str = "DDP_PRINT_CONFIG";
pub(crate) const DRY_RUN: &str = "DDP_DRY_RUN";

/// Variables that are no settings: of other parts, and what other programs use.
const OTHERS: &str = "DDP_JOB DDP_JOB_SECRET DDP_JOB_MAC DDP_SSH DDP_KERNEL_CACHE DDP_SIMD DDP_EPILOGUES DDP_MATMUL_MULTIPROCESSORS DDP_TRAIN DDP_PATH DDP_PARENT \
    DDP_TEST DDP_MODE DDP_STRATEGY";

/// Environment variables.
pub(crate) type Variables = BTreeMap<OsString, OsString>;

/// Settings that exclude each other: in a higher layer, one drops the other below.
const EXCLUSIVE: [[&str; 2]; 3] = [
    ["steps", "epochs"],
    ["val-data", "val-split"],
    ["batch-size", "batch-tokens"],
];

/// Where a setting comes from. Later ones win.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) enum Layer {
    File,
    Variable,
    Flag,
}

/// Settings from several origins.
#[derive(Default)]
pub(crate) struct SettingLayers {
    pub(crate) config: Config,
    /// Where settings come from, with the name of the file, variable or flag.
    origins: BTreeMap<String, (Layer, String)>,
}

impl SettingLayers {
    /// Sets `setting` from the text of a flag or variable.
    pub(crate) fn set(
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
        set.map_err(|message| {
            let here = meant(&format!("{name}={text}"));
            let message = here.map_or(message, |here| format!("no such value; help: {here}"));
            Error::Usage(format!("{context} '{text}': {message}"))
        })?;
        if self.config.model.name() != family {
            // Another model family starts from its defaults.
            let is_of_a_model = |name: &str| find(name).is_some_and(|one| !one.families.is_empty());
            self.origins.retain(|name, _| !is_of_a_model(name));
        }
        self.take_over(name, origin);
        Ok(())
    }

    pub(crate) fn set_flags(&mut self, flags: &SettingFlags) -> Result<()> {
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
    pub(crate) fn read_file(&mut self, path: &Path, text: &str) -> Result<()> {
        let refused = |error: toml::de::Error| {
            // The parser names types of Rust.
            let mut error = error.to_string();
            for (kind, name) in [
                ("f64", "number"),
                ("u64", "whole number"),
                ("usize", "whole number"),
            ] {
                error = error.replace(&format!("expected {kind}"), &format!("expected a {name}"));
            }
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
        let base = self.config.model.clone();
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
    pub(crate) fn read_environment(&mut self, variables: &Variables) -> Result<()> {
        // The model comes first: it decides which other settings there are.
        let model = variable(MODEL);
        let first = variables.get_key_value(OsStr::new(&model)).into_iter();
        let rest = variables.iter().filter(|(name, _)| **name != *model);
        for (name, value) in first.chain(rest) {
            let name = name.to_string_lossy().into_owned();
            match SETTINGS.iter().find(|one| variable(one.name()) == name) {
                Some(setting) => self.set(setting, value, (Layer::Variable, name))?,
                None => check_unknown(&name)?,
            }
        }
        Ok(())
    }

    /// Checks the settings. An error about one that is not a flag says where it is set.
    pub(crate) fn check(&self) -> Result<()> {
        self.config.check().map_err(|error| {
            if let Error::Setting { setting, .. } = &error
                && let Some((Layer::File | Layer::Variable, origin)) = self.origins.get(setting)
            {
                let name = SettingName(setting);
                return Error::Usage(format!("{error} ({name} is set in {origin})"));
            }
            error
        })
    }

    /// Every setting as TOML with its origin, then those that are not set.
    pub(crate) fn describe(&self) -> Result<String> {
        let values = Table::try_from(self.config.with_defaults())
            .map_err(|error| Error::Internal(format!("settings do not fit TOML: {error}")))?;
        let head =
            "# Read back by --config. Flags win over DDP_… variables, and these over the file.";
        let (mut text, mut unset) = (format!("{head}\n"), String::new());
        let apply = |setting: &&Setting| setting.applies_to(&self.config.model);
        for name in SETTINGS.iter().filter(apply).map(Setting::name) {
            let origin = self
                .origins
                .get(name)
                .map_or("default", |(_, origin)| origin);
            match values.get(name).map(on_one_line) {
                Some(value) => text += &format!("{name} = {value}  # {}\n", shown(origin)),
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
        Value::Array(values) => {
            let values: Vec<_> = values.iter().map(on_one_line).collect();
            format!("[{}]", values.join(", "))
        }
        other => other.to_string(),
    }
}

/// As JSON has it, which TOML also reads, without what cannot be seen.
fn in_quotes(text: &str) -> String {
    let escaped = |character: char| {
        if is_unseen(character) {
            return format!("\\U{:08X}", u32::from(character));
        }
        character.into()
    };
    let quoted = serde_json::Value::from(text).to_string();
    quoted.chars().map(escaped).collect()
}

/// Refuses a variable whose name is nearly that of a setting, or what another program calls one.
fn check_unknown(name: &str) -> Result<()> {
    let how = [CONFIG, PRINT_CONFIG, DRY_RUN];
    let mut known = OTHERS.split(' ').chain(how);
    if known.any(|it| it == name) || name.starts_with("DDP_TEST_") {
        return Ok(());
    }
    // What starts ranks elsewhere may set DDP_WORLD_SIZE and the like.
    // Short names may be other programs', such as DDP_SCALE.
    let word = name.trim_start_matches(PREFIX);
    let near = |known: String| {
        // In short names two letters are too many: DDP_RANK, DDP_PORT and DDP_LOG belong to others.
        let is_short = known.len().min(name.len()) < PREFIX.len() + 6 || known.starts_with(JOB);
        let distance = strsim::levenshtein(name, &known);
        (distance <= if is_short { 1 } else { 2 }).then_some((distance, known))
    };
    let known = SETTINGS.iter().map(|setting| variable(setting.name()));
    // One that is misspelled would leave a job unprotected.
    let job = OTHERS.split(' ').filter(|it| it.starts_with(JOB));
    let others = how.into_iter().chain(job).map(String::from);
    let nearest = known.chain(others).filter_map(near).min();
    let is_clear = word.len() > 8 || word.contains('_') || nearest.is_some();
    let here = meant(word).filter(|here| is_clear && here.starts_with("write"));
    let help = match (here, nearest) {
        (Some(here), _) => format!("as a flag, {here}; unset {name} if another program uses it"),
        (None, Some((_, known))) => format!("write {known} if that was meant, else unset {name}"),
        (None, None) => return Ok(()),
    };
    let text = format!("{name} in the environment: no such setting; help: {help}");
    Err(Error::Usage(text))
}

/// The variable of a setting: `DDP_BATCH_SIZE` of `batch-size`.
pub(crate) fn variable(name: &str) -> String {
    format!("{PREFIX}{}", name.replace('-', "_").to_uppercase())
}
