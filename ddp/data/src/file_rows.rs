//! Rows of files: read out of mapped files when they are asked for, and normalized.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ddp_kernels::files::FileError;
use ddp_kernels::mapped::Mapped;
use ddp_kernels::{Device, Tensor, memory, ops};

use crate::dataset::{Dataset, RowSpec, check_gather, sampled_hash};
use crate::error::{Error, Result, bail};
use crate::files::{Array, shown_number};
use crate::labels::Labels;
use crate::normalize::Normalization;
use crate::rows::Rows;
use crate::sampler::Split;
use crate::scan::first_nonfinite;

/// Rows of files.
#[derive(Clone, Debug)]
pub(crate) struct FileData {
    pub(crate) features: Arc<Rows>,
    /// `None` if targets are not needed: each is 0.
    pub(crate) labels: Option<Arc<Labels>>,
    pub(crate) side: Side,
    pub(crate) spec: RowSpec,
    /// What replaces missing numbers.
    pub(crate) fill: Option<Arc<[f32]>>,
    pub(crate) normalization: Option<Normalization>,
    pub(crate) target_normalization: Option<Normalization>,
    /// Whether features are checked when they are read, since not all were before.
    pub(crate) checks: bool,
    /// Of the files, the rows of each class, and those that are trained on; empty if labels are
    /// no classes.
    pub(crate) class_rows: Arc<[Vec<u64>; 2]>,
    /// A hash of the rows of each class, and of the names of classes.
    pub(crate) labels_hash: u64,
    /// A hash of all labels and features, if they were read before training.
    pub(crate) content: Option<String>,
    pub(crate) watch: Arc<ChangeWatch>,
}

/// Which of the rows of files these are.
#[derive(Clone, Debug)]
pub(crate) enum Side {
    All,
    TrainedOn(Split),
    HeldOut(Split),
}

impl Side {
    /// The row of the files that is row `index` of these.
    #[inline]
    fn row(&self, index: u64) -> u64 {
        match self {
            Side::All => index,
            Side::TrainedOn(split) => split.training_row(index),
            Side::HeldOut(split) => split.held_out_row(index),
        }
    }
}

impl FileData {
    /// Other rows of the same files.
    pub(crate) fn on_side(&self, side: Side) -> FileData {
        FileData {
            side,
            ..self.clone()
        }
    }

    /// Features of a row.
    fn width(&self) -> usize {
        self.features.width()
    }

    fn read_features(&self, row: u64, x: &mut [f32]) -> Result<()> {
        self.features.read_f32(row, x)?;
        if let Some(numbers) = &self.fill {
            fill_in(numbers, x);
        }
        if self.checks
            && let Some(column) = first_nonfinite(x)
        {
            return Err(nonfinite(&self.features, row, column, None));
        }
        if let Some(normalization) = &self.normalization {
            normalization.apply(x, self.width());
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
        let why = labels.why_no_class(row, Some(classes))?;
        bail!(Data, "{why}: the file has changed since the start")
    }
}

/// Puts the numbers of `fill` (F) where rows of F features have NaN.
pub(crate) fn fill_in(fill: &[f32], x: &mut [f32]) {
    for row in x.chunks_exact_mut(fill.len()) {
        for (x, &fill) in row.iter_mut().zip(fill) {
            *x = if x.is_nan() { fill } else { *x };
        }
    }
}

/// The error of a non-finite feature.
pub(crate) fn nonfinite(
    features: &Rows,
    row: u64,
    column: usize,
    columns: Option<&[String]>,
) -> Error {
    let place = features.place(row);
    let number = match features.number(row, column) {
        Ok(number) if !(number as f32).is_finite() => number,
        Ok(_) => {
            return Error::Data(format!(
                "{place}: it changed while it was read; help: start again"
            ));
        }
        Err(error) => return error,
    };
    let name = columns.and_then(|columns| columns.get(column));
    let name = name.map_or(String::new(), |name| format!(" ({name})"));
    Error::Data(format!(
        "{place}, feature {column}{name}: expected a finite f32, got {} (rows and features are counted from 0); help: \
         leave out such rows, or replace the number",
        shown_number(number)
    ))
}

impl Dataset for FileData {
    fn rows_of_classes(&self) -> Option<Vec<u64>> {
        let [all, trained] = &*self.class_rows;
        let mut rows = match self.side {
            Side::All => all.clone(),
            Side::TrainedOn(_) => trained.clone(),
            Side::HeldOut(_) => all
                .iter()
                .zip(trained)
                .map(|(all, trained)| all - trained)
                .collect(),
        };
        let classes = self.spec.task.classes()?.count();
        rows.resize(classes, 0);
        (!all.is_empty()).then_some(rows)
    }

    fn rows(&self) -> u64 {
        match &self.side {
            Side::All => self.features.rows(),
            Side::TrainedOn(split) => split.training_rows(),
            Side::HeldOut(split) => split.held_out_rows(),
        }
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    /// Says what the rows are, not where: the same rows in files of another format are the same
    /// data. Versions up to 0.6 had no content.
    fn fingerprint(&self) -> Result<String> {
        let side = match &self.side {
            Side::All => "all",
            Side::TrainedOn(_) => "trained on",
            Side::HeldOut(_) => "held out",
        };
        let content = self.content.as_ref();
        let content = content.map_or(String::new(), |hash| format!(", content {hash}"));
        Ok(format!(
            "{} rows ({side} of {}) of {} features, {}, labels {:016x}, sampled {:016x}{content}",
            self.rows(),
            self.features.rows(),
            self.width(),
            self.spec.task,
            self.labels_hash,
            sampled_hash(self)?
        ))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        self.watch.check()?;
        inputs.with_slice_mut(|x: &mut [f32]| {
            let mut rows = rows.iter().zip(x.chunks_exact_mut(self.width()));
            rows.try_for_each(|(&row, x)| self.read_features(self.side.row(row), x))
        })??;
        match &self.labels {
            None => Ok(ops::zero(targets)?),
            Some(labels) if labels.are_classes() => {
                targets.with_slice_mut(|classes: &mut [i64]| {
                    for (&row, class) in rows.iter().zip(classes) {
                        *class = self.class(labels, self.side.row(row))?;
                    }
                    Ok(())
                })?
            }
            Some(labels) => targets.with_slice_mut(|values: &mut [f32]| {
                let mut rows = rows.iter().zip(values.chunks_exact_mut(labels.width()));
                rows.try_for_each(|(&row, values)| {
                    labels.rows.read_f32(self.side.row(row), values)
                })?;
                if let Some(normalization) = &self.target_normalization {
                    normalization.apply(values, labels.width());
                }
                Ok(())
            })?,
        }
    }
}

/// Tells the system that files larger than memory are read in any order: reading ahead would be
/// wasted.
pub(crate) fn read_in_any_order(arrays: &[Array]) {
    let bytes = arrays.iter().map(|array| array.mapped().len());
    if bytes.fold(0, u64::saturating_add) > memory::free_bytes(Device::Cpu) as u64 {
        let files = arrays.iter().map(Array::mapped);
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

    /// An error if a file has changed.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        if now_ms < self.next_ms.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.next_ms.store(now_ms + PAUSE_MS, Ordering::Relaxed);
        self.files.iter().try_for_each(|file| check_file(file))
    }
}

fn check_file(file: &Mapped) -> Result<()> {
    let path = file.path();
    match file.change() {
        Ok(None) => Ok(()),
        Ok(Some(change)) => bail!(
            Data,
            "{} {change} while it is in use; help: start again once nothing writes to it; new data need a file of another name",
            path.display()
        ),
        Err(source) => Err(Error::Io(FileError {
            action: "check",
            path: path.into(),
            source,
            help: "it is in use as data: see whether its disk or network is available".into(),
        })),
    }
}
