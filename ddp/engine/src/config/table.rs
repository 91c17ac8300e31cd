//! Reads a configuration from a table of settings: TOML, or the JSON of a checkpoint.

use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::settings::{
    Config, SETTINGS, Setting, as_value, default_of, find, model_of, requires_family,
};
use ddp_nn::models::ModelSpec;

impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Config, D::Error> {
        deserializer.deserialize_map(ReadConfig)
    }
}

/// Reads a table of settings. What is missing has its default; unknown names are refused.
struct ReadConfig;

impl<'de> Visitor<'de> for ReadConfig {
    type Value = Config;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of settings")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut table: M) -> Result<Config, M::Error> {
        let mut config = Config::default();
        let mut model = Map::new();
        while let Some(KnownName(name)) = table.next_key()? {
            if name == "model" || !find(&name).is_some_and(|one| one.families.is_empty()) {
                let value = table.next_value_seed(ModelValue(&name))?;
                model.insert(name, value);
            } else {
                config.read_value(&name, &mut table)?;
            }
        }
        let model = read_model(model, &ModelSpec::default());
        config.model = model.map_err(de::Error::custom)?;
        Ok(config)
    }
}

/// A model from its settings. What they do not say is as in `base`.
pub fn read_model(mut settings: Map<String, Value>, base: &ModelSpec) -> Result<ModelSpec, String> {
    let default = match settings.remove("model") {
        None => base,
        Some(Value::Object(table)) => &model_of_table(table, &mut settings, base)?,
        Some(name) => &model_of(name.as_str().unwrap_or_default(), Some(base))?,
    };
    let applies = |name: &str| find(name).is_some_and(|one| one.applies_to(default));
    if let Some(other) = settings.keys().find(|name| !applies(name)) {
        return Err(format!("`{other}` {}", requires_family(other, default)));
    }
    with_settings(default, settings)
}

/// The model that a table `[model]` names, whose settings join the others.
fn model_of_table(
    mut table: Map<String, Value>,
    settings: &mut Map<String, Value>,
    base: &ModelSpec,
) -> Result<ModelSpec, String> {
    let name = table.remove("name");
    let name = name.as_ref().and_then(Value::as_str);
    let model = model_of(
        name.ok_or("[model]: expected name = \"gpt\", or another family")?,
        Some(base),
    )?;
    if let Some(twice) = table.keys().find(|name| settings.contains_key(*name)) {
        return Err(format!(
            "{twice}: expected once, got it in [model] and above; help: remove one"
        ));
    }
    settings.extend(table);
    Ok(model)
}

fn with_settings(model: &ModelSpec, settings: Map<String, Value>) -> Result<ModelSpec, String> {
    let mut table = as_value(model);
    if let Some(table) = table.as_object_mut() {
        table.extend(settings);
    }
    serde_json::from_value(table).map_err(|error| error.to_string())
}

/// The value of a setting of models. One that no family takes is refused where it stands. `model`
/// itself may be a table of settings.
struct ModelValue<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for ModelValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Value, D::Error> {
        if self.0 == "model" {
            return value.deserialize_any(ModelTable);
        }
        let value = Value::deserialize(value)?;
        let one = Map::from_iter([(self.0.to_string(), value.clone())]);
        let known = find(self.0).map_or(&[][..], |setting| &setting.families);
        let models = known.iter().filter_map(|name| default_of(name).ok());
        let read: Vec<_> = models
            .map(|model| with_settings(model, one.clone()))
            .collect();
        match read.first() {
            Some(Err(why)) if read.iter().all(Result::is_err) => Err(de::Error::custom(why)),
            _ => Ok(value),
        }
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
        Ok(name.into())
    }

    fn visit_map<M: MapAccess<'de>>(self, mut table: M) -> Result<Value, M::Error> {
        let mut all = Map::new();
        while let Some(ModelKey(name)) = table.next_key()? {
            let value = table.next_value_seed(ModelValue(&name))?;
            all.insert(name, value);
        }
        Ok(Value::Object(all))
    }
}

/// A key of `[model]`.
#[derive(serde::Deserialize)]
#[serde(try_from = "String")]
struct ModelKey(String);

impl TryFrom<String> for ModelKey {
    type Error = String;

    fn try_from(name: String) -> Result<ModelKey, String> {
        let is_of_models = |one: &Setting| one.name() != "model" && !one.families.is_empty();
        if name == "name" || find(&name).is_some_and(is_of_models) {
            return Ok(ModelKey(name));
        }
        let names = SETTINGS.iter().filter(|one| is_of_models(one));
        let names: Vec<_> = names.map(Setting::name).collect();
        let names = names.join(", ");
        Err(format!(
            "[model] has no setting {name:?}, but name, {names}; help: other settings are above it"
        ))
    }
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
        let names = SETTINGS.iter().filter(|one| !one.is_hidden);
        let names: Vec<String> = names.map(Setting::name).collect();
        let names = names.join(", ");
        Err(format!("unknown setting {name:?}, expected one of {names}"))
    }
}
