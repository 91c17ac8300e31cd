//! The list of model families, and a model of any of them: `ModelSpec`. A new family is a folder
//! beside this file and its lines here; see docs/adding-a-model.md.

mod blocks;
pub mod family;
pub mod gpt;
pub mod mlp;
pub mod model;
#[cfg(feature = "test-family")]
#[path = "../tests/positions/mod.rs"]
pub mod positions;
pub mod split;
pub mod vit;

pub use family::{DataShape, Family};
pub use mlp::Mlp;
pub use model::Model;

use family::Setting;
use serde::{Deserialize, Serialize};

use crate::build::{Declarations, Declared};
use crate::error::Result;
use crate::{Build, Layer, Sequential};

/// Declares the families: a line each, with its help, the struct of its settings and its name. The
/// first one is the default.
macro_rules! families {
    ($(
        $(#[cfg($condition:meta)])?
        $help:literal $variant:ident($settings:path) = $name:literal,
    )+) => {
        /// What a model is: a family and its settings.
        ///
        /// It is written as one table: `model = "mlp"` beside the settings of the family.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "model")]
        pub enum ModelSpec {
            $(
                $(#[cfg($condition)])?
                #[doc = $help]
                #[serde(rename = $name)]
                $variant($settings),
            )+
        }

        impl ModelSpec {
            /// The name of the family.
            pub fn name(&self) -> &'static str {
                match self {
                    $($(#[cfg($condition)])? ModelSpec::$variant(_) => $name,)+
                }
            }

            fn family(&self) -> &dyn Family {
                match self {
                    $($(#[cfg($condition)])? ModelSpec::$variant(family) => family,)+
                }
            }

            /// All families, in the order of the help.
            pub fn families() -> Vec<FamilyInfo> {
                vec![$(
                    $(#[cfg($condition)])?
                    FamilyInfo {
                        name: $name,
                        help: $help,
                        is_hidden: <$settings>::is_hidden(),
                        default: ModelSpec::$variant(<$settings>::default()),
                        presets: <$settings>::presets()
                            .into_iter()
                            .map(|(name, settings)| (name, ModelSpec::$variant(settings)))
                            .collect(),
                        settings: settings_of(|spec| match spec {
                            ModelSpec::$variant(family) => Some(family),
                            #[allow(unreachable_patterns, reason = "there may be one family only")]
                            _ => None,
                        }),
                    },
                )+]
            }
        }
    };
}

families! {
    "A multilayer perceptron" Mlp(mlp::MlpSpec) = "mlp",
    "A transformer that learns the next token, as GPT-2" Gpt(gpt::GptSpec) = "gpt",
    "A transformer over the patches of images" Vit(vit::VitSpec) = "vit",
    #[cfg(feature = "test-family")]
    "For tests: a class for each position" Positions(positions::PositionsSpec) = "positions",
}

/// A model family, for those who list families and read settings.
#[derive(Debug)]
pub struct FamilyInfo {
    /// Its name.
    pub name: &'static str,
    /// Its help.
    pub help: &'static str,
    /// Whether help leaves it out: for families of tests.
    pub is_hidden: bool,
    /// A model of this family with default settings.
    pub default: ModelSpec,
    /// Names for settings that people use often, with what they stand for.
    pub presets: Vec<(&'static str, ModelSpec)>,
    /// Its settings, in the order of the help.
    pub settings: Vec<Setting<ModelSpec>>,
}

impl Default for ModelSpec {
    fn default() -> ModelSpec {
        let mut families = ModelSpec::families();
        families.swap_remove(0).default
    }
}

impl ModelSpec {
    /// Checks the settings. The error names a setting in backquotes.
    pub fn check(&self) -> Result<()> {
        self.family().check()
    }

    /// How many tokens the model sees at once, if it takes tokens.
    pub fn context(&self) -> Option<usize> {
        self.family().context()
    }

    /// How many tokens the model has, if it says so.
    pub fn vocabulary(&self) -> Option<usize> {
        self.family().vocabulary()
    }

    /// Multiplications and additions of a row in training, if the family says so.
    pub fn flop_of_a_row(&self, data: &DataShape<'_>) -> Option<f64> {
        self.family().flop_of_a_row(data)
    }

    /// The layers for these data.
    pub fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        self.family().layers(data)
    }

    /// The same model in PyTorch, on one line, if the family says so.
    pub fn torch(&self, row_shape: &[usize], outputs: usize) -> Option<String> {
        self.family().torch(row_shape, outputs)
    }

    /// Elements of all parameters and buffers. Nothing is allocated for them.
    pub fn parameter_count(&self, data: &DataShape<'_>) -> Result<u128> {
        self.count(data, |_| true)
    }

    /// How many of these are in matrices of hidden layers, as Muon takes them.
    pub fn hidden_count(&self, data: &DataShape<'_>) -> Result<u128> {
        self.count(data, |declared| !declared.matrices.is_empty())
    }

    fn count(&self, data: &DataShape<'_>, counts: impl Fn(&&Declared) -> bool) -> Result<u128> {
        let mut declarations = Declarations::new();
        let mut layers = self.layers(data)?;
        let mut build = Build::new(&mut declarations);
        Layer::build(&mut layers, &mut build, data.row_shape)?;
        let elements =
            |shape: &[usize]| shape.iter().map(|&length| length as u128).product::<u128>();
        let list = &declarations.list;
        let counted = list.iter().filter(counts);
        Ok(counted.map(|declared| elements(&declared.shape)).sum())
    }
}

/// The settings of a family as those of a `ModelSpec`. `family` gives the family's struct.
fn settings_of<F: Family + 'static>(
    family: fn(&mut ModelSpec) -> Option<&mut F>,
) -> Vec<Setting<ModelSpec>> {
    let of_spec = |setting: Setting<F>| setting.inside(family);
    F::settings().into_iter().map(of_spec).collect()
}

#[cfg(test)]
mod tests;
