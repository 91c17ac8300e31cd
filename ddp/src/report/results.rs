//! What a run reached, in a few figures: for its page, `watch`, and the page of several runs.

pub(crate) use super::html::figure;
use super::html::{count, percent};
use super::read::{Run, StepLine};
use crate::evidence::{balanced_accuracy, largest_class};

/// A figure: what it is, its value, and what it is of; the last may be empty.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) note: String,
}

/// How good the model is on held-out rows, then the loss in training, then the speed.
pub(crate) fn results(run: &Run) -> Vec<Figure> {
    let mut all = Vec::new();
    let mut add = |name, value: Option<String>, note: String| {
        all.extend(value.map(|value| Figure { name, value, note }));
    };
    let (end, eval) = (run.end.as_ref(), run.evals.last());
    let number = |value: Option<f64>| value.map(|value| figure(Some(value)));
    let part = |value: Option<f64>| value.map(|value| percent(Some(value)));
    let of_eval = |name: &str| eval?.figure(name);

    let accuracy = end.and_then(|end| end.accuracy);
    let accuracy = accuracy.or_else(|| eval?.accuracy);
    add("Accuracy", part(accuracy), accuracy_note(run));
    // The confusion matrix is of the last evaluation of the run.
    let confusion = run.confusion.as_ref().filter(|_| end.is_some());
    let balanced = confusion.map(|confusion| balanced_accuracy(&confusion.scores()));
    add(
        "Balanced accuracy",
        part(balanced),
        "the mean recall of the classes".into(),
    );
    let units = "held out, in the units of the labels";
    add("RMSE", number(of_eval("rmse")), units.into());
    add("R²", number(of_eval("r2")), "of the held-out rows".into());
    let columns = eval.map_or(0, |eval| eval.columns.len());
    add(
        "Mean R²",
        number(of_eval("mean_r2")),
        format!("over {columns} columns, held out"),
    );
    let held_out = end.and_then(|end| end.eval_loss).or_else(|| eval?.loss);
    add("Held-out loss", number(held_out), best_text(run));
    add(
        "Perplexity",
        number(of_eval("perplexity")),
        "held out".into(),
    );
    add(
        "Bits per byte",
        number(of_eval("bits_per_byte")),
        "held out".into(),
    );
    let loss = end
        .and_then(|end| end.loss)
        .or_else(|| last(run, |line| line.loss));
    add(
        "Training loss",
        number(loss),
        "of the last logged step".into(),
    );
    let (tokens, samples, note) = match end {
        Some(end) => (
            end.tokens_per_s,
            end.samples_per_s,
            "all ranks, evaluations included",
        ),
        None => (
            last(run, |line| line.tokens_per_s),
            last(run, |line| line.samples_per_s),
            "all ranks, now",
        ),
    };
    match tokens {
        Some(_) => add("Tokens a second", number(tokens), note.into()),
        None => add("Samples a second", number(samples), note.into()),
    }
    let share = part(last(run, |line| line.product_share));
    add(
        "Speed of a step",
        share,
        "of what a large matmul reaches".into(),
    );
    all
}

/// `on 500 held-out rows; the largest class has 85.10 % of them`
fn accuracy_note(run: &Run) -> String {
    let rows = run
        .confusion
        .as_ref()
        .map(|confusion| confusion.rows.iter().sum());
    let rows = rows.map_or(String::new(), |rows| format!("{} ", count(rows)));
    let largest = match &run.confusion {
        Some(confusion) => largest_class(&confusion.rows),
        None => run.evals.last().and_then(|eval| eval.largest_class),
    };
    let largest = largest.map_or(String::new(), |part| {
        format!("; the largest class has {} of them", percent(Some(part)))
    });
    format!("on {rows}held-out rows{largest}")
}

/// `lowest 0.9050, after step 1,200`
fn best_text(run: &Run) -> String {
    let evals = run.evals.iter();
    let known = evals.filter_map(|line| Some((line.loss?, line.step)));
    let best = known.reduce(|best, next| if next.0 < best.0 { next } else { best });
    best.map_or(String::new(), |(loss, step)| {
        format!("lowest {}, after step {}", figure(Some(loss)), count(step))
    })
}

/// A finite value of the last logged step that has it.
pub(crate) fn last(run: &Run, value: impl Fn(&StepLine) -> Option<f64>) -> Option<f64> {
    let lines = run.steps.iter().rev();
    lines.filter_map(value).find(|value| value.is_finite())
}
