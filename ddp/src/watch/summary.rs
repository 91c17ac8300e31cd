//! What a metrics log holds, in words.

use super::follow::Followed;
use crate::metrics::{Run, TextLine};
use crate::report::results::{Figure, figure, results};
use crate::shown::shown;
use crate::units::{count, duration, megabytes, plural};

/// The last events that are listed.
const EVENTS_MAX: usize = 8;

/// A summary for a program or a file.
pub(super) fn lines(followed: &Followed) -> Vec<String> {
    let run = &followed.run;
    let folder = shown(&followed.folder.to_string_lossy());
    let mut lines = vec![format!("run {folder}: {}", state(followed)), progress(run)];
    let line = |Figure { name, value, note }| match String::is_empty(&note) {
        true => format!("{name}: {value}"),
        false => format!("{name}: {value} ({note})"),
    };
    lines.extend(figures(run).into_iter().map(line));
    lines.extend(events(run));
    let text = run.texts.last();
    lines.extend(text.map(|text| format!("sample: {}", sample(text))));
    lines
}

/// `done`, `stopped: …`, `no end yet, last written 2.0 s ago`.
pub(super) fn state(followed: &Followed) -> String {
    if let Some(problem) = &followed.problem {
        return shown(&format!("the metrics log cannot be read: {problem}"));
    }
    match followed.run.ending() {
        Some((reason, 0)) => shown(reason),
        Some((reason, code)) => shown(&format!("exit code {code}: {reason}")),
        None => {
            let age = followed.age().map_or(f64::NAN, |age| age.as_secs_f64());
            format!("no end yet, last written {} ago", duration(age))
        }
    }
}

/// The prompt and what the model wrote after it, as one line.
pub(super) fn sample(line: &TextLine) -> String {
    shown(&format!("{}{}", line.prompt, line.text))
}

/// The last step, and all steps of the run.
pub(super) fn steps(run: &Run) -> (u64, u64) {
    let last = run.last_step();
    (last, run.start.steps.unwrap_or(0).max(last))
}

/// `step 120 of 600, about 3.10 s left`
pub(super) fn progress(run: &Run) -> String {
    let (step, steps) = steps(run);
    let step_ms = run.steps.last("step_ms");
    let step_ms = step_ms.filter(|_| run.end().is_none() && step < steps);
    let left = step_ms.map(|ms| duration(ms / 1e3 * (steps - step) as f64));
    let left = left.map(|left| format!(", about {left} left"));
    let (step, steps) = (count(step), count(steps));
    format!("step {step} of {steps}{}", left.unwrap_or_default())
}

/// Results, rates, ranks, memory.
pub(super) fn figures(run: &Run) -> Vec<Figure> {
    let mut all = results(run);
    let parts = [
        ("rows", "data_ms"),
        ("reductions", "reduce_ms"),
        ("saving", "save_ms"),
    ];
    let part = |(name, field): (&str, &str)| {
        let ms = run.steps.last(field).filter(|ms| *ms >= 0.01)?;
        Some(format!("{name} {ms:.2}"))
    };
    let parts: Vec<String> = parts.into_iter().filter_map(part).collect();
    let waits = match parts.is_empty() {
        true => String::new(),
        false => format!("waiting for {}", parts.join(", ")),
    };
    let step_ms = run.steps.last("step_ms");
    all.add("Step", step_ms.map(|step| format!("{step:.2} ms")), waits);
    let lr = run.steps.last("lr").map(|lr| figure(Some(lr)));
    all.add("Learning rate", lr, "");
    if let Some(device) = run.devices().first() {
        all.add("Ranks", Some(count(run.ranks())), shown(device));
    }
    let peak_mb = run.of_end("device_peak_mb");
    let peak_mb = peak_mb.or_else(|| run.steps.last("device_peak_mb"));
    all.add("GPU memory", peak_mb.map(megabytes), "of rank 0");
    let peak_mb = run.of_end("peak_mb").map(megabytes);
    all.add("Host memory", peak_mb, "of rank 0");
    all.0
}

/// The last evaluations, checkpoints, resumes, changes of ranks and the end, the newest last.
pub(super) fn events(run: &Run) -> Vec<String> {
    let evals = run.eval_texts();
    let mut all: Vec<(u64, String)> = evals
        .map(|(step, text)| (step, format!("held-out {text}")))
        .collect();
    let saved = run.checkpoints.iter();
    all.extend(saved.map(|step| (*step, "checkpoint saved".into())));
    for resume in &run.resumes {
        let ranks = plural(resume.ranks.unwrap_or(1), "rank");
        all.push((resume.step, format!("resumed on {ranks}")));
    }
    let changes = run.changes.iter();
    all.extend(changes.map(|change| (change.step, shown(&change.to_string()))));
    all.sort_by_key(|(step, _)| *step);
    if let (Some((reason, _)), Some(end)) = (run.ending(), run.end()) {
        all.push((end["steps"].as_u64().unwrap_or(0), shown(reason)));
    }
    let first = all.len().saturating_sub(EVENTS_MAX);
    let text = |(step, text): &(u64, String)| format!("step {}: {text}", count(*step));
    all[first..].iter().map(text).collect()
}
