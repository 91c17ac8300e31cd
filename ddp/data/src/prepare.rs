//! From a request to data: opens files, reads all rows, splits and normalizes. All ranks do it
//! together, so that whatever is wrong is one error for all, before training begins.

mod built_in;
mod guess;
mod look;
mod source;
mod tokens;
mod understood;
mod warnings;

use std::sync::Arc;

use twox_hash::XxHash3_64;

use self::built_in::built_in;
use self::look::{Findings, look, look_at_labels};
use self::source::{OpenFiles, read_in_any_order};
pub use self::tokens::{TokenSummary, summarize as summarize_tokens};
use crate::dataset::{Dataset, NoRows, RowSpec};
use crate::error::{Error, Result};
use crate::file_rows::{ChangeWatch, FileData, Side};
use crate::files::Element;
use crate::fill::{self, Present};
use crate::normalize::{Normalization, Normalize};
use crate::opened::{Ask, LabelSource};
use crate::plan::{ColumnPlan, FeaturePlan, Missing, PLAIN};
use crate::ranks::{Alone, Ranks, SameFiles};
use crate::request::{Data, DataRequest, Trained};
use crate::spec::{DataSpec, FilesSpec};
use crate::split::Split;
use crate::task::TaskSpec;

/// Opens the data of a request on all ranks together. An error is the same on all of them.
pub fn prepare(request: &DataRequest, ranks: &dyn Ranks) -> Result<Data> {
    // Ranks with different requests would wait for each other in different places.
    let asked = [("the configuration".to_string(), request.text())];
    ranks.must_match(&asked, "start every rank with the same settings")?;
    request.check()?;
    if let Some(named) = tokens::named(&request.data, "data", ranks)? {
        return tokens::prepare(request, &named, ranks);
    }
    expect_rows(request)?;
    match (&request.data, &request.trained) {
        (DataSpec::Files(spec), Some(trained)) => to_use(request, spec, trained, ranks),
        (DataSpec::Files(spec), None) => to_train(request, spec, None, ranks),
        _ => built_in(request),
    }
}

/// Refuses to use rows of features together with tokens.
fn expect_rows(request: &DataRequest) -> Result<()> {
    let data = &request.data;
    let task = request.trained.as_ref().map(|trained| &trained.task);
    match (task, &request.val_data) {
        (Some(TaskSpec::NextToken { .. }), _) => Err(Error::Data(format!(
            "`data` {data}: expected tokens, as the model was trained on, got rows of features; help: give tokens:FILE if \
             its numbers are u16 tokens without a header"
        ))),
        (_, Some(val @ DataSpec::Tokens(_))) => Err(Error::Usage(format!(
            "`val-data` {val}: expected rows of features, as `data` {data} has, got tokens; help: give files of one kind"
        ))),
        _ => Ok(()),
    }
}

/// Opens the data of `spec` as they are, in one process.
pub fn open(spec: &DataSpec) -> Result<Data> {
    prepare(&DataRequest::new(spec.clone()), &Alone)
}

fn label_source(given: &Option<String>) -> LabelSource {
    match given {
        Some(text) => LabelSource::Given(text.clone()),
        None => LabelSource::Default,
    }
}

/// Rows for a model that is trained already.
fn to_use(
    request: &DataRequest,
    spec: &FilesSpec,
    trained: &Trained,
    ranks: &dyn Ranks,
) -> Result<Data> {
    let ask = Ask {
        setting: "data",
        spec,
        labels_setting: "labels",
        labels: match trained.needs_labels {
            true => label_source(&request.labels),
            false => LabelSource::Unwanted,
        },
        table: &PLAIN,
        columns: trained.columns.clone(),
        width: Some(trained.row_shape.iter().product()),
        plan: trained.plan.columns.clone(),
        allows_missing: trained.plan.fill.is_some(),
        is_for_model: true,
        label: trained.label.clone(),
        labels_are_texts: has_text_names(&trained.task),
        cache_dir: request.cache_dir.as_deref(),
        to_evaluate: true,
    };
    let source = OpenFiles::open(&ask, request.task, Some(&trained.task), ranks)?;
    if ranks.rank() == 0 {
        warnings::log_table(&source, &spec.path);
    }
    check_trained_width(trained, &source)?;
    if trained.plan.fill.is_some() && !source.opened.is_table() {
        find_missing(&source, &spec.path, &|_| true, "", ranks)?;
    }
    if source.labels.is_some() {
        look_at_labels(&source, Some(&trained.task), None, ranks)?;
    }
    let columns = source
        .opened
        .columns
        .clone()
        .or_else(|| trained.columns.clone());
    let label = source.opened.label.clone();
    let findings = Findings::unread(source.features().element()?.is_float());
    let understood = understood::text(&source, &trained.task, &findings);
    let rows = data_of(
        source,
        &findings,
        Side::All,
        &trained.task,
        &trained.plan,
        &trained.normalization,
    );
    let description = format!("{}: {} rows, {understood}", request.data, rows.rows());
    Ok(Data {
        held_out: Arc::new(NoRows(rows.spec().clone())),
        train: Arc::new(rows),
        description,
        normalization: trained.normalization.clone(),
        target_normalization: None,
        plan: trained.plan.clone(),
        columns,
        label,
        tokenizer: None,
    })
}

/// Rows to train on, and rows to evaluate on. `known` are the columns of tables without the
/// categories that only held-out rows have, once these were found.
fn to_train(
    request: &DataRequest,
    spec: &FilesSpec,
    known: Option<Vec<ColumnPlan>>,
    ranks: &dyn Ranks,
) -> Result<Data> {
    let is_first = known.is_none();
    let ask = Ask {
        setting: "data",
        spec,
        labels_setting: "labels",
        labels: label_source(&request.labels),
        table: &request.table,
        columns: None,
        width: None,
        plan: known,
        allows_missing: request.table.missing != Missing::Error,
        is_for_model: false,
        label: None,
        labels_are_texts: false,
        cache_dir: request.cache_dir.as_deref(),
        to_evaluate: false,
    };
    let source = OpenFiles::open(&ask, request.task, None, ranks)?;
    let split = split(request, source.features().rows(), ranks)?;
    let is_trained_on = |row| split.as_ref().is_none_or(|split| split.is_trained_on(row));
    let plan = feature_plan(request, &source, &spec.path, &is_trained_on, ranks)?;
    let (filled, normalize) = (plan.fill.as_deref(), request.normalize);
    let findings = look(&source, None, split.as_ref(), filled, normalize, ranks)?;
    if let (true, Some(seen)) = (is_first, trained_categories(&source, &findings)) {
        return to_train(request, spec, Some(seen), ranks);
    }
    if ranks.rank() == 0 {
        warnings::log_table(&source, &spec.path);
    }
    guess::check(&source, &findings.labels)?;
    let task = source.task(&findings.labels)?;
    let normalization = normalization(request.normalize, &source, &findings)?;
    let is_standard = request.normalize == Normalize::Standard && request.normalizes_targets;
    let targets = findings.targets.as_ref().filter(|_| is_standard);
    let target_normalization = targets.map(Normalization::standard);
    if ranks.rank() == 0 {
        // One rank alone must not fail: what cannot be read is found by all of them later.
        _ = warnings::warn(request, &source, &findings, &task);
    }
    let val = match &request.val_data {
        Some(DataSpec::Files(spec)) => {
            let val = open_val(request, spec, &source, &task, ranks)?;
            let findings = look(&val, Some(&task), None, filled, normalize, ranks)?;
            Some(FileData {
                target_normalization: target_normalization.clone(),
                ..data_of(val, &findings, Side::All, &task, &plan, &normalization)
            })
        }
        _ => None,
    };
    let (columns, label) = (source.opened.columns.clone(), source.opened.label.clone());
    let understood = understood::text(&source, &task, &findings);
    let side = split.clone().map_or(Side::All, Side::TrainedOn);
    let train = FileData {
        target_normalization: target_normalization.clone(),
        ..data_of(source, &findings, side, &task, &plan, &normalization)
    };
    let held_out: Arc<dyn Dataset> = match (split, val) {
        (Some(split), _) => Arc::new(train.on_side(Side::HeldOut(split))),
        (None, Some(val)) => Arc::new(val),
        (None, None) => Arc::new(NoRows(train.spec().clone())),
    };
    Ok(Data {
        description: Data::describe(&request.data.to_string(), &train, &*held_out, &understood),
        train: Arc::new(train),
        held_out,
        normalization,
        target_normalization,
        plan,
        columns,
        label,
        tokenizer: None,
    })
}

/// Which of so many rows are held out; `None` if none are. An error if too few are left for the
/// ranks.
fn split(request: &DataRequest, rows: u64, ranks: &dyn Ranks) -> Result<Option<Split>> {
    let split = match request.val_split > 0.0 {
        true => Some(Split::new(rows, request.val_split, request.seed)?),
        false => None,
    };
    let training_rows = split.as_ref().map_or(rows, Split::training_rows);
    request.check_rows(training_rows, ranks)?;
    Ok(split)
}

/// How cells become features.
fn feature_plan(
    request: &DataRequest,
    source: &OpenFiles,
    path: &str,
    is_trained_on: &(dyn Fn(u64) -> bool + Sync),
    ranks: &dyn Ranks,
) -> Result<FeaturePlan> {
    let (how, opened) = (request.table.missing, &source.opened);
    let of_rows = " in the rows that are trained on";
    let present = match how {
        Missing::Error => None,
        Missing::Zero if opened.is_table() => None,
        Missing::Zero | Missing::Mean => find_missing(source, path, is_trained_on, of_rows, ranks)?,
    };
    let names = opened.columns.as_deref();
    let fill = fill::fit(how, source.features(), names, present.as_ref())?;
    let columns = opened.plan.clone();
    Ok(FeaturePlan { columns, fill })
}

/// Finds and logs the missing numbers of rows, which are called `of_rows` in the log. Those of
/// tables are logged when they are converted.
fn find_missing(
    source: &OpenFiles,
    path: &str,
    is_wanted: &(dyn Fn(u64) -> bool + Sync),
    of_rows: &str,
    ranks: &dyn Ranks,
) -> Result<Option<Present>> {
    let same = SameFiles::of(ranks, &source.identity())?;
    let present = Present::find(source.features(), is_wanted, &same)?;
    if let (Some(present), 0, false) = (&present, ranks.rank(), source.opened.is_table()) {
        warnings::log_missing(source, path, present, of_rows);
    }
    Ok(present)
}

/// The columns without the categories that only held-out rows have, whose weights would stay
/// random; `None` if there are none.
fn trained_categories(source: &OpenFiles, findings: &Findings) -> Option<Vec<ColumnPlan>> {
    let found = findings
        .features
        .as_ref()
        .filter(|found| found.is_complete)?;
    let plan = source.opened.plan.as_ref()?;
    let mut greatest = found.moments.greatest.iter();
    let seen = |column: &ColumnPlan| {
        let mut mine = greatest.by_ref().take(column.width());
        let values = column.values.iter().flatten().zip(&mut mine);
        let values = values.filter(|(_, greatest)| **greatest > 0.0);
        let values: Vec<String> = values.map(|(value, _)| value.clone()).collect();
        // A number has one feature, which is still to be taken.
        mine.for_each(drop);
        ColumnPlan {
            name: column.name.clone(),
            values: column.values.is_some().then_some(values),
        }
    };
    let seen: Vec<ColumnPlan> = plan.iter().map(seen).collect();
    (seen != *plan).then_some(seen)
}

/// How features are normalized, as `how` and what was found in them say.
fn normalization(
    how: Normalize,
    source: &OpenFiles,
    findings: &Findings,
) -> Result<Option<Normalization>> {
    let element = source.features().element()?;
    Ok(match (how, &findings.features) {
        (Normalize::Unit, _) if element == Element::U8 => Some(Normalization::of_bytes()),
        (how, Some(found)) => Normalization::of(how, &found.moments),
        _ => None,
    })
}

fn data_of(
    source: OpenFiles,
    findings: &Findings,
    side: Side,
    task: &TaskSpec,
    plan: &FeaturePlan,
    normalization: &Option<Normalization>,
) -> FileData {
    read_in_any_order(source.features().arrays());
    let counts = findings
        .labels
        .counts
        .iter()
        .flat_map(|count| count.to_le_bytes());
    let counts: Vec<u8> = counts.collect();
    let names = task
        .classes()
        .map_or(String::new(), |classes| classes.names().join("\n"));
    let OpenFiles { opened, labels, .. } = source;
    let image = match opened.features.arrays()[0].row_shape() {
        [_] => Vec::new(),
        shape => shape.to_vec(),
    };
    FileData {
        spec: RowSpec {
            image,
            ..RowSpec::features(opened.features.width(), task.clone())
        },
        features: Arc::new(opened.features),
        labels: labels.map(Arc::new),
        side,
        fill: plan.fill.as_deref().map(Arc::from),
        normalization: normalization.clone(),
        target_normalization: None,
        class_rows: Arc::new([
            findings.labels.counts.clone(),
            findings.labels.trained.clone(),
        ]),
        checks: findings.has_unread_features,
        content: findings.content.clone(),
        labels_hash: XxHash3_64::oneshot(&counts)
            ^ XxHash3_64::oneshot(names.as_bytes()).rotate_left(1),
        watch: Arc::new(ChangeWatch::over(opened.watched)),
    }
}

/// Whether labels of tables are texts, even if all could be numbers.
fn has_text_names(task: &TaskSpec) -> bool {
    task.classes()
        .is_some_and(|classes| classes.texts().is_some() && classes.whole_names().is_none())
}

/// Opens the rows of `val-data`, which must be like those that are trained on.
fn open_val(
    request: &DataRequest,
    spec: &FilesSpec,
    train: &OpenFiles,
    task: &TaskSpec,
    ranks: &dyn Ranks,
) -> Result<OpenFiles> {
    let path = &spec.path;
    if request.val_labels.is_none() && train.opened.has_given_label_files {
        return Err(Error::Usage(format!(
            "`val-data` {path}: expected `val-labels`, since `labels` names files; help: give the labels of these rows"
        )));
    }
    let ask = Ask {
        setting: "val-data",
        spec,
        labels_setting: "val-labels",
        labels: label_source(&request.val_labels),
        table: &PLAIN,
        columns: train.opened.columns.clone(),
        width: Some(train.features().width()),
        plan: train.opened.plan.clone(),
        allows_missing: request.table.missing != Missing::Error,
        is_for_model: true,
        label: train.opened.label.clone(),
        labels_are_texts: has_text_names(task),
        cache_dir: request.cache_dir.as_deref(),
        to_evaluate: true,
    };
    let val = OpenFiles::open(&ask, request.task, Some(task), ranks)?;
    if ranks.rank() == 0 {
        warnings::log_table(&val, path);
    }
    if request.table.missing != Missing::Error && !val.opened.is_table() {
        find_missing(&val, path, &|_| true, "", ranks)?;
    }
    let (expected, got) = (train.features().width(), val.features().width());
    if expected != got {
        let [place, like] = [&val, train].map(|files| files.features().arrays()[0].name());
        return Err(Error::Data(format!(
            "{place}: expected {expected} features a row, as in {like}, got {got}; help: give rows of the same shape as \
             `val-data`"
        )));
    }
    let [expected, got] = [train, &val].map(|files| files.features().arrays()[0].row_shape());
    if RowSpec::images_differ(expected, got) {
        let place = val.features().arrays()[0].name();
        return Err(Error::Data(format!(
            "{place}: expected rows of shape {expected:?}, as those to train on, got {got:?}; help: give `val-data` of the same shape"
        )));
    }
    if let (Some(name), 0) = (val.opened.shared_with(&train.opened), ranks.rank()) {
        tracing::warn!(
            "`val-data` {path}: {name} is trained on too: it says nothing about new rows"
        );
    }
    Ok(val)
}

/// An error if a trained model cannot take these rows.
fn check_trained_width(trained: &Trained, source: &OpenFiles) -> Result<()> {
    let expected = trained.row_shape.iter().product::<usize>();
    let (features, got) = (source.features(), source.features().width());
    if expected != got {
        let place = features.arrays()[0].name();
        return Err(Error::Data(format!(
            "{place}: expected {expected} features a row, as the model was trained on, got {got}"
        )));
    }
    trained.check_features()
}

#[cfg(test)]
mod tests;
