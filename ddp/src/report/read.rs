//! Reading a record, which may be incomplete (the run was killed), edited, or not a record at all.
//!
//! Lines that are not events are skipped and listed. Unknown events are skipped.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de;
use serde_json::{Map, Value};

use crate::audit::Audit;
use crate::error::{Error, Result};
use crate::evidence::SAMPLES_FILE;
use crate::evidence::{Confusion, Samples};
use crate::record::EVENTS_FILE;
use crate::shown::significant;
use crate::tasks::ColumnErrors;

/// The longest line that is read as one.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// The largest file of samples that is read: many times what a run writes.
const SAMPLES_BYTES_MAX: u64 = 32 << 20;

/// The contents of a record.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) start: Start,
    pub(crate) steps: Vec<StepLine>,
    pub(crate) evals: Vec<EvalLine>,
    pub(crate) texts: Vec<TextLine>,
    pub(crate) resumes: Vec<ResumeLine>,
    /// The steps after which a checkpoint was saved.
    pub(crate) checkpoints: Vec<u64>,
    pub(crate) placement: Option<Audit>,
    pub(crate) confusion: Option<Confusion>,
    /// None if the run is still going or was killed.
    pub(crate) end: Option<EndLine>,
    /// The last event of each name.
    pub(crate) last: BTreeMap<String, Value>,
    /// Lines that are not events: their numbers, from 1, and the reasons.
    pub(crate) bad_lines: Vec<(u64, String)>,
    pub(crate) samples: Option<Samples>,
    /// Why the file of samples cannot be shown.
    pub(crate) samples_problem: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Start {
    pub(crate) config: Map<String, Value>,
    pub(crate) versions: Map<String, Value>,
    pub(crate) devices: Vec<String>,
    pub(crate) world: WorldLine,
    pub(crate) data: String,
    pub(crate) fingerprint: String,
    pub(crate) parameters: Option<u64>,
    pub(crate) steps: Option<u64>,
    pub(crate) steps_per_epoch: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct WorldLine {
    pub(crate) ranks: u64,
    pub(crate) hosts: u64,
    pub(crate) threads: u64,
    pub(crate) transport: String,
    pub(crate) overlap: bool,
    pub(crate) buckets: u64,
    pub(crate) bits_may_differ: Vec<String>,
}

impl WorldLine {
    /// Why another run may have other bits. Empty if it has the same.
    pub(crate) fn why_bits_may_differ(&self) -> String {
        match &self.bits_may_differ[..] {
            [] => String::new(),
            names => format!(
                "may differ from run to run, since these are not 0: {}",
                names.join(", ")
            ),
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct StepLine {
    pub(crate) step: u64,
    pub(crate) loss: Option<f64>,
    pub(crate) accuracy: Option<f64>,
    pub(crate) lr: Option<f64>,
    pub(crate) grad_norm: Option<f64>,
    pub(crate) samples_per_s: Option<f64>,
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) product_share: Option<f64>,
    pub(crate) step_ms: Option<f64>,
    pub(crate) data_ms: Option<f64>,
    pub(crate) reduce_ms: Option<f64>,
    pub(crate) save_ms: Option<f64>,
    pub(crate) device_peak_mb: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct EvalLine {
    pub(crate) step: u64,
    pub(crate) loss: Option<f64>,
    pub(crate) accuracy: Option<f64>,
    pub(crate) largest_class: Option<f64>,
    /// The errors of each column of numbers.
    #[serde(default)]
    pub(crate) columns: Vec<ColumnErrors>,
    /// The rest of the line.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl EvalLine {
    /// Another number, such as the perplexity.
    pub(crate) fn figure(&self, name: &str) -> Option<f64> {
        self.rest.get(name)?.as_f64()
    }

    /// `loss 0.3124, accuracy 93.10%`
    pub(crate) fn text(&self) -> String {
        let accuracy = self.accuracy.map(|part| format!("{:.2}%", 100.0 * part));
        let figure = |name| Some(significant(self.figure(name)?, 4));
        let figures = [
            ("accuracy", accuracy),
            ("perplexity", figure("perplexity")),
            ("bits per byte", figure("bits_per_byte")),
            ("RMSE", figure("rmse")),
            ("R²", figure("r2")),
            ("mean R²", figure("mean_r2")),
        ];
        let loss = significant(self.loss.unwrap_or(f64::NAN), 4);
        let known = |(name, value): (&str, Option<String>)| Some(format!(", {name} {}", value?));
        let known: String = figures.into_iter().filter_map(known).collect();
        format!("loss {loss}{known}")
    }
}

/// What a transformer made of a prompt.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct TextLine {
    pub(crate) step: u64,
    pub(crate) prompt: String,
    pub(crate) text: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ResumeLine {
    pub(crate) step: u64,
    pub(crate) ranks: Option<u64>,
    /// The devices after the resume, by rank.
    #[serde(default)]
    pub(crate) devices: Vec<String>,
    #[serde(default)]
    pub(crate) overridden: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct CheckpointLine {
    step: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct EndLine {
    pub(crate) reason: String,
    pub(crate) exit_code: Option<u8>,
    pub(crate) steps: Option<u64>,
    pub(crate) samples: Option<u64>,
    pub(crate) seconds: Option<f64>,
    pub(crate) samples_per_s: Option<f64>,
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) loss: Option<f64>,
    pub(crate) eval_loss: Option<f64>,
    pub(crate) accuracy: Option<f64>,
    pub(crate) peak_mb: Option<f64>,
    pub(crate) device_peak_mb: Option<f64>,
}

/// Opens a record. Reading a pipe or a device might never end.
fn open(path: &Path) -> std::io::Result<File> {
    match fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(std::io::Error::other(
            "expected a plain file, got another kind",
        )),
    }
}

/// Calls `each` with the number of each line, from 1, and the line.
pub(super) fn for_each_line(
    path: &Path,
    mut each: impl FnMut(u64, &[u8]) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let (mut file, mut line) = (BufReader::new(open(path)?), Vec::new());
    for number in 1.. {
        line.clear();
        let mut bounded = (&mut file).take(LINE_BYTES_MAX);
        if bounded.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        each(number, &line)?;
    }
    Ok(())
}

/// Reads a record as it grows.
pub(crate) struct RunReader {
    path: PathBuf,
    run: Run,
    /// The length of the lines that were read, and the last of them.
    end: u64,
    last: Vec<u8>,
    lines: u64,
}

impl RunReader {
    /// Of the record at `path`, of which nothing is read yet.
    pub(crate) fn new(path: &Path) -> RunReader {
        RunReader {
            path: path.to_path_buf(),
            run: Run::default(),
            end: 0,
            last: Vec::new(),
            lines: 0,
        }
    }

    /// The run as far as it was read.
    pub(crate) fn run(&self) -> &Run {
        &self.run
    }

    /// Reads the whole lines that were added. Reads all again if what was read has changed.
    pub(crate) fn refresh(&mut self) -> std::io::Result<()> {
        let mut file = BufReader::new(open(&self.path)?);
        file.seek(SeekFrom::Start(self.end - self.last.len() as u64))?;
        let mut last = vec![0; self.last.len()];
        let is_same = file.read_exact(&mut last).is_ok() && last == self.last;
        if !is_same {
            *self = RunReader::new(&self.path);
            file.rewind()?;
        }
        loop {
            let mut line = Vec::new();
            (&mut file)
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut line)?;
            if !line.ends_with(b"\n") {
                return Ok(());
            }
            self.lines += 1;
            self.end += line.len() as u64;
            self.run.take_numbered(self.lines, &line);
            self.last = line;
        }
    }
}

impl Run {
    /// Reads the record of the run in `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Run> {
        let path = folder.join(EVENTS_FILE);
        let mut run = Run::read_record(&path)?;
        if !run.last.contains_key("start") {
            return Err(Error::Data(format!(
                "{}: expected the record of a run, which has a \"start\" event, got none and \
                 {} lines that are not events; help: give the folder of a run that has begun",
                path.display(),
                run.bad_lines.len()
            )));
        }
        run.steps.sort_by_key(|line| line.step);
        run.evals.sort_by_key(|line| line.step);
        run.read_samples(&folder.join(SAMPLES_FILE));
        Ok(run)
    }

    /// Reads only the record. The last line of a killed run may be incomplete: it is ignored.
    pub(crate) fn read_record(path: &Path) -> Result<Run> {
        Run::read_lines(path, |_| true)
    }

    /// Reads a record without its steps, which may be millions.
    pub(crate) fn read_without_steps(path: &Path) -> Result<Run> {
        Run::read_lines(path, |line| !line.starts_with(b"{\"event\":\"step\""))
    }

    fn read_lines(path: &Path, wanted: impl Fn(&[u8]) -> bool) -> Result<Run> {
        let failed = |action: &'static str| {
            let path = path.to_path_buf();
            move |source| Error::Io {
                action,
                path,
                source,
                help: format!("give the folder of a run, its --out: {EVENTS_FILE} is in it"),
            }
        };
        if !fs::metadata(path).map_err(failed("look at"))?.is_file() {
            return Err(Error::Data(format!(
                "{}: expected a plain file, the record of a run, got another kind; help: remove it",
                path.display()
            )));
        }
        let mut run = Run::default();
        for_each_line(path, |number, line| {
            if wanted(line) {
                run.take_numbered(number, line);
            }
            Ok(())
        })
        .map_err(failed("read"))?;
        Ok(run)
    }

    /// Takes in line `number`. One that is no event is listed, but for half a line at the end.
    fn take_numbered(&mut self, number: u64, line: &[u8]) {
        if let Err(error) = self.take(line)
            && line.ends_with(b"\n")
        {
            let why = format!("not an event: {error}");
            self.bad_lines.push((number, why));
        }
    }

    /// Takes in one line.
    fn take(&mut self, line: &[u8]) -> serde_json::Result<()> {
        #[derive(Deserialize)]
        struct Named {
            event: String,
        }
        let event: Value = serde_json::from_slice(line)?;
        let name = Named::deserialize(&event)?.event;
        match &*name {
            "start" => self.start = Start::deserialize(&event)?,
            "step" => self.steps.push(StepLine::deserialize(&event)?),
            "eval" => self.evals.push(EvalLine::deserialize(&event)?),
            "sample" => self.texts.push(TextLine::deserialize(&event)?),
            "resume" => self.resumes.push(ResumeLine::deserialize(&event)?),
            "checkpoint" => {
                let line = CheckpointLine::deserialize(&event)?;
                self.checkpoints.push(line.step);
            }
            "placement" => self.placement = Some(Audit::deserialize(&event)?),
            "confusion" => {
                let confusion = Confusion::deserialize(&event)?;
                if !confusion.is_sound() {
                    return Err(de::Error::custom("its numbers are inconsistent"));
                }
                self.confusion = Some(confusion);
            }
            "end" => self.end = Some(EndLine::deserialize(&event)?),
            _ => {}
        }
        if matches!(&*name, "step" | "resume") {
            // The run continued.
            self.end = None;
            self.last.remove("end");
        }
        self.last.insert(name, event);
        Ok(())
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
    pub(crate) fn devices(&self) -> &[String] {
        let later = self
            .resumes
            .last()
            .map(|resume| &resume.devices)
            .filter(|devices| !devices.is_empty());
        later.unwrap_or(&self.start.devices)
    }

    /// The number of ranks, after the last resume.
    pub(crate) fn ranks(&self) -> u64 {
        self.resumes
            .last()
            .and_then(|resume| resume.ranks)
            .unwrap_or(self.start.world.ranks)
    }

    /// Whether the run used simulated GPUs, whose times mean nothing.
    pub(crate) fn is_simulated(&self) -> bool {
        let is_simulated = |device: &String| device.contains("Simulated");
        self.placement.as_ref().is_some_and(|audit| audit.simulated)
            || self.devices().iter().any(is_simulated)
    }
}
