//! The lines of the metrics log.

use std::collections::BTreeMap;
use std::fmt;

use ddp_comm::LostRank;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::audit::Audit;
use crate::confusion::Confusion;
use crate::digest::{LayerDigest, StepDigests};
use crate::error::EXIT_STOPPED;
use crate::shown::significant;
use crate::tasks::{Baselines, BestBy, ColumnErrors};

/// One line of the metrics log: `{"event":"step",…}`.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum LogEvent<'a> {
    /// The first line.
    Start(StartEvent),
    /// A logged step.
    Step(StepEvent),
    /// An evaluation.
    Eval(EvalEvent),
    /// What the model made of the prompt at an evaluation.
    Sample(SampleEvent),
    /// The classes of all held-out rows at the last evaluation.
    Confusion(&'a Confusion),
    /// How good other models are on the rows of the last evaluation.
    Baselines {
        /// After this step.
        step: u64,
        /// Of the model of the best evaluation, unless that was before a resume.
        model: Option<f64>,
        #[serde(flatten)]
        /// Of others.
        others: &'a Baselines,
    },
    /// Some rows of the last evaluation, if its answers are one number: that of the label, and the
    /// answer.
    Predictions {
        /// After this step.
        step: u64,
        /// In the units of the labels.
        rows: &'a [[f32; 2]],
    },
    /// A durable checkpoint.
    Checkpoint {
        /// Steps taken before it.
        step: u64,
        /// Its folder, below the run's.
        folder: &'a str,
        /// The BLAKE3 of its manifest, which has those of its files.
        #[serde(skip_serializing_if = "Option::is_none")]
        manifest_blake3: Option<String>,
    },
    /// The run was resumed.
    Resume(ResumeEvent),
    /// The run continues with other ranks.
    Ranks(RanksEvent),
    /// What a successful run moved between devices.
    Placement(&'a Audit),
    /// The last line.
    End(EndEvent<'a>),
}

impl LogEvent<'_> {
    /// As JSON.
    pub(crate) fn to_line(&self) -> String {
        serde_json::to_string(self).expect("events are structs of texts and numbers")
    }
}

/// What is known before the first step. Other versions may have written less.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename = "Start", default)]
pub struct StartEvent {
    /// The time, in seconds since 1970.
    pub time_unix_s: f64,
    /// All settings, by name.
    pub config: Map<String, Value>,
    /// The settings that are not at their default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed: Option<Vec<String>>,
    /// Versions of this program and of the libraries that it uses, by name.
    pub versions: BTreeMap<String, String>,
    /// The devices of each rank.
    pub devices: Vec<String>,
    /// The ranks.
    pub world: StartWorld,
    /// A description of the data.
    pub data: String,
    /// The fingerprint of the training data.
    pub fingerprint: String,
    /// That of the held-out data.
    pub held_out_fingerprint: String,
    /// The BLAKE3 of the contents of both, and of the program's file.
    #[serde(flatten)]
    pub blake3: Contents,
    /// Elements of all parameters.
    pub parameters: Option<u64>,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// Steps of an epoch.
    pub steps_per_epoch: u64,
    /// What folds showed where the length of the run was chosen by them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out_of_fold: Option<Box<OutOfFold>>,
    /// The layers before the first step; none where the log of a resumed run was lost.
    #[serde(skip_deserializing)]
    pub initial_weights: Vec<LayerDigest>,
    /// The number of a job that continues without lost ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
}

/// What a run is made of, as BLAKE3. Version 0.8 and older did not say it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Contents {
    /// Of the contents of the training data.
    pub data_blake3: String,
    /// Of the contents of the held-out data.
    pub held_out_blake3: String,
    /// Of the program's file.
    pub program_blake3: String,
}

/// What models showed on rows that they were not trained on, one for each fold of the rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutOfFold {
    /// The steps that are best, 0 if training makes it worse.
    pub steps: u64,
    /// The mean loss of all rows there, each by the model that was not trained on it.
    pub loss: f64,
    /// The loss of each fold.
    pub folds: Vec<f64>,
    /// The part of them that is classified correctly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// The figure by which they are compared with others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// How good these are, fitted to the same rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub others: Option<Baselines>,
}

impl OutOfFold {
    /// Whether these models, which are simpler, are at most one standard error worse than `other`,
    /// fold by fold, or classify as many rows correctly.
    pub fn suffices_beside(&self, other: &OutOfFold) -> bool {
        let count = self.folds.len() as f64;
        let apart = self.folds.iter().zip(&other.folds).map(|(a, b)| a - b);
        let mean = apart.clone().sum::<f64>() / count;
        let variance = apart.map(|it| (it - mean).powi(2)).sum::<f64>() / (count - 1.0);
        mean <= (variance / count).sqrt()
            || self.accuracy.is_some() && self.accuracy >= other.accuracy
    }

    /// How good they are beside other models of the same rows, for people.
    pub fn beside(&self) -> Option<String> {
        let others = self.others.as_ref()?;
        Some(others.text("on rows that were not trained on", self.score))
    }

    /// For people.
    pub fn describe(&self) -> String {
        let accuracy = self
            .accuracy
            .map(|part| format!(", accuracy {:.2}%", part * 100.0));
        format!(
            "loss {}{}",
            significant(self.loss, 4),
            accuracy.unwrap_or_default()
        )
    }
}

/// The ranks of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StartWorld {
    /// The number of ranks.
    pub ranks: u64,
    /// The number of hosts.
    pub hosts: u64,
    /// Threads of a rank.
    pub threads: u64,
    /// How ranks reach each other.
    pub transport: String,
    /// Whether gradients are reduced during backward.
    pub overlap: bool,
    /// The number of buckets.
    pub buckets: u64,
    /// NCCL settings that allow other bits in another run, as rank 0 has them; empty where bits are
    /// fixed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bits_may_differ: Vec<String>,
}

impl StartWorld {
    /// Why another run may have other bits. Empty if it has the same.
    pub fn why_bits_may_differ(&self) -> String {
        let names = self.bits_may_differ.join(", ");
        if names.is_empty() {
            return names;
        }
        format!("may differ from run to run, since these are not 0: {names}")
    }
}

/// A logged step.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StepEvent {
    /// Its number, from 1.
    pub step: u64,
    /// The epoch it is in, from 1.
    pub epoch: u64,
    /// The mean over the whole global batch.
    pub loss: f64,
    /// The fraction of it that is classified correctly; None for regression.
    pub accuracy: Option<f64>,
    /// What follows from the loss, by name: of tokens the perplexity.
    #[serde(flatten)]
    pub figures: BTreeMap<&'static str, f64>,
    /// The learning rate it used.
    pub lr: f64,
    /// The norm of all gradients before clipping.
    pub grad_norm: Option<f64>,
    /// Rows a second over all ranks, since the event before; NaN, and so null, on a simulated GPU.
    pub samples_per_s: f64,
    /// The same in tokens, of a model that predicts at each token of a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// The same in 10¹² multiplications and additions, if the model says how many a row needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
    /// The same as a fraction of what large matmuls reach on these devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matmul_share: Option<f64>,
    /// Milliseconds a step, since the event before; null as well.
    pub step_ms: f64,
    /// The part of it in which rank 0 waited for rows.
    pub data_ms: f64,
    /// The part of it in which rank 0 waited for reductions; None if the host does not wait.
    pub reduce_ms: Option<f64>,
    /// The part of it that checkpoints held up training.
    pub save_ms: f64,
    /// The most GPU memory of rank 0 so far, in MB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_peak_mb: Option<f64>,
    /// What `compare` compares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digests: Option<StepDigests>,
}

/// An evaluation on held-out rows.
#[derive(Clone, Debug, Serialize)]
pub struct EvalEvent {
    /// After this step.
    pub step: u64,
    /// The mean over all held-out rows.
    pub loss: f64,
    /// The fraction that is classified correctly; None for regression.
    pub accuracy: Option<f64>,
    /// The share of the held-out rows that the largest class has, if it is far above an equal
    /// share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_class: Option<f64>,
    /// Which figure decides which evaluation is the best.
    #[serde(skip_serializing_if = "BestBy::is_loss")]
    pub best_by: BestBy,
    /// As in a step; of numbers R², and of a single one RMSE, in the units of the labels; of two
    /// classes AUC and the balanced accuracy.
    #[serde(flatten)]
    pub figures: BTreeMap<&'static str, f64>,
    /// Of several numbers, the errors of each column.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<ColumnErrors>,
}

/// A generated text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SampleEvent {
    /// After this step.
    pub step: u64,
    /// The first text, of which there is always one.
    #[serde(flatten)]
    pub first: SampleText,
    /// The others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<SampleText>,
}

impl SampleEvent {
    /// All texts.
    pub fn texts(&self) -> impl Iterator<Item = &SampleText> {
        std::iter::once(&self.first).chain(&self.more)
    }
}

/// A text that a model in training made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleText {
    /// The text that was given.
    pub prompt: String,
    /// What the model added to it.
    pub text: String,
    /// What the data have after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
}

/// The run was resumed. Other versions may have written less.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ResumeEvent {
    /// The time, in seconds since 1970.
    pub time_unix_s: f64,
    /// After this step.
    pub step: u64,
    /// The checkpoint's folder, below the run's.
    pub from: String,
    /// The number of ranks.
    pub ranks: Option<u64>,
    /// The devices of each rank, in their order.
    pub devices: Vec<String>,
    /// As in the first line.
    pub versions: BTreeMap<String, String>,
    /// As in the first line.
    #[serde(flatten)]
    pub blake3: Contents,
    /// Changes that alter what is computed, each as `--lr 0.01 (was 0.001)`.
    pub overridden: Vec<String>,
    /// All settings from here on, by name.
    pub config: Map<String, Value>,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// The number of a job that continues without lost ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
}

/// The run continues with other ranks, because some were lost or came.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RanksEvent {
    /// The time, in seconds since 1970.
    pub time_unix_s: f64,
    /// After this step.
    pub step: u64,
    /// How often the ranks have met, the start included.
    pub generation: u64,
    /// The number of ranks from here on.
    pub ranks: usize,
    /// With fewer the job saves and ends.
    #[serde(default)]
    pub min_ranks: usize,
    /// Who was lost, by the number that the rank was started with.
    pub lost: Vec<LostRank>,
    /// Who came.
    pub joined: Vec<usize>,
    /// Seconds since the launcher noticed.
    pub seconds: f64,
}

impl fmt::Display for RanksEvent {
    /// `lost rank 2 (killed by signal 9), rank 1 joined: 3 ranks continue`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = self.lost.iter();
        let lost = lost.map(|it| format!("lost rank {} ({})", it.rank, it.why));
        let joined = self.joined.iter().map(|rank| format!("rank {rank} joined"));
        let mut parts: Vec<String> = lost.chain(joined).collect();
        if parts.is_empty() {
            parts.push("the ranks met again".into());
        }
        let (parts, ranks, least) = (parts.join(", "), self.ranks, self.min_ranks);
        match ranks {
            _ if ranks < least => write!(f, "{parts}: {ranks} of at least {least} ranks left"),
            1 => write!(f, "{parts}: 1 rank continues"),
            _ => write!(f, "{parts}: {ranks} ranks continue"),
        }
    }
}

/// Why a run ended that has taken all its steps.
pub(crate) const DONE: &str = "done";

/// In which way a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunOutcome {
    /// All steps are taken.
    Done,
    /// It ended early, because evaluations did not get better.
    Early,
    /// It was asked to stop, and can be resumed.
    Stopped,
    /// By an error.
    Failed,
}

impl RunOutcome {
    /// That of a run that ended with this exit code, and not early.
    pub fn of_exit_code(exit_code: u8) -> RunOutcome {
        match exit_code {
            0 => RunOutcome::Done,
            EXIT_STOPPED => RunOutcome::Stopped,
            _ => RunOutcome::Failed,
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
pub struct EndEvent<'a> {
    /// The time, in seconds since 1970.
    pub time_unix_s: f64,
    /// In which way.
    pub outcome: RunOutcome,
    /// Why: `done`, that it stopped early, or the error.
    pub reason: &'a str,
    /// The exit code of the process.
    pub exit_code: u8,
    /// Steps taken.
    pub steps: u64,
    /// Rows trained on, over all ranks.
    pub samples: u64,
    /// Seconds since the first step of this process, evaluations included.
    pub seconds: f64,
    /// Rows a second over that time; null on a simulated GPU.
    pub samples_per_s: f64,
    /// The same in tokens, of a model that predicts at each token of a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_s: Option<f64>,
    /// The last loss that was read.
    pub loss: Option<f64>,
    /// The loss of the last evaluation.
    pub eval_loss: Option<f64>,
    /// The accuracy of the last evaluation.
    pub accuracy: Option<f64>,
    /// The peak memory of rank 0.
    pub peak_mb: Option<f64>,
    /// The peak GPU memory of rank 0; None on the CPU.
    pub device_peak_mb: Option<f64>,
    /// The ledger of transfers of rank 0.
    pub transfers: Value,
}
