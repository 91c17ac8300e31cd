//! Reads the metrics log of a run (`metrics.jsonl`).
//!
//! A log may be incomplete (the run was killed), edited, or not a log at all. Lines that are not
//! events are skipped and listed, except an incomplete last line. Unknown events are skipped.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use ddp_kernels::files::open_ordinary;
use serde::{Deserialize, de};
use serde_json::{Map, Value};

use crate::audit::Audit;
use crate::checkpoint::{Best, CHECKPOINTS, Opened};
use crate::config::{Config, as_flag};
use crate::confusion::Confusion;
use crate::error::{Error, Result};
use crate::metrics_log::{
    EVENTS_FILE, RanksEvent, ResumeEvent, RunOutcome, SampleEvent, StartEvent,
};
use crate::setting::{DATA, OUT};
use crate::shown::significant;
use crate::tasks::{BestBy, ColumnErrors, figures_text};

/// The longest line that is read.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// The contents of a log, as far as it was read.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) start: StartEvent,
    pub(crate) steps: MetricColumns,
    pub(crate) evals: MetricColumns,
    /// The errors of each label column, at the last evaluation that has them.
    pub(crate) column_errors: Vec<ColumnErrors>,
    pub(crate) texts: Vec<SampleEvent>,
    pub(crate) resumes: Vec<ResumeEvent>,
    /// The lines, from 1, of each start and of each resume.
    pub(crate) starts_at: Vec<u64>,
    pub(crate) resumes_at: Vec<u64>,
    /// Who was lost and who came.
    pub(crate) changes: Vec<RanksEvent>,
    /// From which step on how many ranks trained.
    pub(crate) ranks: Vec<(u64, u64)>,
    /// The steps after which a checkpoint was saved.
    pub(crate) checkpoints: Vec<u64>,
    /// By step, the BLAKE3 of the manifest of its checkpoint.
    pub(crate) manifests: BTreeMap<u64, String>,
    pub(crate) placement: Option<Audit>,
    pub(crate) confusion: Option<Confusion>,
    /// The last event of each name. Without `end` the run is still running or was killed.
    pub(crate) last: BTreeMap<String, Value>,
    /// Lines that are not events: their numbers, from 1, and the reasons.
    pub(crate) bad_lines: Vec<(u64, String)>,
    path: PathBuf,
    /// The number and the length of the lines that were read, and the last of them.
    lines: u64,
    length: u64,
    last_line: Vec<u8>,
}

/// The numbers of logged steps or of evaluations, in the order of steps: a column for each field.
#[derive(Debug, Default)]
pub(crate) struct MetricColumns {
    pub(crate) steps: Vec<u64>,
    /// NaN where a number is missing or not finite.
    columns: BTreeMap<String, Vec<f64>>,
}

impl MetricColumns {
    fn add(&mut self, step: u64, line: &Value) {
        let at = self.steps.partition_point(|known| *known <= step);
        let fields = line.as_object().into_iter().flatten();
        for (name, _) in fields.filter(|(_, value)| value.is_number()) {
            let missing = || vec![f64::NAN; self.steps.len()];
            self.columns.entry(name.clone()).or_insert_with(missing);
        }
        self.steps.insert(at, step);
        for (name, column) in &mut self.columns {
            column.insert(at, line[name].as_f64().unwrap_or(f64::NAN));
        }
    }

    /// Whether any line has this field.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.last(name).is_some()
    }

    /// The field of each line.
    pub(crate) fn values(&self, name: &str) -> impl Iterator<Item = (u64, Option<f64>)> {
        let column = self.columns.get(name);
        let value = move |at: usize| column.map(|column| column[at]);
        let steps = self.steps.iter().enumerate();
        steps.map(move |(at, step)| (*step, value(at).filter(|value| value.is_finite())))
    }

    /// The field of the last line.
    pub(crate) fn newest(&self, name: &str) -> Option<f64> {
        let value = self.columns.get(name)?.last().copied();
        value.filter(|value| value.is_finite())
    }

    /// The last finite value of the field.
    pub(crate) fn last(&self, name: &str) -> Option<f64> {
        let mut values = self.columns.get(name)?.iter().rev().copied();
        values.find(|value| value.is_finite())
    }
}

/// The event of a line, if it is one.
pub(crate) fn event_of(line: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Kind {
        event: String,
    }
    serde_json::from_slice::<Kind>(line).ok().map(|it| it.event)
}

/// The norm of all these layers, of which each is a name, a hash, a norm and a sum.
fn norm_of(layers: &Value) -> Option<f64> {
    let norms = layers.as_array()?.iter().map(|layer| layer[2].as_f64());
    let squares = norms.map(|norm| norm.map(|norm| norm * norm));
    Some(squares.sum::<Option<f64>>()?.sqrt())
}

impl Run {
    /// Reads the log of the run in `folder`, which must have begun.
    pub(crate) fn read(folder: &Path) -> Result<Run> {
        Run::read_log(folder, |_| true)?.begun()
    }

    /// Refuses a log without a start.
    pub(crate) fn begun(self) -> Result<Run> {
        if self.last.contains_key("start") {
            return Ok(self);
        }
        Err(Error::Data(format!(
            "{}: expected the metrics log of a run, which has a \"start\" event, got none and {} \
             lines that are not events; help: give the folder of a run that has begun",
            self.path.display(),
            self.bad_lines.len()
        )))
    }

    /// Reads the log of the run in `folder`, without the lines that are not `wanted`.
    pub(crate) fn read_log(folder: &Path, wanted: impl FnMut(&[u8]) -> bool) -> Result<Run> {
        let path = folder.join(EVENTS_FILE);
        let help = format!("give the folder of a run, its {OUT}: {EVENTS_FILE} is in it");
        let failed = || Error::io("read", &path, &*help);
        if !fs::metadata(&path).map_err(failed())?.is_file() {
            return Err(Error::Data(format!(
                "{}: expected a plain file, the metrics log of a run, got another kind; help: \
                 remove it",
                path.display()
            )));
        }
        let mut run = Run {
            path: path.clone(),
            ..Run::default()
        };
        run.refresh(wanted).map_err(failed())?;
        Ok(run)
    }

    /// Reads the lines that were added, except those that are not `wanted`. Reads all again if
    /// earlier lines have changed.
    pub(crate) fn refresh(&mut self, mut wanted: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
        let mut file = BufReader::new(open_ordinary(&self.path)?);
        let mut last_line = vec![0; self.last_line.len()];
        file.seek(SeekFrom::Start(self.length - last_line.len() as u64))?;
        if file.read_exact(&mut last_line).is_err() || last_line != self.last_line {
            *self = Run {
                path: std::mem::take(&mut self.path),
                ..Run::default()
            };
            file.rewind()?;
        }
        loop {
            let mut line = Vec::new();
            let mut bounded = (&mut file).take(LINE_BYTES_MAX);
            bounded.read_until(b'\n', &mut line)?;
            if !line.ends_with(b"\n") {
                return Ok(());
            }
            self.lines += 1;
            self.length += line.len() as u64;
            let taken = if wanted(&line) {
                self.take(&line)
            } else {
                Ok(())
            };
            let why = taken.err().map(|error| format!("not an event: {error}"));
            self.bad_lines.extend(why.map(|why| (self.lines, why)));
            self.last_line = line;
        }
    }

    /// Takes in one line.
    fn take(&mut self, line: &[u8]) -> serde_json::Result<()> {
        let mut event: Value = serde_json::from_slice(line)?;
        // Digests are large, and only `compare` reads them.
        let fields = event.as_object_mut();
        if let Some(digests) = fields.and_then(|fields| fields.remove("digests")) {
            event["weight_norm"] = norm_of(&digests["weights"]).into();
        }
        let name = String::deserialize(&event["event"])?;
        let step = || u64::deserialize(&event["step"]);
        match &*name {
            "start" => {
                self.start = StartEvent::deserialize(&event)?;
                self.starts_at.push(self.lines);
                self.ranks = vec![(0, self.start.world.ranks)];
            }
            "step" => self.steps.add(step()?, &event),
            "eval" => {
                if !event["columns"].is_null() {
                    self.column_errors = Vec::deserialize(&event["columns"])?;
                }
                self.evals.add(step()?, &event);
            }
            "sample" => self.texts.push(SampleEvent::deserialize(&event)?),
            "resume" => {
                // Only the step must not be missing.
                step()?;
                let resume = ResumeEvent::deserialize(&event)?;
                let ranks = resume.ranks.map(|ranks| (resume.step, ranks));
                self.ranks.extend(ranks);
                self.resumes.push(resume);
                self.resumes_at.push(self.lines);
            }
            "ranks" => {
                let change = RanksEvent::deserialize(&event)?;
                self.ranks.push((change.step, change.ranks as u64));
                self.changes.push(change);
            }
            "checkpoint" => {
                self.checkpoints.push(step()?);
                // Version 0.8 and older did not say it.
                let manifest = event["manifest_blake3"].as_str();
                self.manifests
                    .extend(manifest.map(|it| (step().unwrap_or(0), it.into())));
            }
            "placement" => self.placement = Some(Audit::deserialize(&event)?),
            "confusion" => {
                let confusion = Confusion::deserialize(&event)?;
                if !confusion.is_sound() {
                    return Err(de::Error::custom("its numbers are inconsistent"));
                }
                self.confusion = Some(confusion);
            }
            _ => {}
        }
        if matches!(&*name, "step" | "resume") {
            // The run continued.
            self.last.remove("end");
        }
        self.last.insert(name, event);
        Ok(())
    }

    /// How the run ended.
    pub(crate) fn end(&self) -> Option<&Value> {
        self.last.get("end")
    }

    /// A number of the last event.
    pub(crate) fn of_end(&self, name: &str) -> Option<f64> {
        self.end()?[name].as_f64()
    }

    /// In which way the run ended, why, and its exit code.
    pub(crate) fn ending(&self) -> Option<(RunOutcome, &str, u8)> {
        let end = self.end()?;
        let reason = end["reason"].as_str().unwrap_or_default();
        let code = end["exit_code"].as_u64().unwrap_or(0) as u8;
        let outcome = RunOutcome::deserialize(&end["outcome"]);
        // A log of version 0.6 has only reason and code.
        let outcome = outcome.unwrap_or_else(|_| match RunOutcome::of_exit_code(code) {
            RunOutcome::Done if reason != "done" => RunOutcome::Early,
            other => other,
        });
        Some((outcome, reason, code))
    }

    /// The last logged step; 0 before the first.
    pub(crate) fn last_step(&self) -> u64 {
        self.steps.steps.last().copied().unwrap_or(0)
    }

    /// The best evaluation by the figure that the last one names, the first of several.
    pub(crate) fn best(&self) -> Option<Best> {
        let by = BestBy::deserialize(&self.last.get("eval")?["best_by"]).unwrap_or_default();
        let [losses, accuracies, figures] =
            ["loss", "accuracy", by.names()[0]].map(|name| self.evals.values(name));
        let known = losses.zip(accuracies).zip(figures).filter_map(
            |(((step, loss), (_, accuracy)), (_, figure))| {
                Some(Best {
                    step,
                    loss: loss?,
                    accuracy,
                    by: Some((by, figure?)).filter(|_| by != BestBy::Loss),
                })
            },
        );
        known.min_by(|a, b| a.cost().total_cmp(&b.cost()))
    }

    /// A message that the best evaluation is not the last one; other commands use its checkpoint.
    pub(crate) fn best_is_earlier(&self) -> Option<String> {
        let (best, last) = (self.best()?, *self.evals.steps.last()?);
        let (step, text) = self.eval_texts().find(|(step, _)| *step == best.step)?;
        let why = if self.evals.newest("loss") > Some(best.loss) {
            "The held-out loss has risen since"
        } else {
            "The best evaluation is that after"
        };
        (step < last && self.checkpoints.contains(&step)).then(|| {
            format!(
                "{why} step {step} ({text}), whose checkpoint eval and predict use. Figures and \
                 matrix are of step {last}."
            )
        })
    }

    /// What the scale of the loss depends on.
    pub(crate) fn scale(&self) -> String {
        let value = |name| self.config().get(name).map_or(String::new(), as_flag);
        let [weights, smoothing] = ["class-weights", "label-smoothing"].map(value);
        format!("class weights {weights}, label smoothing {smoothing}")
    }

    /// The step and the figures of each evaluation: `loss 0.3124, accuracy 93.10%`.
    pub(crate) fn eval_texts(&self) -> impl DoubleEndedIterator<Item = (u64, String)> {
        let text = |at: usize| {
            let finite = |value: &f64| value.is_finite();
            let value = |name: &str| Some(self.evals.columns.get(name)?[at]).filter(finite);
            let mut text = format!("loss {}", significant(value("loss").unwrap_or(f64::NAN), 4));
            if let Some(part) = value("accuracy") {
                text += &format!(", accuracy {:.2}%", 100.0 * part);
            }
            text + &figures_text(value)
        };
        let steps = self.evals.steps.iter().enumerate();
        steps.map(move |(at, step)| (*step, text(at)))
    }

    /// All settings, after the last resume.
    pub(crate) fn config(&self) -> &Map<String, Value> {
        let resumed = self.resumes.iter().rev().map(|resume| &resume.config);
        let mut known = resumed.filter(|config| !config.is_empty());
        known.next().unwrap_or(&self.start.config)
    }

    /// Steps of the whole run, after the last resume.
    pub(crate) fn planned(&self) -> Option<u64> {
        let mut resumed = self.resumes.iter().rev().filter_map(|resume| resume.steps);
        resumed.next().or(self.start.steps)
    }

    /// The devices by rank, after the last resume.
    pub(crate) fn devices(&self) -> &[String] {
        let resumed = self.resumes.last().map(|resume| &resume.devices);
        let resumed = resumed.filter(|devices| !devices.is_empty());
        resumed.unwrap_or(&self.start.devices)
    }

    /// The number of ranks at the end.
    pub(crate) fn ranks(&self) -> u64 {
        self.ranks.last().map_or(0, |(_, ranks)| *ranks)
    }

    /// Whether the run used simulated GPUs, whose times mean nothing.
    pub(crate) fn is_simulated(&self) -> bool {
        let mut devices = self.devices().iter();
        self.placement.as_ref().is_some_and(|audit| audit.simulated)
            || devices.any(|device| device.contains("Simulated"))
    }
}

/// Refuses a checkpoint of another run: settings or data that its run never had, according to the
/// metrics log of the run in whose folder it is. Call it when all ranks have opened the checkpoint:
/// a job in training may remove it while the log is read.
pub fn check_run(opened: &Opened) -> Result<()> {
    let folder = opened.folder.canonicalize().unwrap_or_default();
    let parent = folder.parent();
    let checkpoints = parent.filter(|parent| parent.ends_with(CHECKPOINTS));
    let Some(out) = checkpoints.and_then(Path::parent) else {
        return Ok(());
    };
    if !out.join(EVENTS_FILE).exists() {
        return Ok(());
    }
    // There may be millions of others.
    let is_wanted = |line: &[u8]| event_of(line).is_some_and(|it| it == "start" || it == "resume");
    let run = Run::read_log(out, is_wanted)?;
    // Without its first line, or with one of another version, a log says nothing.
    let settings = Some(&run.start.config).filter(|settings| !settings.is_empty());
    let Some(then) = settings.and_then(|settings| Config::from_checkpoint(settings).ok()) else {
        return Ok(());
    };
    let mut changes = Config::of_checkpoint(opened)?.changes(&then);
    if opened.state.fingerprint != run.start.fingerprint {
        changes.push(format!("{DATA} with other rows"));
    }
    // A resume with --override may have changed them.
    let overridden = || run.resumes.iter().flat_map(|resume| &resume.overridden);
    let change = changes.into_iter().find(|change| {
        let name = change.split_inclusive(' ').next().unwrap_or_default();
        !overridden().any(|known| known.starts_with(name))
    });
    change.map_or(Ok(()), |change| {
        Err(Error::Data(format!(
            "{}: expected a checkpoint of the run in {}, got one of another run, with {change}; \
             help: move it to its own run, or out of this one",
            opened.folder.display(),
            out.display()
        )))
    })
}
