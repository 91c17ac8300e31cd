//! The metrics log of a run: OUT/config.toml, and OUT/metrics.jsonl with one event a line.
//! Progress, reports and `inspect` derive from it.
//!
//! Rank 0 writes it. A line is written whole or not at all: a full disk does not damage earlier
//! lines. Non-finite numbers are `null`. Only the first line, the last one, those of a resume
//! and of lost ranks have wall-clock times. When a run is resumed, lines after the checkpoint are
//! removed (`metrics_log/cut.rs`).

mod cut;

pub(crate) use self::cut::{LockedLog, checkpoints, has_ended_well, is_of_job};

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ddp_comm::LostRank;
use ddp_kernels::files as disk;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::audit::Audit;
use crate::confusion::Confusion;
use crate::digest::{LayerDigest, StepDigests};
use crate::error::{EXIT_STOPPED, Error, Result};
use crate::setting::{OUT, RESUME};
use crate::tasks::{BestBy, ColumnErrors};

/// The file of events.
pub const EVENTS_FILE: &str = "metrics.jsonl";
/// The report that is made from it.
pub const REPORT_FILE: &str = "report.html";
/// The file of settings.
pub const CONFIG_FILE: &str = "config.toml";

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
    /// A durable checkpoint.
    Checkpoint {
        /// Steps taken before it.
        step: u64,
        /// Its folder, below the run's.
        folder: &'a str,
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
    /// Elements of all parameters.
    pub parameters: Option<u64>,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// Steps of an epoch.
    pub steps_per_epoch: u64,
    /// The layers before the first step; none where the log of a resumed run was lost.
    #[serde(skip_deserializing)]
    pub initial_weights: Vec<LayerDigest>,
    /// The number of a job that continues without lost ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
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
    /// Changes that alter what is computed, each as `--lr 0.01 (was 0.001)`.
    pub overridden: Vec<String>,
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
    /// Seconds since rank 0 noticed.
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

/// The metrics log that is being written.
#[derive(Debug)]
pub struct MetricsLog {
    file: File,
    path: PathBuf,
    /// The length of the complete lines.
    length: u64,
    written: LastSteps,
}

/// By the names of events: the step of the last line. There is no line for step 0.
pub(crate) type LastSteps = BTreeMap<String, u64>;

/// The events that a step has at most once.
const ONCE: [&str; 5] = ["step", "eval", "sample", "checkpoint", "confusion"];

/// The fields that tell lines apart.
#[derive(Deserialize)]
struct LogLine {
    event: String,
    step: Option<u64>,
    generation: Option<u64>,
    job: Option<String>,
    exit_code: Option<u8>,
}

impl MetricsLog {
    /// Another handle of the file, and its path, to make the metrics log durable. It holds the lock
    /// too.
    pub fn handle(&self) -> Result<(File, PathBuf)> {
        let file = self.file.try_clone();
        let file = file.map_err(disk::failed("open", &self.path))?;
        Ok((file, self.path.clone()))
    }

    /// Refuses a metrics log that was removed, replaced or cut while it is written.
    pub(crate) fn check_present(&self) -> Result<()> {
        let there = fs::metadata(&self.path).and_then(|there| Ok((there, self.file.metadata()?)));
        let gone = match there {
            Ok((there, here)) if there.ino() == here.ino() && here.len() >= self.length => {
                return Ok(());
            }
            Ok((there, here)) if there.ino() == here.ino() => {
                io::Error::other("it was cut while this run was writing it")
            }
            Ok(_) => io::Error::other("it was replaced while this run was writing it"),
            Err(error) => error,
        };
        let help = "leave the folder of a run as it is until the run ends";
        Err(Error::io("find the metrics log", &self.path, help)(gone))
    }

    /// Writes the last line, and makes the metrics log durable.
    pub fn end(&mut self, end: EndEvent<'_>) -> Result<()> {
        self.check_present()?;
        self.write(&LogEvent::End(end))?;
        let synced = self.file.sync_all();
        Ok(synced.map_err(disk::failed("make durable", &self.path))?)
    }

    /// Whether there is a line of this kind for step `step`: after the loss of a rank, others
    /// repeat what belongs to a step.
    pub(crate) fn has(&self, kind: &str, step: u64) -> bool {
        step > 0 && self.written.get(kind).is_some_and(|last| *last >= step)
    }

    /// Writes a line, unless it is there.
    pub fn write(&mut self, event: &LogEvent<'_>) -> Result<()> {
        self.write_once(event.to_line())
    }

    /// Writes the line of an event, which another rank may have made, unless it is there.
    pub(crate) fn write_once(&mut self, line: String) -> Result<()> {
        let parsed = serde_json::from_str(&line);
        let LogLine { event, step, .. } = parsed.expect("the line of an event");
        let step = step.filter(|_| ONCE.contains(&&*event));
        if step.is_some_and(|step| self.has(&event, step)) {
            return Ok(());
        }
        self.write_line(line)?;
        self.written.extend(step.map(|step| (event, step)));
        Ok(())
    }

    /// Writes that the checkpoint of step `step` is durable.
    pub(crate) fn write_checkpoint(&mut self, step: u64, folder: &Path) -> Result<()> {
        let out = self.path.parent().unwrap_or(Path::new(""));
        let folder = folder.strip_prefix(out).unwrap_or(folder);
        let folder = &folder.to_string_lossy();
        self.write(&LogEvent::Checkpoint { step, folder })
    }

    fn write_line(&mut self, mut line: String) -> Result<()> {
        let length = self.file.metadata();
        // Writing after its end would fill what was cut with zeros.
        if length.map_err(disk::failed("look at", &self.path))?.len() < self.length {
            return self.check_present();
        }
        line.push('\n');
        if let Err(error) = self.file.write_all(line.as_bytes()) {
            self.cut_back();
            return Err(disk::failed("write", &self.path)(error).into());
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Removes an incomplete line. An error here is ignored: the first one is reported.
    fn cut_back(&mut self) {
        _ = self.file.set_len(self.length);
        _ = self.file.seek(SeekFrom::Start(self.length));
    }
}

/// Writes the settings' file next to the metrics log.
fn write_settings(out: &Path, settings: &str) -> Result<()> {
    Ok(disk::replace_with(
        &out.join(CONFIG_FILE),
        settings.as_bytes(),
    )?)
}

/// Refuses a folder that holds a run, and names a free one. An empty metrics log does not count:
/// its run failed before it began.
pub(crate) fn check_free(out: &Path) -> Result<()> {
    let begun = fs::metadata(out.join(EVENTS_FILE)).is_ok_and(|events| events.len() > 0);
    if begun || out.join("checkpoints").exists() {
        Err(taken(out))
    } else {
        Ok(())
    }
}

fn taken(out: &Path) -> Error {
    let mut numbers = 2u64..;
    let named = |number: u64| {
        PathBuf::from(format!(
            "{}-{number}",
            out.display().to_string().trim_end_matches('/')
        ))
    };
    let free = numbers.find_map(|number| Some(named(number)).filter(|folder| !folder.exists()));
    let free = free.unwrap_or_else(|| out.to_path_buf());
    Error::Usage(format!(
        "{OUT} {}: it holds a run already, and no run is overwritten; help: give another folder, \
         as in {OUT} {}, or {RESUME} auto to continue that run",
        out.display(),
        free.display()
    ))
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> f64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64());
    (since * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests;
