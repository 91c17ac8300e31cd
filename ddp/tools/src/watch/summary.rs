//! Reads the metrics log of a run as it grows, and puts it into words.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::error::{Error, Result};
use crate::metrics::Run;
use crate::metrics_log::{EVENTS_FILE, RunOutcome, SampleEvent};
use crate::report::charts::{self, Curve, joined};
use crate::report::results::{Figure, figure, figures};
use crate::setting::OUT;
use crate::shown::shown;
use crate::units::{count, duration, plural};

/// The last events that are listed.
const EVENTS_MAX: usize = 8;
/// The charts whose curves are drawn.
const CHARTS: usize = 2;
/// Bars by height, and how many a curve has at most.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const BARS_MAX: usize = 40;

/// A run whose log is read as it grows. A run that resumes cuts it: then it is read again.
pub(super) struct Followed {
    pub(super) folder: PathBuf,
    pub(super) run: Run,
    /// Why the log cannot be read at the moment.
    pub(super) problem: Option<String>,
}

impl Followed {
    /// Reads what was added. If the log cannot be read, what was read before stays.
    pub(super) fn refresh(&mut self) {
        self.problem = self
            .run
            .refresh(|_| true)
            .err()
            .map(|error| error.to_string());
    }

    /// How long ago the log was written to.
    pub(super) fn age(&self) -> Option<Duration> {
        let written = fs::metadata(self.folder.join(EVENTS_FILE)).and_then(|file| file.modified());
        SystemTime::now().duration_since(written.ok()?).ok()
    }
}

/// The run in `folder`. Its log must be there and have a start.
pub(super) fn open(folder: &Path) -> Result<Followed> {
    if !folder.join(EVENTS_FILE).exists() {
        return Err(Error::Usage(format!(
            "watch {}: expected the folder of a run, which has {EVENTS_FILE}, got none; help: give \
             what its {OUT} was, once it has begun",
            folder.display()
        )));
    }
    Ok(Followed {
        folder: folder.to_path_buf(),
        run: Run::read(folder)?,
        problem: None,
    })
}

/// A summary for a program or a file.
pub(super) fn lines(followed: &Followed) -> Vec<String> {
    let run = &followed.run;
    let folder = shown(&followed.folder.to_string_lossy());
    let mut lines = vec![format!("run {folder}: {}", state(followed)), progress(run)];
    let charts = charts::of_run(run).into_iter().take(CHARTS);
    lines.extend(charts.flat_map(|chart| {
        let line =
            |curve: &Curve| format!("{}  {}", joined(&[chart.title, &curve.name]), drawn(curve));
        chart.curves.iter().map(line).collect::<Vec<_>>()
    }));
    lines.extend(events(run));
    let text = run.texts.last();
    lines.extend(text.map(|text| format!("sample: {}", sample(text))));
    let line = |Figure { name, value, note }| {
        if String::is_empty(&note) {
            format!("{name}: {value}")
        } else {
            format!("{name}: {value} ({note})")
        }
    };
    lines.extend(figures(run).into_iter().map(line));
    lines
}

/// A curve as bars, with its first and its last value.
fn drawn(curve: &Curve) -> String {
    let values: Vec<f64> = curve.points.iter().filter_map(|point| point.1).collect();
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let count = values.len().min(BARS_MAX);
    let bar = |at: usize| {
        let value = values[at * (values.len() - 1) / (count - 1).max(1)];
        let part = (value - low) / (high - low);
        BARS[(part * 7.999) as usize]
    };
    let bars: String = (0..count).map(bar).collect();
    let [first, last] = [values.first(), values.last()].map(|value| figure(value.copied()));
    format!("{first} {bars} {last}")
}

/// `done`, `stopped: …`, `no end yet, last written 2.0 s ago`.
fn state(followed: &Followed) -> String {
    if let Some(problem) = &followed.problem {
        return shown(&format!("the metrics log cannot be read: {problem}"));
    }
    match followed.run.ending() {
        Some((RunOutcome::Done | RunOutcome::Early, reason, _)) => shown(reason),
        Some((RunOutcome::Stopped | RunOutcome::Failed, reason, code)) => {
            shown(&format!("exit code {code}: {reason}"))
        }
        None => {
            let age = followed.age().map_or(f64::NAN, |age| age.as_secs_f64());
            format!("no end yet, last written {} ago", duration(age))
        }
    }
}

/// The prompt and what the model wrote after it, as one line.
fn sample(line: &SampleEvent) -> String {
    shown(&format!("{}{}", line.first.prompt, line.first.text))
}

/// `step 120 of 600, about 3.10 s left`
fn progress(run: &Run) -> String {
    let step = run.last_step();
    let steps = run.planned().unwrap_or(0).max(step);
    let step_ms = run.steps.last("step_ms");
    let step_ms = step_ms.filter(|_| run.end().is_none() && step < steps);
    let left = step_ms.map(|ms| duration(ms / 1e3 * (steps - step) as f64));
    let left = left.map(|left| format!(", about {left} left"));
    let (step, steps) = (count(step), count(steps));
    format!("step {step} of {steps}{}", left.unwrap_or_default())
}

/// The last evaluations, checkpoints, resumes, changes of ranks and the end, the newest last.
fn events(run: &Run) -> Vec<String> {
    let evals = run.eval_texts();
    let evals = evals.map(|(step, text)| (step, format!("held-out {text}")));
    let saved = run.checkpoints.iter();
    let saved = saved.map(|step| (*step, "checkpoint saved".into()));
    let mut all: Vec<(u64, String)> = evals.chain(saved).collect();
    for resume in &run.resumes {
        let ranks = plural(resume.ranks.unwrap_or(1), "rank");
        all.push((resume.step, format!("resumed on {ranks}")));
    }
    let changes = run.changes.iter();
    all.extend(changes.map(|change| (change.step, shown(&change.to_string()))));
    all.sort_by_key(|(step, _)| *step);
    if let (Some((_, reason, _)), Some(end)) = (run.ending(), run.end()) {
        all.push((end["steps"].as_u64().unwrap_or(0), shown(reason)));
    }
    let first = all.len().saturating_sub(EVENTS_MAX);
    let text = |(step, text): &(u64, String)| format!("step {}: {text}", count(*step));
    all[first..].iter().map(text).collect()
}
