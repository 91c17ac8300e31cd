//! The requested columns of a table, and their positions in it.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use ddp_data::files::io::refuse;
use ddp_data::words::listed;
use ddp_data::{ColumnPlan, Error, Result, ensure};

/// Which columns of a table are wanted.
#[derive(Clone, Debug, Default)]
pub struct TableRequest {
    /// The column of labels, or several with commas between them: these are numbers.
    pub label: Option<String>,
    /// The columns of features, in this order.
    pub features: Vec<ColumnPlan>,
    /// Whether numbers may be missing: they become NaN.
    pub allows_missing: bool,
    /// Whether labels are texts even if all could be numbers.
    pub labels_are_texts: bool,
    /// Whether rows without a label are left out, unless labels are texts.
    pub leaves_out: bool,
    /// Whether a trained model says what the features are.
    pub is_for_model: bool,
    /// Whether columns are only copied. One may have no name, as an index that pandas wrote.
    pub is_kept: bool,
}

/// The wanted columns of a table.
pub(crate) struct Columns<'a> {
    pub(crate) path: &'a Path,
    pub(crate) request: &'a TableRequest,
    pub(crate) names: Vec<String>,
    /// The indices of the features' columns, in the order of the request.
    pub(crate) features: Vec<usize>,
    /// The indices of the labels.
    pub(crate) labels: Vec<usize>,
}

/// The columns that `name` means among `columns`: one of this name, or several with commas between.
pub(crate) fn label_names<'a>(columns: &[String], name: &'a str) -> Vec<&'a str> {
    if columns.iter().any(|column| column == name) {
        vec![name]
    } else {
        name.split(',').map(str::trim).collect()
    }
}

/// Whether a table with these columns has the label `name`, or all labels that it means.
pub(crate) fn has_label(columns: &[String], name: &str) -> bool {
    let mut names = label_names(columns, name).into_iter();
    names.all(|name| columns.iter().any(|column| column == name))
}

impl<'a> Columns<'a> {
    /// Finds the wanted columns among `names`.
    pub(crate) fn choose(
        path: &'a Path,
        request: &'a TableRequest,
        names: &[String],
    ) -> Result<Columns<'a>> {
        let mut columns = Columns {
            path,
            request,
            names: names.to_vec(),
            features: Vec::new(),
            labels: Vec::new(),
        };
        let mut places = HashMap::new();
        for (column, name) in names.iter().enumerate() {
            // Of columns without a name the first counts.
            let first = *places.entry(name.as_str()).or_insert(column);
            if first != column && !name.is_empty() {
                return Err(columns.bad(format!(
                    "its columns {} and {} are both called \"{name}\"; help: give each its own name",
                    first + 1,
                    column + 1
                )));
            }
        }
        let labels = request.label.iter();
        for name in labels.flat_map(|name| label_names(names, name)) {
            let column = columns.place(name, &places)?;
            ensure!(
                !columns.labels.contains(&column),
                Usage,
                "{}: expected several different columns as labels, got \"{name}\" twice; help: name it once",
                path.display()
            );
            columns.labels.push(column);
        }
        let features = request.features.iter();
        let features = features.map(|plan| columns.place(&plan.name, &places));
        columns.features = features.collect::<Result<_>>()?;
        if !request.is_kept {
            columns.check_features()?;
        }
        Ok(columns)
    }

    /// The indices of all columns that are wanted.
    pub(crate) fn all(&self) -> Vec<usize> {
        [&self.features[..], &self.labels].concat()
    }

    /// The columns that become features, with their indices.
    pub(crate) fn plans(&self) -> impl Iterator<Item = (&ColumnPlan, usize)> {
        self.request
            .features
            .iter()
            .zip(self.features.iter().copied())
    }

    /// The names of all features.
    pub(crate) fn feature_names(&self) -> Vec<String> {
        let plans = self.request.features.iter();
        plans.flat_map(ColumnPlan::feature_names).collect()
    }

    fn check_features(&self) -> Result<()> {
        let mut used = self.all().into_iter();
        if let Some(column) = used.find(|column| self.names[*column].is_empty()) {
            return Err(self.bad(format!(
                "column {} of {} has no name; help: if it is an index that pandas wrote, save without it: \
                 to_csv(path, index=False); if lines end in a delimiter, remove it",
                column + 1,
                self.names.len()
            )));
        }
        let names = self.feature_names();
        let mut seen = HashSet::new();
        if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
            return Err(self.bad(format!(
                "two of its features are called \"{name}\"; help: name a column once; if one is a value of a categorical \
                 column, rename the other"
            )));
        }
        Ok(())
    }

    /// The index of the column `name`, which are in `places`.
    fn place(&self, name: &str, places: &HashMap<&str, usize>) -> Result<usize> {
        places.get(name).copied().ok_or_else(|| {
            let help = match nearest(name, &self.names) {
                Some(near) => format!("\"{near}\" was probably meant"),
                None if self.request.is_for_model => {
                    "the model was trained on this column: add it to the table".to_string()
                }
                None => "name one of these".to_string(),
            };
            self.bad(format!(
                "expected a column \"{name}\", got the columns {}; help: {help}",
                listed(&self.names)
            ))
        })
    }

    pub(crate) fn bad(&self, what: String) -> Error {
        refuse(self.path, what)
    }
}

/// The name that is most like `wanted`, if three quarters of its letters agree and all digits.
fn nearest<'a>(wanted: &str, names: &'a [String]) -> Option<&'a String> {
    let likeness = |name: &String| {
        strsim::normalized_damerau_levenshtein(&wanted.to_lowercase(), &name.to_lowercase())
    };
    let digits = |name: &str| name.replace(|it: char| !it.is_ascii_digit(), "");
    let is_near = |name: &&String| likeness(name) >= 0.75 && digits(name) == digits(wanted);
    let near = names.iter().filter(is_near);
    near.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
}
