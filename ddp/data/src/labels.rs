//! The labels of rows as classes or numbers: integers and texts are classes, other numbers are
//! numbers, unless the task says otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::setting::Choice;

use crate::error::{Error, Result, bail, ensure};
use crate::files::Array;
use crate::files::array::Rows;
use crate::guess;
use crate::setting::{LABELS, TASK};
use crate::task::{CLASSES_MAX, Classes, LabelName, TaskKind, TaskSpec};
use crate::words::{PLAIN_HELP, has_leading_zeros, number, shown_number, some_of};

/// The labels of one file: numbers, or if `names` are given, codes of these texts.
#[derive(Clone, Debug)]
pub struct FileLabels {
    /// A number, or several, for each row.
    pub array: Array,
    /// The texts.
    pub names: Option<Vec<String>>,
    /// The column of a table that they were converted from.
    pub column: Option<TableColumn>,
}

impl FileLabels {
    /// An array of a file.
    pub(crate) fn new(array: &Array, names: Option<Vec<String>>) -> FileLabels {
        FileLabels {
            array: array.clone(),
            names,
            column: None,
        }
    }

    /// The name of its column or array, if it has one.
    pub(crate) fn name(&self) -> Option<LabelName> {
        match (&self.column, &*self.array.key) {
            (Some(column), _) => Some(LabelName::Column(column.name.clone())),
            (None, "") => None,
            (None, key) => Some(LabelName::Array(key.to_string())),
        }
    }
}

/// A column of a table, for messages.
#[derive(Clone, Debug)]
pub struct TableColumn {
    /// Its name, or several with commas between.
    pub name: String,
    /// The table.
    pub path: PathBuf,
    /// The place of the cell in this row of a column, for messages.
    pub place: fn(&TableColumn, u64) -> String,
    /// Whether rows without a label were left out.
    pub leaves_out: bool,
}

/// The labels of all rows.
#[derive(Debug)]
pub(crate) struct Labels {
    /// The numbers of their files.
    pub(crate) rows: Rows,
    files: Vec<FileLabels>,
    coding: LabelCoding,
    /// Whether the task follows from what labels look like.
    pub(crate) is_guessed: bool,
    /// The names of classes that are to be learned, if labels are texts or numbers other than
    /// 0, 1, 2 …
    pub(crate) class_names: Option<Vec<String>>,
    /// What whole numbers of a table were taken for, and why.
    pub(crate) choice: Option<String>,
}

/// How the contents of files become targets.
#[derive(Debug)]
enum LabelCoding {
    /// Whole numbers are the classes.
    Classes,
    /// These whole numbers, sorted, are the names of the classes.
    Numbers(Vec<i64>),
    /// Texts are the classes: of each file, the class of each code.
    Texts(Vec<Vec<i64>>),
    /// Numbers are the targets.
    Values,
}

/// A label as it is in its file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LabelCell<'a> {
    Text(&'a str),
    Whole(i64),
    Number(f64),
}

impl LabelCell<'_> {
    /// Whether it is a text that satisfies `is_so`.
    pub(crate) fn is_text_like(self, is_so: impl Fn(&str) -> bool) -> bool {
        matches!(self, LabelCell::Text(text) if is_so(text))
    }
}

impl fmt::Display for LabelCell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LabelCell::Text(text) => write!(f, "{text:?}"),
            LabelCell::Whole(number) => write!(f, "{number}"),
            LabelCell::Number(number) => f.write_str(&shown_number(*number)),
        }
    }
}

/// Odd labels that are shown.
const SHOWN: usize = 3;
/// Marks a label that is not a class.
const NO_CLASS: i64 = i64::MIN;

impl Labels {
    /// Labels by their type, or as `task` says. `is_open`: whole numbers may be either.
    pub(crate) fn new(
        files: Vec<FileLabels>,
        task: Option<TaskKind>,
        is_open: bool,
    ) -> Result<Labels> {
        let mut labels = match texts_in(&files)? {
            Some(names) => {
                let mut labels = Labels::of_texts(files, |text| names.binary_search(text).ok())?;
                if task == Some(TaskKind::Regression) {
                    return Err(labels.why_texts(&format!("for {TASK} regression")));
                }
                labels.class_names = Some(names);
                labels
            }
            None => {
                let any_float = files.iter().any(|file| file.array.element.is_float());
                let coding = if guess::are_classes(task, any_float) {
                    LabelCoding::Classes
                } else {
                    LabelCoding::Values
                };
                Labels::with(files, coding)?
            }
        };
        labels.is_guessed = task.is_none();
        labels.name_numbers(is_open)?;
        Ok(labels)
    }

    /// Labels for a model that has learned `task` already.
    pub(crate) fn of_task(files: Vec<FileLabels>, task: &TaskSpec) -> Result<Labels> {
        let are_texts = texts_in(&files)?.is_some();
        let Some(classes) = task.classes() else {
            if are_texts {
                let labels = Labels::of_texts(files, |_| None)?;
                return Err(labels.why_texts("as the model was trained on"));
            }
            let (labels, outputs) = (Labels::with(files, LabelCoding::Values)?, task.outputs());
            let (place, got) = (labels.rows.arrays[0].name(), labels.rows.width);
            ensure!(
                got == outputs,
                "{place}: expected {outputs} numbers as the label of each row, as the model was trained on, got {got}; \
                 help: give other {LABELS}"
            );
            return Ok(labels);
        };
        match (classes.whole_names(), classes.texts()) {
            _ if are_texts => Labels::of_texts(files, |text| classes.find(text)),
            (Some(numbers), _) => Labels::with(files, LabelCoding::Numbers(numbers)),
            (None, Some(names)) => bail!(
                "{}: expected texts as labels, such as {:?}, as the model was trained on, got numbers; \
                 help: give a table, in which labels are texts",
                files[0].array.name(),
                names[0]
            ),
            (None, None) => Labels::with(files, LabelCoding::Classes),
        }
    }

    fn of_texts(
        files: Vec<FileLabels>,
        class_of: impl Fn(&String) -> Option<usize>,
    ) -> Result<Labels> {
        let class = |text: &String| class_of(text).map_or(NO_CLASS, |class| class as i64);
        let classes = |file: &FileLabels| file.names.iter().flatten().map(class).collect();
        let classes = files.iter().map(classes).collect();
        Labels::with(files, LabelCoding::Texts(classes))
    }

    fn with(files: Vec<FileLabels>, coding: LabelCoding) -> Result<Labels> {
        let rows = Rows::new(files.iter().map(|file| file.array.clone()).collect())?;
        let array = &rows.arrays[0];
        ensure!(
            rows.width == 1 || matches!(coding, LabelCoding::Values),
            "{}: expected one label for each row, got {} (shape {:?}); help: of one-hot rows save the argmax; for numbers \
             set {TASK} to regression",
            array.name(),
            rows.width,
            array.row_shape()
        );
        Ok(Labels {
            rows,
            files,
            coding,
            is_guessed: false,
            class_names: None,
            choice: None,
        })
    }

    /// Whether labels are classes.
    pub(crate) fn are_classes(&self) -> bool {
        !matches!(self.coding, LabelCoding::Values)
    }

    /// Reads the classes of rows from `first` on. A label that is not a class is below 0 or
    /// beyond all classes.
    pub(crate) fn classes(&self, first: u64, into: &mut [i64]) -> Result<()> {
        for (file, row, range) in self.rows.pieces(first, into.len()) {
            let (array, into) = (&self.rows.arrays[file], &mut into[range]);
            if array.element.is_float() {
                read_whole_floats(array, row, into)?
            } else {
                array.read_i64(row, into)?
            }
            let class_of = |code: i64| match &self.coding {
                LabelCoding::Texts(classes) => {
                    classes[file].get(usize::try_from(code).ok()?).copied()
                }
                LabelCoding::Numbers(numbers) => Some(numbers.binary_search(&code).ok()? as i64),
                LabelCoding::Classes | LabelCoding::Values => Some(code),
            };
            for code in into {
                *code = class_of(*code).unwrap_or(NO_CLASS);
            }
        }
        Ok(())
    }

    /// The classes as whole numbers, unless they are texts, with the number of rows of each.
    pub(crate) fn whole_classes(&self, counts: &[u64]) -> Option<Vec<(i64, u64)>> {
        let counts = counts.iter().copied();
        match &self.coding {
            LabelCoding::Numbers(numbers) => Some(numbers.iter().copied().zip(counts).collect()),
            LabelCoding::Classes => Some((0..).zip(counts).filter(|(_, rows)| *rows > 0).collect()),
            LabelCoding::Texts(_) | LabelCoding::Values => None,
        }
    }

    /// Makes whole numbers other than 0, 1, 2 …, as -1 and 1 or 1 to 3, the names of classes. If
    /// `is_open`, those that are hardly classes become targets.
    fn name_numbers(&mut self, is_open: bool) -> Result<()> {
        if !matches!(self.coding, LabelCoding::Classes) {
            return Ok(());
        }
        let mut rows_of = BTreeMap::new();
        let mut block = vec![0; 8192];
        for first in (0..self.rows.rows()).step_by(block.len()) {
            let count = (self.rows.rows() - first).min(block.len() as u64) as usize;
            self.classes(first, &mut block[..count])?;
            heartbeat::beat(Work::ReadsData);
            for class in &block[..count] {
                *rows_of.entry(*class).or_default() += 1;
            }
            // It is refused later, and says nothing about the others.
            rows_of.remove(&NO_CLASS);
            if rows_of.len() > CLASSES_MAX {
                break;
            }
        }
        if is_open {
            let (what, other, so) = match guess::are_few_classes(&rows_of) {
                true => (
                    "few, consecutive and common: classes",
                    TaskKind::Regression,
                    "numbers",
                ),
                false => (
                    "many, rare or with gaps: numbers",
                    TaskKind::Classification,
                    "classes",
                ),
            };
            let pairs: Vec<(i64, u64)> = rows_of.iter().map(|(a, b)| (*a, *b)).collect();
            if let Some(((odd, rows), _)) = guess::odd_class(&pairs, self.rows.rows())
                && guess::are_few_classes(
                    &rows_of
                        .iter()
                        .filter(|it| *it.0 != odd)
                        .map(|(a, b)| (*a, *b))
                        .collect(),
                )
            {
                tracing::warn!(
                    "{odd} is the label of {rows} rows, far from all others: remove these rows if it marks missing labels"
                );
            }
            if other == TaskKind::Classification {
                self.coding = LabelCoding::Values;
            }
            self.choice = Some(format!(
                "the labels are {} different whole numbers, {what} ({TASK} {} learns them as {so})",
                rows_of.len(),
                other.name()
            ));
        }
        let numbers: BTreeSet<i64> = rows_of.into_keys().collect();
        let can_be = self.are_classes() && numbers.len() <= CLASSES_MAX;
        if can_be && guess::are_names(&numbers) {
            self.class_names = Some(numbers.iter().map(i64::to_string).collect());
            self.coding = LabelCoding::Numbers(numbers.into_iter().collect());
        }
        Ok(())
    }

    /// The error text for a label that is not a class, or not one of the `known` ones.
    pub(crate) fn why_no_class(&self, row: u64, known: Option<&Classes>) -> Result<String> {
        let help = format!(
            "help: number classes consecutively from 0 or write them as texts, or set {TASK} to regression to learn the numbers as they are"
        );
        let (label, most) = (self.label(row)?, CLASSES_MAX - 1);
        let place = format!("{}: the label", self.place(row));
        Ok(match (label, known) {
            (LabelCell::Number(number), _) if number.fract() != 0.0 => {
                format!("{place}: expected a whole number as class, got {label}; {help}")
            }
            (LabelCell::Whole(NO_CLASS), _) => format!(
                "{place}: expected a class, got {label}, the smallest i64, which often marks a missing label; help: \
                 remove the row, or number the class otherwise"
            ),
            (_, Some(known)) => {
                let names = known.names().into_iter().map(|name| match label {
                    LabelCell::Text(_) => format!("{name:?}"),
                    LabelCell::Whole(_) | LabelCell::Number(_) => name,
                });
                let names = some_of(10, names).unwrap_or_default();
                format!(
                    "{place}: expected one of the {} classes that the model was trained on, got {label}; the classes \
                     are {names}; help: correct it, or remove the row",
                    known.count()
                )
            }
            _ => format!("{place}: expected a class from 0 to {most}, got {label}; {help}"),
        })
    }

    /// The first file, and the column in it, for messages.
    pub(crate) fn name(&self) -> String {
        match &self.files[0].column {
            Some(column) => format!("{}, column \"{}\"", column.path.display(), column.name),
            None => self.rows.arrays[0].name().to_string(),
        }
    }

    /// The file and the position of a label in it, for messages.
    pub(crate) fn place(&self, row: u64) -> String {
        let (file, in_file) = self.rows.find(row);
        match &self.files[file].column {
            Some(column) => (column.place)(column, in_file),
            None => format!("{} (counted from 0)", self.rows.place(row)),
        }
    }

    /// The label of a row, or the first number of it.
    pub(crate) fn label(&self, row: u64) -> Result<LabelCell<'_>> {
        let (file, in_file) = self.rows.find(row);
        let array = &self.rows.arrays[file];
        if array.element.is_float() {
            return Ok(LabelCell::Number(self.rows.number(row, 0)?));
        }
        let mut numbers = vec![0; self.rows.width];
        array.read_i64(in_file, &mut numbers)?;
        let (code, names) = (usize::try_from(numbers[0]).ok(), &self.files[file].names);
        let text = names.as_ref().and_then(|names| names.get(code?));
        Ok(text.map_or(LabelCell::Whole(numbers[0]), |text| LabelCell::Text(text)))
    }

    /// The first rows, at most `most`, whose label satisfies `is_wanted`.
    pub(crate) fn find(
        &self,
        most: usize,
        is_wanted: impl Fn(LabelCell<'_>) -> bool,
    ) -> Result<Vec<u64>> {
        let mut found = Vec::new();
        for row in 0..self.rows.rows() {
            if found.len() == most {
                break;
            }
            if is_wanted(self.label(row)?) {
                found.push(row);
            }
        }
        Ok(found)
    }

    /// The error of `count` labels that are unlike the `usual` ones.
    pub(crate) fn refuse_odd(
        &self,
        usual: &str,
        count: u64,
        is_odd: impl Fn(LabelCell<'_>) -> bool,
        help: &str,
    ) -> Result<()> {
        let rows = self.find(SHOWN, is_odd)?.into_iter();
        let shown = rows.map(|row| Ok(format!("{}: {}", self.place(row), self.label(row)?)));
        let shown = shown.collect::<Result<Vec<_>>>()?.join("; ");
        let more = if count > SHOWN as u64 { "; …" } else { "" };
        let are = if count == 1 { "is" } else { "are" };
        bail!(
            "expected labels that are all {usual}, but {count} of {} {are} not: {shown}{more}; help: {help}, or give other {LABELS}",
            self.rows.rows()
        )
    }

    /// The error of texts where numbers are expected: names the first one that is no number.
    fn why_texts(&self, why: &str) -> Error {
        let is_name = |text: &[u8]| number(text).is_none() || has_leading_zeros(text);
        let is_odd = |label: LabelCell<'_>| label.is_text_like(|text| is_name(text.as_bytes()));
        let first = self.find(1, is_odd).and_then(|odd| {
            let row = odd.first().copied().unwrap_or(0);
            Ok((self.place(row), self.label(row)?))
        });
        match first {
            Ok((place, label)) => Error::Data(format!(
                "{place}: expected a number as label {why}, got {label}; help: {PLAIN_HELP}; remove other rows, or give \
                 other {LABELS}"
            )),
            Err(error) => error,
        }
    }

    /// Why a number of the label of this row cannot be learned.
    pub(crate) fn why_no_value(&self, row: u64, column: usize) -> Result<String> {
        Ok(format!(
            "{}: number {column} of the label: expected a finite f32, got {}; help: leave such rows out",
            self.place(row),
            shown_number(self.rows.number(row, column)?)
        ))
    }
}

/// The texts of all files together, sorted by their bytes; `None` if labels are numbers.
fn texts_in(files: &[FileLabels]) -> Result<Option<Vec<String>>> {
    let (with, without): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.names.is_some());
    if let ([with, ..], [without, ..]) = (&with[..], &without[..]) {
        bail!(
            "{}: expected texts as labels, as in {}, got numbers; help: give labels of one kind, or join the tables",
            without.array.name(),
            with.array.name()
        );
    }
    let names = with.iter().flat_map(|file| file.names.iter().flatten());
    let mut names: Vec<String> = names.cloned().collect();
    names.sort_unstable();
    names.dedup();
    Ok((!with.is_empty()).then_some(names))
}

/// Reads classes that are stored as floats.
fn read_whole_floats(array: &Array, first: u64, into: &mut [i64]) -> Result<()> {
    const PIECE: usize = 64;
    let mut numbers = [0f64; PIECE];
    for (index, into) in into.chunks_mut(PIECE).enumerate() {
        let numbers = &mut numbers[..into.len()];
        array.read_f64(first + (index * PIECE) as u64, numbers)?;
        for (class, &number) in into.iter_mut().zip(&*numbers) {
            // A cast would make class 0 of NaN.
            let is_whole = number.fract() == 0.0 && number.abs() < 1e18;
            *class = if is_whole { number as i64 } else { NO_CLASS };
        }
    }
    Ok(())
}
