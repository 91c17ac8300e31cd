//! How the cells of files become features: which columns are read, which of them are categories,
//! and how missing numbers are treated. A model keeps its plan and applies it to other files.

use serde::{Deserialize, Serialize};

use crate::error::ensure;

ddp_kernels::choices! {
    /// How missing numbers are treated.
    #[derive(Default)]
    pub enum Missing {
        /// It is an error
        #[default]
        Error = "error",
        /// Replace it by the feature's mean over the training rows
        Mean = "mean",
        /// Replace it by 0
        Zero = "zero",
    }
}

/// In `TableSettings::categorical`: every column of texts.
pub const AUTO: &str = "auto";

/// How a user wants the columns of tables to be read. Fields are named after the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableSettings {
    /// Columns that are left out.
    pub drop: Vec<String>,
    /// Columns whose values are categories, or `AUTO`.
    pub categorical: Vec<String>,
    /// How missing numbers are treated.
    pub missing: Missing,
}

/// A column of a table that is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnPlan {
    /// Its name.
    pub name: String,
    /// The values of a categorical column, sorted: each becomes a feature that is 1 where a cell
    /// has this value, else 0. `None` for a column of numbers, which is one feature.
    pub values: Option<Vec<String>>,
}

/// How cells become features, apart from their normalization.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FeaturePlan {
    /// The columns of a table, in the order of their features; `None` if each is a number.
    pub columns: Option<Vec<ColumnPlan>>,
    /// What replaces missing numbers, one for each feature; `None` if none may be missing.
    pub fill: Option<Vec<f32>>,
}

impl ColumnPlan {
    /// A column of numbers.
    pub(crate) fn number(name: &str) -> ColumnPlan {
        ColumnPlan {
            name: name.to_string(),
            values: None,
        }
    }

    /// Whether its values are categories.
    pub(crate) fn is_categorical(&self) -> bool {
        self.values.is_some()
    }

    /// How many features it becomes.
    pub(crate) fn width(&self) -> usize {
        self.values.as_ref().map_or(1, Vec::len)
    }

    /// The names of its features.
    pub(crate) fn feature_names(&self) -> Vec<String> {
        let of_value = |value: &String| format!("{}={value}", self.name);
        match &self.values {
            None => vec![self.name.clone()],
            Some(values) => values.iter().map(of_value).collect(),
        }
    }
}

impl FeaturePlan {
    /// Whether features are the numbers in the files as they are.
    pub fn is_plain(&self) -> bool {
        *self == FeaturePlan::default()
    }

    /// What is wrong with a plan for rows of this many features.
    pub fn check(&self, features: usize) -> Result<(), String> {
        let columns = || self.columns.iter().flatten();
        let width = match self.columns {
            Some(_) => columns().map(ColumnPlan::width).sum(),
            None => features,
        };
        ensure!(
            width == features,
            "columns for {width} of {features} features"
        );
        let mut values = columns().filter_map(|column| column.values.as_ref());
        ensure!(
            values.all(|values| values.is_sorted_by(|a, b| a < b)),
            "the values of a column twice, or not in their order"
        );
        let fill = self.fill.as_deref().unwrap_or_default();
        ensure!(
            self.fill.is_none() || fill.len() == features && fill.iter().all(|x| x.is_finite()),
            "{} numbers for what is missing in {features} features, or a non-finite one",
            fill.len()
        );
        Ok(())
    }
}
