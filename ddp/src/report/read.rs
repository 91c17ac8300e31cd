//! Reading a record, which may be incomplete (the run was killed), edited, or not a record at all.
//!
//! Lines that are not events are skipped and counted. Unknown events are skipped. A file without a start
//! event is refused.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::audit::Audit;
use crate::error::{Error, Result};
use crate::evidence::SAMPLES_FILE;
use crate::evidence::{Confusion, Samples};
use crate::record::EVENTS_FILE;

/// The longest line that is read as one.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// The largest file of samples that is read: many times what a run writes.
const SAMPLES_BYTES_MAX: u64 = 32 << 20;

/// The contents of a record.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) start: Start,
    pub(super) steps: Vec<StepLine>,
    pub(super) evals: Vec<EvalLine>,
    pub(super) resumes: Vec<ResumeLine>,
    /// The steps after which a checkpoint was saved.
    pub(super) checkpoints: Vec<u64>,
    pub(super) placement: Option<Audit>,
    pub(super) confusion: Option<Confusion>,
    /// None if the run is still going or was killed.
    pub(super) end: Option<EndLine>,
    /// Lines that are not events.
    pub(super) lines_skipped: u64,
    pub(super) samples: Option<Samples>,
    /// Why the file of samples cannot be shown.
    pub(super) samples_problem: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Start {
    pub(super) config: Map<String, Value>,
    pub(super) versions: Map<String, Value>,
    pub(super) devices: Vec<String>,
    pub(super) world: WorldLine,
    pub(super) data: String,
    pub(super) fingerprint: String,
    pub(super) parameters: Option<u64>,
    pub(super) steps: Option<u64>,
    pub(super) steps_per_epoch: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WorldLine {
    pub(super) ranks: u64,
    pub(super) hosts: u64,
    pub(super) threads: u64,
    pub(super) transport: String,
    pub(super) overlap: bool,
    pub(super) buckets: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct StepLine {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) lr: Option<f64>,
    pub(super) grad_norm: Option<f64>,
    pub(super) samples_per_s: Option<f64>,
    pub(super) step_ms: Option<f64>,
    pub(super) data_ms: Option<f64>,
    pub(super) reduce_ms: Option<f64>,
    pub(super) save_ms: Option<f64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct EvalLine {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) accuracy: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct ResumeLine {
    pub(super) step: u64,
    pub(super) ranks: Option<u64>,
    /// The devices after the resume, by rank.
    #[serde(default)]
    pub(super) devices: Vec<String>,
    #[serde(default)]
    pub(super) overridden: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct CheckpointLine {
    step: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct EndLine {
    pub(super) reason: String,
    pub(super) exit_code: Option<u8>,
    pub(super) steps: Option<u64>,
    pub(super) samples: Option<u64>,
    pub(super) seconds: Option<f64>,
    pub(super) samples_per_s: Option<f64>,
    pub(super) loss: Option<f64>,
    pub(super) eval_loss: Option<f64>,
    pub(super) accuracy: Option<f64>,
    pub(super) peak_mb: Option<f64>,
    pub(super) device_peak_mb: Option<f64>,
}

impl Run {
    /// Reads the record of the run in `folder`.
    pub(super) fn read(folder: &Path) -> Result<Run> {
        let path = folder.join(EVENTS_FILE);
        let failed = |action: &'static str| {
            let path = path.clone();
            move |source| Error::Io {
                action,
                path,
                source,
                way_out: format!("Give the folder of a run, its --out: {EVENTS_FILE} is in it"),
            }
        };
        if !fs::metadata(&path).map_err(failed("look at"))?.is_file() {
            let path = path.display();
            return Err(Error::Data(format!(
                "{path}: expected a plain file, the record of a run"
            )));
        }
        let file = File::open(&path).map_err(failed("open"))?;
        let mut run = Run::default();
        if !run
            .read_lines(BufReader::new(file))
            .map_err(failed("read"))?
        {
            return Err(Error::Data(format!(
                "{}: expected the record of a run, which has a \"start\" event, got none and {} lines that \
                 are not events. Give the folder of a run that has begun",
                path.display(),
                run.lines_skipped
            )));
        }
        run.steps.sort_by_key(|line| line.step);
        run.evals.sort_by_key(|line| line.step);
        run.read_samples(&folder.join(SAMPLES_FILE));
        Ok(run)
    }

    /// Whether the file has a start event.
    fn read_lines(&mut self, mut file: impl BufRead) -> std::io::Result<bool> {
        let (mut line, mut has_start) = (Vec::new(), false);
        loop {
            line.clear();
            let read = (&mut file)
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut line)?;
            if read == 0 {
                return Ok(has_start);
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            match self.take(&line) {
                Some(is_start) => has_start |= is_start,
                None => self.lines_skipped += 1,
            }
        }
    }

    /// Takes in one line: whether it is the start event. None if it is not an event.
    fn take(&mut self, line: &[u8]) -> Option<bool> {
        #[derive(Deserialize)]
        struct Named<'a> {
            #[serde(borrow)]
            event: Cow<'a, str>,
        }
        fn of<'a, T: Deserialize<'a>>(line: &'a [u8]) -> Option<T> {
            serde_json::from_slice(line).ok()
        }
        match &*of::<Named<'_>>(line)?.event {
            "start" => {
                self.start = of(line)?;
                return Some(true);
            }
            "step" => {
                self.steps.push(of(line)?);
                self.end = None;
            }
            "eval" => self.evals.push(of(line)?),
            "resume" => {
                self.resumes.push(of(line)?);
                self.end = None;
            }
            "checkpoint" => self.checkpoints.push(of::<CheckpointLine>(line)?.step),
            "placement" => self.placement = Some(of(line)?),
            "confusion" => {
                self.confusion = Some(of::<Confusion>(line).filter(Confusion::is_sound)?)
            }
            "end" => self.end = Some(of(line)?),
            _ => {}
        }
        Some(false)
    }

    /// Samples are optional: a damaged file is reported on the page and does not prevent it.
    fn read_samples(&mut self, path: &Path) {
        let read = || -> std::result::Result<Option<Samples>, String> {
            match fs::metadata(path) {
                Err(_) => return Ok(None),
                Ok(there) if !there.is_file() => return Err("not a plain file".into()),
                Ok(there) if there.len() > SAMPLES_BYTES_MAX => {
                    return Err("larger than any that a run writes".into());
                }
                Ok(_) => {}
            }
            let bytes = fs::read(path).map_err(|error| error.to_string())?;
            let samples: Samples =
                serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
            samples.check().map(|()| Some(samples))
        };
        match read() {
            Ok(samples) => self.samples = samples,
            Err(problem) => self.samples_problem = Some(format!("{SAMPLES_FILE}: {problem}")),
        }
    }

    /// The devices by rank, after the last resume.
    pub(super) fn devices(&self) -> &[String] {
        let later = self
            .resumes
            .last()
            .map(|resume| &resume.devices)
            .filter(|devices| !devices.is_empty());
        later.unwrap_or(&self.start.devices)
    }

    /// The number of ranks, after the last resume.
    pub(super) fn ranks(&self) -> u64 {
        self.resumes
            .last()
            .and_then(|resume| resume.ranks)
            .unwrap_or(self.start.world.ranks)
    }

    /// Whether the run used simulated GPUs, whose times mean nothing.
    pub(super) fn is_simulated(&self) -> bool {
        let is_simulated = |device: &String| device.contains("Simulated");
        self.placement.as_ref().is_some_and(|audit| audit.simulated)
            || self.devices().iter().any(is_simulated)
    }
}
