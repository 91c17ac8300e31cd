//! Data to train on: what a dataset is, the ones that are built in, the order of rows, and the loader that fills batches.
//!
//! A dataset has rows of one shape, and for each row a target. It hands out any rows, in any order, and remembers nothing
//! of what it handed out: the order is the sampler's.
//!
//! Files of people: `choose.rs` finds them and what in them is what, `files.rs` reads one, `opened.rs` puts them together (`stack.rs`,
//! `labels.rs`), `scan.rs` looks at all rows before training, `rounding.rs` warns of what f32 loses, `dataset.rs` hands rows out;
//! `prepare.rs` is the way through all of it.

pub(crate) mod agree;
pub(crate) mod choose;
mod dataset;
pub(crate) mod files;
pub mod glyphs;
mod labels;
pub mod loader;
mod mix;
mod normalize;
mod opened;
mod prepare;
mod rounding;
pub mod sampler;
mod scan;
pub mod spec;
mod split;
mod stack;
pub mod synthetic;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use ddp_comm::World;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

pub(crate) use loader::SlotId;
pub use loader::{Batch, InOrder, Loader, Micro, Source};
pub use normalize::Normalization;
pub use sampler::Sampler;
pub use spec::{DataSpec, FilesSpec};

use crate::config::{Config, Normalize, TaskKind};
use crate::error::{Error, Result};

/// Rows to train on or to be tested on. Implement it for data of your own.
pub trait Dataset: fmt::Debug + Send + Sync {
    /// How many rows there are.
    fn rows(&self) -> u64;

    /// The shape of one row's features.
    fn row_shape(&self) -> &[usize];

    /// What is to be learned.
    fn task(&self) -> &Task;

    /// What the data are, in a line of text that is equal on two ranks exactly if their data are: the kind, the sizes, and
    /// `sampled_hash`.
    fn fingerprint(&self) -> Result<String>;

    /// Writes the rows called `rows`, one after the other: their features into `x`, their targets into `targets`. The
    /// slices are exactly as long as that takes. Allocates nothing once it is warm, since it is part of every step. A row is the same
    /// each time: the data may be kept on a GPU, and each row then asked for once.
    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()>;
}

/// What is to be learned from the rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Which class a row belongs to.
    Classification {
        /// How many classes.
        classes: usize,
        /// What they are called, one name a class.
        names: Vec<String>,
    },
    /// Numbers that belong to a row.
    Regression {
        /// How many numbers.
        outputs: usize,
    },
}

impl Task {
    /// How many numbers a model gives for a row: one a class, or the outputs.
    pub fn outputs(&self) -> usize {
        match self {
            Task::Classification { classes, .. } => *classes,
            Task::Regression { outputs } => *outputs,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Task::Classification { classes, .. } => write!(f, "classification into {classes} classes"),
            Task::Regression { outputs: 1 } => f.write_str("regression of 1 number"),
            Task::Regression { outputs } => write!(f, "regression of {outputs} numbers"),
        }
    }
}

/// Where `gather` writes targets.
#[derive(Debug)]
pub enum Targets<'a> {
    /// A class a row.
    Classes(&'a mut [i64]),
    /// As many numbers a row as the task has outputs.
    Values(&'a mut [f32]),
}

impl<'a> Targets<'a> {
    /// The classes, of a dataset that has classes.
    pub fn classes(self) -> Result<&'a mut [i64]> {
        match self {
            Targets::Classes(classes) => Ok(classes),
            Targets::Values(_) => Err(Error::Data("asked for numbers as targets of data that have classes".into())),
        }
    }

    /// The numbers, of a dataset that has numbers.
    pub fn values(self) -> Result<&'a mut [f32]> {
        match self {
            Targets::Values(values) => Ok(values),
            Targets::Classes(_) => Err(Error::Data("asked for classes as targets of data that have numbers".into())),
        }
    }
}

/// What a run trains on, and what it is tested on.
#[derive(Clone, Debug)]
pub struct Data {
    /// The rows to train on.
    pub train: Arc<dyn Dataset>,
    /// Rows that training never sees, for evaluation. May have none.
    pub held_out: Arc<dyn Dataset>,
    /// For people: what this is and how much.
    pub description: String,
    /// What was done to features, as the training data say.
    pub normalization: Option<Normalization>,
    /// What features are called, in their order, where their columns have names.
    pub columns: Option<Vec<String>>,
    /// What labels are called, where they have a name.
    pub label: Option<LabelName>,
}

/// What labels are called: those of other files for the same model are most likely called the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LabelName {
    /// The column of a table.
    Column(String),
    /// The array of a file that has several.
    Array(String),
}

/// What is asked for: which data, and how they are to be taken.
#[derive(Clone, Debug, PartialEq)]
pub struct DataRequest {
    /// The rows to train on, or to use a model on.
    pub data: DataSpec,
    /// Where their labels are.
    pub labels: Option<String>,
    /// Rows to evaluate on.
    pub val_data: Option<DataSpec>,
    /// Where their labels are.
    pub val_labels: Option<String>,
    /// The part of the rows that is kept for evaluation, chosen by `seed`.
    pub val_split: f64,
    /// Chooses it.
    pub seed: u64,
    /// Whether labels are classes.
    pub task: Option<TaskKind>,
    /// What is done to features.
    pub normalize: Normalize,
    /// Where what cannot be mapped is kept converted.
    pub cache_dir: Option<PathBuf>,
    /// The model that the rows are for, if it is trained already: then they have to be such as it was trained on.
    pub trained: Option<Trained>,
}

/// What a trained model expects of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    /// What it learned, with the names of classes.
    pub task: Task,
    /// The shape of one row's features.
    pub row_shape: Vec<usize>,
    /// What is done to features.
    pub normalization: Option<Normalization>,
    /// What features are called, in their order, where their columns had names.
    pub columns: Option<Vec<String>>,
    /// What labels are called, where they had a name.
    pub label: Option<LabelName>,
    /// Whether rows need labels; without them every target is 0.
    pub needs_labels: bool,
}

impl DataRequest {
    /// The data that `spec` names as they are.
    pub fn new(spec: DataSpec) -> DataRequest {
        DataRequest {
            data: spec,
            labels: None,
            val_data: None,
            val_labels: None,
            val_split: 0.0,
            seed: 0,
            task: None,
            normalize: Normalize::None,
            cache_dir: None,
            trained: None,
        }
    }

    /// As a run asks.
    pub fn of(config: &Config) -> DataRequest {
        DataRequest {
            data: config.data.clone(),
            labels: config.labels.clone(),
            val_data: config.val_data.clone(),
            val_labels: config.val_labels.clone(),
            val_split: config.val_split,
            seed: config.seed,
            task: config.task,
            normalize: config.normalize,
            cache_dir: config.cache_dir.clone(),
            trained: None,
        }
    }
}

/// Opens what is asked for, on all ranks of `world` together: what is wrong with it is one error, the same on all.
pub fn prepare(request: &DataRequest, world: &World) -> Result<Data> {
    prepare::prepare(request, world)
}

/// Opens the data that `spec` names as they are, for a process alone.
pub fn open(spec: &DataSpec) -> Result<Data> {
    prepare(&DataRequest::new(spec.clone()), &World::single()?)
}

/// Rows that `sampled_hash` looks at.
const SAMPLED_ROWS: u64 = 16;

/// A hash over the contents of some rows spread over the data, first and last among them: for fingerprints.
pub fn sampled_hash(dataset: &dyn Dataset) -> Result<u64> {
    let rows = dataset.rows();
    let mut hash = Xxh3::new();
    let mut x = vec![0f32; dataset.row_shape().iter().product()];
    let mut class = [0i64];
    let mut values = vec![0f32; dataset.task().outputs()];
    let count = SAMPLED_ROWS.min(rows);
    for sample in 0..count {
        let row = (u128::from(rows - 1) * u128::from(sample) / u128::from((count - 1).max(1))) as u64;
        match dataset.task() {
            Task::Classification { .. } => {
                dataset.gather(&[row], &mut x, Targets::Classes(&mut class))?;
                hash.update(&class[0].to_le_bytes());
            }
            Task::Regression { .. } => {
                dataset.gather(&[row], &mut x, Targets::Values(&mut values))?;
                values.iter().for_each(|value| hash.update(&value.to_le_bytes()));
            }
        }
        x.iter().for_each(|value| hash.update(&value.to_le_bytes()));
    }
    Ok(hash.digest())
}

/// Asserts what `gather` is promised: slices of exactly the right length and rows that are there.
pub(crate) fn check_gather(dataset: &dyn Dataset, rows: &[u64], x: &[f32], targets: &Targets<'_>) {
    let features: usize = dataset.row_shape().iter().product();
    assert_eq!(x.len(), rows.len() * features, "features of {} rows of {features}", rows.len());
    let (got, each) = match targets {
        Targets::Classes(classes) => (classes.len(), 1),
        Targets::Values(values) => (values.len(), dataset.task().outputs()),
    };
    assert_eq!(got, rows.len() * each, "targets of {} rows", rows.len());
    let missing = rows.iter().find(|&&row| row >= dataset.rows());
    assert!(missing.is_none(), "row {missing:?} of {}", dataset.rows());
}
