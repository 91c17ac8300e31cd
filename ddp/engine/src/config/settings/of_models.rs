//! Models by the text that the setting `model` takes.

use ddp_nn::models::ModelSpec;

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
    let names = || model_names().join(", ");
    found.ok_or_else(|| {
        format!(
            "expected one of {}, got {name:?}; help: docs/adding-a-model.md adds others",
            names()
        )
    })
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
