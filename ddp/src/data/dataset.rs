//! Rows of files: read out of mapped files one by one as they are asked for, normalized on the way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ddp_kernels::mapped::Mapped;

use super::labels::Labels;
use super::scan::first_nonfinite;
use super::split::Split;
use super::stack::Stack;
use super::{Dataset, Normalization, Targets, Task, check_gather, sampled_hash};
use crate::error::{Error, Result};

/// Rows of files.
#[derive(Debug)]
pub(crate) struct FileData {
    pub(crate) features: Arc<Stack>,
    /// None where nobody asks for targets: each is 0.
    pub(crate) labels: Option<Arc<Labels>>,
    pub(crate) side: Side,
    pub(crate) shape: [usize; 1],
    pub(crate) task: Task,
    pub(crate) normalization: Option<Normalization>,
    /// Whether numbers are looked at as they are read, since not all were before.
    pub(crate) checks: bool,
    /// A hash of what all labels are.
    pub(crate) labels_hash: u64,
    pub(crate) watch: Arc<Watch>,
}

/// Which of the rows of files these are.
#[derive(Clone, Debug)]
pub(crate) enum Side {
    All,
    TrainedOn(Split),
    HeldOut(Split),
}

impl Side {
    /// Which of all rows row `index` is.
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
    fn features_of(&self, row: u64, x: &mut [f32]) -> Result<()> {
        self.features.read_f32(row, x)?;
        if self.checks
            && let Some(column) = first_nonfinite(x)
        {
            return Err(nonfinite(&self.features, row, column, None));
        }
        if let Some(normalization) = &self.normalization {
            normalization.apply(x, self.shape[0]);
        }
        Ok(())
    }

    /// The class of a row. Every label was looked at before: one that is none now has been written since.
    fn class(&self, labels: &Labels, row: u64) -> Result<i64> {
        let mut class = [0];
        labels.classes(row, &mut class)?;
        if (0..self.task.outputs() as i64).contains(&class[0]) {
            return Ok(class[0]);
        }
        let why = labels.why_no_class(row, Some(self.task.outputs()))?;
        Err(Error::Data(format!("{why}. It was not so at the start: the file has changed while it is in use")))
    }
}

/// The error of a feature that is no finite number.
pub(crate) fn nonfinite(features: &Stack, row: u64, column: usize, columns: Option<&[String]>) -> Error {
    let number = match features.number(row, column) {
        Ok(number) => number,
        Err(error) => return error,
    };
    let name = columns.and_then(|columns| columns.get(column)).map(|name| format!(" ({name})")).unwrap_or_default();
    let what = if number.is_finite() { "is beyond what f32 holds" } else { "is no finite number" };
    Error::Data(format!(
        "{}, feature {column}{name}: {number} {what}, and cannot be trained on (rows and features are counted from 0). Leave such rows out, \
         or put a number there",
        features.place(row)
    ))
}

impl Dataset for FileData {
    fn rows(&self) -> u64 {
        match &self.side {
            Side::All => self.features.rows(),
            Side::TrainedOn(split) => split.training_rows(),
            Side::HeldOut(split) => split.held_out_rows(),
        }
    }

    fn row_shape(&self) -> &[usize] {
        &self.shape
    }

    fn task(&self) -> &Task {
        &self.task
    }

    /// Of what the rows are, not of where: the same rows in files of another kind are the same data.
    fn fingerprint(&self) -> Result<String> {
        let side = match &self.side {
            Side::All => "all",
            Side::TrainedOn(_) => "trained on",
            Side::HeldOut(_) => "held out",
        };
        Ok(format!(
            "{} rows ({side} of {}) of {} features, {}, labels {:016x}, sampled {:016x}",
            self.rows(),
            self.features.rows(),
            self.shape[0],
            self.task,
            self.labels_hash,
            sampled_hash(self)?
        ))
    }

    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()> {
        check_gather(self, rows, x, &targets);
        self.watch.look()?;
        for (&row, x) in rows.iter().zip(x.chunks_exact_mut(self.shape[0])) {
            self.features_of(self.side.row(row), x)?;
        }
        match (&self.labels, targets) {
            (None, Targets::Classes(classes)) => classes.fill(0),
            (None, Targets::Values(values)) => values.fill(0.0),
            (Some(labels), Targets::Classes(classes)) => {
                for (&row, class) in rows.iter().zip(classes) {
                    *class = self.class(labels, self.side.row(row))?;
                }
            }
            (Some(labels), Targets::Values(values)) => {
                for (&row, values) in rows.iter().zip(values.chunks_exact_mut(labels.width())) {
                    labels.values(self.side.row(row), values)?;
                }
            }
        }
        Ok(())
    }
}

/// Asks from time to time whether files are still as they were when they were opened.
#[derive(Debug)]
pub(crate) struct Watch {
    files: Vec<Arc<Mapped>>,
    started: Instant,
    /// When to ask next, since the start.
    next_ms: AtomicU64,
}

/// How long nobody asks again. Asking takes the system some microseconds a file.
const PAUSE_MS: u64 = 1000;

impl Watch {
    pub(crate) fn over(files: Vec<Arc<Mapped>>) -> Watch {
        Watch { files, started: Instant::now(), next_ms: AtomicU64::new(0) }
    }

    /// An error if a file has changed. Only now and then it really looks.
    #[inline]
    fn look(&self) -> Result<()> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        if now_ms < self.next_ms.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.next_ms.store(now_ms + PAUSE_MS, Ordering::Relaxed);
        self.files.iter().try_for_each(|file| look_at(file))
    }
}

fn look_at(file: &Mapped) -> Result<()> {
    match file.change() {
        Ok(None) => Ok(()),
        Ok(Some(change)) => Err(Error::Data(format!(
            "{} {change} while it is in use: the rows before and after would not be of the same data. Start again once nobody writes to it; to \
             change data while a run goes on, write another file and rename nothing over this one",
            file.path().display()
        ))),
        Err(source) => Err(Error::Io {
            action: "look after",
            path: file.path().into(),
            source,
            way_out: "It is in use as data: see whether its disk or network is still there".into(),
        }),
    }
}

/// No rows, for evaluation that nobody asked for.
#[derive(Debug)]
pub(crate) struct NoRows {
    pub(crate) shape: Vec<usize>,
    pub(crate) task: Task,
}

impl Dataset for NoRows {
    fn rows(&self) -> u64 {
        0
    }

    fn row_shape(&self) -> &[usize] {
        &self.shape
    }

    fn task(&self) -> &Task {
        &self.task
    }

    fn fingerprint(&self) -> Result<String> {
        Ok("no rows".into())
    }

    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()> {
        check_gather(self, rows, x, &targets);
        Ok(())
    }
}
