//! The setting that chooses a model, and those that model families have.

use ddp_nn::models::ModelSpec;
use ddp_nn::models::family::FamilySetting;

use super::{MODEL, Setting, SharedBy, get_field};
use crate::config::values::{Form, Limits};

/// The setting `model`.
pub(super) fn model_setting() -> Setting {
    let mut lines = Vec::new();
    for family in ModelSpec::families() {
        let (name, help) = (family.name, family.help);
        let names: Vec<_> = family.presets.iter().map(|(name, _)| *name).collect();
        lines.push(match names.len() {
            0 => format!("{name}: {help}"),
            _ => format!("{name}: {help} (presets: {})", names.join(", ")),
        });
    }
    Setting {
        name: MODEL.to_string(),
        help: format!(
            "Model family or preset; settings may follow, as in gpt,layers=6,width=384. {}",
            lines.join("; ")
        ),
        group: "Model".to_string(),
        value_name: "MODEL",
        scope: SharedBy::Run,
        form: Form::One,
        choices: Vec::new(),
        default: ModelSpec::default().name().into(),
        families: Vec::new(),
        commands: &[],
        limits: Limits::Any,
        field: get_field(|_| None),
    }
}

/// The settings of all families, grouped by the families that have them. Families may share a name;
/// its help is that of the first family.
pub(super) fn settings_of_families() -> Vec<Setting> {
    let mut all: Vec<Setting> = Vec::new();
    for mut family in ModelSpec::families() {
        let name = family.name;
        for setting in family.default.settings() {
            let known = all.iter_mut().find(|known| known.name == setting.name);
            match known {
                Some(known) => known.families.push(name),
                None => all.push(family_setting(name, setting)),
            }
        }
    }
    for setting in &mut all {
        setting.group = format!("Model {}", setting.families.join(", "));
    }
    all.sort_by_key(|setting| setting.families.len());
    all
}

fn family_setting(family: &'static str, setting: FamilySetting<'_>) -> Setting {
    let (name, fixed) = (setting.name.clone(), setting.changes_results);
    Setting {
        name: setting.name,
        help: setting.help,
        group: String::new(),
        value_name: setting.value_name,
        scope: if fixed { SharedBy::Run } else { SharedBy::Job },
        form: setting.field.form(),
        choices: setting.field.choices(),
        default: setting.field.value(),
        families: vec![family],
        commands: &[],
        // The family checks it.
        limits: Limits::Any,
        field: get_field(move |config| Some(config.model.setting(&name)?.field)),
    }
}

/// The model that `gpt` or `gpt2,context=512` means. The name of a `current` model's family keeps
/// its settings.
pub fn model_of(text: &str, current: Option<&ModelSpec>) -> Result<ModelSpec, String> {
    let mut parts = text.split(',');
    let name = parts.next().unwrap_or_default();
    let current = current.filter(|current| current.name() == name);
    let mut model = current.map_or_else(|| default_of(name), |current| Ok(current.clone()))?;
    let mut given = Vec::new();
    for part in parts {
        let (name, value) = part.split_once('=').unwrap_or((part, "true"));
        if given.contains(&name) {
            return Err(format!(
                "{name}: expected once, got it twice; help: remove one"
            ));
        }
        given.push(name);
        let Some(setting) = model.setting(name) else {
            let names: Vec<_> = model.values().into_iter().map(|(name, _)| name).collect();
            let (family, names) = (model.name(), names.join(", "));
            return Err(format!("{family} has no setting {name:?}, but {names}"));
        };
        let set = setting.field.set(value);
        set.map_err(|error| format!("{part}: {error}"))?;
    }
    Ok(model)
}

/// A model of the family or preset `name`.
pub(super) fn default_of(name: &str) -> Result<ModelSpec, String> {
    let models = ModelSpec::families().into_iter().flat_map(|family| {
        let presets = family.presets.into_iter();
        presets.chain([(family.name, family.default)])
    });
    let mut known = models.filter(|(known, _)| *known == name);
    let found = known.next().map(|(_, model)| model);
    found.ok_or_else(|| format!("expected one of {}, got {name:?}", model_names().join(", ")))
}

/// The names that `model` takes: families, then presets.
pub fn model_names() -> Vec<&'static str> {
    let families = ModelSpec::families();
    let presets = families.iter().flat_map(|family| &family.presets);
    let presets = presets.map(|(name, _)| *name);
    families
        .iter()
        .map(|family| family.name)
        .chain(presets)
        .collect()
}
