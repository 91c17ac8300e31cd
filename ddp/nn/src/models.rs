//! The model families, and a model of any of them: `ModelSpec`. A family here is a file in
//! `models/` and its line in `FAMILIES`; a program adds others by `register`. See
//! docs/adding-a-model.md.

mod blocks;
pub mod family;
pub mod gpt;
pub mod mlp;
pub mod model;
mod rope;
pub mod vit;

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value;

pub use family::{DataShape, Family, OwnLayers};
pub use mlp::Mlp;
pub use model::{Layers, Model};

use crate::build::{Declaration, Declarations, is_adapter};
use crate::error::Result;
use crate::forward::Traced;
use crate::{Lora, Sequential};
use family::FamilySetting;

/// All families, in the order of the help. The first one is the default.
static FAMILIES: LazyLock<RwLock<Vec<FamilyInfo>>> = LazyLock::new(|| {
    RwLock::new(vec![
        FamilyInfo::of::<mlp::MlpSpec>(),
        FamilyInfo::of::<gpt::GptSpec>(),
        FamilyInfo::of::<vit::VitSpec>(),
    ])
});

/// Adds a family to those that `--model` takes; before the command line is read, since flags follow
/// from its settings. A second call does nothing.
///
/// # Panics
/// If another family has the name.
pub fn register<F: Family + Default>() {
    let new = FamilyInfo::of::<F>();
    let mut families = FAMILIES.write().unwrap_or_else(PoisonError::into_inner);
    let known = families.iter().find(|known| known.name == new.name);
    match known.map(|known| known.default.get::<F>().is_some()) {
        None => families.push(new),
        Some(is_same) => assert!(is_same, "two model families are called {}", new.name),
    }
}

/// A model family, as lists show it.
#[derive(Clone, Debug)]
pub struct FamilyInfo {
    /// Its name.
    pub name: &'static str,
    /// Its help.
    pub help: &'static str,
    /// A model of this family with default settings.
    pub default: ModelSpec,
    /// Names for settings that people use often, with what they mean.
    pub presets: Vec<(&'static str, ModelSpec)>,
}

impl FamilyInfo {
    fn of<F: Family + Default>() -> FamilyInfo {
        let default = F::default();
        let presets = F::presets().into_iter();
        FamilyInfo {
            name: default.name(),
            help: default.help(),
            presets: presets.map(|(name, spec)| (name, spec.into())).collect(),
            default: default.into(),
        }
    }
}

/// What a model is: a family and its settings.
///
/// It is written as one table: `model = "mlp"` beside the settings of the family.
#[derive(Debug)]
pub struct ModelSpec(Box<dyn Family>);

impl<F: Family> From<F> for ModelSpec {
    fn from(family: F) -> ModelSpec {
        ModelSpec(Box::new(family))
    }
}

impl Deref for ModelSpec {
    type Target = dyn Family;

    fn deref(&self) -> &dyn Family {
        &*self.0
    }
}

impl DerefMut for ModelSpec {
    fn deref_mut(&mut self) -> &mut dyn Family {
        &mut *self.0
    }
}

impl Clone for ModelSpec {
    fn clone(&self) -> ModelSpec {
        ModelSpec(self.0.boxed())
    }
}

impl PartialEq for ModelSpec {
    fn eq(&self, other: &ModelSpec) -> bool {
        self.name() == other.name() && self.values() == other.values()
    }
}

impl Serialize for ModelSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("model", self.name())?;
        // What follows from the data is not written.
        let values = self.values().into_iter().filter(|(_, it)| !it.is_null());
        for (name, value) in values {
            map.serialize_entry(&name, &value)?;
        }
        map.end()
    }
}

impl Default for ModelSpec {
    fn default() -> ModelSpec {
        ModelSpec::families().swap_remove(0).default
    }
}

impl ModelSpec {
    /// All families, in the order of the help.
    pub fn families() -> Vec<FamilyInfo> {
        let families = FAMILIES.read().unwrap_or_else(PoisonError::into_inner);
        families.clone()
    }

    /// The names of the families that continue texts: `gpt`.
    pub fn that_generate() -> String {
        let families = ModelSpec::families().into_iter();
        let names = families.filter_map(|one| one.default.generates().then_some(one.name));
        names.collect::<Vec<_>>().join(" or ")
    }

    /// The settings of the family `F`, if it is of that family.
    pub fn get<F: Family>(&self) -> Option<&F> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref()
    }

    /// Name and value of each setting.
    pub fn values(&self) -> Vec<(String, Value)> {
        let mut copy = self.0.boxed();
        let settings = copy.settings().into_iter();
        settings.map(|one| (one.name, one.field.value())).collect()
    }

    /// The value of a setting; null if the family does not have it.
    pub fn value(&self, name: &str) -> Value {
        let mut values = self.values().into_iter();
        let value = values.find(|(known, _)| known == name);
        value.map_or(Value::Null, |(_, value)| value)
    }

    /// The setting of this name, if the family has it.
    pub fn setting(&mut self, name: &str) -> Option<FamilySetting<'_>> {
        self.0.settings().into_iter().find(|one| one.name == name)
    }

    /// Elements of all parameters and buffers. Nothing is allocated for them.
    pub fn parameter_count(&self, data: &DataShape<'_>) -> Result<u128> {
        self.count(self.layers(data)?, data, |_| true)
    }

    /// Elements of all parameters of these adapters of the model.
    pub fn adapter_count(&self, data: &DataShape<'_>, lora: Lora) -> Result<u128> {
        let layers = self.layers(data)?.adapted(lora);
        self.count(layers, data, |declared| is_adapter(&declared.name))
    }

    /// How many parts [`Model::recompute_parts`] knows of it.
    pub fn part_count(&self, data: &DataShape<'_>) -> Result<usize> {
        let layers = Arc::new(self.layers(data)?);
        let traced = Traced::build(layers, &mut Declarations::new(), data.row_shape)?.0;
        traced.part_count()
    }

    fn count(
        &self,
        layers: Sequential,
        data: &DataShape<'_>,
        counts: impl Fn(&&Declaration) -> bool,
    ) -> Result<u128> {
        let mut declarations = Declarations::new();
        Traced::build(Arc::new(layers), &mut declarations, data.row_shape)?;
        let elements =
            |shape: &[usize]| shape.iter().map(|&length| length as u128).product::<u128>();
        let list = &declarations.list;
        let counted = list.iter().filter(counts);
        Ok(counted.map(|declared| elements(&declared.shape)).sum())
    }
}

#[cfg(test)]
mod tests;
