//! The settings of a run: one checked `Config`, which the trainer takes. Programs read it from
//! flags, variables and TOML files.
//!
//! `settings.rs` declares the settings with their limits, `table.rs` reads them from tables,
//! `check.rs` checks them against each other; `derived.rs` has what follows from them.

mod check;
mod derived;
mod settings;
mod table;
pub mod values;

use ddp_kernels::setting::SettingName;
use serde_json::{Map, Value};

pub use derived::Length;
pub use settings::{Config, MODEL, SETTINGS, Setting, SharedBy, find, model_names, model_of};
pub use table::ReadConfig;
pub use values::{
    BestBy, ClassWeights, Decayed, DeviceChoice, FloatType, Form, GraphChoice, GroupSetting,
    Groups, List, LogLevel, LoraSetting, LossOn, Missing, NcclChoice, OptimizerKind, Overlap,
    Packing, Precision, Resident, Resume, Scaling, Schedule, SettingValue, TIMEOUT_S, TaskKind,
    When, as_flag,
};

use crate::checkpoint::{MODEL_FILE, Opened, STATE_FILE, State, damaged};
use crate::error::{Error, Result};
use crate::setting::INIT_FROM;
use crate::tasks;

impl Config {
    /// As TOML, settled: the content of OUT/config.toml.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.with_defaults()).expect("a checked configuration fits TOML")
    }

    /// From TOML; what is missing has its default.
    pub fn from_toml(text: &str) -> Result<Config> {
        let config: Config = toml::from_str(text).map_err(|error| {
            Error::Usage(format!("configuration: {}", error.to_string().trim_end()))
        })?;
        config.check()?;
        Ok(config)
    }

    /// As JSON, settled, for the metrics log and checkpoints. Settings that do not apply are left
    /// out.
    pub fn to_json(&self) -> Map<String, Value> {
        let json = serde_json::to_value(self.with_defaults()).expect("settings fit JSON");
        let Value::Object(mut map) = json else {
            unreachable!("a struct is a map");
        };
        map.retain(|_, value| !value.is_null());
        map
    }

    /// The names of settings that are not at their default.
    pub fn changed(&self) -> Vec<String> {
        let defaults = Config::default().to_json();
        let given = self.to_json().into_iter();
        let changed = given.filter(|(name, value)| defaults.get(name) != Some(value));
        changed.map(|(name, _)| name).collect()
    }

    /// The settings that a checkpoint was saved with, checked.
    pub fn of_checkpoint(opened: &Opened) -> Result<Config> {
        let State { config, task, .. } = &opened.state;
        let family = config.get(MODEL).and_then(Value::as_str);
        if let Some(family) = family.filter(|name| !model_names().contains(name)) {
            return Err(Error::Data(format!(
                "cannot use the checkpoint {}: expected a model of {}, got the unknown family {family:?}; help: use the \
                 program that trained it",
                opened.folder.display(),
                model_names().join(", ")
            )));
        }
        let mut given = config.iter().filter(|(_, value)| !value.is_null());
        if let Some((name, _)) = given.find(|(name, _)| find(name).is_none()) {
            return Err(Error::Data(format!(
                "cannot use the checkpoint {}: {} wrote it, with the setting {name:?}, which this program does not know; \
                 help: use that program, or start a new run from its {MODEL_FILE} ({INIT_FROM})",
                opened.folder.display(),
                opened.state.program
            )));
        }
        let checked = |config: Config| {
            let checked = tasks::of(task).check(&config.loss_options(), config.data.name());
            checked.map(|()| config).map_err(|error| error.to_string())
        };
        let config = Config::from_checkpoint(config).and_then(checked);
        let text = |why| format!("{STATE_FILE} cannot be read: {why}");
        config.map_err(|why| damaged(&opened.folder, text(why)))
    }

    /// The settings of a checkpoint or of a metrics log, checked.
    pub fn from_checkpoint(settings: &Map<String, Value>) -> Result<Config, String> {
        let mut settings = settings.clone();
        settings.retain(|_, value| !value.is_null());
        let config: Config =
            serde_json::from_value(settings.into()).map_err(|error| error.to_string())?;
        config.check().map_err(|error| error.to_string())?;
        Ok(config)
    }

    /// The settings of scope `Run` that have changed since `then`: `lr` 0.01 (was 0.001).
    pub fn changes(&self, then: &Config) -> Vec<String> {
        let (then, now) = (then.to_json(), self.to_json());
        let fixed = SETTINGS
            .iter()
            .filter(|setting| setting.scope == SharedBy::Run);
        let shown = |value: Option<&Value>| value.map_or("not given".into(), as_flag);
        let describe = |name: &str| {
            let (now, then) = (now.get(name), then.get(name));
            let text =
                |[now, then]: [String; 2]| format!("{} {now} (was {then})", SettingName(name));
            (now != then).then(|| text([now, then].map(shown)))
        };
        fixed.map(Setting::name).filter_map(describe).collect()
    }

    /// Name and value of every setting that must be equal on all ranks, a line each.
    pub fn equal_on_all_ranks(&self) -> String {
        let mut text = format!("device = {}\n", self.device.kind());
        let values = self.to_json();
        let shared = SETTINGS.iter().filter(|one| one.scope != SharedBy::Rank);
        for name in shared.map(Setting::name) {
            if let Some(value) = values.get(name) {
                text += &format!("{name} = {value}\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests;
