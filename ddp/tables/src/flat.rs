//! Converts a table once into a flat file, which is mapped. Memory holds a piece of the table and
//! the distinct labels.
//!
//! Rows become `features`, f32 of all columns except the label's, and `labels`. A missing number is
//! NaN.
//!
//! The type of the labels depends on all of them: whole numbers are i64, other numbers f64. If one
//! is a text, all are texts: they are stored as i64 codes of the texts sorted by their bytes, which
//! are the classes. Until the last row is read, labels are kept in a file, one a line. If a whole
//! number has leading zeros, all labels are texts.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Seek, Write};
use std::num::IntErrorKind;
use std::path::{Path, PathBuf};

use ddp_data::files::io::writing;
use ddp_data::files::{Contents, NumberType, OddCells, cache, flat};
use ddp_data::words::{has_leading_zeros, number};
use ddp_data::{CLASSES_MAX, ColumnPlan, Error, MoreFeatures, Result, ensure};

use crate::columns::{Columns, TableRequest};
use crate::dates;
use crate::source::Table;
use crate::survey::Survey;
use crate::table::{Cell, TableReader, Value, shown};

/// The arrays that `request` wants of a table.
pub(crate) fn open(
    table: Table,
    request: &TableRequest,
    cache_dir: Option<&Path>,
) -> Result<Contents> {
    let path = table.path.clone();
    let asked = serde_json::json!({
        "label": request.label,
        "features": request.features,
        "allows missing": request.allows_missing,
        "labels are texts": request.labels_are_texts,
        "leaves out": request.leaves_out,
    });
    let made = converted(&path, cache_dir, &asked, |to| {
        flat::write(to, |out| convert(table, request, to, out))
    })?;
    flat::open(&made, &path.display().to_string())
}

/// The copy of a table that `make` makes. The ending of a name may say how a table is read.
fn converted(
    path: &Path,
    cache_dir: Option<&Path>,
    asked: &serde_json::Value,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    let stem = path.file_stem().map(Path::new).and_then(Path::extension);
    let asked = format!("table 5 {stem:?} {ending:?} {asked}");
    cache::converted(path, cache_dir, &asked, make)
}

/// What the cells of the columns in `request` are. Values are kept of `categorical` columns and of
/// texts. The result is kept in the cache.
pub(crate) fn survey(
    path: &Path,
    request: &TableRequest,
    categorical: &[String],
    cache_dir: Option<&Path>,
) -> Result<Survey> {
    let asked = serde_json::json!(["survey 7", request.features, request.label, categorical]);
    let made = converted(path, cache_dir, &asked, |to| {
        let mut table = Table::open(path)?;
        let columns = Columns::choose(path, request, table.rows.names())?;
        Survey::of(&columns, &mut *table.rows, categorical)?.write(to)
    })?;
    Survey::open(&made)
}

fn convert(
    mut table: Table,
    request: &TableRequest,
    to: &Path,
    out: &mut flat::Writer,
) -> Result<flat::About> {
    let columns = Columns::choose(&table.path, request, table.rows.names())?;
    table.rows.select(&columns.all())?;
    let mut rows = RowWriter::new(&columns, to, out)?;
    while table.rows.advance()? {
        match rows.add(&*table.rows) {
            // There may be more such columns: all are named at once.
            Err(first) if rows.refused_cell => {
                let mut again = Table::open(&table.path)?;
                let survey = Survey::of(&columns, &mut *again.rows, &[])?;
                return Err(survey.refusal(&columns).unwrap_or(first));
            }
            added => added?,
        }
    }
    rows.finish()
}

/// Numbers written at once.
pub(crate) const PIECE_COUNT: usize = 1 << 18;

/// Writes rows: features at once, labels aside until all are known.
pub(crate) struct RowWriter<'a> {
    columns: &'a Columns<'a>,
    out: &'a mut flat::Writer,
    features: Vec<f32>,
    /// Of each column.
    odd: Vec<OddCells>,
    /// Whether a cell was refused that other settings would allow.
    pub(crate) refused_cell: bool,
    labels: Option<LabelColumn>,
    /// Missing labels, and where the first one is.
    unlabelled: u64,
    first_unlabelled: String,
    rows: u64,
}

impl<'a> RowWriter<'a> {
    /// Rows of the file `to`.
    pub(crate) fn new(
        columns: &'a Columns<'a>,
        to: &Path,
        out: &'a mut flat::Writer,
    ) -> Result<RowWriter<'a>> {
        let plans = &columns.request.features;
        let width = plans.iter().map(ColumnPlan::width).sum();
        if width > 0 {
            out.begin("features", NumberType::F32, &[width])?;
        }
        let (are_texts, targets) = (columns.request.labels_are_texts, columns.labels.len());
        let labels = (targets > 0).then(|| LabelColumn::beside(to, are_texts, targets));
        let odd = |plan: &ColumnPlan| OddCells {
            column: plan.name.clone(),
            ..OddCells::default()
        };
        Ok(RowWriter {
            columns,
            out,
            features: Vec::with_capacity(PIECE_COUNT + width),
            odd: plans.iter().map(odd).collect(),
            refused_cell: false,
            labels: labels.transpose()?,
            unlabelled: 0,
            first_unlabelled: String::new(),
            rows: 0,
        })
    }

    /// Adds the current row of `table`.
    pub(crate) fn add(&mut self, table: &dyn TableReader) -> Result<()> {
        let columns = self.columns;
        let mut labels = columns.labels.iter();
        if columns.request.leaves_out && labels.any(|label| table.value(*label).is_no_label()) {
            if self.unlabelled == 0 {
                self.first_unlabelled = columns.cell_place(table, columns.labels[0]);
            }
            self.unlabelled += 1;
            return Ok(());
        }
        for (index, (plan, column)) in columns.plans().enumerate() {
            self.feature(table, index, plan, column)?;
        }
        for &column in &columns.labels {
            self.label(table, column)?;
        }
        self.rows += 1;
        if self.features.len() >= PIECE_COUNT {
            self.write_piece()
        } else {
            Ok(())
        }
    }

    /// Adds the cell of the feature column `index`.
    fn feature(
        &mut self,
        table: &dyn TableReader,
        index: usize,
        plan: &ColumnPlan,
        column: usize,
    ) -> Result<()> {
        let (value, odd) = (table.value(column), &mut self.odd[index]);
        let bad = |what: &str| Err(self.columns.bad_cell(table, column, what));
        let (start, end) = (self.features.len(), self.features.len() + plan.width());
        match (value.cell(), &plan.values) {
            (Cell::Missing, values) if self.columns.request.allows_missing => {
                odd.missing += 1;
                let filler = if values.is_some() { 0.0 } else { f32::NAN };
                self.features.resize(end, filler);
                if plan.more == MoreFeatures::Missing {
                    self.features[end - 1] = 1.0;
                }
            }
            // Values are sorted.
            (Cell::Number(_) | Cell::Text(_), Some(values)) => {
                let text = value.text();
                self.features.resize(end, 0.0);
                let place =
                    |text: &[u8]| values.binary_search_by(|value| value.as_bytes().cmp(text));
                match place(&text).or_else(|_| place(&value.category())) {
                    Ok(position) => self.features[start + position] = 1.0,
                    Err(_) if plan.more == MoreFeatures::Other => self.features[end - 1] = 1.0,
                    Err(_) => odd.add_unseen(&text),
                }
            }
            (Cell::Text(text), None) if matches!(plan.more, MoreFeatures::Date { .. }) => {
                let day = str::from_utf8(text).ok().and_then(dates::day);
                let MoreFeatures::Date { first } = plan.more else {
                    unreachable!("it is a date")
                };
                match day {
                    Some(day) => self.features.extend(dates::features(day, first)),
                    None => return bad(&no_date(&value.text())),
                }
            }
            (Cell::Number(_), None) if matches!(plan.more, MoreFeatures::Date { .. }) => {
                return bad(&no_date(&value.text()));
            }
            (Cell::Number(number), None) if (number as f32).is_finite() => {
                self.features.push(number as f32);
                self.features.resize(end, 0.0);
            }
            (Cell::Number(number), None) => {
                let got = shown(&value.text());
                return bad(&if number.is_finite() {
                    format!(
                        "expected at most {:e}, the largest f32, got {got}; help: give the column a larger unit",
                        f32::MAX
                    )
                } else {
                    format!(
                        "expected a finite number, got {got}; help: fill it in, or remove the row or the column"
                    )
                });
            }
            (Cell::Missing | Cell::Text(_), _) => {
                let error = bad("expected a number");
                self.refused_cell = true;
                return error;
            }
        }
        Ok(())
    }

    fn label(&mut self, table: &dyn TableReader, column: usize) -> Result<()> {
        let (columns, value) = (self.columns, table.value(column));
        let text = value.text();
        if text.is_empty() {
            if self.unlabelled == 0 {
                self.first_unlabelled = columns.cell_place(table, column);
            }
            self.unlabelled += 1;
            return Ok(());
        }
        let is_text = matches!(value, Value::Text(_));
        let bad = |what: String| columns.bad_cell(table, column, &what);
        let labels = self.labels.as_mut();
        labels.map_or(Ok(()), |labels| labels.push(&text, is_text, bad))
    }

    fn write_piece(&mut self) -> Result<()> {
        self.out.write_numbers(&self.features, f32::to_le_bytes)?;
        self.features.clear();
        Ok(())
    }

    /// Writes the labels after the last row.
    pub(crate) fn finish(mut self) -> Result<flat::About> {
        let columns = self.columns;
        let are_texts = |labels: &LabelColumn| labels.any_text || labels.any_leading_zeros;
        let leaves_out = columns.request.leaves_out;
        let is_wrong = self.rows == 0 || !leaves_out || self.labels.as_ref().is_some_and(are_texts);
        if self.unlabelled > 0 && is_wrong {
            let (got, left_out, class) = match leaves_out {
                true => (
                    "an empty cell, NA or NaN",
                    self.unlabelled,
                    "; a class that is called NA needs another name",
                ),
                false => ("an empty cell", 0, ""),
            };
            return Err(columns.bad(format!(
                "{}: expected a number or a text as label, got {got}; number of missing labels: {} in {} rows; \
                 help: fill them in or remove these rows{class}",
                self.first_unlabelled,
                self.unlabelled,
                self.rows + left_out
            )));
        }
        if self.rows == 0 {
            return Err(columns.bad("it has a header and no rows; help: add rows below it".into()));
        }
        if !self.features.is_empty() {
            self.write_piece()?;
        }
        let labels = self.labels.map(|labels| labels.finish(self.out));
        self.odd.retain(|odd| odd.missing + odd.unseen > 0);
        Ok(flat::About {
            classes: labels.transpose()?.flatten(),
            columns: Some(columns.feature_names()),
            source: Some(columns.path.display().to_string()),
            odd_cells: self.odd,
            unlabelled: (self.unlabelled > 0).then_some(self.unlabelled),
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

/// What is wrong with a cell of a column of dates.
fn no_date(cell: &[u8]) -> String {
    let got = shown(cell);
    format!("expected a date such as 2026-11-22, got {got}; help: correct it")
}

/// The names of all classes together in a flat file's header.
const TEXTS_BYTES_MAX: usize = 16 << 20;

struct LabelColumn {
    aside: BufWriter<File>,
    path: PathBuf,
    /// The different texts; `None` once there are too many for classes.
    texts: Option<HashSet<Box<[u8]>>>,
    texts_bytes: usize,
    any_text: bool,
    all_whole: bool,
    any_leading_zeros: bool,
    /// Labels of a row: several are numbers.
    width: usize,
}

impl LabelColumn {
    /// A column without labels yet, which are kept in a file beside `to`. `are_texts`: labels are
    /// texts even if all look like numbers.
    fn beside(to: &Path, are_texts: bool, width: usize) -> Result<LabelColumn> {
        let path = to.with_extension("labels");
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(writing(&path))?;
        // The file exists as long as it is open.
        std::fs::remove_file(&path).map_err(writing(&path))?;
        Ok(LabelColumn {
            aside: BufWriter::with_capacity(1 << 18, file),
            path,
            texts: (width == 1).then(HashSet::new),
            texts_bytes: 0,
            any_text: are_texts,
            all_whole: width == 1,
            any_leading_zeros: false,
            width,
        })
    }

    /// Adds the label of the next row. `bad` turns a description into the error of this cell.
    /// `is_text`: the format says that it is a text, even if it looks like a number.
    fn push(&mut self, cell: &[u8], is_text: bool, bad: impl Fn(String) -> Error) -> Result<()> {
        let value = number(cell);
        self.any_text |= is_text || value.is_none();
        self.all_whole = self.all_whole && whole(cell).is_some();
        self.any_leading_zeros |= has_leading_zeros(cell);
        let noted = check(cell, value).and_then(|()| self.note(cell));
        noted.map_err(bad)?;
        let written = self.aside.write_all(cell);
        let written = written.and_then(|()| self.aside.write_all(b"\n"));
        written.map_err(writing(&self.path))
    }

    /// Notes a text that may be a class, or says why it cannot be a label.
    fn note(&mut self, text: &[u8]) -> Result<(), String> {
        let Some(texts) = &mut self.texts else {
            ensure!(
                !self.any_text,
                "expected a number as label, got \"{}\": several labels, and labels with more than {CLASSES_MAX} different \
                 values, must be numbers; help: name one label, or correct this one",
                shown(text)
            );
            return Ok(());
        };
        if texts.contains(text) {
            return Ok(());
        }
        self.texts_bytes += text.len();
        if texts.len() < CLASSES_MAX && self.texts_bytes <= TEXTS_BYTES_MAX {
            texts.insert(text.into());
            return Ok(());
        }
        ensure!(
            !self.any_text,
            "expected at most {CLASSES_MAX} different texts of {TEXTS_BYTES_MAX} bytes together as labels, got more: \
             \"{}\"; help: is this column the label?",
            shown(text)
        );
        self.texts = None;
        Ok(())
    }

    /// Writes all labels as the type they turned out to be, and returns the classes if they are
    /// texts.
    fn finish(self, out: &mut flat::Writer) -> Result<Option<Vec<String>>> {
        let are_padded = self.any_leading_zeros && self.all_whole && self.texts.is_some();
        let (are_texts, failed) = (self.any_text || are_padded, writing(&self.path));
        let file = self.aside.into_inner();
        let mut file = file.map_err(|error| failed(error.into_error()))?;
        file.rewind().map_err(writing(&self.path))?;
        let are_values = !are_texts && !self.all_whole;
        let element = if are_values {
            NumberType::F64
        } else {
            NumberType::I64
        };
        let row_shape: &[usize] = if self.width > 1 { &[self.width] } else { &[] };
        out.begin("labels", element, row_shape)?;
        let texts = self.texts.filter(|_| are_texts);
        let mut texts: Vec<Box<[u8]>> = texts.into_iter().flatten().collect();
        texts.sort();
        let classes: HashMap<&[u8], i64> = texts.iter().map(|text| &**text).zip(0..).collect();
        for line in BufReader::with_capacity(1 << 18, file).split(b'\n') {
            let line = line.map_err(writing(&self.path))?;
            out.write(&match (are_values, are_texts) {
                (true, _) => number(&line).unwrap_or(f64::NAN).to_le_bytes(),
                (_, true) => classes[&*line].to_le_bytes(),
                _ => whole(&line).unwrap_or_default().to_le_bytes(),
            })?;
        }
        let names = texts.iter();
        let names = names.map(|text| String::from_utf8_lossy(text).into_owned());
        Ok(are_texts.then(|| names.collect()))
    }
}

/// The whole number in a cell, by its digits since an f64 would round it: `7`, `-7.0` or `7e2`;
/// `None` if it has a fraction or does not fit i64.
fn whole(cell: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(cell).ok()?;
    // Most are written so, and this allocates nothing.
    if let Ok(whole) = text.parse() {
        return Some(whole);
    }
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (before, after) = digits.split_once('.').unwrap_or((digits, ""));
    let exponent: usize = exponent.parse().ok().filter(|&exponent| exponent < 20)?;
    let after = format!("{after:0<exponent$}");
    let (moved, fraction) = after.split_at_checked(exponent)?;
    // One digit more, since `.0` has none before the point.
    let tenfold: i128 = format!("{before}{moved}0").parse().ok()?;
    let has_fraction = fraction.bytes().any(|digit| digit != b'0');
    i64::try_from(tenfold / 10).ok().filter(|_| !has_fraction)
}

/// Whether a cell can be a label, or why not.
fn check(cell: &[u8], value: Option<f64>) -> Result<(), String> {
    use IntErrorKind::{NegOverflow, PosOverflow};
    let got = || shown(cell);
    let text = std::str::from_utf8(cell);
    let whole = text.map(str::parse::<i64>);
    ensure!(
        value.is_none_or(f64::is_finite),
        "expected a number or a text as label, got {}; help: remove the row, or give the class another name",
        got()
    );
    ensure!(
        !matches!(whole, Ok(Err(error)) if matches!(error.kind(), PosOverflow | NegOverflow)),
        "expected a label that 64 bits hold, got {}; help: put a letter before each if they are names",
        got()
    );
    ensure!(
        text.is_ok(),
        "the label \"{}\" is not UTF-8; help: save the file as UTF-8",
        got()
    );
    ensure!(
        !cell.contains(&b'\n'),
        "expected a label of one line, got \"{}\"; help: look for a quote that is not closed",
        got()
    );
    Ok(())
}
