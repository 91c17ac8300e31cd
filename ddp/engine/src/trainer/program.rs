//! What the trainer needs of the program around it: progress, the report.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_data::Data;
use ddp_data::tables::Tables;
use ddp_nn::Loss;

use crate::error::Result;
use crate::metrics_log::{EvalEvent, StepEvent};

/// The program around a run. Only rank 0 shows anything.
pub trait RunProgram {
    /// A loss of the program itself, in place of the one that follows from the data.
    fn loss(&self) -> Option<Arc<dyn Loss>> {
        None
    }

    /// Data of the program itself, in place of what the settings name.
    fn data(&self) -> Option<Data> {
        None
    }

    /// What reads tables, if the program reads some.
    fn tables(&self) -> Option<&'static dyn Tables> {
        None
    }

    /// The metrics log is open: `taken` of `steps` steps are done.
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

/// Makes the report of the run in `out`. One that fails is only warned of.
pub(super) fn report(program: &dyn RunProgram, out: &Path) -> Option<PathBuf> {
    let report = program.report(out);
    report
        .inspect_err(|error| tracing::warn!("there is no report: {error}"))
        .ok()
}
