//! What a run reached, in a few figures: for its page, `watch`, and the page of several runs.

pub(crate) use super::html::figure;
use super::html::{count, percent};
use crate::metrics::Run;
use crate::samples::{Confusion, balanced_accuracy, largest_class};

/// A figure: what it is, its value, and what it is of; the last may be empty.
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
    let note = "the mean recall of the classes";
    all.add("Balanced accuracy", part(balanced), note);
    let of_eval = |field: &str| number(evals.newest(field));
    let note = "held out, in the units of the labels";
    all.add("RMSE", of_eval("rmse"), note);
    all.add("R²", of_eval("r2"), "of the held-out rows");
    let columns = format!("over {} columns, held out", run.column_errors.len());
    all.add("Mean R²", of_eval("mean_r2"), columns);
    let held_out = run.of_end("eval_loss").or_else(|| evals.newest("loss"));
    let best = run
        .best()
        .map(|best| (figure(Some(best.loss)), count(best.step)));
    let best = best.map(|(loss, step)| format!("lowest {loss}, after step {step}"));
    all.add("Held-out loss", number(held_out), best.unwrap_or_default());
    all.add("Perplexity", of_eval("perplexity"), "held out");
    all.add("Bits per byte", of_eval("bits_per_byte"), "held out");
    let loss = run.of_end("loss").or_else(|| steps.last("loss"));
    all.add("Training loss", number(loss), "of the last logged step");
    let rate = |field: &str| match has_ended {
        true => number(run.of_end(field)),
        false => number(steps.last(field)),
    };
    let note = match has_ended {
        true => "all ranks, evaluations included",
        false => "all ranks, now",
    };
    match rate("tokens_per_s") {
        None => all.add("Samples a second", rate("samples_per_s"), note),
        tokens => all.add("Tokens a second", tokens, note),
    }
    let share = part(steps.last("matmul_share"));
    all.add("Speed of a step", share, "of what a large matmul reaches");
    all
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
    format!("on {rows}held-out rows{}", largest.unwrap_or_default())
}
