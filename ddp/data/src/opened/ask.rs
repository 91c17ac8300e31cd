//! What is to be opened.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files::{Array, Contents};
use crate::labels::FileLabels;
use crate::plan::{ColumnPlan, TableSettings};
use crate::spec::FilesSpec;
use crate::task::LabelName;

/// Where labels are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum LabelSource {
    /// In the usual place of the format.
    Default,
    /// As the user says: `#NAME`, the name of a column or an array, or files.
    Given(String),
    /// Labels are not needed.
    Unwanted,
}

/// Which files are opened, and for what.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    /// The setting that names the files, for messages.
    pub(crate) setting: &'static str,
    pub(crate) spec: &'a FilesSpec,
    /// The setting that names the labels.
    pub(crate) labels_setting: &'static str,
    pub(crate) labels: LabelSource,
    /// Which columns of tables become features, and how.
    pub(crate) table: &'a TableSettings,
    /// The names of the features, in this order, if known.
    pub(crate) columns: Option<Vec<String>>,
    /// How many features the model takes, if there is one.
    pub(crate) width: Option<usize>,
    /// The columns of tables that they come from, if known.
    pub(crate) plan: Option<Vec<ColumnPlan>>,
    /// Whether numbers in tables may be missing.
    pub(crate) allows_missing: bool,
    /// Whether columns and label are those of a trained model.
    pub(crate) is_for_model: bool,
    /// The name of the labels in other files of these data.
    pub(crate) label: Option<LabelName>,
    /// Whether labels in tables are texts even if all could be numbers.
    pub(crate) labels_are_texts: bool,
    pub(crate) cache_dir: Option<&'a Path>,
    pub(crate) to_evaluate: bool,
}

impl Ask<'_> {
    /// The columns that the name of the data has: `table.csv#a,b`.
    pub(super) fn named_columns(&self) -> Option<Vec<String>> {
        let part = self.spec.part.as_ref()?;
        Some(
            part.split(',')
                .map(|name| name.trim().to_string())
                .collect(),
        )
    }
}

/// Where labels are, once it is known whether a name is that of files.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum LabelPlace {
    Default,
    /// In the column or array of this name.
    Named(String),
    /// In separate files; the second is the array or column in each.
    Files(Vec<PathBuf>, Option<String>),
    /// In files beside those of the features, one each.
    Beside(Vec<PathBuf>),
    Unwanted,
}

impl LabelPlace {
    /// The files that hold only labels.
    pub(super) fn files(&self) -> &[PathBuf] {
        match self {
            LabelPlace::Files(files, _) | LabelPlace::Beside(files) => files,
            _ => &[],
        }
    }
}

/// The labels of one file.
pub(super) struct Labelled {
    pub(super) of_file: FileLabels,
    pub(super) path: PathBuf,
    pub(super) name: Option<LabelName>,
}

impl Labelled {
    /// An array of a file.
    pub(super) fn of_array(path: &Path, array: &Array, names: Option<Vec<String>>) -> Labelled {
        let name = (!array.key().is_empty()).then(|| LabelName::Array(array.key().to_string()));
        let array = array.clone();
        Labelled {
            of_file: FileLabels {
                array,
                names,
                column: None,
            },
            path: path.into(),
            name,
        }
    }

    /// The column of a converted table.
    pub(super) fn of_column(path: &Path, contents: &Contents, column: String) -> Result<Labelled> {
        let array = array_of(contents, path, "labels")?;
        let names = contents.classes.clone();
        Ok(Labelled {
            of_file: FileLabels {
                array,
                names,
                column: Some((path.into(), column.clone())),
            },
            path: path.into(),
            name: Some(LabelName::Column(column)),
        })
    }
}

/// The features or labels of a converted table.
pub(super) fn array_of(contents: &Contents, path: &Path, key: &str) -> Result<Array> {
    let path = path.display();
    match contents.find(key) {
        Ok(Some(array)) => Ok(array.clone()),
        Ok(None) => Err(Error::Data(format!(
            "{path}: no columns of {key} are left; help: leave out fewer columns"
        ))),
        Err(why) => Err(Error::Data(format!("{path}: {why}"))),
    }
}
