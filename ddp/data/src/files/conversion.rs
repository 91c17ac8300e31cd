//! The conversion of tables into the flat format: `features`, f32 of all columns except the
//! label's, and `labels`. A missing number is NaN.

mod labels;

use std::collections::{HashMap, HashSet};
use std::path::Path;

use self::labels::LabelColumn;
use super::array::Element;
use super::cell::{Cell, CellSink};
use super::contents::{EXAMPLES_MAX, OddCells};
use super::flat;
use super::io::refuse;
use super::shown::{listed, shown, shown_number};
use crate::error::{Error, Result};
use crate::plan::ColumnPlan;
use crate::rounding::{self, Ends};

/// Numbers written at once.
pub(super) const PIECE_COUNT: usize = 1 << 18;
/// The most bytes that the names of all features have in a flat file's header.
const NAMES_BYTES_MAX: usize = 40 << 20;

/// Which columns of a table are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableRequest<'a> {
    /// The column of labels, or several with commas between them: these are numbers.
    pub label: Option<&'a str>,
    /// The columns of features, in this order; `None` for all others, in the order of the table,
    /// as numbers.
    pub features: Option<&'a [ColumnPlan]>,
    /// Whether numbers may be missing: they become NaN.
    pub allows_missing: bool,
    /// Whether labels are texts even if all could be numbers.
    pub labels_are_texts: bool,
    /// Whether a trained model says what the features are.
    pub is_for_model: bool,
    /// The folder of the converted table, if not the usual one.
    pub cache_dir: Option<&'a Path>,
}

/// The columns of a table that is being converted, and which of them are wanted.
pub(super) struct Columns<'a> {
    pub(super) path: &'a Path,
    pub(super) request: &'a TableRequest<'a>,
    pub(super) names: Vec<String>,
    pub(super) features: Vec<Feature>,
    /// The indices of the labels.
    pub(super) labels: Vec<usize>,
}

/// The columns that `name` means among `columns`: one of this name, or several with commas between.
pub(crate) fn label_names<'a>(columns: &[String], name: &'a str) -> Vec<&'a str> {
    match columns.iter().any(|column| column == name) {
        true => vec![name],
        false => name.split(',').map(str::trim).collect(),
    }
}

/// A column of features.
pub(super) struct Feature {
    /// Its index in the table.
    pub(super) column: usize,
    /// The position of each value of a categorical column.
    positions: Option<HashMap<Box<[u8]>, usize>>,
}

impl Feature {
    fn of(column: usize, plan: Option<&ColumnPlan>) -> Feature {
        let values = plan.and_then(|plan| plan.values.as_ref());
        let position = |(position, value): (usize, &String)| (value.as_bytes().into(), position);
        Feature {
            column,
            positions: values.map(|values| values.iter().enumerate().map(position).collect()),
        }
    }

    fn width(&self) -> usize {
        self.positions.as_ref().map_or(1, HashMap::len)
    }
}

impl<'a> Columns<'a> {
    /// Finds the wanted columns among `names`.
    pub(super) fn choose(
        path: &'a Path,
        request: &'a TableRequest<'a>,
        names: Vec<String>,
    ) -> Result<Columns<'a>> {
        let mut columns = Columns {
            path,
            request,
            names,
            features: Vec::new(),
            labels: Vec::new(),
        };
        columns.check_names_differ()?;
        // Of names that are given twice, which only empty ones are, the first counts.
        let places = columns.names.iter().enumerate().rev();
        let places: HashMap<_, _> = places.map(|(place, name)| (name.as_str(), place)).collect();
        let labels = request.label.iter();
        let labels = labels.flat_map(|name| label_names(&columns.names, name));
        let labels = labels.map(|name| columns.place(name, &places));
        columns.labels = labels.collect::<Result<_>>()?;
        columns.check_labels_differ()?;
        columns.features = match request.features {
            Some(wanted) => {
                let feature = |plan: &ColumnPlan| {
                    let place = columns.place(&plan.name, &places)?;
                    Ok(Feature::of(place, Some(plan)))
                };
                wanted.iter().map(feature).collect::<Result<_>>()?
            }
            None => {
                let all = 0..columns.names.len();
                all.filter(|column| !columns.labels.contains(column))
                    .map(|column| Feature::of(column, None))
                    .collect()
            }
        };
        columns.check_features()?;
        Ok(columns)
    }

    /// The name of the feature column `index`.
    pub(super) fn name(&self, index: usize) -> &str {
        &self.names[self.features[index].column]
    }

    /// The names of all features.
    fn feature_names(&self) -> Vec<String> {
        match self.request.features {
            Some(plans) => plans.iter().flat_map(ColumnPlan::feature_names).collect(),
            None => (0..self.features.len())
                .map(|index| self.name(index).to_string())
                .collect(),
        }
    }

    fn check_features(&self) -> Result<()> {
        let features = self.features.iter().map(|feature| feature.column);
        let mut used = features.chain(self.labels.iter().copied());
        if let Some(column) = used.find(|column| self.names[*column].is_empty()) {
            return Err(self.bad(format!(
                "column {} of {} has no name; help: if it is an index that pandas wrote, save without it: \
                 to_csv(path, index=False); if lines end in a delimiter, remove it",
                column + 1,
                self.names.len()
            )));
        }
        if self.features.is_empty() && self.request.features.is_none() {
            let label = &self.names[0];
            return Err(self.bad(format!(
                "it has no column besides the label \"{label}\"; help: if this line holds several names, put commas \
                 between them"
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
        let bytes: usize = names.iter().map(|name| flat::text_bytes(name)).sum();
        if bytes > NAMES_BYTES_MAX {
            return Err(self.bad(format!(
                "the names of its columns: expected at most {NAMES_BYTES_MAX} bytes together, got {bytes}; \
                 help: give them shorter names"
            )));
        }
        Ok(())
    }

    /// The place of the column `name` among all, which are in `places`.
    fn place(&self, name: &str, places: &HashMap<&str, usize>) -> Result<usize> {
        places.get(name).copied().ok_or_else(|| {
            let has = listed(&self.names);
            let help = match nearest(name, &self.names) {
                Some(near) => format!("\"{near}\" was probably meant"),
                None if self.request.is_for_model => {
                    "the model was trained on this column: add it to the table".to_string()
                }
                None => "name one of these".to_string(),
            };
            self.bad(format!(
                "expected a column \"{name}\", got the columns {has}; help: {help}"
            ))
        })
    }

    fn check_names_differ(&self) -> Result<()> {
        let mut seen = HashMap::new();
        for (column, name) in self.names.iter().enumerate() {
            if let Some(first) = seen.insert(name, column).filter(|_| !name.is_empty()) {
                return Err(self.bad(format!(
                    "its columns {} and {} are both called \"{name}\"; help: give each its own name",
                    first + 1,
                    column + 1
                )));
            }
        }
        Ok(())
    }

    fn check_labels_differ(&self) -> Result<()> {
        let mut seen = HashSet::new();
        match self.labels.iter().find(|column| !seen.insert(**column)) {
            None => Ok(()),
            Some(&column) => Err(Error::Usage(format!(
                "{}: expected several different columns as labels, got \"{}\" twice; help: name it once",
                self.path.display(),
                self.names[column]
            ))),
        }
    }

    pub(super) fn bad(&self, what: String) -> Error {
        refuse(self.path, what)
    }

    /// The error of a number that is no finite f32.
    fn bad_number(&self, place: &str, index: usize, value: f64, text: &[u8]) -> Error {
        let name = self.name(index);
        let got = match text {
            [] => shown_number(value),
            text => shown(text),
        };
        let what = match value.is_finite() {
            true => format!(
                "expected at most {:e}, the largest f32, got {got}; help: give the column a larger unit",
                f32::MAX
            ),
            false => format!(
                "expected a finite number, got {got}; help: fill it in, or remove the row or the column"
            ),
        };
        self.bad(format!("{place}, column \"{name}\": {what}"))
    }
}

/// The name that is most like `wanted`, if at least half of its letters agree.
fn nearest<'a>(wanted: &str, names: &'a [String]) -> Option<&'a String> {
    let likeness = |name: &String| {
        strsim::normalized_damerau_levenshtein(&wanted.to_lowercase(), &name.to_lowercase())
    };
    let near = names.iter().filter(|name| likeness(name) > 0.5);
    near.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
}

/// Writes rows: features at once, labels aside until all are known.
pub(super) struct RowWriter<'a> {
    columns: &'a Columns<'a>,
    out: &'a mut flat::Writer,
    features: Vec<f32>,
    /// Of each column of numbers, before rounding.
    ends: Vec<Ends>,
    /// Of each column.
    odd: Vec<OddCells>,
    /// Whether a cell was refused that other settings would allow.
    pub(super) refused_cell: bool,
    labels: Option<LabelColumn>,
    /// Missing labels, and where the first one is.
    unlabelled: u64,
    first_unlabelled: String,
    rows: u64,
}

impl<'a> RowWriter<'a> {
    /// Rows of the file `to`.
    pub(super) fn new(
        columns: &'a Columns<'a>,
        to: &Path,
        out: &'a mut flat::Writer,
    ) -> Result<RowWriter<'a>> {
        let width = columns.features.iter().map(Feature::width).sum();
        if width > 0 {
            out.begin("features", Element::F32, &[width])?;
        }
        let (are_texts, targets) = (columns.request.labels_are_texts, columns.labels.len());
        let labels = (targets > 0).then(|| LabelColumn::beside(to, are_texts, targets));
        let odd = |index| OddCells::of(columns.name(index));
        let count = columns.features.len();
        Ok(RowWriter {
            columns,
            out,
            features: Vec::with_capacity(PIECE_COUNT + width),
            ends: vec![Ends::NONE; count],
            odd: (0..count).map(odd).collect(),
            refused_cell: false,
            labels: labels.transpose()?,
            unlabelled: 0,
            first_unlabelled: String::new(),
            rows: 0,
        })
    }

    /// A cell of a categorical column: its features are 0 where `value` is `None` or unknown.
    fn category(&mut self, index: usize, value: Option<&[u8]>) {
        let feature = &self.columns.features[index];
        let start = self.features.len();
        self.features.resize(start + feature.width(), 0.0);
        let Some(value) = value else {
            return;
        };
        let positions = feature.positions.as_ref();
        match positions.and_then(|positions| positions.get(value)) {
            Some(position) => self.features[start + position] = 1.0,
            None => {
                let odd = &mut self.odd[index];
                odd.unseen += 1;
                let example = shown(value);
                if odd.examples.len() < EXAMPLES_MAX && !odd.examples.contains(&example) {
                    odd.examples.push(example);
                }
            }
        }
    }

    fn write_piece(&mut self) -> Result<()> {
        self.out.write_numbers(&self.features, f32::to_le_bytes)?;
        self.features.clear();
        Ok(())
    }

    /// Writes the labels after the last row.
    pub(super) fn finish(mut self) -> Result<flat::About> {
        let columns = self.columns;
        if self.rows == 0 {
            return Err(columns.bad("it has a header and no rows; help: add rows below it".into()));
        }
        if self.unlabelled > 0 {
            return Err(columns.bad(format!(
                "{}: expected a number or a text as label, got an empty cell; in all, {} labels of {} rows are missing; \
                 help: fill them in or remove these rows",
                self.first_unlabelled, self.unlabelled, self.rows
            )));
        }
        if !self.features.is_empty() {
            self.write_piece()?;
        }
        let ends = self.ends.iter().enumerate();
        let close = ends.filter(|(_, ends)| ends.are_too_close());
        let close: Vec<_> = close
            .map(|(index, ends)| (format!("\"{}\"", columns.name(index)), *ends))
            .collect();
        if let Some(warning) = rounding::warning(&close) {
            tracing::warn!("{}: {warning}", columns.path.display());
        }
        let classes = match self.labels {
            Some(labels) => labels.finish(self.out)?,
            None => None,
        };
        self.odd.retain(|odd| odd.missing + odd.unseen > 0);
        Ok(flat::About {
            classes,
            columns: Some(columns.feature_names()),
            source: Some(columns.path.display().to_string()),
            odd: self.odd,
            ..flat::About::default()
        })
    }
}

impl CellSink for RowWriter<'_> {
    fn wants_text(&self, index: usize) -> bool {
        self.columns.features[index].positions.is_some()
    }

    #[inline]
    fn feature(&mut self, index: usize, cell: Cell<'_>, place: &dyn Fn() -> String) -> Result<()> {
        let is_category = self.columns.features[index].positions.is_some();
        match cell {
            Cell::Number(_, text) | Cell::Text(text) if is_category => {
                self.category(index, Some(text));
            }
            Cell::Number(value, _) if (value as f32).is_finite() => {
                self.ends[index].add(value);
                self.features.push(value as f32);
            }
            Cell::Number(value, text) => {
                return Err(self.columns.bad_number(&place(), index, value, text));
            }
            Cell::Missing if self.columns.request.allows_missing => {
                self.odd[index].missing += 1;
                match is_category {
                    true => self.category(index, None),
                    false => self.features.push(f32::NAN),
                }
            }
            Cell::Missing | Cell::Text(_) => {
                self.refused_cell = true;
                let (place, name) = (place(), self.columns.name(index));
                return Err(self
                    .columns
                    .bad(format!("{place}, column \"{name}\": expected a number")));
            }
        }
        Ok(())
    }

    fn label(
        &mut self,
        index: usize,
        cell: &[u8],
        is_text: bool,
        place: &dyn Fn() -> String,
    ) -> Result<()> {
        let Some(labels) = &mut self.labels else {
            return Ok(());
        };
        let column = self.columns.labels[index];
        let place = || format!("{}, column \"{}\"", place(), self.columns.names[column]);
        if cell.is_empty() {
            if self.unlabelled == 0 {
                self.first_unlabelled = place();
            }
            self.unlabelled += 1;
            return Ok(());
        }
        let bad = |what: String| self.columns.bad(format!("{}: {what}", place()));
        labels.push(cell, is_text, bad)
    }

    fn end_row(&mut self) -> Result<()> {
        self.rows += 1;
        if self.features.len() >= PIECE_COUNT {
            self.write_piece()?;
        }
        Ok(())
    }
}
