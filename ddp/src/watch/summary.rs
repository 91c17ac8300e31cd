//! What a record holds, in words.

use super::follow::Followed;
use crate::report::read::{Run, StepLine};
use crate::shown::{shown, significant};
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
    lines.extend(
        figures(run)
            .into_iter()
            .map(|(name, text)| format!("{name}: {text}")),
    );
    lines.extend(events(run));
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

/// Names and values: losses, rates, ranks, memory.
pub(super) fn figures(run: &Run) -> Vec<(&'static str, String)> {
    let number = |value: f64| significant(value, 4);
    let mut all: Vec<(&'static str, String)> = Vec::new();
    let mut add = |name, text: Option<String>| all.extend(text.map(|text| (name, text)));
    add("loss", last(run, |line| line.loss).map(number));
    let evals = || {
        run.evals
            .iter()
            .filter_map(|line| Some((line.loss?, line.step)))
    };
    let best = evals().reduce(|best, next| if next.0 < best.0 { next } else { best });
    let held_out = evals().next_back().map(|(loss, _)| {
        let best = best.map_or(String::new(), |(loss, step)| {
            format!(", lowest {} after step {}", number(loss), count(step))
        });
        number(loss) + &best
    });
    add("held-out loss", held_out);
    let accuracy = run.evals.last().and_then(|line| line.accuracy);
    add(
        "held-out accuracy",
        accuracy.map(|part| format!("{:.2}%", part * 100.0)),
    );
    add(
        "samples a second",
        last(run, |line| line.samples_per_s).map(|rate| count(rate as u64)),
    );
    let ms = |part: fn(&StepLine) -> Option<f64>| last(run, part);
    let step_ms = ms(|line| line.step_ms).map(|step| {
        let parts = [
            ("rows", ms(|line| line.data_ms)),
            ("reductions", ms(|line| line.reduce_ms)),
            ("saving", ms(|line| line.save_ms)),
        ];
        let parts = parts.into_iter().filter_map(|(name, ms)| Some((name, ms?)));
        let parts: Vec<String> = parts.map(|(name, ms)| format!("{name} {ms:.2}")).collect();
        match parts.is_empty() {
            true => format!("{step:.2} ms"),
            false => format!("{step:.2} ms (waiting for {})", parts.join(", ")),
        }
    });
    add("step", step_ms);
    add("learning rate", last(run, |line| line.lr).map(number));
    let device = run.devices().first();
    let ranks = device.map(|device| format!("{}, {}", plural(run.ranks(), "rank"), shown(device)));
    add("ranks", ranks);
    let end = run.end.as_ref();
    let peak_mb = end.and_then(|end| end.device_peak_mb);
    let peak_mb = peak_mb.or_else(|| last(run, |line| line.device_peak_mb));
    add("GPU memory of rank 0", peak_mb.map(megabytes));
    add(
        "memory of rank 0",
        end.and_then(|end| end.peak_mb).map(megabytes),
    );
    all
}

/// The last evaluations, checkpoints, resumes and the end, the newest last.
pub(super) fn events(run: &Run) -> Vec<String> {
    let mut all: Vec<(u64, String)> = Vec::new();
    for line in &run.evals {
        let accuracy = line
            .accuracy
            .map(|part| format!(", accuracy {:.2}%", part * 100.0));
        let loss = significant(line.loss.unwrap_or(f64::NAN), 4);
        all.push((
            line.step,
            format!("held-out loss {loss}{}", accuracy.unwrap_or_default()),
        ));
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

/// A finite value of the last logged step that has it.
fn last(run: &Run, value: impl Fn(&StepLine) -> Option<f64>) -> Option<f64> {
    let lines = run.steps.iter().rev();
    lines.filter_map(value).find(|value| value.is_finite())
}
