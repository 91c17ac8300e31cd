//! What `compare` reads of a metrics log: the digests of each logged step.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::error::Result;
use crate::metrics::Run;

/// A layer: its name, a hash of its bits, its norm and its sum. The numbers are null where they
/// are not finite.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(super) struct Layer(
    pub(super) String,
    pub(super) String,
    pub(super) Option<f64>,
    Option<f64>,
);

/// What a step read and computed. See `StepDigests` of the engine.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(super) struct Digests {
    pub(super) batch: String,
    pub(super) gradients: Vec<Layer>,
    pub(super) weights: Vec<Layer>,
}

/// A logged step. Versions up to 0.7 wrote no digests.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(super) struct Step {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) digests: Option<Digests>,
}

/// A run to compare.
#[derive(Debug, Default)]
pub(super) struct Logged {
    pub(super) run: Run,
    /// Empty in logs of versions up to 0.7.
    pub(super) initial_weights: Vec<Layer>,
    pub(super) steps: BTreeMap<u64, Step>,
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
        let weights = &run.last["start"]["initial_weights"];
        Ok(Logged {
            initial_weights: Deserialize::deserialize(weights).unwrap_or_default(),
            run,
            steps,
        })
    }
}
