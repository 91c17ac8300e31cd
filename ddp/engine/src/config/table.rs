//! Reads a configuration from a table of settings: TOML, or the JSON of a checkpoint.

use std::fmt;

use ddp_kernels::setting::SettingName;
use ddp_nn::models::ModelSpec;
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::settings::{Config, MODEL, SETTINGS, Setting, find, model_of};

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Config, D::Error> {
        ReadConfig(ModelSpec::default()).deserialize(deserializer)
    }
}

/// Reads a table of settings. What is missing has its default, settings of the model those of this
/// one; unknown names are refused.
pub struct ReadConfig(pub ModelSpec);

impl<'de> DeserializeSeed<'de> for ReadConfig {
    type Value = Config;

    fn deserialize<D: Deserializer<'de>>(self, table: D) -> Result<Config, D::Error> {
        table.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ReadConfig {
    type Value = Config;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of settings")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut table: M) -> Result<Config, M::Error> {
        let mut values = Map::new();
        while let Some(KnownName(name)) = table.next_key()? {
            let value = table.next_value_seed(ValueOf(&name))?;
            values.insert(name, value);
        }
        of_values(values, self.0).map_err(de::Error::custom)
    }
}

/// The configuration with these settings, the rest of the model as in `base`.
fn of_values(mut values: Map<String, Value>, base: ModelSpec) -> Result<Config, String> {
    let model = match values.remove(MODEL) {
        None => base,
        Some(Value::Object(mut table)) => {
            let name = table.remove("name");
            let name = name.as_ref().and_then(Value::as_str);
            let name = name.ok_or("[model]: expected name = \"gpt\", or another family")?;
            if let Some(twice) = table.keys().find(|name| values.contains_key(*name)) {
                return Err(format!(
                    "{twice}: expected once, got it in [model] and above; help: remove one"
                ));
            }
            values.extend(table);
            model_of(name, Some(&base))?
        }
        Some(name) => model_of(name.as_str().unwrap_or_default(), Some(&base))?,
    };
    let mut config = Config {
        model,
        ..Config::default()
    };
    for (name, value) in values {
        let setting = find(&name).ok_or("a name is known")?;
        let set = setting.set_value(&mut config, value);
        set.map_err(|why| format!("{} {why}", SettingName(&name)))?;
    }
    Ok(config)
}

/// The value of a setting, refused where it stands if no run can have it.
struct ValueOf<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for ValueOf<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Value, D::Error> {
        if self.0 == MODEL {
            return value.deserialize_any(ModelTable);
        }
        let value = Value::deserialize(value)?;
        let setting = find(self.0).expect("a known name");
        setting.try_value(&value).map_err(de::Error::custom)?;
        Ok(value)
    }
}

/// The name of a model, or a table with it and with settings.
struct ModelTable;

impl<'de> Visitor<'de> for ModelTable {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a model, or a table with its name and settings")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Value, E> {
        // First: else the error would name one of its settings.
        model_of(name, None).map_err(E::custom)?;
        Ok(name.into())
    }

    fn visit_map<M: MapAccess<'de>>(self, mut table: M) -> Result<Value, M::Error> {
        let mut all = Map::new();
        while let Some(name) = table.next_key::<String>()? {
            let value = match &*name {
                "name" => table.next_value()?,
                _ if find(&name).is_some_and(|one| !one.families.is_empty()) => {
                    table.next_value_seed(ValueOf(&name))?
                }
                _ => return Err(de::Error::custom(no_model_setting(&name))),
            };
            all.insert(name, value);
        }
        Ok(Value::Object(all))
    }
}

fn no_model_setting(name: &str) -> String {
    let names = SETTINGS.iter().filter(|one| !one.families.is_empty());
    let names: Vec<_> = names.map(Setting::name).collect();
    let names = names.join(", ");
    format!("[model] has no setting {name:?}, but name, {names}; help: other settings are above it")
}

/// The name of a setting, as a table has it.
#[derive(serde::Deserialize)]
#[serde(try_from = "String")]
struct KnownName(String);

impl TryFrom<String> for KnownName {
    type Error = String;

    fn try_from(name: String) -> Result<KnownName, String> {
        if find(&name).is_some() {
            return Ok(KnownName(name));
        }
        let names: Vec<&str> = SETTINGS.iter().map(Setting::name).collect();
        let names = names.join(", ");
        Err(format!(
            "unknown setting {name:?}, expected one of {names}; help: a program with models of its \
             own has other settings, too: use the one that trained the run"
        ))
    }
}
