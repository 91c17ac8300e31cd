//! `state.json` of a checkpoint: everything but tensors that going on with a run, or using its model, needs.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::data::{Normalization, Task};
use crate::error::Result;

/// The file of a checkpoint that holds its state.
pub const STATE_FILE: &str = "state.json";

/// The version of this file that is written.
pub(crate) const FORMAT: u32 = 1;

/// What a run was when it was saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// That of this file.
    pub format: u32,
    /// The program that wrote it.
    pub program: String,
    /// Steps taken.
    pub step: u64,
    /// Rows trained on, over all ranks.
    pub samples: u64,
    /// The configuration, every value settled: flags as they stand in OUT/config.toml.
    pub config: Config,
    /// Where the sampler is.
    pub position: Position,
    /// How the learning rate goes.
    pub schedule: ScheduleState,
    /// On what it ran.
    pub world: WorldState,
    /// What is learned, with the names of classes.
    pub task: Task,
    /// The shape of one row's features.
    pub row_shape: Vec<usize>,
    /// What is done to features before the model sees them.
    pub normalization: Option<Normalization>,
    /// What features are called, in their order, of data whose columns have names.
    pub columns: Option<Vec<String>>,
    /// That of the training data.
    pub fingerprint: String,
    /// The evaluation with the least loss so far.
    pub best: Option<Best>,
    /// The last evaluation.
    pub last: Option<Best>,
}

/// Where the order of rows is: pure numbers, so that any number of ranks can go on from them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The seed of the order.
    pub seed: u64,
    /// The epoch of the next step, from 0.
    pub epoch: u64,
    /// Batches of it that are done.
    pub in_epoch: u64,
    /// Rows of the data.
    pub rows: u64,
    /// Rows of a global batch.
    pub batch: u64,
    /// Whether short batches are left out.
    pub drop_last: bool,
}

/// How the learning rate goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleState {
    /// Steps of the whole run.
    pub steps: u64,
    /// Of these, until the peak.
    pub warmup_steps: u64,
    /// The next step's learning rate.
    pub learning_rate: f64,
}

/// On what a run ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldState {
    /// Ranks.
    pub ranks: usize,
    /// Of how many files the optimizer's moments are: one, or one a rank.
    pub optimizer_parts: usize,
    /// A line a rank: on what.
    pub devices: Vec<String>,
}

/// An evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// After this step.
    pub step: u64,
    /// The mean loss over held-out rows.
    pub loss: f64,
    /// The part that is classified rightly.
    pub accuracy: Option<f64>,
}

impl State {
    /// From the file in the checkpoint's folder. A file that is not as it was written is an error that says what is wrong.
    pub fn read(_folder: &Path) -> Result<State> {
        Err(crate::error::Error::Internal(format!("reading a state of format {FORMAT} is not there yet")))
    }
}
