//! What a record holds, in words.

use super::follow::Followed;
use crate::report::read::{Run, TextLine};
use crate::report::results::{Figure, figure, last, results};
use crate::shown::shown;
use crate::units::{count, duration, megabytes, plural};

/// The last events that are listed.
const EVENTS_MAX: usize = 8;

/// A summary for a program or a file.
pub(super) fn lines(followed: &Followed) -> Vec<String> {
    let run = followed.run();
    let mut lines = vec![
        format!(
            "run {}: {}",
            shown(&followed.folder.to_string_lossy()),
            state(followed)
        ),
        progress(run),
    ];
    lines.extend(figures(run).into_iter().map(
        |Figure { name, value, note }| match note.is_empty() {
            true => format!("{name}: {value}"),
            false => format!("{name}: {value} ({note})"),
        },
    ));
    lines.extend(events(run));
    let text = run.texts.last();
    lines.extend(text.map(|text| format!("sample: {}", sample(text))));
    lines
}

/// `done`, `stopped: …`, `no end yet, last written 2.0 s ago`.
pub(super) fn state(followed: &Followed) -> String {
    if let Some(problem) = &followed.problem {
        return shown(&format!("the record cannot be read: {problem}"));
    }
    match &followed.run().end {
        Some(end) => match end.exit_code {
            Some(0) | None => shown(&end.reason),
            Some(code) => shown(&format!("exit code {code}: {}", end.reason)),
        },
        None => {
            let age = followed.age().map(|age| duration(age.as_secs_f64()));
            format!(
                "no end yet, last written {} ago",
                age.unwrap_or_else(|| "–".into())
            )
        }
    }
}

/// The prompt and what the model wrote after it, as one line.
pub(super) fn sample(line: &TextLine) -> String {
    shown(&format!("{}{}", line.prompt, line.text))
}

/// The last step, and all steps of the run.
pub(super) fn steps(run: &Run) -> (u64, u64) {
    let last = run.steps.last().map_or(0, |line| line.step);
    (last, run.start.steps.unwrap_or(0).max(last))
}

/// `step 120 of 600, about 3.10 s left`
pub(super) fn progress(run: &Run) -> String {
    let (step, steps) = steps(run);
    let left_s = last(run, |line| line.step_ms).map(|ms| ms / 1e3 * (steps - step) as f64);
    let left = left_s.filter(|_| run.end.is_none() && step < steps);
    let left = left.map_or(String::new(), |left| {
        format!(", about {} left", duration(left))
    });
    format!("step {} of {}{left}", count(step), count(steps))
}

/// Results, rates, ranks, memory.
pub(super) fn figures(run: &Run) -> Vec<Figure> {
    let mut all = results(run);
    let mut add = |name, value: Option<String>, note: String| {
        all.extend(value.map(|value| Figure { name, value, note }));
    };
    let parts = [
        ("rows", last(run, |line| line.data_ms)),
        ("reductions", last(run, |line| line.reduce_ms)),
        ("saving", last(run, |line| line.save_ms)),
    ];
    let parts = parts.into_iter().filter_map(|(name, ms)| Some((name, ms?)));
    let parts = parts.filter(|(_, ms)| *ms >= 0.01);
    let parts: Vec<String> = parts.map(|(name, ms)| format!("{name} {ms:.2}")).collect();
    let waits = match parts.is_empty() {
        true => String::new(),
        false => format!("waiting for {}", parts.join(", ")),
    };
    let step_ms = last(run, |line| line.step_ms);
    add("Step", step_ms.map(|step| format!("{step:.2} ms")), waits);
    let lr = last(run, |line| line.lr);
    add(
        "Learning rate",
        lr.map(|lr| figure(Some(lr))),
        String::new(),
    );
    let device = run.devices().first();
    let ranks = device.map(|_| count(run.ranks()));
    add(
        "Ranks",
        ranks,
        device.map_or(String::new(), |device| shown(device)),
    );
    let end = run.end.as_ref();
    let peak_mb = end.and_then(|end| end.device_peak_mb);
    let peak_mb = peak_mb.or_else(|| last(run, |line| line.device_peak_mb));
    add("GPU memory", peak_mb.map(megabytes), "of rank 0".into());
    let host = end.and_then(|end| end.peak_mb).map(megabytes);
    add("Host memory", host, "of rank 0".into());
    all
}

/// The last evaluations, checkpoints, resumes and the end, the newest last.
pub(super) fn events(run: &Run) -> Vec<String> {
    let mut all: Vec<(u64, String)> = Vec::new();
    for line in &run.evals {
        all.push((line.step, format!("held-out {}", line.text())));
    }
    all.extend(
        run.checkpoints
            .iter()
            .map(|step| (*step, "checkpoint saved".into())),
    );
    for resume in &run.resumes {
        all.push((
            resume.step,
            format!("resumed on {}", plural(resume.ranks.unwrap_or(1), "rank")),
        ));
    }
    all.sort_by_key(|(step, _)| *step);
    if let Some(end) = &run.end {
        all.push((end.steps.unwrap_or(0), shown(&end.reason)));
    }
    let first = all.len().saturating_sub(EVENTS_MAX);
    let text = |(step, text): &(u64, String)| format!("step {}: {text}", count(*step));
    all[first..].iter().map(text).collect()
}
