//! What `--dry-run` predicts, beside what the run measured, with a sentence where they differ.

use super::html::{figure, table};
use super::read::{Run, StepLine};
use crate::audit::BETWEEN_RANKS;
use crate::units::megabytes;

/// Predictions are explained if they are off by more than this part.
const NEAR: f64 = 0.1;
/// A dry run times at most so many steps, after the first ones.
const FIRST_STEPS: std::ops::RangeInclusive<u64> = 2..=53;

/// A prediction and what came of it, in one unit.
struct Compared {
    what: &'static str,
    predicted: f64,
    measured: f64,
    shown: fn(f64) -> String,
    /// Why they may differ: what to look at.
    why: String,
}

/// The table and its sentences; None if nothing can be compared.
pub(super) fn section(run: &Run) -> Option<String> {
    let all = [memory(run), step_time(run), transfers(run)];
    let all = all.into_iter().flatten();
    let all: Vec<Compared> = all.filter(|one| one.predicted > 0.0).collect();
    let row = |one: &Compared| {
        let ratio = one.measured / one.predicted;
        vec![
            one.what.to_string(),
            (one.shown)(one.predicted),
            (one.shown)(one.measured),
            format!("{ratio:.2}"),
        ]
    };
    let headings = ["", "predicted", "measured", "ratio"];
    let rows = table("Predicted and measured", &headings, 1, all.iter().map(row));
    let sentences: String = all.iter().filter_map(Compared::sentence).collect();
    (!all.is_empty()).then(|| rows + &sentences)
}

impl Compared {
    fn sentence(&self) -> Option<String> {
        let more = self.measured / self.predicted - 1.0;
        if more.abs() <= NEAR {
            return None;
        }
        let how = match more {
            1.0.. => format!("{:.1} times the prediction", more + 1.0),
            0.0.. => format!("{:.0} % above the prediction", more * 100.0),
            _ => format!("{:.0} % below the prediction", -more * 100.0),
        };
        Some(format!(
            "<p class=\"note\">{} is {how}: {}.</p>",
            self.what, self.why
        ))
    }
}

/// The model's memory on a rank, which `--dry-run` adds up, and the peak of rank 0.
fn memory(run: &Run) -> Option<Compared> {
    let end = run.end.as_ref()?;
    let rest = match end.device_peak_mb {
        Some(_) => "activations, batches and the memory of libraries come on top",
        None => "activations, batches, data and the program itself come on top",
    };
    Some(Compared {
        what: "The memory of a rank",
        predicted: run.start.predicted.model_mb?,
        measured: end.device_peak_mb.or(end.peak_mb)?,
        shown: megabytes,
        why: format!(
            "the prediction is parameters, gradients, moments and the copy being saved; {rest}"
        ),
    })
}

/// The median of the first steps, which are those that a dry run times, and the median of the rest.
fn step_time(run: &Run) -> Option<Compared> {
    let is_first = |line: &&StepLine| FIRST_STEPS.contains(&line.step);
    let (first, rest): (Vec<_>, Vec<_>) = run.steps.iter().partition(is_first);
    let rest: Vec<&StepLine> = rest
        .into_iter()
        .filter(|line: &&StepLine| line.step > *FIRST_STEPS.end())
        .collect();
    let of = |lines: &[&StepLine], part: fn(&StepLine) -> Option<f64>| {
        median(lines.iter().filter_map(|line| part(line)).collect())
    };
    let grown = |part| Some(of(&rest, part)? - of(&first, part)?);
    let parts = [
        ("waiting for rows", grown(|line| line.data_ms)),
        ("waiting for reductions", grown(|line| line.reduce_ms)),
        ("saving", grown(|line| line.save_ms)),
    ];
    let (predicted, measured) = (
        of(&first, |line| line.step_ms)?,
        of(&rest, |line| line.step_ms)?,
    );
    let whole = measured - predicted;
    let known = parts.into_iter().filter_map(|(name, ms)| Some((name, ms?)));
    let most = known.max_by(|a, b| (a.1 * whole.signum()).total_cmp(&(b.1 * whole.signum())));
    let why = match most {
        Some((name, ms)) if ms / whole > 0.5 => {
            format!("{name} changed by {ms:+.2} ms of {whole:+.2} ms a step")
        }
        _ => format!("the layers themselves changed by most of {whole:+.2} ms a step"),
    };
    Some(Compared {
        what: "The time of a step",
        predicted,
        measured,
        shown: |ms| format!("{} ms", figure(Some(ms))),
        why: format!("the prediction is the median of steps 2 to 53, which a dry run times; {why}"),
    })
}

/// Bytes between ranks in a step.
fn transfers(run: &Run) -> Option<Compared> {
    let rank = run.placement.as_ref()?.ranks.first()?;
    let predicted = run.start.predicted.between_ranks_bytes?;
    Some(Compared {
        what: "What a rank sends in a step",
        predicted,
        measured: rank.per_step.get(BETWEEN_RANKS)?.bytes,
        shown: |bytes| megabytes(bytes / 1e6),
        why: "the prediction is the gradients, and under ZeRO-1 the values; sums of losses, buffers, \
              Muon's matrices and stop polls come on top"
            .to_string(),
    })
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
