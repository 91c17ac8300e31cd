//! Rows of files: read from mapped files on request, and normalized.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ddp_kernels::files::FileError;
use ddp_kernels::mapped::Mapped;
use ddp_kernels::{Device, Tensor, memory, ops};
use twox_hash::XxHash3_64;

use crate::dataset::{Dataset, NoRows, RowSpec, check_gather, content_blake3, sampled_hash};
use crate::error::{Error, Result, bail};
use crate::facts::Facts;
use crate::features::{Normalization, Scaling};
use crate::files::Array;
use crate::files::array::fill_in;
use crate::labels::Labels;
use crate::open::OpenFiles;
use crate::request::{Data, DataRequest, Trained};
use crate::sampler::Split;
use crate::scan::first_nonfinite;
use crate::task::{LabelName, TaskSpec};
use crate::words::listed_up_to;

/// Rows of files.
#[derive(Clone, Debug)]
pub(crate) struct FileData {
    source: Arc<OpenFiles>,
    facts: Arc<Facts>,
    /// How the rows become inputs and targets.
    model: Arc<Trained>,
    target_normalization: Option<Normalization>,
    /// If these are only some of the rows: the split, and whether they are the held-out ones.
    side: Option<(Split, bool)>,
    spec: RowSpec,
    watch: Arc<ChangeWatch>,
}

impl FileData {
    /// All rows of `source`, as a model takes them.
    pub(crate) fn new(source: OpenFiles, facts: Facts, model: Trained) -> FileData {
        let features = &source.features;
        read_in_any_order(&features.arrays);
        let image = match features.arrays[0].row_shape() {
            [_] => Vec::new(),
            shape => shape.to_vec(),
        };
        FileData {
            spec: RowSpec {
                image,
                ..RowSpec::features(features.width, model.task.clone())
            },
            watch: Arc::new(ChangeWatch::over(source.watched.clone())),
            target_normalization: None,
            side: None,
            source: Arc::new(source),
            facts: Arc::new(facts),
            model: Arc::new(model),
        }
    }

    fn read_features(&self, row: u64, x: &mut [f32]) -> Result<()> {
        let features = &self.source.features;
        features.read_f32(row, x)?;
        if let Some(numbers) = &self.model.plan.fill {
            fill_in(numbers, x);
        }
        if self.facts.has_unread_features
            && let Some(column) = first_nonfinite(x)
        {
            return Err(features.nonfinite((row, column), None, true));
        }
        if let Some(normalization) = &self.model.normalization {
            normalization.apply(x, features.width);
        }
        Ok(())
    }

    /// The class of a row. Labels were validated at start-up; an invalid one means that the file
    /// has changed.
    fn class(&self, labels: &Labels, row: u64) -> Result<i64> {
        let mut class = [0];
        labels.classes(row, &mut class)?;
        let classes = self.spec.task.outputs();
        if (0..classes as i64).contains(&class[0]) {
            return Ok(class[0]);
        }
        let why = labels.why_no_class(row, self.spec.task.classes())?;
        bail!("{why}: the file has changed since the start")
    }
}

impl Dataset for FileData {
    #[inline]
    fn number(&self, index: u64) -> u64 {
        match &self.side {
            None => index,
            Some((split, is_held_out)) => split.row(*is_held_out, index),
        }
    }

    fn rows_of_classes(&self) -> Option<Vec<u64>> {
        let (all, trained) = (&self.facts.labels.counts, &self.facts.labels.trained);
        let mut rows = match self.side {
            None => all.clone(),
            Some((_, false)) => trained.clone(),
            Some((_, true)) => {
                let rows = all.iter().zip(trained);
                rows.map(|(all, trained)| all - trained).collect()
            }
        };
        let classes = self.spec.task.classes()?.count();
        rows.resize(classes, 0);
        (!all.is_empty()).then_some(rows)
    }

    fn rows(&self) -> u64 {
        match &self.side {
            None => self.source.features.rows(),
            Some((split, is_held_out)) => split.rows(*is_held_out),
        }
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    /// Identifies the contents of the rows, not their files: the same rows in files of another
    /// format are the same data. Versions up to 0.6 left out the content.
    fn fingerprint(&self) -> Result<String> {
        let side = match &self.side {
            None => "all",
            Some((_, false)) => "trained on",
            Some((_, true)) => "held out",
        };
        let counts = self.facts.labels.counts.iter();
        let counts: Vec<u8> = counts.flat_map(|count| count.to_le_bytes()).collect();
        let names = self.spec.task.classes();
        let names = names.map_or(String::new(), |classes| classes.names().join("\n"));
        let names = XxHash3_64::oneshot(names.as_bytes()).rotate_left(1);
        let content = self.facts.content.as_ref();
        let content = content.map_or(String::new(), |hash| format!(", content {hash}"));
        Ok(format!(
            "{} rows ({side} of {}) of {} features, {}, labels {:016x}, sampled {:016x}{content}",
            self.rows(),
            self.source.features.rows(),
            self.source.features.width,
            self.spec.task,
            XxHash3_64::oneshot(&counts) ^ names,
            sampled_hash(self)?
        ))
    }

    fn blake3(&self) -> Result<String> {
        content_blake3(self, &self.facts.blake3)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.watch.check_all()
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        self.watch.check()?;
        inputs.with_slice_mut(|x: &mut [f32]| {
            let width = self.source.features.width;
            let mut rows = rows.iter().zip(x.chunks_exact_mut(width));
            rows.try_for_each(|(&row, x)| self.read_features(self.number(row), x))
        })??;
        match &self.source.labels {
            None => Ok(ops::zero(targets)?),
            Some(labels) if labels.are_classes() => {
                targets.with_slice_mut(|classes: &mut [i64]| {
                    for (&row, class) in rows.iter().zip(classes) {
                        *class = self.class(labels, self.number(row))?;
                    }
                    Ok(())
                })?
            }
            Some(labels) => targets.with_slice_mut(|values: &mut [f32]| {
                let mut rows = rows.iter().zip(values.chunks_exact_mut(labels.rows.width));
                rows.try_for_each(|(&row, values)| labels.rows.read_f32(self.number(row), values))?;
                if let Some(normalization) = &self.target_normalization {
                    normalization.apply(values, labels.rows.width);
                }
                Ok(())
            })?,
        }
    }
}

/// The rows to train on or to use a model on, and those to evaluate on. `val` are rows of other
/// files.
pub(crate) fn dataset(
    request: &DataRequest,
    source: OpenFiles,
    facts: Facts,
    model: Trained,
    val: Option<FileData>,
) -> Data {
    let description = describe(&source, &facts, &model.task);
    let is_standard = request.normalize == Scaling::Standard && request.normalizes_targets;
    let targets = facts.targets.as_ref().filter(|_| is_standard);
    let target_normalization = targets.map(|moments| {
        let standard = Normalization::standard(moments);
        if request.clips_targets {
            standard.clipping(moments)
        } else {
            standard
        }
    });
    let of_table = source.is_table.then(|| Arc::new(request.clone()));
    let (columns, label, split) = (
        source.columns.clone(),
        source.label.clone(),
        facts.split.clone(),
    );
    let mut train = FileData::new(source, facts, model.clone());
    train.target_normalization.clone_from(&target_normalization);
    let held_out: Arc<dyn Dataset> = match (split, val) {
        (Some(split), _) => {
            let held_out = FileData {
                side: Some((split.clone(), true)),
                ..train.clone()
            };
            train.side = Some((split, false));
            Arc::new(held_out)
        }
        (None, Some(mut val)) => {
            val.target_normalization.clone_from(&target_normalization);
            Arc::new(val)
        }
        (None, None) => Arc::new(NoRows(train.spec.clone())),
    };
    Data {
        normalization: model.normalization,
        target_normalization,
        plan: model.plan,
        of_table,
        columns: columns.or(model.columns),
        label,
        ..Data::new(Arc::new(train), held_out, description)
    }
}

/// Names that are shown.
const SHOWN: usize = 8;

/// The label, the task, and the features used and left out, for people: said at the start of a run,
/// by `--dry-run` and in the metrics log.
fn describe(source: &OpenFiles, facts: &Facts, task: &TaskSpec) -> String {
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
    let width = match source.features.width {
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

/// Tells the system that files larger than memory are read in any order: reading ahead would be
/// wasted.
pub(crate) fn read_in_any_order(arrays: &[Array]) {
    let bytes = arrays.iter().map(|array| array.mapped.len());
    if bytes.fold(0, u64::saturating_add) > memory::free_bytes(Device::Cpu) as u64 {
        let files = arrays.iter().map(|array| &array.mapped);
        files.for_each(|file| file.random_order(true));
    }
}

/// Checks from time to time that files are as they were when they were opened.
#[derive(Debug)]
pub(crate) struct ChangeWatch {
    files: Vec<Arc<Mapped>>,
    started: Instant,
    /// When to check next, since the start.
    next_ms: AtomicU64,
}

/// The time between two checks. A check takes some microseconds a file.
const PAUSE_MS: u64 = 1000;

impl ChangeWatch {
    pub(crate) fn over(files: Vec<Arc<Mapped>>) -> ChangeWatch {
        ChangeWatch {
            files,
            started: Instant::now(),
            next_ms: AtomicU64::new(0),
        }
    }

    /// An error if a file has changed. Looks at most once a second.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        if now_ms < self.next_ms.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.next_ms.store(now_ms + PAUSE_MS, Ordering::Relaxed);
        self.check_all()
    }

    /// An error if a file has changed.
    pub(crate) fn check_all(&self) -> Result<()> {
        for file in &self.files {
            let path = file.path();
            match file.change() {
                Ok(None) => {}
                Ok(Some(change)) => bail!(
                    "{} {change} while it is in use; help: start again once nothing writes to it; new data need a file of \
                     another name",
                    path.display()
                ),
                Err(source) => {
                    let help = "it is in use as data: see whether its disk or network is available";
                    return Err(Error::Io(FileError {
                        action: "check",
                        path: path.into(),
                        source,
                        help: help.into(),
                    }));
                }
            }
        }
        Ok(())
    }
}
