//! What a run is: its data, model and length, and where it writes. The program makes this from its
//! settings; an error names a setting in backquotes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use ddp_comm::World;
use ddp_data::{Data, DataRequest, DataSpec, Resident, Sampler};
use ddp_kernels::DType;
use ddp_kernels::products::ProductChoice;
use ddp_nn::optim::{Group, Rule, Schedule, Shape};
use serde::{Deserialize, Serialize};

use super::model::ModelOptions;
use crate::checkpoint::State;
use crate::error::{Error, Result};
use crate::ranks::WorldRanks;
use crate::reducer::Overlap;
use crate::step::GraphChoice;
use crate::tasks;
use crate::trace::TraceSteps;

/// The largest number of steps: TOML has no larger whole number.
const STEPS_MAX: u64 = i64::MAX as u64;

/// A training run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Model and loss.
    pub model: ModelOptions,
    /// Names of layers or parameters that are not trained.
    pub freeze: Vec<String>,
    /// A model file, or a checkpoint's folder, to take the first values from.
    pub init_from: Option<PathBuf>,
    /// The data.
    pub data: RunData,
    /// Whether training data are kept in GPU memory.
    pub data_on_device: Resident,
    /// Rows of a global batch.
    pub batch_size: u64,
    /// The most rows of a rank that pass through the model at a time.
    pub micro_batch: Option<usize>,
    /// Whether an epoch's last batch is skipped if it is smaller than the others.
    pub drop_last: bool,
    /// How long the run is.
    pub length: Length,
    /// The optimizer and its constants.
    pub rule: Rule,
    /// Parameters with other numbers than the rule's.
    pub groups: Vec<Group>,
    /// The learning rate.
    pub learning_rate: LearningRate,
    /// The largest norm of all gradients together; 0 for any.
    pub grad_clip: f64,
    /// The seed of everything random in training.
    pub seed: u64,
    /// Whether steps are captured as graphs.
    pub graph: GraphChoice,
    /// Which algorithms matrix products on GPUs use.
    pub products: ProductChoice,
    /// CPU threads of a rank.
    pub threads: Option<usize>,
    /// How gradients are reduced.
    pub reduction: Reduction,
    /// The folder of the run.
    pub out: PathBuf,
    /// Steps between evaluations, 0 for one at the end only; an epoch by default.
    pub eval_every: Option<u64>,
    /// Steps between checkpoints, 0 for one at the end only; an epoch by default.
    pub checkpoint_every: Option<u64>,
    /// What a transformer continues at evaluations, if anything.
    pub sample: Option<String>,
    /// How many of the newest checkpoints are kept.
    pub keep: u64,
    /// Steps between lines of the record.
    pub log_every: u64,
    /// The steps of which a timeline is written.
    pub trace: Option<TraceSteps>,
    /// Whether a run is resumed.
    pub resume: Resume,
    /// Resume even if settings that change the results differ.
    pub override_: bool,
}

/// The data of a run.
#[derive(Clone, Debug)]
pub enum RunData {
    /// Files or built-in data.
    Request(Box<DataRequest>),
    /// Datasets of the program itself.
    Own(Box<Data>),
}

impl RunData {
    /// Opens the data. All ranks call it together.
    pub(super) fn open(&self, world: &World, resumed: Option<&State>) -> Result<Data> {
        match self {
            RunData::Request(request) => {
                let mut request = request.clone();
                // A run that began with targets as they are goes on with them.
                request.normalizes_targets =
                    resumed.is_none_or(|state| state.target_normalization.is_some());
                Ok(ddp_data::prepare(&request, &WorldRanks(world))?)
            }
            RunData::Own(data) => Ok(Data::clone(data)),
        }
    }

    pub(super) fn name(&self) -> &str {
        match self {
            RunData::Request(request) => request.data.name(),
            RunData::Own(data) => &data.description,
        }
    }

    /// Whether rows may be pictures, which rows made from a formula are not.
    pub(super) fn may_be_pictures(&self) -> bool {
        match self {
            RunData::Request(request) => !matches!(request.data, DataSpec::Synthetic(_)),
            RunData::Own(_) => true,
        }
    }
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// In steps. 0 saves the untrained model.
    Steps(u64),
    /// In passes through the data.
    Epochs(u64),
}

/// The learning rate of each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// The curve after the warm-up.
    pub shape: Shape,
    /// The peak.
    pub peak: f64,
    /// At the end.
    pub min: f64,
    /// Steps to reach the peak; a tenth of all steps by default, at most 100.
    pub warmup_steps: Option<u64>,
}

impl LearningRate {
    /// The rate of each step of a run.
    pub fn schedule(&self, plan: &Plan) -> Result<Schedule> {
        let (warmup, steps) = (plan.warmup_steps, plan.steps);
        Ok(Schedule::new(
            self.shape, self.peak, self.min, warmup, steps,
        )?)
    }
}

/// How gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    /// The size of a bucket; None for that of the device.
    pub bucket_bytes: Option<usize>,
    /// The type of gradients in transit.
    pub dtype: DType,
    /// Whether reductions run during backward.
    pub overlap: Overlap,
    /// ZeRO-1: whether ranks divide the optimizer's moments.
    pub zero: bool,
}

/// Whether a run is resumed, and from which checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Resume {
    /// The run must be new.
    #[default]
    Never,
    /// From the newest intact checkpoint, if there is one.
    Auto,
    /// From this checkpoint.
    From(PathBuf),
}

impl fmt::Display for Resume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resume::Never => f.write_str("never"),
            Resume::Auto => f.write_str("auto"),
            Resume::From(path) => path.display().fmt(f),
        }
    }
}

impl FromStr for Resume {
    type Err = String;

    fn from_str(text: &str) -> Result<Resume, String> {
        match text {
            "never" => Ok(Resume::Never),
            "auto" => Ok(Resume::Auto),
            "" => Err("expected never, auto or the folder of a checkpoint".into()),
            path => Ok(Resume::From(path.into())),
        }
    }
}

impl TryFrom<String> for Resume {
    type Error = String;

    fn try_from(text: String) -> Result<Resume, String> {
        text.parse()
    }
}

impl From<Resume> for String {
    fn from(resume: Resume) -> String {
        resume.to_string()
    }
}

/// A run in steps, once the data are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The order of rows.
    pub sampler: Sampler,
    /// Steps of the whole run.
    pub steps: u64,
    /// Steps until the peak of the learning rate.
    pub warmup_steps: u64,
    /// Steps between evaluations; 0 for one at the end only.
    pub eval_every: u64,
    /// Steps between checkpoints; 0 for one at the end only.
    pub checkpoint_every: u64,
}

impl RunOptions {
    /// The run in steps, over these data. Checks the options that depend on them.
    pub fn plan(&self, data: &Data) -> Result<Plan> {
        let task = tasks::of(data.train.task());
        task.check(&self.model.loss, self.data.name())?;
        task.settled(&self.model.loss, data, self.data.name())?;
        let rows = data.train.rows();
        self.check_rows(rows)?;
        let sampler = Sampler::new(rows, self.batch_size, self.seed, self.drop_last)?;
        let per_epoch = sampler.steps_per_epoch();
        let steps = match self.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => epochs
                .checked_mul(per_epoch)
                .filter(|&steps| steps <= STEPS_MAX)
                .ok_or_else(|| {
                    let epochs_max = STEPS_MAX / per_epoch;
                    Error::Usage(format!(
                        "`epochs` {epochs}: expected at most {epochs_max} times {per_epoch} \
                         steps; help: give fewer"
                    ))
                })?,
        };
        let warmup_steps = self.learning_rate.warmup_steps;
        let warmup_steps = warmup_steps.unwrap_or_else(|| (steps / 10).min(100));
        if warmup_steps > steps {
            return Err(Error::Usage(format!(
                "`warmup-steps` {warmup_steps}: expected at most the {steps} steps of the run; \
                 help: warm up for less, or train for more"
            )));
        }
        Ok(Plan {
            sampler,
            steps,
            warmup_steps,
            eval_every: self.eval_every.unwrap_or(per_epoch),
            checkpoint_every: self.checkpoint_every.unwrap_or(per_epoch),
        })
    }

    /// Refuses files with less than one batch if only full batches are trained on.
    fn check_rows(&self, rows: u64) -> Result<()> {
        let files = match &self.data {
            RunData::Request(request) => match &request.data {
                data @ (DataSpec::Files(_) | DataSpec::Tokens(_)) => Some(data),
                _ => None,
            },
            RunData::Own(_) => None,
        };
        let too_few = self.drop_last && rows < self.batch_size;
        let Some(data) = files.filter(|_| too_few) else {
            return Ok(());
        };
        let batch = self.batch_size;
        Err(Error::Data(format!(
            "`data` {data}: expected at least {batch} rows, one `batch-size`, because of \
             `drop-last`, got {rows}; help: give `batch-size` {} or less, or more data, or leave \
             `drop-last` out",
            rows.max(1)
        )))
    }

    /// Whether the parameter `name` is not trained: `0` freezes all of layer 0, `0.bias` one
    /// parameter.
    pub fn is_frozen(&self, name: &str) -> bool {
        self.freeze.iter().any(|prefix| is_below(prefix, name))
    }

    /// Refuses a name in `freeze` that is no layer and no parameter of the model.
    pub(crate) fn check_freeze(&self, names: &[&str]) -> Result<()> {
        let is_unknown = |prefix: &&String| !names.iter().any(|name| is_below(prefix, name));
        match self.freeze.iter().find(is_unknown) {
            None => Ok(()),
            Some(prefix) => Err(Error::Usage(format!(
                "`freeze` {prefix}: expected the name of a layer or parameter of the model; \
                 help: the model has {}",
                names.join(", ")
            ))),
        }
    }
}

/// Whether `name` is `prefix` or a parameter of the layer `prefix`.
fn is_below(prefix: &str, name: &str) -> bool {
    let prefix = prefix.trim_end_matches('.');
    name.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
pub(super) mod tests;
