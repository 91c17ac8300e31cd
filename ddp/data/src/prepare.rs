//! From a request to data: finds and opens files, reads all rows, splits and normalizes. All ranks
//! do it together, so that whatever is wrong is one error for all, before training begins.

mod tokens;

use std::sync::Arc;

use ddp_kernels::setting::SettingName;
use twox_hash::XxHash3_64;

pub use self::tokens::{TokenSummary, summarize as summarize_tokens};
use crate::dataset::{Dataset, NoRows, RowSpec};
use crate::error::{Error, Result, ensure};
use crate::facts::{Facts, scan};
use crate::feature_plan::{Missing, PLAIN};
use crate::file_rows::{ChangeWatch, FileData, Side, read_in_any_order};
use crate::files::listed_up_to;
use crate::glyphs::Glyphs;
use crate::learn::learn;
use crate::normalize::{Normalization, Normalize};
use crate::open::{Source, open as open_files};
use crate::ranks::{Alone, Ranks, in_turn};
use crate::request::{Data, DataRequest, Trained};
use crate::resolve::{FoundFiles, Wanted, resolve};
use crate::setting::{DATA, LABELS, VAL_DATA, VAL_LABELS};
use crate::spec::{DataSpec, FilesSpec};
use crate::synthetic::Synthetic;
use crate::task::{LabelName, TaskSpec};
use crate::warnings;

/// Opens the data of a request on all ranks together. An error is the same on all of them.
pub fn prepare(request: &DataRequest, ranks: &dyn Ranks) -> Result<Data> {
    // Ranks with different requests would wait for each other in different places.
    let asked = [("the configuration".to_string(), request.text())];
    ranks.must_match(&asked, "start every rank with the same settings")?;
    request.check()?;
    if let Some(named) = tokens::named(&request.data, DATA, ranks)? {
        return tokens::prepare(request, &named, ranks);
    }
    request.check_rows_of_features()?;
    let DataSpec::Files(spec) = &request.data else {
        return built_in(request);
    };
    let wanted = wanted(request, DATA, spec, request.trained.as_ref());
    let files = in_turn(ranks, || resolve(&wanted))?;
    let source = open_alike(request, &files, ranks)?;
    let facts = scan(request, &source, request.trained.as_ref(), ranks)?;
    if ranks.rank() == 0 {
        warnings::log_table(&source);
    }
    let model = match &request.trained {
        Some(trained) => trained.clone(),
        None => learn(request, &source, &facts)?,
    };
    if ranks.rank() == 0 && request.trained.is_none() {
        // One rank alone must not fail: what cannot be read is found by all of them later.
        _ = warnings::warn(request, &source, &facts, &model.task);
    }
    let val = match &request.val_data {
        Some(DataSpec::Files(spec)) if request.trained.is_none() => {
            let (val, facts) = val_rows(request, spec, &model, &source, ranks)?;
            Some(file_data(val, &facts, &model))
        }
        _ => None,
    };
    Ok(data(request, source, facts, model, val))
}

/// Opens the data of `spec` as they are, in one process.
pub fn open(spec: &DataSpec) -> Result<Data> {
    prepare(&DataRequest::new(spec.clone()), &Alone)
}

/// The rows of `spec` that are wanted, to train on or for a model.
fn wanted<'a>(
    request: &'a DataRequest,
    setting: SettingName<'static>,
    spec: &'a FilesSpec,
    model: Option<&'a Trained>,
) -> Wanted<'a> {
    let labels = match setting == DATA {
        true => &request.labels,
        false => &request.val_labels,
    };
    let (table, allows_missing) = match model {
        Some(model) => (&PLAIN, model.plan.fill.is_some()),
        None => (&request.table, request.table.missing != Missing::Error),
    };
    Wanted {
        setting,
        spec,
        labels: labels.as_deref(),
        table,
        model,
        allows_missing,
        cache_dir: request.cache_dir.as_deref(),
    }
}

/// Opens and converts files, on one rank of a host first. An error on all ranks unless their files
/// are alike, since they share the reading of rows from here on.
fn open_alike(request: &DataRequest, files: &FoundFiles<'_>, ranks: &dyn Ranks) -> Result<Source> {
    let source = in_turn(ranks, || open_files(files, request.task))?;
    let help = "compare the files on the hosts: all ranks need the same data";
    ranks.must_match(&source.traits()?, help)?;
    Ok(source)
}

/// Opens and scans the rows of `val-data`, which must be like those that are trained on.
fn val_rows(
    request: &DataRequest,
    spec: &FilesSpec,
    model: &Trained,
    train: &Source,
    ranks: &dyn Ranks,
) -> Result<(Source, Facts)> {
    let path = &spec.path;
    ensure!(
        request.val_labels.is_some() || !train.has_label_files,
        Usage,
        "{VAL_DATA} {path}: expected {VAL_LABELS}, since {LABELS} names files; help: give the labels of these rows"
    );
    let wanted = wanted(request, VAL_DATA, spec, Some(model));
    let files = in_turn(ranks, || resolve(&wanted))?;
    let val = open_alike(request, &files, ranks)?;
    if ranks.rank() == 0 {
        warnings::log_table(&val);
        if let Some(name) = val.shared_with(train) {
            tracing::warn!(
                "{VAL_DATA} {path}: {name} is trained on too: it says nothing about new rows"
            );
        }
    }
    let [expected, got] = [train, &val].map(|source| source.features.arrays()[0].row_shape());
    ensure!(
        !RowSpec::images_differ(expected, got),
        Data,
        "{}: expected rows of shape {expected:?}, as those to train on, got {got:?}; help: give {VAL_DATA} of the same shape",
        val.place()
    );
    let facts = scan(request, &val, Some(model), ranks)?;
    Ok((val, facts))
}

/// The rows of `source`, all of them, as a model takes them.
fn file_data(source: Source, facts: &Facts, model: &Trained) -> FileData {
    read_in_any_order(source.features.arrays());
    let counts = facts.labels.counts.iter();
    let counts: Vec<u8> = counts.flat_map(|count| count.to_le_bytes()).collect();
    let names = model.task.classes();
    let names = names.map_or(String::new(), |classes| classes.names().join("\n"));
    let image = match source.features.arrays()[0].row_shape() {
        [_] => Vec::new(),
        shape => shape.to_vec(),
    };
    FileData {
        spec: RowSpec {
            image,
            ..RowSpec::features(source.features.width(), model.task.clone())
        },
        features: Arc::new(source.features),
        labels: source.labels.map(Arc::new),
        side: Side::All,
        fill: model.plan.fill.as_deref().map(Arc::from),
        normalization: model.normalization.clone(),
        target_normalization: None,
        class_rows: Arc::new([facts.labels.counts.clone(), facts.labels.trained.clone()]),
        checks: facts.has_unread_features,
        content: facts.content.clone(),
        labels_hash: XxHash3_64::oneshot(&counts)
            ^ XxHash3_64::oneshot(names.as_bytes()).rotate_left(1),
        watch: Arc::new(ChangeWatch::over(source.watched)),
    }
}

/// The rows to train on or to use a model on, and those to evaluate on.
fn data(
    request: &DataRequest,
    mut source: Source,
    facts: Facts,
    model: Trained,
    val: Option<FileData>,
) -> Data {
    let understood = describe(&source, &facts, &model.task);
    let is_standard = request.normalize == Normalize::Standard && request.normalizes_targets;
    let targets = facts.targets.as_ref().filter(|_| is_standard);
    let target_normalization = targets.map(Normalization::standard);
    let (columns, label) = (source.columns.take(), source.label.take());
    let mut train = file_data(source, &facts, &model);
    train.target_normalization.clone_from(&target_normalization);
    let held_out: Arc<dyn Dataset> = match (facts.split, val) {
        (Some(split), _) => {
            let held_out = train.on_side(Side::HeldOut(split.clone()));
            train.side = Side::TrainedOn(split);
            Arc::new(held_out)
        }
        (None, Some(mut val)) => {
            val.target_normalization.clone_from(&target_normalization);
            Arc::new(val)
        }
        (None, None) => Arc::new(NoRows(train.spec().clone())),
    };
    Data {
        description: Data::describe(request, &train, &*held_out, &understood),
        train: Arc::new(train),
        held_out,
        normalization: model.normalization,
        target_normalization,
        plan: model.plan,
        columns: columns.or(model.columns),
        label,
        tokenizer: None,
    }
}

/// Names that are shown.
const SHOWN: usize = 8;

/// The label, the task, and the features used and left out, for people: said at the start of a run,
/// by `inspect` and in the metrics log.
fn describe(source: &Source, facts: &Facts, task: &TaskSpec) -> String {
    let label = match (&source.label, &source.labels) {
        (_, None) => String::new(),
        (Some(name @ LabelName::Column(_)), _) => match &*name.columns() {
            [one] => format!("label column \"{one}\", "),
            all => format!("label columns {}, ", listed_up_to(SHOWN, all)),
        },
        (Some(LabelName::Array(name)), _) => format!("label array \"{name}\", "),
        (None, Some(labels)) => format!("labels {}, ", labels.name()),
    };
    let names = task.classes().and_then(|classes| classes.texts());
    let learned = match (names, facts.labels.range) {
        (Some(names), _) => format!(" ({})", listed_up_to(SHOWN, names)),
        // Of several columns the units may differ.
        (None, Some((least, greatest))) if task.outputs() == 1 => {
            format!(" ({least:?} to {greatest:?})")
        }
        (None, _) => String::new(),
    };
    let width = match source.features.width() {
        1 => "1 feature".to_string(),
        width => format!("{width} features"),
    };
    let features = match &source.columns {
        Some(columns) => format!("{width}: {}", listed_up_to(SHOWN, columns)),
        None => format!("{width} a row"),
    };
    let left_out = match source.left_out.len() {
        0 => String::new(),
        count => format!(
            " ({count} left out: {})",
            listed_up_to(SHOWN, &source.left_out)
        ),
    };
    format!("{label}{task}{learned}, {features}{left_out}")
}

/// Built-in data, which are normalized already.
fn built_in(request: &DataRequest) -> Result<Data> {
    let (train, held_out): (Arc<dyn Dataset>, Arc<dyn Dataset>) = match &request.data {
        DataSpec::Glyphs(spec) => (
            Arc::new(Glyphs::train(spec)),
            Arc::new(Glyphs::held_out(spec)),
        ),
        DataSpec::Synthetic(spec) => {
            let (train, held_out) = Synthetic::pair(spec);
            (Arc::new(train), Arc::new(held_out))
        }
        DataSpec::Files(_) | DataSpec::Tokens(_) => {
            return Err(Error::Internal("files are not built in".into()));
        }
    };
    if let Some(trained) = &request.trained {
        check_trained(trained, &request.data, &*train)?;
    }
    let understood = format!(
        "{}, {} features a row",
        train.task(),
        train.spec().inputs.elements()
    );
    let description = Data::describe(request, &*train, &*held_out, &understood);
    Ok(Data::new(train, held_out, description))
}

/// An error if a trained model cannot take these data.
fn check_trained(trained: &Trained, spec: &DataSpec, data: &dyn Dataset) -> Result<()> {
    let (expected, trained_task) = (trained.row_shape.iter().product::<usize>(), &trained.task);
    let (got, task) = (data.spec().inputs.elements(), data.task());
    ensure!(
        expected == got && task == trained_task,
        Data,
        "{DATA} {spec}: expected {expected} features a row and {trained_task}, as the model was trained on, got {got} and {task}"
    );
    ensure!(
        trained.normalization.is_none(),
        Data,
        "{DATA} {spec}: expected files, since the model was trained on normalized features"
    );
    Ok(())
}

#[cfg(test)]
mod tests;
