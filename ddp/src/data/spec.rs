//! What `--data` takes: a name, then options. `glyphs,rows=50000`, `synthetic:classification,features=32,classes=4`.
//!
//! A spec prints with every option resolved, and reads back as itself.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The most rows of generated data.
pub const ROWS_MAX: u64 = 1_000_000_000_000;
/// The most features, classes or outputs of generated data.
pub const WIDTH_MAX: u64 = 1 << 16;
/// Seeds fit the whole numbers of a TOML file.
pub const SEED_MAX: u64 = i64::MAX as u64;

/// Which data a run trains on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DataSpec {
    /// Digits drawn by code.
    Glyphs(GlyphsSpec),
    /// Rows made from a formula.
    Synthetic(SyntheticSpec),
    /// Rows of files.
    Files(FilesSpec),
}

/// `PATH`, or `PATH#PART`: files by a name, a pattern or a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilesSpec {
    /// A file, a folder of shards, or a pattern with `*`, `?` and `[…]`.
    pub path: String,
    /// Which part of each file: an array's or a column's name.
    pub part: Option<String>,
}

/// `glyphs`: 28×28 grey digits drawn by code.
#[derive(Clone, Debug, PartialEq)]
pub struct GlyphsSpec {
    /// Images to train on.
    pub rows: u64,
    /// Images for evaluation, never among those to train on.
    pub held_out: u64,
    /// Other seeds draw other images.
    pub seed: u64,
}

/// `synthetic:…`: rows made from a formula, of any number.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticSpec {
    /// What they are.
    pub kind: SyntheticKind,
    /// Rows to train on.
    pub rows: u64,
    /// Rows for evaluation, never among those to train on.
    pub held_out: u64,
    /// Numbers in a row.
    pub features: usize,
    /// Classes, or numbers to learn for a row.
    pub outputs: usize,
    /// The deviation of what is added at random to the teacher's answers, which themselves have one of about 1.
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
    /// Rows that hold their own number, for finding out which rows went where.
    RowNumber,
}

/// The names, for messages.
const NAMES: &str = "glyphs, synthetic:classification, synthetic:regression, synthetic:row-number";

impl DataSpec {
    /// The name, without options.
    pub fn name(&self) -> &'static str {
        match self {
            DataSpec::Glyphs(_) => "glyphs",
            DataSpec::Synthetic(spec) => match spec.kind {
                SyntheticKind::Classification => "synthetic:classification",
                SyntheticKind::Regression => "synthetic:regression",
                SyntheticKind::RowNumber => "synthetic:row-number",
            },
            DataSpec::Files(_) => "the files",
        }
    }
}

impl Default for DataSpec {
    fn default() -> DataSpec {
        DataSpec::Glyphs(GlyphsSpec::default())
    }
}

impl Default for GlyphsSpec {
    fn default() -> GlyphsSpec {
        GlyphsSpec { rows: 20_000, held_out: 2_000, seed: 0 }
    }
}

impl SyntheticSpec {
    /// The kind with its defaults.
    pub fn new(kind: SyntheticKind) -> SyntheticSpec {
        let (features, outputs) = match kind {
            SyntheticKind::Classification => (64, 10),
            SyntheticKind::Regression => (64, 1),
            SyntheticKind::RowNumber => (4, 4),
        };
        let noise = if kind == SyntheticKind::RowNumber { 0.0 } else { 0.1 };
        SyntheticSpec { kind, rows: 100_000, held_out: 2_000, features, outputs, noise, seed: 0 }
    }
}

impl fmt::Display for DataSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            DataSpec::Glyphs(GlyphsSpec { rows, held_out, seed }) => {
                write!(f, "{name},rows={rows},held-out={held_out},seed={seed}")
            }
            DataSpec::Files(FilesSpec { path, part: None }) => f.write_str(path),
            DataSpec::Files(FilesSpec { path, part: Some(part) }) => write!(f, "{path}#{part}"),
            DataSpec::Synthetic(SyntheticSpec { kind, rows, held_out, features, outputs, noise, seed }) => {
                write!(f, "{name},rows={rows},held-out={held_out}")?;
                match kind {
                    SyntheticKind::Classification => {
                        write!(f, ",features={features},classes={outputs},noise={noise},seed={seed}")
                    }
                    SyntheticKind::Regression => {
                        write!(f, ",features={features},outputs={outputs},noise={noise},seed={seed}")
                    }
                    SyntheticKind::RowNumber => Ok(()),
                }
            }
        }
    }
}

impl FromStr for DataSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<DataSpec> {
        if let Some(files) = FilesSpec::parse(text) {
            return Ok(DataSpec::Files(files));
        }
        let (name, options) = text.split_once(',').unwrap_or((text, ""));
        let mut options = Options::parse(text, name, options)?;
        let synthetic = |kind| Some(SyntheticSpec::new(kind));
        let spec = match name {
            "glyphs" => None,
            "synthetic:classification" => synthetic(SyntheticKind::Classification),
            "synthetic:regression" => synthetic(SyntheticKind::Regression),
            "synthetic:row-number" => synthetic(SyntheticKind::RowNumber),
            _ => {
                return Err(refuse(
                    text,
                    format!("there are no data called {name:?}"),
                    &format!("Give one of {NAMES}"),
                ));
            }
        };
        let spec = match spec {
            None => {
                let defaults = GlyphsSpec::default();
                DataSpec::Glyphs(GlyphsSpec {
                    rows: options.whole("rows", defaults.rows, 1..=GLYPHS_ROWS_MAX)?,
                    held_out: options.whole("held-out", defaults.held_out, 0..=GLYPHS_ROWS_MAX)?,
                    seed: options.whole("seed", defaults.seed, 0..=SEED_MAX)?,
                })
            }
            Some(defaults) => DataSpec::Synthetic(options.synthetic(defaults)?),
        };
        options.finish()?;
        Ok(spec)
    }
}

impl FilesSpec {
    /// Whatever is not built in is a path.
    fn parse(text: &str) -> Option<FilesSpec> {
        let name = text.split(',').next().unwrap_or_default();
        if text.is_empty() || name == "glyphs" || name.starts_with("synthetic:") {
            return None;
        }
        Some(FilesSpec::split(text))
    }

    /// Path and part: what is behind the last `#`, unless that is in the name of the file or of a folder above it.
    pub(crate) fn split(text: &str) -> FilesSpec {
        let is_pattern = |path: &str| path.contains(['*', '?', '[']);
        let is_there = |path: &str| is_pattern(path) || Path::new(path).exists();
        let (path, part) = match text.rsplit_once('#') {
            Some((path, part)) if path.is_empty() || part.is_empty() => (text, None),
            Some((path, part)) if part.contains('/') && (is_pattern(part) || !is_there(path)) => (text, None),
            Some((path, part)) if !Path::new(text).exists() => (path, Some(part.to_string())),
            _ => (text, None),
        };
        FilesSpec { path: path.to_string(), part }
    }
}

/// The most drawn images on either side: beyond it nobody would see a difference.
const GLYPHS_ROWS_MAX: u64 = 1_000_000_000;

/// The options of a spec that nobody has asked for yet.
struct Options<'a> {
    text: &'a str,
    name: &'a str,
    given: BTreeMap<&'a str, &'a str>,
    known: Vec<&'static str>,
}

impl<'a> Options<'a> {
    fn parse(text: &'a str, name: &'a str, options: &'a str) -> Result<Options<'a>> {
        let mut given = BTreeMap::new();
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let Some((key, value)) = option.split_once('=') else {
                return Err(refuse(
                    text,
                    format!("{option:?} has no value"),
                    "Options are NAME=VALUE, with commas between",
                ));
            };
            if given.insert(key, value).is_some() {
                return Err(refuse(text, format!("{key} is given twice"), "Give it once"));
            }
        }
        Ok(Options { text, name, given, known: Vec::new() })
    }

    fn synthetic(&mut self, defaults: SyntheticSpec) -> Result<SyntheticSpec> {
        let rows = self.whole("rows", defaults.rows, 1..=ROWS_MAX)?;
        let held_out = self.whole("held-out", defaults.held_out, 0..=ROWS_MAX)?;
        let defaults = SyntheticSpec { rows, held_out, ..defaults };
        let outputs = match defaults.kind {
            SyntheticKind::Classification => self.whole("classes", defaults.outputs as u64, 2..=WIDTH_MAX)?,
            SyntheticKind::Regression => self.whole("outputs", defaults.outputs as u64, 1..=WIDTH_MAX)?,
            SyntheticKind::RowNumber => return Ok(defaults),
        } as usize;
        let features = self.whole("features", defaults.features as u64, 1..=WIDTH_MAX)? as usize;
        let noise = self.number("noise", defaults.noise, 0.0, 100.0)?;
        let seed = self.whole("seed", defaults.seed, 0..=SEED_MAX)?;
        Ok(SyntheticSpec { features, outputs, noise, seed, ..defaults })
    }

    fn whole(&mut self, key: &'static str, default: u64, range: std::ops::RangeInclusive<u64>) -> Result<u64> {
        self.known.push(key);
        let Some(value) = self.given.remove(key) else { return Ok(default) };
        value.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| {
            let expected = format!("a whole number from {} to {}", range.start(), range.end());
            refuse(self.text, format!("{key} is {value:?}"), &format!("Give {expected}, as in {key}={default}"))
        })
    }

    fn number(&mut self, key: &'static str, default: f64, least: f64, most: f64) -> Result<f64> {
        self.known.push(key);
        let Some(value) = self.given.remove(key) else { return Ok(default) };
        value.parse().ok().filter(|value| (least..=most).contains(value)).ok_or_else(|| {
            refuse(self.text, format!("{key} is {value:?}"), &format!("Give a number from {least} to {most}"))
        })
    }

    fn finish(self) -> Result<()> {
        match self.given.keys().next() {
            None => Ok(()),
            Some(key) => {
                let way_out = format!("{} takes {}", self.name, self.known.join(", "));
                Err(refuse(self.text, format!("{key:?} is no option of {}", self.name), &way_out))
            }
        }
    }
}

fn refuse(text: &str, why: String, way_out: &str) -> Error {
    Error::Usage(format!("--data {text}: {why}. {way_out}."))
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
mod tests {
    use super::*;
    use crate::files::testing::Scratch;

    #[test]
    fn a_spec_reads_back_as_it_prints() {
        for text in [
            "glyphs",
            "glyphs,rows=7,held-out=0,seed=9",
            "synthetic:classification,rows=1000000000000,features=784,classes=2,noise=0.25",
            "synthetic:regression,outputs=3,seed=9223372036854775807",
            "synthetic:row-number,rows=5",
            "digits.npz#x_train",
            "shards/*.npy",
        ] {
            let spec: DataSpec = text.parse().unwrap();
            assert_eq!(spec.to_string().parse::<DataSpec>().unwrap(), spec, "{spec}");
            assert!(text.split(',').all(|part| spec.to_string().split(',').any(|printed| printed == part)), "{spec}");
        }
    }

    #[test]
    fn a_path_may_have_the_sign_that_stands_before_a_part() {
        let scratch = Scratch::new();
        let folder = scratch.path().join("M#1");
        std::fs::create_dir(&folder).unwrap();
        std::fs::create_dir(scratch.path().join("M")).unwrap();
        std::fs::write(folder.join("a#b.csv"), "").unwrap();
        std::fs::write(folder.join("d.npz"), "").unwrap();
        for (name, part) in [
            ("", None),
            ("/a#b.csv", None),
            ("/a#b.csv", Some("x")),
            ("/d.npz", Some("encoder/x")),
            ("/d.npz", None),
            ("/*.npz", None),
            ("/*.npz", Some("encoder/x")),
        ] {
            let path = format!("{}{name}", folder.display());
            let text = part.map_or(path.clone(), |part| format!("{path}#{part}"));
            assert_eq!(FilesSpec::split(&text), FilesSpec { path, part: part.map(String::from) }, "{text}");
        }
        for (text, part) in [("absent.npz#x", Some("x")), ("absent#1/d.csv", None), ("#x", None), ("a.npz#", None)] {
            assert_eq!(FilesSpec::split(text).part.as_deref(), part, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_can() {
        for (text, parts) in [
            ("synthetic:mnist", &["no data called \"synthetic:mnist\"", "glyphs"][..]),
            ("glyphs,rows=0", &["rows is \"0\"", "from 1 to"]),
            ("glyphs,rows=1e3", &["rows is \"1e3\"", "whole number"]),
            ("glyphs,classes=3", &["\"classes\" is no option of glyphs", "rows, held-out, seed"]),
            ("glyphs,rows", &["\"rows\" has no value", "NAME=VALUE"]),
            ("glyphs,rows=3,rows=4", &["given twice"]),
            ("synthetic:regression,classes=3", &["\"classes\" is no option", "outputs"]),
            ("synthetic:regression,noise=nan", &["noise is \"nan\"", "from 0 to 100"]),
            ("synthetic:classification,classes=1", &["classes is \"1\"", "from 2"]),
            ("", &["no data called \"\""]),
        ] {
            let error = text.parse::<DataSpec>().unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let message = error.to_string();
            assert!(message.starts_with(&format!("--data {text}: ")), "{message}");
            parts.iter().for_each(|part| assert!(message.contains(part), "{message} lacks {part}"));
        }
    }
}
