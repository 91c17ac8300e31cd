//! Model families: structs of settings, declared by `family_settings!`, that implement [`Family`];
//! and a family without settings, for a program's own layers.

pub use ddp_kernels::setting::{Form, List};

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use ddp_kernels::DType;
use ddp_kernels::setting::{Number, SettingValue};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::Sequential;
use crate::error::{Error, Result};

/// A model family, implemented by the struct of its settings. `models::register` makes it known to
/// `--model`.
pub trait Family: Settings {
    /// Its name, as in `--model mlp`.
    fn name(&self) -> &'static str;

    /// Its help, one line.
    fn help(&self) -> &'static str;

    /// Names for settings that people use often, with what they mean.
    fn presets() -> Vec<(&'static str, Self)>
    where
        Self: Sized,
    {
        Vec::new()
    }

    /// Checks the settings. The error names a setting; see `refuse`.
    fn check(&self) -> Result<()>;

    /// The layers for these data. A family that cannot use the data refuses them here.
    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential>;

    /// How many tokens the model sees at once, if it takes tokens.
    fn context(&self) -> Option<usize> {
        None
    }

    /// How many tokens the model has, if it says so.
    fn vocabulary(&self) -> Option<usize> {
        None
    }

    /// Whether a `Decoder` can continue a text with the model: each token depends only on those
    /// before it, which its layers see through `SelfAttention` alone.
    fn generates(&self) -> bool {
        false
    }

    /// Writes out what 0 means in a setting, in a model of this many outputs, so that models can be
    /// compared by their settings.
    fn write_out(&mut self, _outputs: usize) {}

    /// Multiplications and additions of a row in training, if they are known.
    fn flop_of_a_row(&self, _data: &DataShape<'_>) -> Option<f64> {
        None
    }

    /// The same model in PyTorch, on one line, for `inspect`.
    fn torch(&self, _row_shape: &[usize], _outputs: usize) -> Option<String> {
        None
    }
}

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataShape<'a> {
    /// The shape of one row of the inputs.
    pub row_shape: &'a [usize],
    /// The shape that a row has in its file, if the row is flat and that has several dimensions.
    pub image: &'a [usize],
    /// The dtype of the inputs.
    pub dtype: DType,
    /// How many numbers the model gives for each prediction: one for each class, or the targets.
    pub outputs: usize,
    /// Whether a row of tokens may hold several documents ([`crate::Embedding::of_documents`]).
    pub documents: bool,
}

impl DataShape<'_> {
    /// Refuses inputs of another dtype. `family` is for the message.
    pub fn check_dtype(&self, expected: DType, family: &str) -> Result<()> {
        if self.dtype == expected {
            return Ok(());
        }
        Err(Error::model(
            format!("model {family}"),
            format!("inputs of {expected}"),
            format!("{} {:?}", self.dtype, self.row_shape),
            match expected {
                DType::I64 => "give tokens, as of a text, or choose another model family",
                _ => "give other data, or choose another model family: gpt takes tokens",
            },
        ))
    }
}

/// The settings of a family by name. `family_settings!` implements it.
pub trait Settings: Any + fmt::Debug + Send + Sync {
    /// All of them, in the order of the help.
    fn settings(&mut self) -> Vec<FamilySetting<'_>>;

    /// A copy.
    fn boxed(&self) -> Box<dyn Family>;
}

/// A setting of a family.
pub struct FamilySetting<'a> {
    /// Its name in flags, files and checkpoints.
    pub name: String,
    /// What help calls its value.
    pub value_name: &'static str,
    /// Its help, without the default.
    pub help: String,
    /// Whether results depend on it; otherwise it may change when a run is resumed.
    pub changes_results: bool,
    /// Its value.
    pub field: &'a mut dyn SettingField,
}

/// The value of a setting.
pub trait SettingField {
    /// Sets it from the text of a flag. The error says what was expected.
    fn set(&mut self, text: &str) -> Result<(), String>;

    /// Sets it from TOML or JSON. The error says what was expected.
    fn set_value(&mut self, value: Value) -> Result<(), String>;

    /// Its value; null for NaN.
    fn value(&self) -> Value;

    /// How its values are written.
    fn form(&self) -> Form;

    /// Its values and their help, if it takes one of a few names.
    fn choices(&self) -> Vec<(&'static str, &'static str)>;

    /// Its value, if it is a number.
    fn number(&self) -> Option<Number>;
}

impl<T: SettingValue + Serialize + DeserializeOwned> SettingField for T {
    fn set(&mut self, text: &str) -> Result<(), String> {
        *self = T::read(text)?;
        Ok(())
    }

    fn set_value(&mut self, value: Value) -> Result<(), String> {
        *self = serde_json::from_value(value).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn value(&self) -> Value {
        serde_json::to_value(self).expect("settings fit JSON")
    }

    fn form(&self) -> Form {
        T::FORM
    }

    fn choices(&self) -> Vec<(&'static str, &'static str)> {
        T::choices()
    }

    fn number(&self) -> Option<Number> {
        SettingValue::number(self)
    }
}

/// Declares the struct of a family's settings: for each its help, its name, what help calls its
/// value, its type and its default. A type is `bool`, `usize`, `f64`, `String`, `Vec<usize>` or an
/// enum of [`choices!`](ddp_kernels::choices). `changes_results: false` marks a setting on which no
/// result depends.
#[macro_export]
macro_rules! family_settings {
    (
        $(#[$meta:meta])*
        $vis:vis struct $family:ident {
            $(
                $(#[doc = $help:literal])+
                $field:ident $value_name:literal: $kind:ty = $default:expr $(, changes_results: $changes:literal)?;
            )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $family {
            $($(#[doc = $help])+ pub $field: $kind,)+
        }

        impl Default for $family {
            fn default() -> $family {
                $family { $($field: $default,)+ }
            }
        }

        impl $crate::models::family::Settings for $family {
            fn settings(&mut self) -> Vec<$crate::models::family::FamilySetting<'_>> {
                vec![$($crate::models::family::FamilySetting {
                    name: stringify!($field).replace('_', "-"),
                    value_name: $value_name,
                    help: [$($help.trim_ascii()),+].join(" "),
                    changes_results: [$($changes,)? true][0],
                    field: &mut self.$field,
                },)+]
            }

            fn boxed(&self) -> Box<dyn $crate::models::Family> {
                Box::new(self.clone())
            }
        }
    };
}

/// The error of a setting with a wrong value.
pub fn refuse(setting: &str, got: impl fmt::Display, expected: &str, help: &str) -> Error {
    Error::Setting {
        setting: setting.to_string(),
        text: format!("{got}: expected {expected}; help: {help}"),
    }
}

/// Refuses a setting that is 0 or too large.
pub fn check_size(setting: &str, size: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&size) {
        return Ok(());
    }
    let expected = format!("a whole number from 1 to {most}");
    Err(refuse(setting, size, &expected, "give another"))
}

type MakeLayers = dyn Fn(&DataShape<'_>) -> Result<Sequential> + Send + Sync;

/// The model that a function makes for data of a shape.
#[derive(Clone)]
pub struct OwnLayers(Option<Arc<MakeLayers>>);

impl OwnLayers {
    /// The model that `make` makes. It is called more than once, and must make the same each time.
    pub fn new(
        make: impl Fn(&DataShape<'_>) -> Result<Sequential> + Send + Sync + 'static,
    ) -> OwnLayers {
        OwnLayers(Some(Arc::new(make)))
    }
}

impl Default for OwnLayers {
    /// A model of an unknown program: what a checkpoint says of it.
    fn default() -> OwnLayers {
        OwnLayers(None)
    }
}

impl fmt::Debug for OwnLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnLayers")
    }
}

impl Settings for OwnLayers {
    fn settings(&mut self) -> Vec<FamilySetting<'_>> {
        Vec::new()
    }

    fn boxed(&self) -> Box<dyn Family> {
        Box::new(self.clone())
    }
}

impl Family for OwnLayers {
    fn name(&self) -> &'static str {
        "own"
    }

    fn help(&self) -> &'static str {
        "Layers that only the program has that trained them"
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        match &self.0 {
            Some(make) => make(data),
            None => Err(Error::model(
                "model own",
                "the program that trained it, which has its layers",
                "another program",
                "use it there, or make the layers a family and register it",
            )),
        }
    }
}
