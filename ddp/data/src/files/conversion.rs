//! The conversion of tables into the flat format: `features`, f32 of all columns except the
//! label's, and `labels`.

mod labels;

use std::collections::HashMap;
use std::path::Path;

use self::labels::LabelColumn;
use super::array::Element;
use super::csv::number;
use super::flat;
use super::io::refuse;
use super::shown::{listed, shown};
use crate::error::{Error, Result};
use crate::rounding::{self, Ends};

/// Numbers written at once.
pub(super) const PIECE_COUNT: usize = 1 << 18;
/// The most bytes that the names of all features have in a flat file's header.
const NAMES_BYTES_MAX: usize = 40 << 20;

/// Which columns of a table are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableRequest<'a> {
    /// The column of labels.
    pub label: Option<&'a str>,
    /// The columns of features, in this order; `None` for all others, in the order of the table.
    pub features: Option<&'a [String]>,
    /// Whether labels are texts even if all could be numbers.
    pub labels_are_texts: bool,
    /// The folder of the converted table, if not the usual one.
    pub cache_dir: Option<&'a Path>,
}

/// The columns of a table that is being converted, and which of them are wanted.
pub(super) struct Columns<'a> {
    pub(super) path: &'a Path,
    pub(super) request: &'a TableRequest<'a>,
    pub(super) names: Vec<String>,
    /// The indices of the features.
    pub(super) features: Vec<usize>,
    /// The index of the label.
    pub(super) label: Option<usize>,
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
            label: None,
        };
        columns.check_names_differ()?;
        let label = request.label.map(|name| columns.position(name));
        columns.label = label.transpose()?;
        columns.features = match request.features {
            Some(wanted) => {
                let wanted = wanted.iter().map(|name| columns.position(name));
                wanted.collect::<Result<_>>()?
            }
            None => {
                let all = 0..columns.names.len();
                all.filter(|&column| Some(column) != columns.label)
                    .collect()
            }
        };
        columns.check_features()?;
        Ok(columns)
    }

    fn check_features(&self) -> Result<()> {
        let names = || self.features.iter().map(|&column| &self.names[column]);
        if let Some(index) = names().position(|name| name.is_empty()) {
            return Err(self.bad(format!(
                "column {} of {} has no name; help: if it is an index that pandas wrote, save without it: \
                 to_csv(path, index=False)",
                self.features[index] + 1,
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
        let bytes: usize = names().map(|name| flat::text_bytes(name)).sum();
        if bytes > NAMES_BYTES_MAX {
            return Err(self.bad(format!(
                "the names of its columns: expected at most {NAMES_BYTES_MAX} bytes together, got {bytes}; \
                 help: give them shorter names"
            )));
        }
        Ok(())
    }

    fn position(&self, name: &str) -> Result<usize> {
        let position = self.names.iter().position(|has| has == name);
        position.ok_or_else(|| {
            let has = listed(&self.names);
            self.bad(format!(
                "expected a column \"{name}\", got the columns {has}; help: name one of these"
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

    pub(super) fn bad(&self, what: String) -> Error {
        refuse(self.path, what)
    }

    /// The error of a cell of features that is no number, or no finite f32. `place` is its line or
    /// row.
    pub(super) fn bad_feature(
        &self,
        place: &str,
        column: usize,
        cell: &[u8],
        value: Option<f64>,
    ) -> Error {
        let (name, got) = (&self.names[column], shown(cell));
        let what = match value {
            _ if cell.is_empty() => {
                "expected a number, got an empty cell; help: fill it in, or remove the row (pandas: dropna) or the column"
                    .into()
            }
            None if has_decimal_comma(cell) => {
                format!("expected a number, got \"{got}\"; help: write decimals with a point (pandas: read_csv(…, decimal=\",\"))")
            }
            None => format!("expected a number, got \"{got}\"; {}", text_help(name)),
            Some(value) if value.is_finite() => {
                let most = f32::MAX;
                format!("expected at most {most:e}, the largest f32, got {got}; help: give the column a larger unit")
            }
            Some(_) => {
                format!("expected a finite number, got {got}; help: fill it in, or remove the row or the column")
            }
        };
        self.bad(format!("{place}, column \"{name}\": {what}"))
    }
}

/// Whether a cell is a number but for a comma.
fn has_decimal_comma(cell: &[u8]) -> bool {
    let text = String::from_utf8_lossy(cell);
    text.matches(',').count() == 1 && number(text.replace(',', ".").as_bytes()).is_some()
}

/// What to do about a column of texts.
pub(super) fn text_help(column: &str) -> String {
    format!(
        "help: if this column is the label, set `labels` to \"{column}\"; else turn its texts into numbers (pandas: \
         get_dummies) or remove it"
    )
}

/// Writes rows: features at once, labels aside until all are known.
pub(super) struct RowWriter<'a> {
    out: &'a mut flat::Writer,
    features: Vec<f32>,
    /// Of each column, before rounding.
    ends: Vec<Ends>,
    labels: Option<LabelColumn>,
    rows: u64,
}

impl<'a> RowWriter<'a> {
    /// Rows of the file `to`. `has_text_labels`: whatever they look like.
    pub(super) fn new(
        columns: &Columns<'_>,
        to: &Path,
        out: &'a mut flat::Writer,
        has_text_labels: bool,
    ) -> Result<RowWriter<'a>> {
        let count = columns.features.len();
        if count > 0 {
            out.begin("features", Element::F32, &[count])?;
        }
        let are_texts = has_text_labels || columns.request.labels_are_texts;
        let labels = columns.label.map(|_| LabelColumn::beside(to, are_texts));
        Ok(RowWriter {
            out,
            features: Vec::with_capacity(PIECE_COUNT + count),
            ends: vec![Ends::NONE; count],
            labels: labels.transpose()?,
            rows: 0,
        })
    }

    /// The next feature of the row, number `index` of it. It is finite as f32.
    #[inline]
    pub(super) fn feature(&mut self, index: usize, value: f64) {
        self.ends[index].add(value);
        self.features.push(value as f32);
    }

    /// The label of the row. `bad` makes an error of what is wrong with it.
    pub(super) fn label(&mut self, cell: &[u8], bad: impl Fn(String) -> Error) -> Result<()> {
        match &mut self.labels {
            Some(labels) => labels.push(cell, bad),
            None => Ok(()),
        }
    }

    /// Ends the row.
    pub(super) fn end_row(&mut self) -> Result<()> {
        self.rows += 1;
        debug_assert_eq!(self.features.len() % self.ends.len().max(1), 0);
        if self.features.len() >= PIECE_COUNT {
            self.write_piece()?;
        }
        Ok(())
    }

    fn write_piece(&mut self) -> Result<()> {
        self.out.write_numbers(&self.features, f32::to_le_bytes)?;
        self.features.clear();
        Ok(())
    }

    /// Writes the labels after the last row.
    pub(super) fn finish(mut self, columns: &Columns<'_>) -> Result<flat::About> {
        if self.rows == 0 {
            return Err(columns.bad("it has a header and no rows; help: add rows below it".into()));
        }
        if !self.features.is_empty() {
            self.write_piece()?;
        }
        let names = columns.features.iter();
        let names: Vec<String> = names.map(|&column| columns.names[column].clone()).collect();
        let close = names
            .iter()
            .zip(&self.ends)
            .filter(|(_, ends)| ends.are_too_close());
        let close: Vec<_> = close
            .map(|(name, ends)| (format!("\"{name}\""), *ends))
            .collect();
        if let Some(warning) = rounding::warning(&close) {
            tracing::warn!("{}: {warning}", columns.path.display());
        }
        let classes = match self.labels {
            Some(labels) => labels.finish(self.out)?,
            None => None,
        };
        Ok(flat::About {
            classes,
            columns: Some(names),
            source: Some(columns.path.display().to_string()),
        })
    }
}
