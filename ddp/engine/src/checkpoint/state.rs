//! `state.json` of a checkpoint: everything but tensors that is needed to resume a run or to use
//! its model.
//!
//! The file may come from anyone: unknown names and impossible numbers are refused.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::files::{of_other_version, other_format, read_all};
use super::folders::STATE_FILE;
use crate::error::Result;
use crate::setting::SCHEDULE_STEPS;
use crate::tasks::BestBy;
use ddp_data::{FeaturePlan, LabelName, Normalization, TaskSpec};

/// The version of this file that is written.
pub(super) const FORMAT: u32 = 1;

/// Longer files are refused unread: ten million features take less.
const BYTES_MAX: u64 = 256 << 20;
/// The largest number of steps, epochs, rows and so on: JSON numbers are exact up to here.
const COUNT_MAX: u64 = 1 << 53;
/// The largest number of ranks, classes and outputs.
const WIDTH_MAX: u64 = 1 << 24;

/// The state of a run when it was saved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The version of the file.
    pub format: u32,
    /// The program that wrote it.
    pub program: String,
    /// Versions of the program and of libraries, by name; up to 0.7 there were none.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// Steps taken.
    pub step: u64,
    /// Rows trained on, over all ranks.
    pub samples: u64,
    /// The program's settings by name, with all defaults filled in. This crate does not read them.
    pub config: Map<String, Value>,
    /// The sampler's position.
    pub position: Position,
    /// The learning rate schedule.
    pub schedule: ScheduleState,
    /// The step after which the optimizer started with zero moments: 0, unless the run was resumed
    /// with another optimizer.
    #[serde(default)]
    pub optimizer_since: u64,
    /// The ranks and devices.
    pub world: WorldState,
    /// The task, with the names of classes.
    pub task: TaskSpec,
    /// The shape of one row's features.
    pub row_shape: Vec<usize>,
    /// The shape that a row has in its file, if that has several dimensions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image: Vec<usize>,
    /// The normalization of features.
    pub normalization: Option<Normalization>,
    /// The normalization of numeric targets: outputs are undone by it. Versions up to 0.6 had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_normalization: Option<Normalization>,
    /// How cells become features before they are normalized.
    #[serde(default, skip_serializing_if = "FeaturePlan::is_plain")]
    pub plan: FeaturePlan,
    /// Names of the feature columns, if they have names.
    pub columns: Option<Vec<String>>,
    /// The name of the label, if it has one.
    pub label: Option<LabelName>,
    /// The weight of each class in the loss; empty for equal weights. Versions up to 0.7 had them
    /// among the settings only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub class_weights: Vec<f64>,
    /// The loss of a program that has its own. Versions up to 0.7 did not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_loss: Option<String>,
    /// The digest of the base model, if the checkpoint has adapters alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The fingerprint of the training data.
    pub fingerprint: String,
    /// The fingerprint of the held-out rows; None if there are none.
    #[serde(default)]
    pub held_out: Option<String>,
    /// The best evaluation so far whose checkpoint was saved.
    pub best: Option<Best>,
    /// The last evaluation.
    pub last: Option<Best>,
    /// The count that ends a run early. Versions up to 0.7 did not have it.
    #[serde(default)]
    pub progress: Plateau,
}

/// The position in the order of rows. It does not depend on the number of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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

/// The learning rate schedule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleState {
    /// Steps of the whole run.
    pub steps: u64,
    /// Steps until the peak.
    pub warmup_steps: u64,
    /// The learning rate of the next step.
    pub learning_rate: f64,
}

/// The ranks and devices of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorldState {
    /// Ranks.
    pub ranks: usize,
    /// The number of files with the optimizer's moments: one, or one for each rank.
    pub optimizer_parts: usize,
    /// The devices of each rank.
    pub devices: Vec<String>,
}

/// How long a run has made no progress on held-out rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename = "Progress", deny_unknown_fields)]
pub struct Plateau {
    /// The best evaluation so far, whether or not its checkpoint was lost with a rank.
    pub best: Option<Best>,
    /// Evaluations since then.
    pub since: u64,
    /// The step of the last evaluation.
    pub step: u64,
}

/// An evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// After this step.
    pub step: u64,
    /// The mean loss over held-out rows.
    pub loss: f64,
    /// The fraction that is classified correctly.
    pub accuracy: Option<f64>,
    /// The metric that decides which evaluation is the best, unless that is the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<(BestBy, f64)>,
}

impl State {
    /// Reads the open file of the checkpoint in `folder`, whose checksum is right.
    pub(super) fn of_file(folder: &Path, file: &File) -> Result<State> {
        let bytes = read_all(folder, STATE_FILE, file, BYTES_MAX)?;
        State::parse(&bytes).map_err(|why| of_other_version(folder, STATE_FILE, &why, &bytes))
    }

    /// Reads the file's bytes. An error says what is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<State, String> {
        let unreadable = |error: serde_json::Error| format!("cannot be read: {error}");
        let value: Value = serde_json::from_slice(bytes).map_err(unreadable)?;
        let format = value.get("format").and_then(Value::as_u64);
        let format =
            format.ok_or("does not say its format: it is not the state of a checkpoint")?;
        if format != u64::from(FORMAT) {
            return Err(other_format(format, FORMAT));
        }
        // From the bytes: there, a duplicate name is an error.
        let state: State = serde_json::from_slice(bytes).map_err(unreadable)?;
        let known = serde_json::to_value(&state).map_err(unreadable)?;
        if let Some(name) = unknown(&value, &known) {
            return Err(format!(
                "has {name}, which this program does not know: it was written by another version"
            ));
        }
        state.check()?;
        Ok(state)
    }

    /// The bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        // JSON has no numbers that are not finite.
        let finite = |evaluation: Option<Best>| evaluation.filter(Best::is_finite);
        let state = State {
            best: finite(self.best),
            last: finite(self.last),
            ..self.clone()
        };
        let mut bytes =
            serde_json::to_vec_pretty(&state).expect("it holds only names, texts and numbers");
        bytes.push(b'\n');
        bytes
    }

    /// The token that ends a text, if the tokens of the data have one.
    pub fn end_of_text(&self) -> Option<usize> {
        match &self.task {
            TaskSpec::NextToken { tokenizer, .. } => tokenizer.as_ref()?.end_of_text,
            _ => None,
        }
    }

    /// Refuses impossible numbers.
    pub fn check(&self) -> Result<(), String> {
        let (position, schedule) = (&self.position, &self.schedule);
        // A run may end before its schedule does.
        let of_schedule = self.config.get(SCHEDULE_STEPS.0).and_then(Value::as_u64);
        let of_schedule = of_schedule.unwrap_or(0);
        for (name, count, least, most) in [
            ("step", self.step, 0, COUNT_MAX),
            ("samples", self.samples, 0, COUNT_MAX),
            ("position.epoch", position.epoch, 0, COUNT_MAX),
            ("position.in_epoch", position.in_epoch, 0, COUNT_MAX),
            ("position.rows", position.rows, 1, COUNT_MAX),
            ("position.batch", position.batch, 1, COUNT_MAX),
            ("schedule.steps", schedule.steps, 0, COUNT_MAX),
            (
                "schedule.warmup_steps",
                schedule.warmup_steps,
                0,
                of_schedule.max(schedule.steps),
            ),
            ("optimizer_since", self.optimizer_since, 0, self.step),
            ("world.ranks", self.world.ranks as u64, 1, WIDTH_MAX),
            ("task's outputs", self.task.outputs() as u64, 1, WIDTH_MAX),
        ] {
            if !(least..=most).contains(&count) {
                return Err(format!(
                    "has {name} = {count}: expected from {least} to {most}"
                ));
            }
        }
        let (ranks, parts) = (self.world.ranks, self.world.optimizer_parts);
        let devices = self.world.devices.len();
        if ![1, ranks].contains(&parts) || devices != ranks {
            return Err(format!(
                "has {ranks} ranks, {devices} devices and an optimizer in {parts} parts"
            ));
        }
        let mut lengths = self.row_shape.iter();
        let features = lengths.try_fold(1usize, |all, &length| all.checked_mul(length));
        let features = features.filter(|&count| (1..=1 << 40).contains(&count));
        let features =
            features.ok_or_else(|| format!("has rows of the shape {:?}", self.row_shape))?;
        check_normalization(&self.normalization, features, "features")?;
        check_normalization(&self.target_normalization, self.task.outputs(), "targets")?;
        let plan = self.plan.check(features);
        plan.map_err(|why| format!("has {why}"))?;
        let columns = self.columns.as_ref().map_or(features, Vec::len);
        if columns != features {
            return Err(format!(
                "has the names of {columns} columns for {features} features"
            ));
        }
        if !schedule.learning_rate.is_finite() || schedule.learning_rate < 0.0 {
            return Err(format!("has an impossible schedule: {schedule:?}"));
        }
        let evaluations = [&self.best, &self.last, &self.progress.best];
        let mut evaluations = evaluations.into_iter().flatten();
        let is_impossible = |it: &&Best| !it.is_finite() || it.step > self.step;
        match evaluations.find(is_impossible) {
            Some(evaluation) => Err(format!("has an impossible evaluation: {evaluation:?}")),
            None => Ok(()),
        }
    }
}

/// Refuses a normalization that is not for rows of `width` numbers.
fn check_normalization(
    normalization: &Option<Normalization>,
    width: usize,
    what: &str,
) -> Result<(), String> {
    let Some(Normalization {
        shift,
        scale,
        range,
    }) = normalization
    else {
        return Ok(());
    };
    let fits = (shift.len() == 1 || shift.len() == width) && shift.len() == scale.len();
    let are_ranges = |[least, greatest]: &[f32; 2]| least <= greatest;
    let fits = fits && [0, width].contains(&range.len()) && range.iter().all(are_ranges);
    if fits && shift.iter().chain(scale).all(|number| number.is_finite()) {
        return Ok(());
    }
    let lengths = (shift.len(), scale.len());
    Err(format!(
        "has a normalization of {lengths:?} numbers for {width} {what}, or a non-finite one"
    ))
}

impl Best {
    /// The figure that decides which evaluation is the best.
    pub fn by(&self) -> (BestBy, f64) {
        self.by.unwrap_or((BestBy::Loss, self.loss))
    }

    /// Lower for a better evaluation.
    pub fn cost(&self) -> f64 {
        self.by.map_or(self.loss, |(_, figure)| -figure)
    }

    /// Whether JSON can hold it.
    pub(crate) fn is_finite(&self) -> bool {
        let accuracy = self.accuracy.unwrap_or(0.0);
        [self.loss, self.cost(), accuracy]
            .iter()
            .all(|figure| figure.is_finite())
    }
}

/// A name in `given` that `known` does not have.
fn unknown(given: &Value, known: &Value) -> Option<String> {
    match (given, known) {
        (Value::Object(given), Value::Object(known)) => {
            let mut fields = given.iter();
            fields.find_map(|(name, given)| match known.get(name) {
                None => Some(name.clone()),
                Some(known) => unknown(given, known).map(|inner| format!("{name}.{inner}")),
            })
        }
        (Value::Array(given), Value::Array(known)) => {
            let mut pairs = given.iter().zip(known);
            pairs.find_map(|(given, known)| unknown(given, known))
        }
        _ => None,
    }
}
