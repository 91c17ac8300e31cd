//! From what is asked for to data that are ready: files opened, looked at, split and normalized; all ranks together, so that whatever is
//! wrong is one error for all, before anything is trained.

mod alike;
mod built_in;
mod look;

use std::path::Path;
use std::sync::Arc;

use ddp_comm::{Field, World};
use ddp_kernels::{Device, memory};
use xxhash_rust::xxh3::xxh3_64;

use self::alike::check_alike;
use self::built_in::built_in;
use self::look::{bad_label, look};
use super::dataset::{FileData, NoRows, Side, Watch};
use super::files::{Array, Element};
use super::labels::{Labels, are_texts};
use super::opened::{self, Ask, LabelSource, Opened};
use super::scan::{self, Kept};
use super::spec::FilesSpec;
use super::split::Split;
use super::stack::Stack;
use super::{Data, DataRequest, DataSpec, Dataset, Normalization, Task, Trained, agree, rounding};
use crate::config::Normalize;
use crate::error::{Error, Result};

/// Opens what is asked for, on all ranks of `world` together.
pub(super) fn prepare(request: &DataRequest, world: &World) -> Result<Data> {
    // Ranks that are asked for different things would wait for each other at different places.
    let asked = Field::must_match("the configuration", request.text(), "Start every rank with the same flags.");
    world.handshake(&[asked])?;
    request.check()?;
    match &request.data {
        DataSpec::Files(spec) => of_files(request, spec, world),
        _ => built_in(request, world),
    }
}

impl DataRequest {
    /// What all ranks have to be asked for alike, a line a flag.
    fn text(&self) -> String {
        let DataRequest { data, labels, val_data, val_labels, val_split, seed, task, normalize, .. } = self;
        let given = [
            ("data", Some(format!("\"{data}\""))),
            ("labels", labels.as_ref().map(|labels| format!("{labels:?}"))),
            ("val-data", val_data.as_ref().map(|data| format!("\"{data}\""))),
            ("val-labels", val_labels.as_ref().map(|labels| format!("{labels:?}"))),
            ("val-split", (*val_split != 0.0).then(|| val_split.to_string())),
            ("seed", (*val_split != 0.0).then(|| seed.to_string())),
            ("task", task.map(|task| format!("{task:?}"))),
            ("normalize", Some(format!("{normalize:?}"))),
        ];
        given.into_iter().filter_map(|(name, value)| Some(format!("{name} = {}\n", value?))).collect()
    }

    /// Refuses flags that cannot be together.
    fn check(&self) -> Result<()> {
        let refuse = |flag: &str, text: String| Err(Error::Usage(format!("{flag}: {text}")));
        if let (Some(data), true) = (&self.val_data, self.val_split > 0.0) {
            let text = format!("either --val-data or --val-split. Leave --val-data {data} out, or --val-split");
            return refuse(&format!("--val-split {}", self.val_split), format!("expected {text}"));
        }
        if let (Some(labels), None) = (&self.val_labels, &self.val_data) {
            let text = "expected --val-data, whose labels they are. Give both, or leave it out".to_string();
            return refuse(&format!("--val-labels {labels}"), text);
        }
        if let Some(data @ (DataSpec::Glyphs(_) | DataSpec::Synthetic(_))) = &self.val_data {
            let text =
                "expected files. Built-in data have held-out rows of their own, as many as held-out=N says in --data";
            return refuse(&format!("--val-data {}", data.name()), text.into());
        }
        if matches!(self.data, DataSpec::Files(_)) {
            return Ok(());
        }
        let given = [
            ("--labels", self.labels.is_some()),
            ("--val-data", self.val_data.is_some()),
            ("--val-split", self.val_split > 0.0),
            // A model that is trained says it of all data.
            ("--task", self.task.is_some() && self.trained.is_none()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((flag, _)) => {
                let name = self.data.name();
                let text = format!(
                    "expected files as --data, and {name} is built in: it has its labels and its held-out rows"
                );
                refuse(flag, format!("{text}. Leave {flag} out"))
            }
        }
    }

    fn cache_dir(&self) -> Option<&Path> {
        self.cache_dir.as_deref()
    }
}

/// Files that are open, with their labels as what they are.
struct Source {
    flag: &'static str,
    opened: Opened,
    labels: Option<Labels>,
    /// What classes are called, where labels are texts.
    names: Option<Vec<String>>,
}

impl Source {
    /// All ranks: opens and converts, one rank of a host first. From then on all know that they have files of the same kind and size.
    fn open(ask: &Ask<'_>, request: &DataRequest, task: Option<&Task>, world: &World) -> Result<Source> {
        let source = agree::in_turn(world, || {
            let mut opened = opened::open(ask)?;
            opened.features.element()?;
            let files = opened.labels.take();
            let (labels, names) = match (files, task) {
                (None, _) => (None, None),
                (Some(files), Some(task)) => (Some(Labels::of_task(files, task)?), None),
                (Some(files), None) => {
                    let (labels, names) = Labels::new(files, request.task)?;
                    (Some(labels), names)
                }
            };
            Ok(Source { flag: ask.flag, opened, labels, names })
        })?;
        check_alike(&source, &ask.spec.path, world)?;
        Ok(source)
    }

    fn features(&self) -> &Stack {
        &self.opened.features
    }

    /// What is to be learned, once the classes are counted.
    fn task(&self, kept: &Kept) -> Result<Task> {
        let labels = self.labels.as_ref().ok_or_else(|| Error::Internal("a run without labels".into()))?;
        if !labels.are_classes() {
            return Ok(Task::Regression { outputs: labels.width() });
        }
        let classes = self.names.as_ref().map_or(kept.counts.len(), Vec::len);
        if classes < 2 {
            let place = labels.stack().arrays()[0].name();
            return Err(Error::Data(format!(
                "{place}: expected labels of at least 2 classes, got {classes} in all {} rows. There is nothing to tell apart: give other \
                 --labels, or --task regression",
                labels.rows()
            )));
        }
        let numbered = || (0..classes).map(|class| class.to_string()).collect();
        Ok(Task::Classification { classes, names: self.names.clone().unwrap_or_else(numbered) })
    }
}

/// Data in files.
fn of_files(request: &DataRequest, spec: &FilesSpec, world: &World) -> Result<Data> {
    let trained = request.trained.as_ref();
    let ask = Ask {
        flag: "--data",
        spec,
        labels_flag: "--labels",
        labels: match trained {
            Some(trained) if !trained.needs_labels => LabelSource::Unwanted,
            _ => label_source(request.labels.as_ref()),
        },
        columns: trained.and_then(|trained| trained.columns.clone()),
        label: trained.and_then(|trained| trained.label.clone()),
        labels_are_texts: trained.is_some_and(|trained| are_texts(&trained.task)),
        cache_dir: request.cache_dir(),
        to_evaluate: trained.is_some(),
    };
    let source = Source::open(&ask, request, trained.map(|trained| &trained.task), world)?;
    match trained {
        Some(trained) => to_use(request, trained, source, world),
        None => to_train(request, source, world),
    }
}

/// Where labels are, by what was written.
fn label_source(text: Option<&String>) -> LabelSource {
    text.map_or(LabelSource::Default, |text| LabelSource::Given(text.clone()))
}

/// Rows for a model that is trained already.
fn to_use(request: &DataRequest, trained: &Trained, source: Source, world: &World) -> Result<Data> {
    let width = source.features().width();
    check_width(trained, &source)?;
    let known = match &trained.task {
        Task::Classification { classes, .. } => Some(*classes),
        Task::Regression { .. } => None,
    };
    if let Some(labels) = &source.labels {
        bad_label(scan::labels(labels, known, world)?)?;
    }
    let columns = source.opened.columns.clone().or_else(|| trained.columns.clone());
    let label = source.opened.label.clone();
    let normalization = trained.normalization.clone();
    let checks = source.features().element()?.is_float();
    let side = Side::All;
    let Source { opened, labels, .. } = source;
    let train = FileData {
        features: Arc::new(opened.features),
        labels: labels.map(Arc::new),
        side,
        shape: [width],
        task: trained.task.clone(),
        normalization: normalization.clone(),
        checks,
        labels_hash: 0,
        watch: Arc::new(Watch::over(opened.watched)),
    };
    let held_out = NoRows { shape: vec![width], task: trained.task.clone() };
    let description = format!("{}: {} rows, [{width}] features each, {}", request.data, train.rows(), train.task());
    Ok(Data { train: Arc::new(train), held_out: Arc::new(held_out), description, normalization, columns, label })
}

/// Rows to train on, and those to evaluate on.
fn to_train(request: &DataRequest, source: Source, world: &World) -> Result<Data> {
    let rows = source.features().rows();
    let split = (request.val_split > 0.0).then(|| Split::new(rows, request.val_split, request.seed)).transpose()?;
    let training_rows = split.as_ref().map_or(rows, Split::training_rows);
    if training_rows < world.size() as u64 {
        return Err(Error::Data(format!(
            "--data {}: expected at least a row to train on for each of {} ranks, got {training_rows}. Start fewer ranks, or give more data",
            request.data,
            world.size()
        )));
    }
    let element = source.features().element()?;
    let kept = look(&source, None, split.as_ref(), request, world)?;
    let task = source.task(&kept)?;
    let normalization = match (request.normalize, element, &kept.found) {
        (Normalize::Unit, Element::U8, _) => Some(Normalization::of_bytes()),
        (how, _, Some(found)) => Normalization::of(how, &found.moments),
        _ => None,
    };
    if world.rank() == 0 {
        warn_of(request, &source, element, &kept, &task);
    }
    let val_source = match &request.val_data {
        Some(DataSpec::Files(spec)) => Some(open_val(request, spec, &source, &task, world)?),
        _ => None,
    };
    let val_kept = val_source.as_ref().map(|val| look(val, Some(&task), None, request, world)).transpose()?;

    let (columns, label) = (source.opened.columns.clone(), source.opened.label.clone());
    let name = request.data.to_string();
    let sides = match split {
        None => (Side::All, None),
        Some(split) => (Side::TrainedOn(split.clone()), Some(Side::HeldOut(split))),
    };
    let train = data_of(source, &kept, sides.0, &task, &normalization);
    let held_out: Arc<dyn Dataset> = match (sides.1, val_source.zip(val_kept)) {
        (Some(side), _) => Arc::new(FileData {
            features: train.features.clone(),
            labels: train.labels.clone(),
            side,
            shape: train.shape,
            task: task.clone(),
            normalization: normalization.clone(),
            watch: train.watch.clone(),
            ..train
        }),
        (None, Some((val, kept))) => Arc::new(data_of(val, &kept, Side::All, &task, &normalization)),
        (None, None) => Arc::new(NoRows { shape: train.shape.to_vec(), task }),
    };
    let description = describe(&name, &train, &*held_out);
    Ok(Data { train: Arc::new(train), held_out, description, normalization, columns, label })
}

fn data_of(source: Source, kept: &Kept, side: Side, task: &Task, normalization: &Option<Normalization>) -> FileData {
    read_in_any_order(source.features());
    let Source { opened, labels, .. } = source;
    let counts: Vec<u8> = kept.counts.iter().flat_map(|count| count.to_le_bytes()).collect();
    let names = match task {
        Task::Classification { names, .. } => names.join("\n"),
        Task::Regression { .. } => String::new(),
    };
    FileData {
        shape: [opened.features.width()],
        features: Arc::new(opened.features),
        labels: labels.map(Arc::new),
        side,
        task: task.clone(),
        normalization: normalization.clone(),
        checks: kept.found.as_ref().is_some_and(|found| !found.is_complete),
        labels_hash: xxh3_64(&counts) ^ xxh3_64(names.as_bytes()).rotate_left(1),
        watch: Arc::new(Watch::over(opened.watched)),
    }
}

/// Tells the system that rows of files larger than memory are read in any order from now on: to read ahead would be to read for nothing.
fn read_in_any_order(features: &Stack) {
    let bytes = features.arrays().iter().fold(0u64, |sum, array| sum.saturating_add(array.mapped().len()));
    if bytes > memory::free_bytes(Device::Cpu) as u64 {
        features.arrays().iter().for_each(|array| array.mapped().random_order(true));
    }
}

/// Opens `--val-data`, whose rows have to be such as those that are trained on.
fn open_val(request: &DataRequest, spec: &FilesSpec, train: &Source, task: &Task, world: &World) -> Result<Source> {
    if request.val_labels.is_none() && train.opened.has_given_label_files {
        return Err(Error::Usage(format!(
            "--val-data {}: expected --val-labels, since --labels names files of their own. Give the labels of these rows",
            spec.path
        )));
    }
    let ask = Ask {
        flag: "--val-data",
        spec,
        labels_flag: "--val-labels",
        labels: label_source(request.val_labels.as_ref()),
        columns: train.opened.columns.clone(),
        label: train.opened.label.clone(),
        labels_are_texts: are_texts(task),
        cache_dir: request.cache_dir(),
        to_evaluate: true,
    };
    let val = Source::open(&ask, request, Some(task), world)?;
    let (expected, got) = (train.features().width(), val.features().width());
    if expected != got {
        return Err(Error::Data(format!(
            "{}: expected {expected} features a row, as in {}, got {got}. Give rows of the same shape as --val-data",
            val.features().arrays()[0].name(),
            train.features().arrays()[0].name()
        )));
    }
    let is_trained_on = |array: &&Array| train.features().arrays().iter().any(|trained| is_same(trained, array));
    if let Some(other) = val.features().arrays().iter().find(is_trained_on)
        && world.rank() == 0
    {
        tracing::warn!("--val-data {}: {} is trained on too: it says nothing of new rows", spec.path, other.name());
    }
    Ok(val)
}

/// Whether two arrays are the same bytes of the same file.
fn is_same(a: &Array, b: &Array) -> bool {
    a.mapped().identity() == b.mapped().identity() && a.name() == b.name()
}

/// What there is to say of data that can be trained on.
fn warn_of(request: &DataRequest, source: &Source, element: Element, kept: &Kept, task: &Task) {
    let data = &request.data;
    if element == Element::U8 && request.normalize == Normalize::None {
        tracing::warn!(
            "--data {data}: features are bytes up to 255, and models learn better from 0 to 1: --normalize unit"
        );
    }
    warn_of_rounding(request, source, kept);
    if let Some(found) = kept.found.as_ref().filter(|found| !found.is_complete) {
        tracing::warn!(
            "--data {data}: more than {} GB of features: {} rows spread over all were looked at before training; the others are \
             looked at as they are trained on",
            scan::BYTES_MAX >> 30,
            found.moments.count
        );
    }
    if let Task::Classification { names, .. } = task {
        let absent: Vec<&str> = names
            .iter()
            .enumerate()
            .filter(|(class, _)| kept.counts.get(*class).is_none_or(|&count| count == 0))
            .map(|(_, name)| &**name)
            .collect();
        if !absent.is_empty() && source.names.is_none() {
            let shown = absent[..absent.len().min(8)].join(", ");
            let more = if absent.len() > 8 { " …" } else { "" };
            tracing::warn!(
                "--data {data}: of {} classes {} have no rows: {shown}{more}. Are classes numbered from 0 on without gaps?",
                names.len(),
                absent.len()
            );
        }
    }
}

/// Says which features f32 has all but made constant. Of tables it was said as they were converted.
fn warn_of_rounding(request: &DataRequest, source: &Source, kept: &Kept) {
    let Some(found) = &kept.found else { return };
    // What cannot be read ends the run soon enough.
    let close = rounding::columns_too_close(source.features(), &found.moments).unwrap_or_default();
    let close: Vec<_> = close.into_iter().map(|(column, ends)| (format!("{column} (counted from 0)"), ends)).collect();
    if let Some(warning) = rounding::warning(&close) {
        tracing::warn!("--data {}: {warning}", request.data);
    }
}

fn check_normalization(trained: &Trained) -> Result<()> {
    let width = trained.row_shape.iter().product();
    match &trained.normalization {
        Some(normalization) if !normalization.fits(width) => Err(Error::Data(format!(
            "the model's normalization: expected one number or {width} of them, got {} and {}. The checkpoint is damaged",
            normalization.shift.len(),
            normalization.scale.len()
        ))),
        _ => Ok(()),
    }
}

/// Files for a model that is trained already.
fn check_width(trained: &Trained, source: &Source) -> Result<()> {
    let (expected, got) = (trained.row_shape.iter().product::<usize>(), source.features().width());
    if expected != got {
        return Err(Error::Data(format!(
            "{}: expected {expected} features a row, as the model was trained on, got {got}. Give rows of that shape",
            source.features().arrays()[0].name()
        )));
    }
    check_normalization(trained)
}

fn describe(name: &str, train: &dyn Dataset, held_out: &dyn Dataset) -> String {
    format!(
        "{name}: {} rows to train on, {} held out, {:?} features each, {}",
        train.rows(),
        held_out.rows(),
        train.row_shape(),
        train.task()
    )
}

#[cfg(test)]
mod tests;
