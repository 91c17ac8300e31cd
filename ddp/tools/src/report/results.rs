//! The results of a run in a few figures: for its page, `watch`, and the page of several runs.

use serde::Deserialize;

pub(crate) use super::html::figure;
use super::html::{joined, percent, shortened};
use crate::confusion::{Confusion, balanced_accuracy, largest_class};
use crate::devices::models;
use crate::metrics::Run;
use crate::shown::shown;
use crate::tasks::{Baselines, BestBy};
use crate::units::{count, duration, megabytes, plural};

/// A figure: its name, its value, and a note on what it refers to, which may be empty.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) note: String,
}

/// Figures, of which those without a value are left out.
#[derive(Default)]
pub(crate) struct Figures(pub(crate) Vec<Figure>);

impl Figures {
    pub(crate) fn add(
        &mut self,
        name: &'static str,
        value: Option<String>,
        note: impl Into<String>,
    ) {
        let note = note.into();
        let figure = value.map(|value| Figure { name, value, note });
        self.0.extend(figure);
    }
}

/// How good the model is on held-out rows, then the loss in training, then the speed.
pub(crate) fn results(run: &Run) -> Figures {
    let mut all = Figures::default();
    let number = |value: Option<f64>| value.map(|value| figure(Some(value)));
    let part = |value: Option<f64>| value.map(|value| percent(Some(value)));
    let (steps, evals, has_ended) = (&run.steps, &run.evals, run.end().is_some());
    let accuracy = run.of_end("accuracy").or_else(|| evals.newest("accuracy"));
    all.add("Accuracy", part(accuracy), accuracy_note(run));
    // The confusion matrix is of the last evaluation of the run.
    let confusion = run.confusion.as_ref().filter(|_| has_ended);
    let balanced = confusion.map(|confusion| balanced_accuracy(&confusion.scores()));
    let balanced = balanced.or_else(|| evals.newest("balanced_accuracy"));
    let note = "the mean recall of the classes";
    all.add("Balanced accuracy", part(balanced), note);
    let of_eval = |field: &str| number(evals.newest(field));
    all.add("AUC", of_eval("auc"), "held out");
    let note = "held out, in the units of the labels";
    all.add("RMSE", of_eval("rmse"), note);
    all.add(
        "R²",
        of_eval("r2"),
        joined(&["of the held-out rows", &beside(run)]),
    );
    let columns = format!("over {} columns, held out", run.column_errors.len());
    all.add(
        "Mean R²",
        of_eval("mean_r2"),
        joined(&[&columns, &beside(run)]),
    );
    if let Some(folds) = &run.start.out_of_fold
        && let Some(others) = &folds.others
    {
        let (name, value) = match &*others.figure {
            "accuracy" => ("Accuracy out of fold", part(folds.score)),
            _ => ("R² out of fold", number(folds.score)),
        };
        let note = joined(&["of rows that were not trained on", &listed(others)]);
        all.add(name, value, note);
    }
    let held_out = run.of_end("eval_loss").or_else(|| evals.newest("loss"));
    let best = run
        .best()
        .map_or(String::new(), |best| match (best.by(), count(best.step)) {
            ((BestBy::Loss, loss), step) => {
                format!("lowest {}, after step {step}", figure(Some(loss)))
            }
            ((by, figure), step) => {
                format!("the best model has {}, after step {step}", by.text(figure))
            }
        });
    all.add("Held-out loss", number(held_out), best);
    all.add("Perplexity", of_eval("perplexity"), "held out");
    all.add("Bits per byte", of_eval("bits_per_byte"), "held out");
    let loss = run.of_end("loss").or_else(|| steps.last("loss"));
    all.add("Training loss", number(loss), "of the last logged step");
    let rate = |field: &str| {
        if has_ended {
            number(run.of_end(field))
        } else {
            number(steps.last(field))
        }
    };
    let note = if has_ended {
        "all ranks, evaluations included"
    } else {
        "all ranks, now"
    };
    match rate("tokens_per_s") {
        None => all.add("Samples a second", rate("samples_per_s"), note),
        tokens => all.add("Tokens a second", tokens, note),
    }
    let share = part(steps.last("matmul_share"));
    all.add("Speed of a step", share, "of a large matmul's speed");
    all
}

/// The same, then what a step takes, where the run is and how far it came.
pub(crate) fn figures(run: &Run) -> Vec<Figure> {
    let (mut all, last) = (results(run), |field| run.steps.last(field));
    let wait = |name: &str, field| {
        let ms = last(field).filter(|ms| *ms >= 0.01);
        ms.map_or(String::new(), |ms| format!("{name} {ms:.2}"))
    };
    let rows = wait("rows", "data_ms");
    let (reductions, saving) = (wait("reductions", "reduce_ms"), wait("saving", "save_ms"));
    let mut waits = joined(&[&rows, &reductions, &saving]);
    if !waits.is_empty() {
        waits.insert_str(0, "waiting for ");
    }
    all.add(
        "Step",
        last("step_ms").map(|ms| format!("{ms:.2} ms")),
        waits,
    );
    all.add("Learning rate", last("lr").map(|lr| figure(Some(lr))), "");
    let mut ranks = count(run.ranks());
    if run.start.world.hosts > 1 {
        ranks += &format!(" on {}", plural(run.start.world.hosts, "host"));
    }
    all.add("Ranks", Some(ranks), kinds_of_devices(run));
    let peak_mb = run.of_end("device_peak_mb").or(last("device_peak_mb"));
    let note = "of rank 0, at the peak";
    all.add("GPU memory", peak_mb.map(megabytes), note);
    let peak_mb = run.of_end("peak_mb").map(megabytes);
    all.add("Host memory", peak_mb, note);
    let seconds = run.of_end("seconds").filter(|_| !run.is_simulated());
    let since = run.resumes.last().map(|resume| count(resume.step));
    let since = since.map(|step| format!("since it was resumed after step {step}"));
    all.add("Time", seconds.map(duration), since.unwrap_or_default());
    let whole = |name: &str| run.end().and_then(|end| end[name].as_u64());
    let steps = whole("steps").unwrap_or(0).max(run.last_step());
    let mut of_all = count(steps);
    if let Some(all) = run.planned().filter(|all| *all != steps) {
        of_all += &format!(" of {}", count(all));
    }
    let unit = match run.of_end("tokens_per_s") {
        None => "samples",
        Some(_) => "windows of tokens",
    };
    let samples = whole("samples").map(|samples| format!("{} {unit}", count(samples)));
    let samples = samples.unwrap_or_default();
    all.add("Steps", Some(of_all), samples);
    all.add("Parameters", run.start.parameters.map(count), "");
    all.0
}

/// `2 × NVIDIA H200`, `4 × cpu`: devices without their numbers and hosts.
fn kinds_of_devices(run: &Run) -> String {
    let text = |(kind, number): (&str, u64)| format!("{number} × {}", shown(&shortened(kind, 60)));
    let kinds = models(run.devices()).into_iter().take(4).map(text);
    kinds.collect::<Vec<_>>().join(", ")
}

/// `on 500 held-out rows; the largest class has 85.10 % of them`
fn accuracy_note(run: &Run) -> String {
    let (rows, largest) = match &run.confusion {
        Some(Confusion { rows, .. }) => {
            let all = rows.iter().sum();
            (format!("{} ", count(all)), largest_class(rows))
        }
        None => (String::new(), run.evals.newest("largest_class")),
    };
    let largest = largest.map(|part| percent(Some(part)));
    let largest = largest.map(|part| format!("; the largest class has {part} of them"));
    let others = Some(beside(run)).filter(|it| !it.is_empty());
    let note = others.map(|others| format!("; {others}")).or(largest);
    format!("on {rows}held-out rows{}", note.unwrap_or_default())
}

/// `a linear model: 0.9300, the mean of the labels: −0.0016`: simple models on the same rows.
fn beside(run: &Run) -> String {
    let others = run.last.get("baselines").map(Baselines::deserialize);
    others
        .and_then(Result::ok)
        .map_or(String::new(), |others| listed(&others))
}

fn listed(others: &Baselines) -> String {
    let (text, constant) = match &*others.figure {
        "accuracy" => (percent as fn(_) -> _, "the largest class"),
        _ => (figure as _, "the mean of the labels"),
    };
    let linear = others
        .linear
        .map(|value| format!("a linear model: {}", text(Some(value))));
    let constant = format!("{constant}: {}", text(Some(others.constant)));
    joined(&[&linear.unwrap_or_default(), &constant])
}
