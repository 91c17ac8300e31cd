//! Rows of a table, written into a flat file: `features`, f32 of all columns except the label's,
//! and `labels`. A missing number is NaN.

use std::path::Path;

use super::super::cell::{Cell, TableReader, Value, number};
use super::super::contents::{EXAMPLES_MAX, OddCells};
use super::super::csv::HEADER_HELP;
use super::super::flat;
use super::super::shown::shown;
use super::columns::{Columns, Feature};
use super::labels::LabelColumn;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::rounding::{self, Ends};

/// Numbers written at once.
pub(super) const PIECE_COUNT: usize = 1 << 18;

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
    /// Whether some columns are called like numbers.
    any_number: bool,
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
        let count = columns.features.len();
        let is_number = |name: &String| number(name.as_bytes()).is_some();
        Ok(RowWriter {
            columns,
            out,
            features: Vec::with_capacity(PIECE_COUNT + width),
            ends: vec![Ends::NONE; count],
            odd: (0..count)
                .map(|index| OddCells::of(columns.name(index)))
                .collect(),
            refused_cell: false,
            labels: labels.transpose()?,
            unlabelled: 0,
            first_unlabelled: String::new(),
            rows: 0,
            any_number: columns.names.iter().any(is_number),
        })
    }

    /// Adds the current row of `table`.
    pub(super) fn add(&mut self, table: &dyn TableReader) -> Result<()> {
        for (index, feature) in self.columns.features.iter().enumerate() {
            self.feature(table, index, feature)?;
        }
        for &column in &self.columns.labels {
            self.label(table, column)?;
        }
        self.rows += 1;
        match self.features.len() >= PIECE_COUNT {
            true => self.write_piece(),
            false => Ok(()),
        }
    }

    fn feature(&mut self, table: &dyn TableReader, index: usize, feature: &Feature) -> Result<()> {
        let value = table.value(feature.column);
        let bad = |what: String| self.columns.bad_cell(table, feature.column, &what);
        match (value.cell(), &feature.positions) {
            (Cell::Missing, positions) if self.columns.request.allows_missing => {
                self.odd[index].missing += 1;
                let filler = if positions.is_some() { 0.0 } else { f32::NAN };
                let end = self.features.len() + feature.width();
                self.features.resize(end, filler);
            }
            (Cell::Number(_) | Cell::Text(_), Some(positions)) => {
                let (start, text) = (self.features.len(), value.text());
                self.features.resize(start + positions.len(), 0.0);
                match positions.get(&*text) {
                    Some(position) => self.features[start + position] = 1.0,
                    None => self.odd[index].add_unseen(&text),
                }
            }
            (Cell::Number(value), None) if (value as f32).is_finite() => {
                self.ends[index].add(value);
                self.features.push(value as f32);
            }
            (Cell::Number(number), None) => {
                let got = shown(&value.text());
                return Err(bad(match number.is_finite() {
                    true => format!(
                        "expected at most {:e}, the largest f32, got {got}; help: give the column a larger unit",
                        f32::MAX
                    ),
                    false => format!(
                        "expected a finite number, got {got}; help: fill it in, or remove the row or the column"
                    ),
                }));
            }
            (Cell::Missing | Cell::Text(_), _) => {
                let error = bad("expected a number".into());
                self.refused_cell = true;
                return Err(error);
            }
        }
        Ok(())
    }

    fn label(&mut self, table: &dyn TableReader, column: usize) -> Result<()> {
        let (columns, value) = (self.columns, table.value(column));
        let (text, name) = (value.text(), &columns.names[column]);
        if text.is_empty() {
            if self.unlabelled == 0 {
                self.first_unlabelled = columns.cell_place(table, column);
            }
            self.unlabelled += 1;
            return Ok(());
        }
        let is_name = *text == *name.as_bytes() && number(&text).is_none();
        if is_name && self.any_number && matches!(value, Value::Written(_)) {
            let what = format!(
                "the label \"{}\" is the column's name, and other names are numbers, as if the first line were a row; \
                 {HEADER_HELP}",
                shown(&text)
            );
            return Err(columns.bad_cell(table, column, &what));
        }
        let is_text = matches!(value, Value::Text(_));
        let labels = self.labels.iter_mut();
        labels.into_iter().try_for_each(|labels| {
            labels.push(&text, is_text, |what| {
                columns.bad_cell(table, column, &what)
            })
        })
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
        let labels = self.labels.map(|labels| labels.finish(self.out));
        self.odd.retain(|odd| odd.missing + odd.unseen > 0);
        Ok(flat::About {
            classes: labels.transpose()?.flatten(),
            columns: Some(columns.feature_names()),
            source: Some(columns.path.display().to_string()),
            odd_cells: self.odd,
            ..flat::About::default()
        })
    }
}

impl Columns<'_> {
    fn cell_place(&self, table: &dyn TableReader, column: usize) -> String {
        format!("{}, column \"{}\"", table.place(column), self.names[column])
    }

    /// The error of a cell in the current row.
    fn bad_cell(&self, table: &dyn TableReader, column: usize, what: &str) -> Error {
        self.bad(format!("{}: {what}", self.cell_place(table, column)))
    }
}

impl OddCells {
    /// Counts a value that is not among the column's categories.
    fn add_unseen(&mut self, value: &[u8]) {
        self.unseen += 1;
        let example = shown(value);
        if self.examples.len() < EXAMPLES_MAX && !self.examples.contains(&example) {
            self.examples.push(example);
        }
    }
}
