//! Names of data, with options: `glyphs,rows=50000`,
//! `synthetic:classification,features=32,classes=4`, `shards/*.npz#x`,
//! `tokens:train.bin,context=64`.
//!
//! A spec prints with every option resolved, and reads back as itself.

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use ddp_kernels::setting::{Choice, SettingValue};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, bail, ensure};
use crate::files::array::NumberType;
use crate::setting::DATA;
use crate::task::TOKENS_MAX;

/// The most rows of generated data.
pub const ROWS_MAX: u64 = 1_000_000_000_000;
/// The most features, classes or outputs of generated data.
pub const WIDTH_MAX: usize = 1 << 16;
/// Seeds fit the integers of a TOML file.
pub(crate) const SEED_MAX: u64 = i64::MAX as u64;
/// The most drawn images of a split.
const GLYPHS_ROWS_MAX: u64 = 1_000_000_000;

/// Which data a run trains on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DataSpec {
    /// Digits drawn by code.
    Glyphs(GlyphsSpec),
    /// Rows made from a formula.
    Synthetic(SyntheticSpec),
    /// Rows of files, or tokens if the files say so.
    Files(FilesSpec),
    /// Tokens of files.
    Tokens(TokensSpec),
}

/// `tokens:PATH`: files that hold tokens, whether or not their format says so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokensSpec {
    /// A file, a folder of shards, or a pattern with `*`, `?` and `[…]`.
    pub path: String,
    /// How many tokens a model sees at once, unless the model says so.
    pub context: Option<usize>,
    /// The size of the vocabulary, unless the files say so.
    pub vocabulary: Option<usize>,
    /// The type of tokens without a header; u16 unless they look like another.
    pub(crate) token_type: Option<NumberType>,
}

/// `PATH` or `PATH#PART`: a file, a pattern or a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilesSpec {
    /// A file, a folder of shards, or a pattern with `*`, `?` and `[…]`.
    pub path: String,
    /// Which part of each file: an array or columns.
    pub part: Option<String>,
}

/// `glyphs`: 28×28 grey digits drawn by code.
#[derive(Clone, Debug, PartialEq)]
pub struct GlyphsSpec {
    /// Images to train on.
    pub rows: u64,
    /// Other images, for evaluation.
    pub held_out: u64,
    /// Other seeds draw other images.
    pub seed: u64,
}

/// `synthetic:…`: rows made from a formula.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticSpec {
    /// The formula.
    pub kind: SyntheticKind,
    /// Rows to train on.
    pub rows: u64,
    /// Other rows, for evaluation.
    pub held_out: u64,
    /// Numbers in a row.
    pub features: usize,
    /// Classes, or numbers to learn for a row.
    pub outputs: usize,
    /// The standard deviation of the noise on the teacher's outputs, whose own is about 1.
    pub noise: f64,
    /// Other seeds make another teacher and other rows.
    pub seed: u64,
}

ddp_kernels::choices! {
    /// The kinds of `synthetic:…`.
    pub enum SyntheticKind {
        /// Classes that a fixed random network gives to random rows.
        Classification = "synthetic:classification",
        /// Numbers that a fixed random network gives to random rows.
        Regression = "synthetic:regression",
    }
}

impl DataSpec {
    /// The name, without options.
    pub fn name(&self) -> &'static str {
        match self {
            DataSpec::Glyphs(_) => "glyphs",
            DataSpec::Synthetic(spec) => spec.kind.name(),
            DataSpec::Files(_) => "the files",
            DataSpec::Tokens(_) => "the tokens",
        }
    }
}

impl SettingValue for DataSpec {
    fn read(text: &str) -> Result<DataSpec, String> {
        parse(text)
    }
}

impl Default for DataSpec {
    fn default() -> DataSpec {
        DataSpec::Glyphs(GlyphsSpec::default())
    }
}

impl Default for GlyphsSpec {
    fn default() -> GlyphsSpec {
        GlyphsSpec {
            rows: 20_000,
            held_out: 2_000,
            seed: 0,
        }
    }
}

impl SyntheticSpec {
    /// The kind with its defaults.
    pub fn new(kind: SyntheticKind) -> SyntheticSpec {
        let outputs = match kind {
            SyntheticKind::Classification => 10,
            SyntheticKind::Regression => 1,
        };
        SyntheticSpec {
            kind,
            rows: 100_000,
            held_out: 2_000,
            features: 64,
            outputs,
            noise: 0.1,
            seed: 0,
        }
    }
}

/// Where the value of an option is, and which values it may have.
enum Place<'a> {
    Whole(&'a mut u64, RangeInclusive<u64>),
    Count(&'a mut usize, RangeInclusive<usize>),
    Number(&'a mut f64, RangeInclusive<f64>),
    /// From 1 to `TOKENS_MAX`, if it is given.
    Tokens(&'a mut Option<usize>),
    /// The type of tokens, if it is given.
    Type(&'a mut Option<NumberType>),
}

impl Place<'_> {
    /// Takes the value, or says what was expected.
    fn read(self, value: &str) -> Result<(), String> {
        fn within<T: FromStr + PartialOrd + Display>(
            value: &str,
            what: &str,
            range: &RangeInclusive<T>,
        ) -> Result<T, String> {
            let number = value.parse().ok().filter(|number| range.contains(number));
            let (start, end) = (range.start(), range.end());
            number.ok_or_else(|| format!("expected {what} from {start} to {end}"))
        }
        let whole = "a whole number";
        match self {
            Place::Whole(into, range) => *into = within(value, whole, &range)?,
            Place::Count(into, range) => *into = within(value, whole, &range)?,
            Place::Number(into, range) => *into = within(value, "a number", &range)?,
            Place::Tokens(into) => *into = Some(within(value, whole, &(1..=TOKENS_MAX as usize))?),
            Place::Type(into) => {
                let known = |one: &NumberType| matches!(one, NumberType::U16 | NumberType::U32);
                let found = value.parse().ok().filter(known);
                *into = Some(found.ok_or("expected u16 or u32")?);
            }
        }
        Ok(())
    }

    fn text(&self) -> Option<String> {
        match self {
            Place::Whole(value, _) => Some(value.to_string()),
            Place::Count(value, _) => Some(value.to_string()),
            Place::Number(value, _) => Some(value.to_string()),
            Place::Tokens(value) => value.map(|value| value.to_string()),
            Place::Type(value) => value.map(|value| value.to_string()),
        }
    }
}

impl DataSpec {
    /// The options in the order in which they are printed.
    fn options(&mut self) -> Vec<(&'static str, Place<'_>)> {
        match self {
            DataSpec::Glyphs(spec) => vec![
                ("rows", Place::Whole(&mut spec.rows, 1..=GLYPHS_ROWS_MAX)),
                (
                    "held-out",
                    Place::Whole(&mut spec.held_out, 0..=GLYPHS_ROWS_MAX),
                ),
                ("seed", Place::Whole(&mut spec.seed, 0..=SEED_MAX)),
            ],
            DataSpec::Synthetic(spec) => {
                let (outputs_name, least) = match spec.kind {
                    SyntheticKind::Classification => ("classes", 2),
                    SyntheticKind::Regression => ("outputs", 1),
                };
                vec![
                    ("rows", Place::Whole(&mut spec.rows, 1..=ROWS_MAX)),
                    ("held-out", Place::Whole(&mut spec.held_out, 0..=ROWS_MAX)),
                    ("features", Place::Count(&mut spec.features, 1..=WIDTH_MAX)),
                    (
                        outputs_name,
                        Place::Count(&mut spec.outputs, least..=WIDTH_MAX),
                    ),
                    ("noise", Place::Number(&mut spec.noise, 0.0..=100.0)),
                    ("seed", Place::Whole(&mut spec.seed, 0..=SEED_MAX)),
                ]
            }
            DataSpec::Tokens(spec) => vec![
                ("context", Place::Tokens(&mut spec.context)),
                ("vocabulary", Place::Tokens(&mut spec.vocabulary)),
                ("type", Place::Type(&mut spec.token_type)),
            ],
            DataSpec::Files(_) => Vec::new(),
        }
    }
}

impl Display for DataSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataSpec::Glyphs(_) | DataSpec::Synthetic(_) => f.write_str(self.name())?,
            DataSpec::Tokens(spec) => write!(f, "tokens:{}", spec.path)?,
            DataSpec::Files(FilesSpec { path, part }) => {
                f.write_str(path)?;
                part.as_ref().map_or(Ok(()), |part| write!(f, "#{part}"))?;
            }
        }
        for (key, place) in self.clone().options() {
            if let Some(value) = place.text() {
                write!(f, ",{key}={value}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for DataSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<DataSpec> {
        parse(text).map_err(|why| Error::Usage(format!("{DATA} {text}: {why}")))
    }
}

/// What `text` names, or what is wrong with it.
fn parse(text: &str) -> Result<DataSpec, String> {
    let (mut name, options) = text.split_once(',').unwrap_or((text, ""));
    let mut spec = match (name.strip_prefix("tokens:"), name.parse()) {
        (Some(path), _) if !path.is_empty() => {
            name = "tokens";
            DataSpec::Tokens(TokensSpec {
                path: path.to_string(),
                ..TokensSpec::default()
            })
        }
        (_, Ok(kind)) => DataSpec::Synthetic(SyntheticSpec::new(kind)),
        _ if name == "glyphs" => DataSpec::Glyphs(GlyphsSpec::default()),
        (None, _) if !text.is_empty() && !name.starts_with("synthetic:") => {
            return Ok(DataSpec::Files(FilesSpec::split(text)));
        }
        _ => bail!(
            "expected a path, tokens:PATH, glyphs, synthetic:classification, synthetic:regression, got {name:?}"
        ),
    };
    let mut given = BTreeSet::new();
    for option in options.split(',').filter(|option| !option.is_empty()) {
        let Some((key, value)) = option.split_once('=') else {
            bail!("expected options NAME=VALUE, got {option:?}");
        };
        ensure!(given.insert(key), "{key} is given twice");
        let mut all = spec.options();
        let Some(at) = all.iter().position(|(known, _)| *known == key) else {
            let known: Vec<&str> = all.iter().map(|(known, _)| *known).collect();
            let known = known.join(", ");
            bail!("{name}: expected the options {known}, got {key:?}");
        };
        let read = all.swap_remove(at).1.read(value);
        read.map_err(|why| format!("{key}: {why}, got {value:?}"))?;
    }
    Ok(spec)
}

impl FilesSpec {
    /// Path and part: the part follows the last `#`, unless that belongs to the name of a file or
    /// of a folder.
    pub(crate) fn split(text: &str) -> FilesSpec {
        let is_pattern = |path: &str| path.contains(['*', '?', '[']);
        let exists = |path: &str| is_pattern(path) || Path::new(path).exists();
        let (path, part) = match text.rsplit_once('#') {
            Some((path, part)) if path.is_empty() || part.is_empty() => (text, None),
            Some((path, part)) if part.contains('/') && (is_pattern(part) || !exists(path)) => {
                (text, None)
            }
            Some((path, part)) if !Path::new(text).exists() => (path, Some(part.to_string())),
            _ => (text, None),
        };
        FilesSpec {
            path: path.to_string(),
            part,
        }
    }
}

impl TryFrom<String> for DataSpec {
    type Error = Error;
    fn try_from(text: String) -> Result<DataSpec> {
        text.parse()
    }
}

impl From<DataSpec> for String {
    fn from(spec: DataSpec) -> String {
        spec.to_string()
    }
}

#[cfg(test)]
mod tests;
