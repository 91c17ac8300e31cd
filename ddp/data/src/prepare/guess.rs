//! Refuses labels whose task is a guess that is likely wrong: nearly all say one thing and few
//! another, there are too many classes, or classes are in one-hot form.

use super::source::OpenFiles;
use crate::error::{Error, Result};
use crate::files::{Written, is_missing, number};
use crate::labels::{Label, Labels};
use crate::scan::LabelsFound;
use crate::task::CLASSES_MAX;

/// Fewer than one label of so many is odd.
const ODD: u64 = 20;
/// A class that is no further from the others is not odd.
const FAR: u64 = 9;
/// More classes than this must not be more than a tenth of the rows.
const CLASSES: u64 = 100;
/// More classes than this, each with one row, are no classes.
const SINGLE: u64 = 20;
/// Odd labels that are shown.
const SHOWN: usize = 3;

/// An error if the task does not follow clearly from the labels, and was not given.
pub(super) fn check(source: &OpenFiles, found: &LabelsFound) -> Result<()> {
    match &source.labels {
        Some(labels) if !labels.is_guessed() => Ok(()),
        None => Ok(()),
        Some(labels) => match (&source.names, labels.are_classes()) {
            (Some(names), _) if labels.have_number_names() => {
                let numbers = names.iter().filter_map(|name| name.parse().ok());
                check_classes(labels, numbers.zip(found.counts.iter().copied()).collect())?;
                check_count(labels, names.len() as u64, "whole numbers")
            }
            (Some(names), _) => check_texts(labels, names, found),
            (None, true) => {
                let numbers = (0..).zip(found.counts.iter().copied());
                check_classes(labels, numbers.filter(|(_, rows)| *rows > 0).collect())?;
                check_count(labels, found.counts.len() as u64, "whole numbers")
            }
            (None, false) => check_numbers(labels, found),
        },
    }
}

fn check_texts(labels: &Labels, names: &[String], found: &LabelsFound) -> Result<()> {
    let is_number = |text: &str| number(text.as_bytes()).is_some();
    let rows = names.iter().zip(&found.counts);
    let (numbers, texts): (Vec<_>, Vec<_>) = rows.partition(|(name, _)| is_number(name));
    let sum = |rows: &[(&String, &u64)]| rows.iter().map(|(_, count)| **count).sum::<u64>();
    let are_missing = texts.iter().all(|(name, _)| is_missing(name.as_bytes()));
    let (number_rows, text_rows) = (sum(&numbers), sum(&texts));
    let help =
        "correct or remove these rows, or set `task` to classification if every text is a class";
    let odd = |usual, is_odd: &dyn Fn(&str) -> bool, count| {
        let is_odd = |label: Label<'_>| label.is_text_like(is_odd);
        refuse_odd(labels, usual, count, is_odd, help)
    };
    if let Some(written) = written_numbers(names) {
        let help = format!(
            "{}, or set `task` to classification if every text is a class",
            written.help()
        );
        let is_odd = |label: Label<'_>| label.is_text_like(|text| !is_number(text));
        return refuse_odd(labels, "numbers", text_rows, is_odd, &help);
    }
    match (number_rows, text_rows) {
        (0, _) | (_, 0) => {}
        _ if are_missing || text_rows * ODD < labels.rows() => {
            return odd("numbers", &|text| !is_number(text), text_rows);
        }
        _ if number_rows * ODD < labels.rows() => {
            return odd("texts", &is_number, number_rows);
        }
        _ => {}
    }
    let missing = texts.iter().filter(|(name, _)| is_missing(name.as_bytes()));
    let missing_rows = missing.map(|(_, count)| **count).sum::<u64>();
    if missing_rows > 0 {
        return odd(
            "names of classes",
            &|text| is_missing(text.as_bytes()),
            missing_rows,
        );
    }
    check_count(labels, names.len() as u64, "texts")
}

/// An error if the least or the greatest class is rare and far from the others, or the only
/// negative one: -1 or 99 among 0 to 2 likely stands for a missing label. `classes` are sorted;
/// each has its number of rows.
fn check_classes(labels: &Labels, classes: Vec<(i64, u64)>) -> Result<()> {
    if classes.len() < 3 {
        return Ok(());
    }
    let (least, above) = (classes[0], &classes[1..]);
    let (greatest, below) = (classes[classes.len() - 1], &classes[..classes.len() - 1]);
    for ((odd, rows), others) in [(least, above), (greatest, below)] {
        let (first, last) = (others[0].0, others[others.len() - 1].0);
        let gap = odd.abs_diff(first).min(odd.abs_diff(last));
        let is_odd = gap > last.abs_diff(first).max(FAR) || odd < 0 && first >= 0;
        if is_odd && rows * ODD < labels.rows() {
            let help =
                "correct or remove these rows, or set `task` to classification if this is a class";
            let usual = format!("from {first} to {last}");
            let is_odd = |label: Label<'_>| match label {
                Label::Whole(number) => number == odd,
                Label::Number(number) => number == odd as f64,
                Label::Text(_) => false,
            };
            return refuse_odd(labels, &usual, rows, is_odd, help);
        }
    }
    Ok(())
}

/// How the first text of labels writes a number, if all of them do that are neither missing nor
/// numbers already.
fn written_numbers(names: &[String]) -> Option<Written> {
    let is_text =
        |name: &&String| !is_missing(name.as_bytes()) && number(name.as_bytes()).is_none();
    let written: Option<Vec<_>> = names
        .iter()
        .filter(is_text)
        .map(|name| Written::of(name))
        .collect();
    written?.first().copied()
}

fn check_numbers(labels: &Labels, found: &LabelsFound) -> Result<()> {
    if labels.width() > 1 && found.one_hot == labels.rows() {
        let (name, width) = (labels.name(), labels.width());
        return Err(Error::Data(format!(
            "{name}: every label is a single 1 among {width} numbers, as one-hot rows of classes are; help: save the argmax \
             of each row, or set `task` to regression to learn the {width} numbers"
        )));
    }
    let kinds = found.whole.len() as u64;
    let look_like_classes = kinds < CLASSES_MAX as u64 && kinds <= CLASSES.max(labels.rows() / 10);
    if labels.width() > 1 || !look_like_classes || found.fractions * ODD >= labels.rows() {
        return Ok(());
    }
    match found.fractions {
        // Floats that are all whole numbers are numbers, as their type says.
        0 => Ok(()),
        count => {
            let help =
                "correct or remove these rows, or set `task` to regression if labels are numbers";
            let has_fraction =
                |label: Label<'_>| matches!(label, Label::Number(number) if number.fract() != 0.0);
            refuse_odd(labels, "whole numbers", count, has_fraction, help)
        }
    }
}

/// An error if so many classes are unlikely.
fn check_count(labels: &Labels, classes: u64, what: &str) -> Result<()> {
    let rows = labels.rows();
    let are_many = classes > CLASSES && classes * 10 > rows;
    let are_single = classes > SINGLE && classes == rows;
    if !are_many && !are_single {
        return Ok(());
    }
    let place = labels.name();
    let numbers = match what {
        "texts" => "",
        _ => "to regression to predict numbers, or ",
    };
    Err(Error::Data(format!(
        "{place}: the labels are {what}, and would make {classes} classes for {rows} rows; help: set `task` {numbers}to \
         classification if they are classes, or give other `labels`"
    )))
}

/// The error of `count` labels that are unlike the `usual` ones.
fn refuse_odd(
    labels: &Labels,
    usual: &str,
    count: u64,
    is_odd: impl Fn(Label<'_>) -> bool,
    help: &str,
) -> Result<()> {
    let rows = labels.find(SHOWN, is_odd)?.into_iter();
    let shown = rows.map(|row| Ok(format!("{}: {}", labels.place(row), labels.label(row)?)));
    let shown = shown.collect::<Result<Vec<_>>>()?.join("; ");
    let more = match count > SHOWN as u64 {
        true => "; …",
        false => "",
    };
    let are = if count == 1 { "is" } else { "are" };
    Err(Error::Data(format!(
        "expected labels that are all {usual}, but {count} of {} {are} not: {shown}{more}; help: {help}, or give other `labels`",
        labels.rows()
    )))
}
