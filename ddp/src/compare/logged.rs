//! What `compare` reads of a metrics log: the digests of each logged step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::Result;
use crate::metrics::Run;

/// A layer: its name, a hash of its bits, its norm and its sum. The numbers are null where they
/// are not finite.
pub(super) type Layer = (String, String, Option<f64>, Option<f64>);

/// See `StepDigests` of the engine.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Digests {
    pub(super) batch: String,
    pub(super) gradients: Vec<Layer>,
    pub(super) weights: Vec<Layer>,
}

/// A logged step, or the initial weights as step 0. Version 0.6 and older wrote no digests.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Step {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) digests: Option<Digests>,
}

/// Steps by number.
pub(super) type Steps = BTreeMap<u64, Step>;

/// A run to compare.
#[derive(Debug)]
pub(super) struct Logged {
    pub(super) folder: PathBuf,
    pub(super) run: Run,
    pub(super) steps: Steps,
}

impl Logged {
    /// Reads the run in `folder`.
    pub(super) fn read(folder: &Path) -> Result<Logged> {
        let mut steps = BTreeMap::new();
        let run = Run::read_begun(folder, |line| {
            if !line.starts_with(b"{\"event\":\"step\"") {
                return true;
            }
            let step = serde_json::from_slice::<Step>(line);
            step.map(|step| steps.insert(step.step, step)).is_err()
        })?;
        if let Ok(weights) = Vec::deserialize(&run.last["start"]["initial_weights"]) {
            let mut first = Step::default();
            first.digests.get_or_insert_default().weights = weights;
            steps.insert(first.step, first);
        }
        let folder = folder.to_path_buf();
        Ok(Logged { folder, run, steps })
    }
}
