//! What a file holds, whatever its format.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;
use serde::{Deserialize, Serialize};

use super::array::{Array, ArrayPlace};
use super::io::refuse;
use crate::error::Result;

/// The arrays of a file by name, and what the file says besides.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// Those that have rows, in the order of the file. At least one.
    pub arrays: Vec<Array>,
    /// The names of the others, and why each cannot be used.
    pub others: Vec<(String, String)>,
    /// The names of classes.
    pub classes: Option<Vec<String>>,
    /// The names of features.
    pub columns: Option<Vec<String>>,
    /// Of a converted table: the columns that had such cells.
    pub odd_cells: Vec<OddCells>,
    /// If the array is tokens and the file says so: all are below this.
    pub vocabulary: Option<usize>,
    /// The token after each document, if the file says so.
    pub end_of_text: Option<usize>,
    /// A hash of the vocabulary, if the file says so.
    pub tokenizer: Option<String>,
}

/// How many unknown values of a column are kept for messages.
pub(super) const EXAMPLES_MAX: usize = 3;

/// Cells of a column that had no number or category of their own when a table was converted.
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
    /// None so far.
    pub(super) fn of(column: &str) -> OddCells {
        OddCells {
            column: column.to_string(),
            ..OddCells::default()
        }
    }

    /// Adds those of a later file to `all`, by the names of columns.
    pub(crate) fn add(later: Vec<OddCells>, all: &mut Vec<OddCells>) {
        let places = all.iter().enumerate();
        let places = places.map(|(place, odd)| (odd.column.clone(), place));
        let places: HashMap<String, usize> = places.collect();
        for mut odd in later {
            let Some(&place) = places.get(&odd.column) else {
                all.push(odd);
                continue;
            };
            let known = &mut all[place];
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
            None => Ok(self.arrays.iter().find(|array| array.key() == key)),
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
        if !self.arrays.is_empty() {
            return Ok(self);
        }
        Err(refuse(
            path,
            match self.others.first() {
                None => "it holds no arrays".into(),
                Some((name, why)) if name.is_empty() => why.clone(),
                Some((name, why)) => format!("{name}: {why}"),
            },
        ))
    }
}
