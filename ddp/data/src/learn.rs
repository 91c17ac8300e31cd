//! Decides from the rows what is trained: the task, guessed from the labels unless that guess is
//! likely to be wrong, and how features become a model's inputs. Also what is logged about the
//! rows.

use crate::error::{Error, Result, ensure};
use crate::facts::Facts;
use crate::features::{COMMON, ColumnPlan, FeaturePlan, Moments, Normalization, Scaling};
use crate::files::NumberType;
use crate::guess;
use crate::labels::{LabelCell, Labels};
use crate::open::OpenFiles;
use crate::request::{DataRequest, Trained};
use crate::scan::{self, LabelsFound};
use crate::setting::{DATA, DROP, LABELS, NORMALIZE, SEED, TASK, VAL_SPLIT};
use crate::spec::DataSpec;
use crate::task::{Classes, TaskSpec};
use crate::words::{PLAIN_HELP, is_missing, is_written_otherwise, listed, number, pasted, some_of};

/// Numbers of the first rows in which identifiers are looked for.
const IDENTIFIERS_NUMBERS: usize = 1 << 20;

/// What a model that is trained on these rows expects of others.
pub(crate) fn learn(request: &DataRequest, source: &OpenFiles, facts: &Facts) -> Result<Trained> {
    let labels = source.labels.as_ref();
    let labels = labels.ok_or_else(|| Error::Internal("training without labels".into()))?;
    if labels.is_guessed {
        check_guess(labels, &facts.labels)?;
    }
    let normalization = match (request.normalize, &facts.features) {
        (Scaling::Unit, _) if source.features.element()? == NumberType::U8 => {
            Some(Normalization::of_bytes())
        }
        (Scaling::Unit, Some(found)) => Some(Normalization::unit(&found.moments)),
        (Scaling::Standard, Some(found)) => {
            let mut standard = Normalization::standard(&found.moments);
            if request.table.categorical.iter().any(|name| name == COMMON) {
                let plans = source.plan.iter().flatten();
                standard.only_centre(plans.flat_map(ColumnPlan::are_flags));
            }
            Some(standard)
        }
        _ => None,
    };
    Ok(Trained {
        task: task(labels, &facts.labels)?,
        row_shape: vec![source.features.width],
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

/// The task that follows from these labels.
fn task(labels: &Labels, found: &LabelsFound) -> Result<TaskSpec> {
    let (place, rows) = (labels.name(), labels.rows.rows());
    if !labels.are_classes() {
        let (least, greatest) = found.range.unwrap_or_default();
        ensure!(
            least != greatest || rows == 1,
            "{place}: expected labels that differ, got {least:?} as f32 in all {rows} rows; help: give other {LABELS}, or if \
             they differ by little for their size, subtract an offset before saving them"
        );
        let outputs = labels.rows.width;
        return Ok(TaskSpec::Regression { outputs });
    }
    let (classes, or_else) = match labels.class_names.as_deref() {
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
    let names = labels.class_names.as_deref();
    let count = names.map_or(found.counts.len(), <[String]>::len);
    let Some(classes) = labels.whole_classes(&found.counts) else {
        check_texts(labels, names.unwrap_or_default(), &found.counts)?;
        return check_count(labels, count, "texts", "");
    };
    if let Some(((odd, rows), (first, last))) = guess::odd_class(&classes, labels.rows.rows()) {
        let is_odd = |label: LabelCell<'_>| match label {
            LabelCell::Whole(number) => number == odd,
            LabelCell::Number(number) => number == odd as f64,
            LabelCell::Text(_) => false,
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
    let (rows, number_rows) = (labels.rows.rows(), rows_of(&is_number));
    let (text_rows, missing_rows) = (rows_of(&is_text), rows_of(&is_missing));
    let odd = |usual, is_odd: &dyn Fn(&str) -> bool, help: &str| {
        let help = format!("{help}, or set {TASK} to classification if every text is a class");
        let is_odd_label = |label: LabelCell<'_>| label.is_text_like(is_odd);
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
    let (width, rows) = (labels.rows.width, labels.rows.rows());
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
        |label: LabelCell<'_>| matches!(label, LabelCell::Number(number) if number.fract() != 0.0);
    labels.refuse_odd("whole numbers", found.fractions, has_fraction, &help)
}

/// An error if this many classes are unlikely.
fn check_count(labels: &Labels, classes: usize, what: &str, or_numbers: &str) -> Result<()> {
    let (place, rows) = (labels.name(), labels.rows.rows());
    ensure!(
        !guess::are_too_many(classes as u64, rows),
        "{place}: the labels are {what}, and would make {classes} classes for {rows} rows; help: set {TASK} {or_numbers}to \
         classification if they are classes, or give other {LABELS}"
    );
    Ok(())
}

/// Logs which columns of tables are categorical, and which cells had no number or category.
pub(crate) fn log_table(source: &OpenFiles) {
    let OpenFiles { setting, path, .. } = source;
    for note in &source.notes {
        tracing::info!("{setting} {path}: {note}");
    }
    let plans = source.plan.iter().flatten();
    let categorical = plans.filter(|plan| plan.is_categorical());
    let categorical: Vec<String> = categorical.map(|plan| plan.name.clone()).collect();
    if !categorical.is_empty() {
        let names = listed(&categorical);
        tracing::info!("{setting} {path}: categorical columns: {names}");
    }
    let missing = source.odd_cells.iter().filter(|odd| odd.missing > 0);
    let missing = missing.map(|odd| format!("\"{}\" {}", odd.column, odd.missing));
    if let Some(missing) = some_of(20, missing) {
        tracing::info!("{setting} {path}: missing cells, which are filled in: {missing}");
    }
    let odd = source.odd_cells.iter().filter(|odd| odd.unseen > 0);
    let unseen = odd.map(|odd| {
        let examples = listed(&odd.examples);
        format!("\"{}\" {} ({examples})", odd.column, odd.unseen)
    });
    if let Some(unseen) = some_of(20, unseen) {
        tracing::warn!(
            "{setting} {path}: cells with values that were not trained on, which count as none of the categories: {unseen}"
        );
    }
}

/// Warns of files to evaluate on that are trained on.
pub(crate) fn warn_of_shared(val: &OpenFiles, train: &OpenFiles) {
    if let Some(name) = val.shared_with(train) {
        let OpenFiles { setting, path, .. } = val;
        tracing::warn!(
            "{setting} {path}: {name} is also trained on: it says nothing about new rows"
        );
    }
}

/// The columns whose least and greatest numbers satisfy `are_so`.
fn columns_with(moments: &Moments, are_so: fn(f32, f32) -> bool) -> impl Iterator<Item = usize> {
    let ends = moments.least.iter().zip(&moments.greatest).enumerate();
    let found = ends.filter(move |(_, (least, greatest))| are_so(**least, **greatest));
    found.map(|(column, _)| column)
}

/// Warns of columns of `what`, with these moments, that f32 makes nearly constant.
fn warn_of_rounding(what: &str, moments: &Moments, name: impl Fn(usize) -> String) {
    let close = columns_with(moments, guess::are_too_close).map(name);
    if let Some(close) = some_of(8, close) {
        tracing::warn!(
            "{what}: f32 rounds nearly all differences between the numbers of {close}; help: subtract an offset before \
             saving them, as in x - x.min()"
        );
    }
}

/// Logs what a user should know about these data.
pub(crate) fn warn(
    request: &DataRequest,
    source: &OpenFiles,
    facts: &Facts,
    task: &TaskSpec,
) -> Result<()> {
    let (data, features) = (&request.data, &source.features);
    if features.element()? == NumberType::U8 && request.normalize == Scaling::None {
        tracing::warn!(
            "{DATA} {data}: features are bytes up to 255, and models learn better from 0 to 1; help: set {NORMALIZE} to unit"
        );
    }
    if let Some(found) = &facts.features {
        let constant = columns_with(&found.moments, |least, greatest| least == greatest);
        let constant: Vec<String> = constant.map(|index| source.feature(index)).collect();
        let are_few = request.normalize == Scaling::Standard || source.is_table;
        if are_few && !constant.is_empty() {
            let names = listed(&constant);
            tracing::warn!(
                "{DATA} {data}: features that are the same in all rows that are trained on, and say nothing: {names}"
            );
        }
        let name = |index| format!("feature {}", source.feature(index));
        warn_of_rounding(&format!("{DATA} {data}"), &found.moments, name);
        if request.normalize != Scaling::Standard {
            warn_of_scales(request, source, &found.moments);
        }
        if !found.is_complete {
            tracing::warn!(
                "{DATA} {data}: more than {} GB of features: {} rows spread over all were checked before training, the others \
                 are checked when they are trained on",
                scan::BYTES_MAX >> 30,
                found.moments.count
            );
        }
    }
    if source.is_table {
        warn_of_identifiers(data, source)?;
    }
    warn_of_labels(request, source, facts);
    warn_of_classes(request, facts, task);
    Ok(())
}

/// Warns of features from which models learn less than from others.
fn warn_of_scales(request: &DataRequest, source: &OpenFiles, moments: &Moments) {
    let (data, width) = (&request.data, source.features.width);
    let are_pixels = !source.is_table && width >= guess::PIXELS;
    let range = |at: usize| f64::from(moments.greatest[at]) - f64::from(moments.least[at]);
    let widest = (0..width).max_by(|a, b| range(*a).total_cmp(&range(*b)));
    let widest = widest.unwrap_or(0);
    let is_offset = |at: usize| {
        let deviation = (moments.squares[at] / moments.count.max(1) as f64).sqrt();
        let is_flag = (moments.least[at], moments.greatest[at]) == (0.0, 1.0);
        let can_be = request.normalize == Scaling::None && !are_pixels && !is_flag;
        can_be && guess::is_offset(moments.mean[at], deviation)
    };
    let is_narrow = |at: usize| guess::is_narrow(range(at), range(widest), are_pixels);
    let found = (0..width).filter(|&at| is_narrow(at) || is_offset(at));
    if let Some(names) = some_of(8, found.map(|at| source.feature(at))) {
        let widest = source.feature(widest);
        tracing::warn!(
            "{DATA} {data}: features that vary much less than {widest}, or little beside their mean: models learn less \
             from them: {names}; help: set {NORMALIZE} to standard"
        );
    }
}

/// Warns of columns of a table that are likely identifiers, by their first rows.
fn warn_of_identifiers(data: &DataSpec, source: &OpenFiles) -> Result<()> {
    let width = source.features.width;
    let rows = source
        .features
        .rows()
        .min((IDENTIFIERS_NUMBERS / width) as u64);
    let mut x = vec![0.0; rows as usize * width];
    source.features.read_f32(0, &mut x)?;
    let numbers = |column: usize| x.iter().skip(column).step_by(width).copied().collect();
    let of_plan = |plan: &ColumnPlan| vec![plan.is_number(); plan.width()];
    let plan = source.plan.as_ref();
    let are_numbers: Option<Vec<bool>> = plan.map(|all| all.iter().flat_map(of_plan).collect());
    let is_number = |column: &usize| are_numbers.as_ref().is_none_or(|all| all[*column]);
    let found = (0..width).filter(is_number);
    let found = found.filter(|&column| guess::are_identifiers(numbers(column)));
    let names: Vec<String> = found.map(|column| source.feature(column)).collect();
    if !names.is_empty() {
        let names = pasted(names.iter().map(String::as_str));
        tracing::warn!(
            "{DATA} {data}: features of whole numbers that never repeat, as identifiers do; help: if they are \
             identifiers, leave them out: {DROP} {names}"
        );
    }
    Ok(())
}

/// Says how numeric targets are standardized, and warns of those that are hard to learn.
fn warn_of_labels(request: &DataRequest, source: &OpenFiles, facts: &Facts) {
    let (Some(labels), Some(moments)) = (&source.labels, &facts.targets) else {
        return;
    };
    let name = labels.name();
    let column = |index| format!("column {index} (counted from 0)");
    warn_of_rounding(&format!("{LABELS} {name}"), moments, column);
    let Normalization { shift, scale, .. } = Normalization::standard(moments);
    let targets = shift.iter().zip(scale.iter().map(|scale| 1.0 / scale));
    let described = |(mean, deviation)| format!("mean {mean:?}, standard deviation {deviation:?}");
    let described: Vec<String> = targets.clone().take(8).map(described).collect();
    let described = described.join("; ");
    let mut targets = targets;
    if request.normalize != Scaling::Standard {
        if targets.any(|(mean, deviation)| guess::are_large_targets(*mean, deviation)) {
            tracing::warn!(
                "{LABELS} {name}: {described}: expected numbers of a size near 1, which models learn; help: set {NORMALIZE} \
                 to standard, which scales features and labels"
            );
        }
    } else if request.normalizes_targets {
        tracing::info!(
            "{LABELS} {name}: standardized ({described}): losses are in these units, and 1 is the loss of predicting the mean"
        );
    }
    let constant = columns_with(moments, |least, greatest| least == greatest);
    let constant = constant.map(|column| column.to_string());
    if let Some(columns) = some_of(usize::MAX, constant) {
        tracing::warn!(
            "{LABELS} {name}: the same number in all rows that were looked at, in column {columns} (counted from 0)"
        );
    }
}

/// Warns of classes that cannot be learned.
fn warn_of_classes(request: &DataRequest, facts: &Facts, task: &TaskSpec) {
    let Some(classes) = task.classes() else {
        return;
    };
    let counts = &facts.labels.counts;
    let rows = counts.iter().zip(&facts.labels.trained).enumerate();
    let unseen = rows.filter(|(_, (all, trained))| **all > 0 && **trained == 0);
    let unseen: Vec<_> = unseen.map(|(class, _)| classes.name(class)).collect();
    if !unseen.is_empty() {
        tracing::warn!(
            "{VAL_SPLIT} {}: only held-out rows have these classes, which the model cannot learn: {}; help: give more \
             rows of them, or another {SEED}",
            request.val_split,
            listed(&unseen)
        );
    }
}
