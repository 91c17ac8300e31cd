//! What is to be learned of each row, as files have it: whole numbers and texts are classes, other numbers are numbers, unless the task
//! says otherwise.

use std::collections::BTreeMap;

use super::Task;
use super::files::Array;
use super::stack::Stack;
use crate::config::TaskKind;
use crate::error::{Error, Result};

/// The labels of one file: numbers, or where `names` are given, codes for these texts.
#[derive(Clone, Debug)]
pub(crate) struct FileLabels {
    pub(crate) array: Array,
    pub(crate) names: Option<Vec<String>>,
}

/// The labels of all rows.
#[derive(Debug)]
pub(crate) struct Labels {
    stack: Stack,
    coding: Coding,
}

/// How what is in the files becomes what is learned.
#[derive(Debug)]
enum Coding {
    /// Whole numbers are the classes.
    Whole,
    /// Numbers with a fraction that is 0 are.
    Fractions,
    /// Texts are: of each file, the class of each of its codes.
    Texts { classes: Vec<Vec<i64>>, names: Vec<Vec<String>> },
    /// Numbers without a fraction are the names of classes.
    Named(BTreeMap<i64, i64>),
    /// They are what is learned.
    Values,
}

/// What stands for a label that is no class.
const NO_CLASS: i64 = i64::MIN;

impl Labels {
    /// Labels as they look, or as `task` says; and the names of classes where they have some of their own.
    pub(crate) fn new(files: Vec<FileLabels>, task: Option<TaskKind>) -> Result<(Labels, Option<Vec<String>>)> {
        let texts = texts_in(&files)?;
        let is_regression = task == Some(TaskKind::Regression);
        if let Some(names) = texts {
            if is_regression {
                let text = names.first().map_or("", String::as_str);
                return Err(Error::Data(format!(
                    "{}: expected numbers as labels with --task regression, got texts, as {text:?}. Leave --task out, or \
                     give another --labels",
                    files[0].array.name()
                )));
            }
            let labels = Labels::of_texts(files, |text| names.binary_search_by(|name| name.as_str().cmp(text)).ok())?;
            return Ok((labels, Some(names)));
        }
        let has_fractions = files.iter().any(|file| file.array.element().is_float());
        let coding = match task {
            Some(TaskKind::Regression) => Coding::Values,
            None if has_fractions => Coding::Values,
            Some(TaskKind::Classification) if has_fractions => Coding::Fractions,
            _ => Coding::Whole,
        };
        Ok((Labels::with(files, coding)?, None))
    }

    /// Labels for a model that has learned `task` already.
    pub(crate) fn of_task(files: Vec<FileLabels>, task: &Task) -> Result<Labels> {
        let texts = texts_in(&files)?;
        match task {
            Task::Classification { names, .. } => {
                if texts.is_some() {
                    return Labels::of_texts(files, |text| names.iter().position(|name| name == text));
                }
                let coding = if are_texts(task) {
                    Coding::Named(numbers_of(names, files[0].array.name())?)
                } else if files.iter().any(|file| file.array.element().is_float()) {
                    Coding::Fractions
                } else {
                    Coding::Whole
                };
                Labels::with(files, coding)
            }
            Task::Regression { outputs } => {
                let name = files[0].array.name().to_string();
                let labels = Labels::with(files, Coding::Values)?;
                if texts.is_some() || labels.width() != *outputs {
                    let got = if texts.is_some() { "texts".into() } else { format!("{} numbers", labels.width()) };
                    return Err(Error::Data(format!(
                        "{name}: expected {outputs} numbers as the label of each row, as the model was trained on, got \
                         {got}. Give other --labels"
                    )));
                }
                Ok(labels)
            }
        }
    }

    fn of_texts(files: Vec<FileLabels>, class_of: impl Fn(&str) -> Option<usize>) -> Result<Labels> {
        let names: Vec<Vec<String>> = files.iter().map(|file| file.names.clone().unwrap_or_default()).collect();
        let class = |text: &String| class_of(text).map_or(NO_CLASS, |class| class as i64);
        let classes = names.iter().map(|names| names.iter().map(class).collect()).collect();
        Labels::with(files, Coding::Texts { classes, names })
    }

    fn with(files: Vec<FileLabels>, coding: Coding) -> Result<Labels> {
        let stack = Stack::new(files.into_iter().map(|file| file.array).collect())?;
        if !matches!(coding, Coding::Values) && stack.width() != 1 {
            return Err(Error::Data(format!(
                "{}: expected one label for each row, got {} of them (shape {:?}). A class is one number from 0 on: of \
                 one-hot rows save the argmax; numbers to be learned as they are need --task regression",
                stack.arrays()[0].name(),
                stack.width(),
                stack.arrays()[0].row_shape()
            )));
        }
        Ok(Labels { stack, coding })
    }

    /// How many rows have labels.
    pub(crate) fn rows(&self) -> u64 {
        self.stack.rows()
    }

    /// How many numbers a label is.
    pub(crate) fn width(&self) -> usize {
        self.stack.width()
    }

    /// Whether they are classes.
    pub(crate) fn are_classes(&self) -> bool {
        !matches!(self.coding, Coding::Values)
    }

    /// Where they are.
    pub(crate) fn stack(&self) -> &Stack {
        &self.stack
    }

    /// For whoever compares: how what is in the files is taken.
    pub(crate) fn coding_text(&self) -> String {
        format!("{:?}", self.coding)
    }

    /// The classes of rows from `first` on; what is none is a number below 0 or beyond all classes.
    pub(crate) fn classes(&self, first: u64, into: &mut [i64]) -> Result<()> {
        for (file, row, range) in self.stack.pieces(first, into.len()) {
            let (array, into) = (&self.stack.arrays()[file], &mut into[range]);
            match array.element().is_float() {
                true => read_fractions(array, row, into)?,
                false => array.read_i64(row, into)?,
            }
            match &self.coding {
                Coding::Texts { classes, .. } => {
                    let classes = &classes[file];
                    let class = |code: i64| usize::try_from(code).ok().and_then(|code| classes.get(code).copied());
                    into.iter_mut().for_each(|code| *code = class(*code).unwrap_or(NO_CLASS));
                }
                Coding::Named(classes) => {
                    into.iter_mut().for_each(|name| *name = classes.get(name).copied().unwrap_or(NO_CLASS));
                }
                Coding::Whole | Coding::Fractions | Coding::Values => {}
            }
        }
        Ok(())
    }

    /// The numbers of rows from `first` on.
    pub(crate) fn values(&self, first: u64, into: &mut [f32]) -> Result<()> {
        self.stack.read_f32(first, into)
    }

    /// Why the label of this row is no class, or none of the `known`.
    pub(crate) fn why_no_class(&self, row: u64, known: Option<usize>) -> Result<String> {
        let (file, local) = self.stack.find(row);
        let place = self.stack.place(row);
        let number = self.stack.number(row, 0)?;
        let label = match &self.coding {
            Coding::Texts { names, .. } => {
                let mut code = [0];
                self.stack.arrays()[file].read_i64(local, &mut code)?;
                match usize::try_from(code[0]).ok().and_then(|code| names[file].get(code)) {
                    Some(text) => format!("the label {text:?}"),
                    None => format!("the label has the code {}, and there are {} texts", code[0], names[file].len()),
                }
            }
            _ => format!("the label {number}"),
        };
        Ok(match known {
            _ if matches!(self.coding, Coding::Fractions) && (number.fract() != 0.0 || !number.is_finite()) => {
                format!(
                    "{place}: {label} is no whole number, so it is no class. Give whole numbers from 0 on, or --task \
                         regression"
                )
            }
            Some(known) => format!("{place}: {label} is none of the {known} classes that the model is trained on"),
            None if number < 0.0 => {
                format!(
                    "{place}: {label} is below 0, and classes are the whole numbers from 0 on. Number them from 0, or \
                     give --task regression for numbers to be learned as they are"
                )
            }
            None => format!(
                "{place}: {label} is no class: expected less than {}. Number classes from 0 on without gaps, or give --task \
                 regression for numbers to be learned as they are",
                super::scan::CLASSES_MAX
            ),
        })
    }

    /// Why a number of the label of this row cannot be learned.
    pub(crate) fn why_no_value(&self, row: u64, column: usize) -> Result<String> {
        Ok(format!(
            "{}, number {column} of the label: {} is no number that f32 holds, and cannot be learned. Leave such rows out",
            self.stack.place(row),
            self.stack.number(row, column)?
        ))
    }
}

/// Whether the classes of a model are texts. Without such they are called 0, 1, 2 …
pub(crate) fn are_texts(task: &Task) -> bool {
    match task {
        Task::Classification { names, .. } => names.iter().enumerate().any(|(class, name)| *name != class.to_string()),
        Task::Regression { .. } => false,
    }
}

/// The classes whose names are whole numbers, by these: for labels of the array `place`, which are numbers.
fn numbers_of(names: &[String], place: &str) -> Result<BTreeMap<i64, i64>> {
    let mut classes = BTreeMap::new();
    for (class, name) in names.iter().enumerate() {
        let Ok(number) = name.parse::<i64>() else { continue };
        if let Some(other) = classes.insert(number, class as i64) {
            return Err(Error::Data(format!(
                "{place}: expected texts as labels, got numbers, and the model's classes {:?} and {name:?} are the same number. Give a table, \
                 in which they stand as texts",
                names[other as usize]
            )));
        }
    }
    Ok(classes)
}

/// The texts of all files together, sorted by their bytes; nothing where labels are numbers.
fn texts_in(files: &[FileLabels]) -> Result<Option<Vec<String>>> {
    let with = files.iter().find(|file| file.names.is_some());
    let without = files.iter().find(|file| file.names.is_none());
    match (with, without) {
        (None, _) => Ok(None),
        (Some(with), Some(without)) => Err(Error::Data(format!(
            "{}: expected texts as labels, as in {}, got numbers. Give labels of one kind: all in tables, or all numbers",
            without.array.name(),
            with.array.name()
        ))),
        (Some(_), None) => {
            let mut names: Vec<String> = files.iter().flat_map(|file| file.names.iter().flatten()).cloned().collect();
            names.sort_unstable();
            names.dedup();
            Ok(Some(names))
        }
    }
}

/// Classes from numbers that may have fractions.
fn read_fractions(array: &Array, first: u64, into: &mut [i64]) -> Result<()> {
    const PIECE: usize = 64;
    let mut numbers = [0f64; PIECE];
    for (index, into) in into.chunks_mut(PIECE).enumerate() {
        let numbers = &mut numbers[..into.len()];
        array.read_f64(first + (index * PIECE) as u64, numbers)?;
        for (class, &number) in into.iter_mut().zip(&*numbers) {
            // As casts go, what is no number would be class 0.
            *class = if number.fract() == 0.0 && number.abs() < 1e18 { number as i64 } else { NO_CLASS };
        }
    }
    Ok(())
}
