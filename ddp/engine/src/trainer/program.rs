//! What the trainer needs of the program around it: devices, settings, progress, the report.

use std::path::{Path, PathBuf};

use ddp_comm::World;
use ddp_kernels::Device;
use serde_json::{Map, Value};

use super::options::Plan;
use crate::checkpoint::Opened;
use crate::error::Result;
use crate::record::{EvalEvent, StepEvent};

/// The program around a run. Only rank 0 shows anything.
pub trait Program {
    /// This rank's devices, checked against the settings. All ranks call it together.
    fn devices(&self, world: &World) -> Result<Vec<Device>>;

    /// Name and value of every setting that must be equal on all ranks, a line each.
    fn shared_settings(&self) -> String;

    /// Every setting, with `chosen` in place of defaults.
    fn settings(&self, chosen: &Chosen) -> Settings;

    /// Settings that differ from those of a checkpoint and change what is computed, each with its
    /// name in backquotes: lr 0.01 (was 0.001).
    fn changed_settings(&self, saved: &Opened) -> Result<Vec<String>>;

    /// The text with the names of settings in backquotes replaced by what users type.
    fn named(&self, text: &str) -> String;

    /// The record is open: `taken` of `steps` steps are done.
    fn begin(&mut self, out: &Path, taken: u64, steps: u64) -> Result<()>;

    /// A step is done. Called after every step.
    fn step(&mut self, step: u64);

    /// A step was logged.
    fn logged(&mut self, event: &StepEvent) -> Result<()>;

    /// The model was evaluated.
    fn evaluated(&mut self, event: &EvalEvent) -> Result<()>;

    /// A line for people.
    fn note(&mut self, line: &str);

    /// The run is over.
    fn finish(&mut self);

    /// Makes the report of the run in `out`, and returns its file.
    fn report(&self, out: &Path) -> Result<PathBuf>;
}

/// Choices that the settings left to the run.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    /// The plan.
    pub plan: Plan,
    /// Whether steps are captured.
    pub graph: bool,
    /// Whether training data are kept in GPU memory.
    pub data_on_device: bool,
    /// CPU threads of this rank.
    pub threads: usize,
}

/// All settings of a run.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// By name, for the record and checkpoints.
    pub values: Map<String, Value>,
    /// The content of the settings' file.
    pub file: String,
}
