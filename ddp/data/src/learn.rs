//! What is learned from rows: the task that their labels show, unless that guess is likely wrong,
//! and how features become a model's inputs.

use crate::error::{Error, Result, ensure};
use crate::facts::Facts;
use crate::feature_plan::FeaturePlan;
use crate::files::{Element, PLAIN_HELP, is_missing, is_written_otherwise, number};
use crate::guess;
use crate::labels::{Label, Labels};
use crate::normalize::{Normalization, Normalize};
use crate::open::Source;
use crate::request::{DataRequest, Trained};
use crate::scan::LabelsFound;
use crate::setting::{LABELS, TASK};
use crate::task::{Classes, TaskSpec};

/// What a model of these rows is to expect of others.
pub(crate) fn learn(request: &DataRequest, source: &Source, facts: &Facts) -> Result<Trained> {
    let labels = source.labels.as_ref();
    let labels = labels.ok_or_else(|| Error::Internal("training without labels".into()))?;
    if labels.is_guessed {
        check_guess(labels, &facts.labels)?;
    }
    let normalization = match (request.normalize, &facts.features) {
        (Normalize::Unit, _) if source.features.element()? == Element::U8 => {
            Some(Normalization::of_bytes())
        }
        (how, Some(found)) => Normalization::of(how, &found.moments),
        _ => None,
    };
    Ok(Trained {
        task: task(labels, &facts.labels)?,
        row_shape: vec![source.features.width()],
        normalization,
        plan: FeaturePlan {
            columns: source.plan.clone(),
            fill: facts.fill.clone(),
        },
        columns: source.columns.clone(),
        label: source.label.clone(),
        needs_labels: true,
    })
}

/// What is to be learned from these labels.
fn task(labels: &Labels, found: &LabelsFound) -> Result<TaskSpec> {
    let (place, rows) = (labels.name(), labels.count());
    if !labels.are_classes() {
        let (least, greatest) = found.range.unwrap_or_default();
        ensure!(
            least != greatest || rows == 1,
            "{place}: expected labels that differ, got {least:?} as f32 in all {rows} rows; help: give other {LABELS}, or if \
             they differ by little for their size, subtract an offset before saving them"
        );
        let outputs = labels.width();
        return Ok(TaskSpec::Regression { outputs });
    }
    let (classes, or_else) = match labels.class_names() {
        Some(names) => (Classes::named(names.to_vec()), String::new()),
        None => (
            Classes::numbered(found.counts.len()),
            format!(", or set {TASK} to regression"),
        ),
    };
    ensure!(
        classes.count() > 1,
        "{place}: expected labels of at least 2 classes, got {} in {rows} rows; help: give other {LABELS}{or_else}",
        classes.count()
    );
    Ok(TaskSpec::Classification(classes))
}

/// An error if the task does not follow clearly from the labels: nearly all say one thing and few
/// another, there are too many classes, or classes are in one-hot form.
fn check_guess(labels: &Labels, found: &LabelsFound) -> Result<()> {
    if !labels.are_classes() {
        return check_numbers(labels, found);
    }
    let names = labels.class_names();
    let count = names.map_or(found.counts.len(), <[String]>::len);
    let Some(classes) = labels.whole_classes(&found.counts) else {
        check_texts(labels, names.unwrap_or_default(), &found.counts)?;
        return check_count(labels, count, "texts", "");
    };
    if let Some(((odd, rows), (first, last))) = guess::odd_class(&classes, labels.count()) {
        let is_odd = |label: Label<'_>| match label {
            Label::Whole(number) => number == odd,
            Label::Number(number) => number == odd as f64,
            Label::Text(_) => false,
        };
        let usual = format!("from {first} to {last}");
        let help = format!(
            "correct or remove these rows, or set {TASK} to classification if this is a class"
        );
        return labels.refuse_odd(&usual, rows, is_odd, &help);
    }
    let or_numbers = "to regression to predict numbers, or ";
    check_count(labels, count, "whole numbers", or_numbers)
}

fn check_texts(labels: &Labels, names: &[String], counts: &[u64]) -> Result<()> {
    let is_number = |text: &str| number(text.as_bytes()).is_some();
    let is_text = |text: &str| !is_number(text);
    let is_missing = |text: &str| is_text(text) && is_missing(text.as_bytes());
    // The number of rows whose label matches.
    let rows_of = |is_so: &dyn Fn(&str) -> bool| -> u64 {
        let rows = names.iter().zip(counts).filter(|(name, _)| is_so(name));
        rows.map(|(_, rows)| rows).sum()
    };
    let (rows, number_rows) = (labels.count(), rows_of(&is_number));
    let (text_rows, missing_rows) = (rows_of(&is_text), rows_of(&is_missing));
    let odd = |usual, is_odd: &dyn Fn(&str) -> bool, help: &str| {
        let help = format!("{help}, or set {TASK} to classification if every text is a class");
        let is_odd_label = |label: Label<'_>| label.is_text_like(is_odd);
        labels.refuse_odd(usual, rows_of(is_odd), is_odd_label, &help)
    };
    let is_name = |text: &str| is_text(text) && !is_missing(text);
    let is_other_name = |text: &str| is_name(text) && !is_written_otherwise(text);
    if rows_of(&is_name) > 0 && rows_of(&is_other_name) == 0 {
        return odd("numbers", &is_text, PLAIN_HELP);
    }
    let help = "correct or remove these rows";
    let are_mixed = number_rows > 0 && text_rows > 0;
    if are_mixed && (missing_rows == text_rows || guess::are_odd(text_rows, rows)) {
        return odd("numbers", &is_text, help);
    }
    if are_mixed && guess::are_odd(number_rows, rows) {
        return odd("texts", &is_number, help);
    }
    match missing_rows {
        0 => Ok(()),
        _ => odd("names of classes", &is_missing, help),
    }
}

fn check_numbers(labels: &Labels, found: &LabelsFound) -> Result<()> {
    let (width, rows) = (labels.width(), labels.count());
    ensure!(
        width == 1 || found.one_hot < rows,
        "{}: every label is a single 1 among {width} numbers, as one-hot rows of classes are; help: save the argmax \
         of each row, or set {TASK} to regression to learn the {width} numbers",
        labels.name()
    );
    let different = found.whole.len() as u64;
    let are_classes = width == 1 && guess::look_like_classes(different, found.fractions, rows);
    // Floats that are all whole numbers are numbers, as their type says.
    if !are_classes || found.fractions == 0 {
        return Ok(());
    }
    let help =
        format!("correct or remove these rows, or set {TASK} to regression if labels are numbers");
    let has_fraction =
        |label: Label<'_>| matches!(label, Label::Number(number) if number.fract() != 0.0);
    labels.refuse_odd("whole numbers", found.fractions, has_fraction, &help)
}

/// An error if this many classes are unlikely.
fn check_count(labels: &Labels, classes: usize, what: &str, or_numbers: &str) -> Result<()> {
    let (place, rows) = (labels.name(), labels.count());
    ensure!(
        !guess::are_too_many(classes as u64, rows),
        "{place}: the labels are {what}, and would make {classes} classes for {rows} rows; help: set {TASK} {or_numbers}to \
         classification if they are classes, or give other {LABELS}"
    );
    Ok(())
}
