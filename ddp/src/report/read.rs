//! Reading a record that may be anything: whole, of a run that was killed, edited, or no record at all.
//!
//! A line that is no event is passed over and counted; an event that this version does not know is passed over. Of a file without a
//! first event there is no report.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::evidence::{Confusion, Samples};
use super::{REPORT_FILE, SAMPLES_FILE};
use crate::error::{Error, Result};
use crate::metrics::EVENTS_FILE;

/// The longest line that is read; the rest of a longer one is passed over.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// The largest file of samples that is read: many times what a run writes.
const SAMPLES_BYTES_MAX: u64 = 32 << 20;

/// What a record says.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) start: Start,
    /// In their order.
    pub(super) steps: Vec<StepLine>,
    pub(super) evals: Vec<EvalLine>,
    pub(super) resumes: Vec<ResumeLine>,
    /// The steps after which there was one.
    pub(super) checkpoints: Vec<u64>,
    pub(super) placement: Option<Placement>,
    pub(super) confusion: Option<Confusion>,
    /// How it ended; none of a run that has not, or was killed.
    pub(super) end: Option<EndLine>,
    /// Lines that are no events.
    pub(super) lines_passed_over: u64,
    pub(super) samples: Option<Samples>,
    /// Why there are no samples though there is their file.
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
    /// Those it went on with; nothing of a record that does not say.
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

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Placement {
    pub(super) steps: u64,
    pub(super) simulated: bool,
    pub(super) ranks: Vec<RankLine>,
    pub(super) differences: Vec<DifferenceLine>,
    pub(super) hints: Vec<HintLine>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RankLine {
    pub(super) rank: u64,
    pub(super) devices: Vec<String>,
    pub(super) rows: u64,
    pub(super) per_step: BTreeMap<String, AmountLine>,
    pub(super) phases: BTreeMap<String, BTreeMap<String, AmountLine>>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(super) struct AmountLine {
    pub(super) count: f64,
    pub(super) bytes: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct DifferenceLine {
    pub(super) kind: String,
    pub(super) at: String,
    pub(super) amounts: Vec<Option<AmountLine>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct HintLine {
    pub(super) ranks: Vec<u64>,
    pub(super) count: u64,
    pub(super) text: String,
}

impl Run {
    /// The run in this folder.
    pub(super) fn read(folder: &Path) -> Result<Run> {
        let path = folder.join(EVENTS_FILE);
        let unreadable = |action: &'static str| {
            let path = path.clone();
            let way_out = format!(
                "Give the folder of a run, what its --out was: {EVENTS_FILE} in it is what {REPORT_FILE} is made from"
            );
            move |source| Error::Io { action, path, source, way_out }
        };
        let is_file = fs::metadata(&path).map_err(unreadable("look at"))?.is_file();
        if !is_file {
            return Err(Error::Data(format!("{}: expected a plain file, the record of a run", path.display())));
        }
        let mut run = Run::default();
        let has_start =
            run.read_lines(BufReader::with_capacity(1 << 20, File::open(&path).map_err(unreadable("open"))?));
        if !has_start.map_err(unreadable("read"))? {
            return Err(Error::Data(format!(
                "{}: expected the record of a run, whose first event is \"start\", got {}. Give the folder of a run that has begun",
                path.display(),
                match run.lines_passed_over {
                    0 => "no such event".to_string(),
                    lines => format!("none in it, and {lines} lines that are no events"),
                }
            )));
        }
        run.steps.sort_by_key(|line| line.step);
        run.evals.sort_by_key(|line| line.step);
        run.read_samples(&folder.join(SAMPLES_FILE));
        Ok(run)
    }

    /// Whether there was a start.
    fn read_lines(&mut self, mut file: impl BufRead) -> std::io::Result<bool> {
        let (mut line, mut has_start) = (Vec::new(), false);
        loop {
            line.clear();
            let read = (&mut file).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
            if read == 0 {
                return Ok(has_start);
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            match self.take(&line) {
                Some(is_start) => has_start |= is_start,
                None => self.lines_passed_over += 1,
            }
        }
    }

    /// What one line says: whether it is the start; none if it is no event.
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
            "confusion" => self.confusion = Some(of::<Confusion>(line).filter(Confusion::is_sound)?),
            "end" => self.end = Some(of(line)?),
            _ => {}
        }
        Some(false)
    }

    /// Samples are an extra: whatever is wrong with them, there is a report.
    fn read_samples(&mut self, path: &Path) {
        let read = || -> std::result::Result<Option<Samples>, String> {
            match fs::metadata(path) {
                Err(_) => return Ok(None),
                Ok(there) if !there.is_file() => return Err("it is not a plain file".into()),
                Ok(there) if there.len() > SAMPLES_BYTES_MAX => {
                    return Err("it is larger than any that a run writes".into());
                }
                Ok(_) => {}
            }
            let bytes = fs::read(path).map_err(|error| error.to_string())?;
            let samples: Samples = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
            samples.check().map(|()| Some(samples))
        };
        match read() {
            Ok(samples) => self.samples = samples,
            Err(problem) => self.samples_problem = Some(format!("{SAMPLES_FILE}: {problem}")),
        }
    }

    /// What it trained on, by rank: at the end, if that has changed.
    pub(super) fn devices(&self) -> &[String] {
        let later = self.resumes.last().map(|resume| &resume.devices).filter(|devices| !devices.is_empty());
        later.unwrap_or(&self.start.devices)
    }

    /// On how many ranks: at the end, if that has changed.
    pub(super) fn ranks(&self) -> u64 {
        self.resumes.last().and_then(|resume| resume.ranks).unwrap_or(self.start.world.ranks)
    }

    /// Whether it trained on GPUs that are simulated, whose times say nothing.
    pub(super) fn is_simulated(&self) -> bool {
        self.placement.as_ref().is_some_and(|placement| placement.simulated)
            || self.devices().iter().any(|device| device.contains("Simulated"))
    }
}
