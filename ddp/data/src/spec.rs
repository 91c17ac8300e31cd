//! Names of data, with options: `glyphs,rows=50000`,
//! `synthetic:classification,features=32,classes=4`, `shards/*.npz#x`,
//! `tokens:train.bin,context=64`.
//!
//! A spec prints with every option resolved, and reads back as itself.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use ddp_kernels::choice::SettingValue;
use serde::{Deserialize, Serialize};

use crate::element::Element;
use crate::error::{Error, Result};

/// The most rows of generated data.
pub const ROWS_MAX: u64 = 1_000_000_000_000;
/// The most features, classes or outputs of generated data.
pub const WIDTH_MAX: u64 = 1 << 16;
/// Seeds fit the integers of a TOML file.
pub const SEED_MAX: u64 = i64::MAX as u64;
/// The most tokens of a window, and of a vocabulary.
pub const TOKENS_MAX: u64 = 1 << 24;
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

/// `tokens:PATH`: files of tokens, also such that do not say so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokensSpec {
    /// A file, a folder of shards, or a pattern with `*`, `?` and `[…]`.
    pub path: String,
    /// How many tokens a model sees at once, unless the model says so.
    pub context: Option<usize>,
    /// Tokens are below this, unless the files say so.
    pub vocabulary: Option<usize>,
    /// The type of tokens without a header; u16 unless they look like another.
    pub token_type: Option<Element>,
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

/// The kinds of `synthetic:…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticKind {
    /// Classes that a fixed random network gives to random rows.
    Classification,
    /// Numbers that a fixed random network gives to random rows.
    Regression,
}

impl SyntheticKind {
    const ALL: [SyntheticKind; 2] = [SyntheticKind::Classification, SyntheticKind::Regression];

    fn name(self) -> &'static str {
        match self {
            SyntheticKind::Classification => "synthetic:classification",
            SyntheticKind::Regression => "synthetic:regression",
        }
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
    fn read(text: &str) -> std::result::Result<DataSpec, String> {
        text.parse().map_err(|error: Error| {
            // The caller names the setting and its value already.
            let error = error.to_string();
            let start = format!("`data` {text}: ");
            error.strip_prefix(&start).unwrap_or(&error).to_string()
        })
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

    /// What `outputs` is called in the options.
    fn outputs_name(&self) -> &'static str {
        match self.kind {
            SyntheticKind::Classification => "classes",
            SyntheticKind::Regression => "outputs",
        }
    }
}

impl Display for DataSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            DataSpec::Glyphs(spec) => {
                let (rows, held_out, seed) = (spec.rows, spec.held_out, spec.seed);
                write!(f, "{name},rows={rows},held-out={held_out},seed={seed}")
            }
            DataSpec::Files(FilesSpec { path, part: None }) => f.write_str(path),
            DataSpec::Files(spec) => {
                let part = spec.part.as_deref().unwrap_or_default();
                write!(f, "{}#{part}", spec.path)
            }
            DataSpec::Tokens(spec) => {
                write!(f, "tokens:{}", spec.path)?;
                let text = |number: usize| number.to_string();
                let options = [
                    ("context", spec.context.map(text)),
                    ("vocabulary", spec.vocabulary.map(text)),
                    ("type", spec.token_type.map(|one| one.name().to_string())),
                ];
                let mut given = options
                    .iter()
                    .filter_map(|(key, value)| Some((key, value.as_ref()?)));
                given.try_for_each(|(key, value)| write!(f, ",{key}={value}"))
            }
            DataSpec::Synthetic(spec) => {
                write!(f, "{name},rows={},held-out={}", spec.rows, spec.held_out)?;
                let (outputs_name, outputs) = (spec.outputs_name(), spec.outputs);
                write!(f, ",features={},{outputs_name}={outputs}", spec.features)?;
                write!(f, ",noise={},seed={}", spec.noise, spec.seed)
            }
        }
    }
}

impl FromStr for DataSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<DataSpec> {
        let (name, options) = text.split_once(',').unwrap_or((text, ""));
        let tokens = name.strip_prefix("tokens:").filter(|path| !path.is_empty());
        let is_built_in = text.is_empty()
            || ["glyphs", "tokens:"].contains(&name)
            || name.starts_with("synthetic:");
        if !is_built_in && tokens.is_none() {
            return Ok(DataSpec::Files(FilesSpec::split(text)));
        }
        let mut options = Options::parse(text, options)?;
        if let Some(path) = tokens {
            let spec = DataSpec::Tokens(options.tokens(path)?);
            options.finish("tokens")?;
            return Ok(spec);
        }
        let mut kinds = SyntheticKind::ALL.into_iter();
        let spec = match kinds.find(|kind| kind.name() == name) {
            Some(kind) => DataSpec::Synthetic(options.synthetic(SyntheticSpec::new(kind))?),
            None if name == "glyphs" => DataSpec::Glyphs(options.glyphs(GlyphsSpec::default())?),
            None => {
                let names = SyntheticKind::ALL.map(SyntheticKind::name).join(", ");
                let expected = format!("expected a path, tokens:PATH, glyphs, {names}");
                return Err(refuse(text, format!("{expected}, got {name:?}")));
            }
        };
        options.finish(name)?;
        Ok(spec)
    }
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

/// The options of a spec: those not read yet, and the names of those that exist.
struct Options<'a> {
    text: &'a str,
    given: BTreeMap<&'a str, &'a str>,
    known: Vec<&'static str>,
}

impl<'a> Options<'a> {
    fn parse(text: &'a str, options: &'a str) -> Result<Options<'a>> {
        let mut given = BTreeMap::new();
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let Some((key, value)) = option.split_once('=') else {
                let why = format!("expected options NAME=VALUE, got {option:?}");
                return Err(refuse(text, why));
            };
            if given.insert(key, value).is_some() {
                return Err(refuse(text, format!("{key} is given twice")));
            }
        }
        Ok(Options {
            text,
            given,
            known: Vec::new(),
        })
    }

    fn glyphs(&mut self, defaults: GlyphsSpec) -> Result<GlyphsSpec> {
        Ok(GlyphsSpec {
            rows: self.whole("rows", defaults.rows, 1..=GLYPHS_ROWS_MAX)?,
            held_out: self.whole("held-out", defaults.held_out, 0..=GLYPHS_ROWS_MAX)?,
            seed: self.whole("seed", defaults.seed, 0..=SEED_MAX)?,
        })
    }

    fn tokens(&mut self, path: &str) -> Result<TokensSpec> {
        // 0 cannot be given, so it stands for an option that was not.
        let mut given = |key| {
            let number = self.whole(key, 0, 1..=TOKENS_MAX)? as usize;
            Ok::<_, Error>((number > 0).then_some(number))
        };
        Ok(TokensSpec {
            path: path.to_string(),
            context: given("context")?,
            vocabulary: given("vocabulary")?,
            token_type: self.token_type()?,
        })
    }

    fn token_type(&mut self) -> Result<Option<Element>> {
        self.known.push("type");
        let Some(given) = self.given.remove("type") else {
            return Ok(None);
        };
        let known = |one: &Element| matches!(one, Element::U16 | Element::U32);
        let found = Element::named(given).filter(known);
        let refused = || {
            refuse(
                self.text,
                format!("type: expected u16 or u32, got {given:?}"),
            )
        };
        found.map(Some).ok_or_else(refused)
    }

    fn synthetic(&mut self, defaults: SyntheticSpec) -> Result<SyntheticSpec> {
        let mut spec = defaults;
        spec.rows = self.whole("rows", spec.rows, 1..=ROWS_MAX)?;
        spec.held_out = self.whole("held-out", spec.held_out, 0..=ROWS_MAX)?;
        let outputs_min = match spec.kind {
            SyntheticKind::Classification => 2,
            SyntheticKind::Regression => 1,
        };
        let (name, outputs) = (spec.outputs_name(), spec.outputs as u64);
        spec.outputs = self.whole(name, outputs, outputs_min..=WIDTH_MAX)? as usize;
        spec.features = self.whole("features", spec.features as u64, 1..=WIDTH_MAX)? as usize;
        spec.noise = self.read("noise", "a number", spec.noise, 0.0..=100.0)?;
        spec.seed = self.whole("seed", spec.seed, 0..=SEED_MAX)?;
        Ok(spec)
    }

    fn whole(
        &mut self,
        key: &'static str,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64> {
        self.read(key, "a whole number", default, range)
    }

    fn read<T: FromStr + PartialOrd + Display>(
        &mut self,
        key: &'static str,
        what: &str,
        default: T,
        range: RangeInclusive<T>,
    ) -> Result<T> {
        self.known.push(key);
        let Some(value) = self.given.remove(key) else {
            return Ok(default);
        };
        let number = value.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (start, end) = (range.start(), range.end());
            let expected = format!("expected {what} from {start} to {end}");
            refuse(self.text, format!("{key}: {expected}, got {value:?}"))
        })
    }

    /// An error if an option is left that does not exist.
    fn finish(self, name: &str) -> Result<()> {
        let Some(key) = self.given.keys().next() else {
            return Ok(());
        };
        let known = self.known.join(", ");
        let why = format!("{name}: expected the options {known}, got {key:?}");
        Err(refuse(self.text, why))
    }
}

fn refuse(text: &str, why: String) -> Error {
    Error::Usage(format!("`data` {text}: {why}"))
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
