//! The description of a file format: its name, how its files are recognised, and how they are read;
//! and what a file of any format contains.

use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files::array::{Array, ArrayPlace, NumberType};
use crate::files::io::{map, refuse};

/// A format of data files. A new one is a file with such a static, and a line in `files.rs`.
#[derive(Debug)]
pub struct Format {
    /// What it is called in messages: "an .npy file".
    pub name: &'static str,
    /// How names of its files end.
    pub(crate) endings: &'static [&'static str],
    /// Whether the first and last bytes of a file say that it is of this format.
    pub(crate) begins: fn(&FileEnds<'_>) -> bool,
    /// Why a file is refused whose name has this format's ending but whose first bytes do not
    /// match; `None` if the name is enough.
    pub(crate) must_begin: Option<&'static str>,
    pub(crate) holds: Holds,
}

/// What files of a format hold, and how that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Holds {
    /// Arrays of numbers: read by ranges of rows from a mapped file, or from a converted copy.
    Arrays(fn(&DataFile<'_>) -> Result<Contents>),
    /// A table, which another crate turns into a flat file.
    Table(TableFormat),
    /// Conversations, which a tokenizer turns into tokens.
    Conversations,
    /// Tokens, and nothing else.
    Tokens(fn(&DataFile<'_>) -> Result<TokenFile>),
    /// A file of another format, which is unpacked.
    Packed,
}

/// A format of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFormat {
    /// Text between commas, semicolons or tabs.
    Csv,
    /// Parquet.
    Parquet,
}

/// What most formats have in common.
pub(crate) const PLAIN: Format = Format {
    name: "",
    endings: &[],
    begins: |_| false,
    must_begin: None,
    holds: Holds::Packed,
};

/// The first bytes of a file, the last eight, and how many there are.
#[derive(Debug)]
pub(crate) struct FileEnds<'a> {
    pub(crate) start: &'a [u8],
    pub(crate) end: [u8; 8],
    pub(crate) bytes: u64,
}

/// A file that is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataFile<'a> {
    pub(crate) path: &'a Path,
    /// Its name in messages: for an unpacked file, the name of the packed one.
    pub(crate) name: &'a str,
    /// Where converted copies are kept, if not in the usual place.
    pub(crate) cache_dir: Option<&'a Path>,
    /// The type of tokens in a file without a header, if the user states it.
    pub(crate) stated: Option<NumberType>,
}

impl<'a> DataFile<'a> {
    pub(crate) fn new(path: &'a Path, name: &'a str, cache_dir: Option<&'a Path>) -> DataFile<'a> {
        DataFile {
            path,
            name,
            cache_dir,
            stated: None,
        }
    }

    pub(crate) fn map(&self) -> Result<Arc<Mapped>> {
        map(self.path)
    }

    /// The error for a file with wrong content.
    pub(crate) fn bad(&self, why: String) -> Error {
        refuse(Path::new(self.name), why)
    }
}

impl Format {
    /// Whether it is this one.
    pub(crate) fn is(&self, other: &'static Format) -> bool {
        std::ptr::eq(self, other)
    }

    /// Whether its files are lines of text, tables or conversations.
    pub(crate) fn is_text(&self) -> bool {
        self.is_table() || matches!(self.holds, Holds::Conversations)
    }

    /// Whether its files are tables.
    pub(crate) fn is_table(&self) -> bool {
        matches!(self.holds, Holds::Table(_))
    }
}

/// The arrays of a file by name, and its metadata.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// Those that have rows, in the order of the file. At least one.
    pub arrays: Vec<Array>,
    /// The names of the others, and why each cannot be used.
    pub others: Vec<(String, String)>,
    /// What the file says besides.
    pub about: About,
}

/// An array in the header of a flat file (`flat.rs`).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub(super) name: String,
    pub(super) element: NumberType,
    pub(super) shape: Vec<usize>,
    pub(super) offset: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) xxh3: Option<String>,
}

/// What the header of a flat file says.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct About {
    /// Its arrays.
    pub arrays: Vec<Entry>,
    /// The names of classes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<String>>,
    /// The names of features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub columns: Option<Vec<String>>,
    /// The file it was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Of a converted table: the columns that had some.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub odd_cells: Vec<OddCells>,
    /// Of a converted table: rows without a label, which were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unlabelled: Option<u64>,
    /// Of tokens: all are below this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// Of tokens: the one after each document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_of_text: Option<usize>,
    /// Of tokens: a hash of their vocabulary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
}

/// How many unknown values of a column are kept for messages.
pub const EXAMPLES_MAX: usize = 3;

/// Cells of a column that were missing or had an unknown category when a table was converted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OddCells {
    /// The column.
    pub column: String,
    /// How many were missing.
    pub missing: u64,
    /// How many had a value that is not among the column's categories.
    pub unseen: u64,
    /// Some of these values.
    pub examples: Vec<String>,
}

impl OddCells {
    /// Counts a cell with an unknown value.
    pub fn add_unseen(&mut self, text: &[u8]) {
        self.unseen += 1;
        let example: String = String::from_utf8_lossy(text).chars().take(40).collect();
        if self.examples.len() < EXAMPLES_MAX && !self.examples.contains(&example) {
            self.examples.push(example);
        }
    }

    /// Adds those of a later file to `all`, by the names of columns.
    pub(crate) fn add(later: Vec<OddCells>, all: &mut Vec<OddCells>) {
        for mut odd in later {
            let Some(known) = all.iter_mut().find(|known| known.column == odd.column) else {
                all.push(odd);
                continue;
            };
            known.missing += odd.missing;
            known.unseen += odd.unseen;
            odd.examples
                .retain(|example| !known.examples.contains(example));
            known.examples.append(&mut odd.examples);
            known.examples.truncate(EXAMPLES_MAX);
        }
    }
}

impl Contents {
    /// The array of this name, if there is one. One that cannot be used is an error that says why.
    pub fn find(&self, key: &str) -> Result<Option<&Array>, String> {
        match self.others.iter().find(|(name, _)| name == key) {
            Some((name, why)) => Err(format!("{name}: {why}")),
            None => Ok(self.arrays.iter().find(|array| array.key == key)),
        }
    }

    /// Adds the array at `place`, or the reason why it cannot be used.
    pub(super) fn add(&mut self, mapped: &Arc<Mapped>, file: &str, place: &ArrayPlace<'_>) {
        match Array::new(mapped, file, place) {
            Ok(array) => self.arrays.push(array),
            Err(why) => self.others.push((place.key.to_string(), why)),
        }
    }

    /// The contents, or an error if no array can be used.
    pub(super) fn checked(self, path: &Path) -> Result<Contents> {
        let why = match self.others.first() {
            _ if !self.arrays.is_empty() => return Ok(self),
            None => "it holds no arrays".into(),
            Some((name, why)) if name.is_empty() => why.clone(),
            Some((name, why)) => format!("{name}: {why}"),
        };
        Err(refuse(path, why))
    }
}

/// The tokens of one file, whatever its format.
#[derive(Debug)]
pub struct TokenFile {
    /// Rows of one token each.
    pub tokens: Array,
    /// What the tokens are.
    pub coding: Coding,
}

/// What the tokens of a file are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coding {
    /// The format, for people.
    pub format: &'static str,
    /// How many different tokens there are, if the file says so.
    pub vocabulary: Option<usize>,
    /// The token after each document, if the file says so.
    pub end_of_text: Option<usize>,
    /// A hash of the vocabulary, if the file says so.
    pub tokenizer: Option<String>,
    /// Whether each token is a byte of a text.
    pub are_bytes: bool,
}

impl TokenFile {
    pub(super) fn new(tokens: Array, format: &'static str, vocabulary: Option<usize>) -> TokenFile {
        let coding = Coding {
            format,
            vocabulary,
            ..Coding::default()
        };
        TokenFile { tokens, coding }
    }

    /// Format and type of the tokens, and what the file says of them.
    pub fn describe(&self) -> String {
        let mut text = format!("{} ({}", self.coding.format, self.tokens.element);
        if let Some(count) = self.coding.vocabulary {
            text += &format!(", vocabulary {count}");
        }
        if let Some(token) = self.coding.end_of_text {
            text += &format!(", documents end with {token}");
        }
        text + ")"
    }
}
