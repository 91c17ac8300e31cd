//! What a model has to be better than: one answer for all rows, and ridge regression (`linear.rs`),
//! which one rank computes alone.

use ddp_data::{Dataset, TaskSpec};
use serde::{Deserialize, Serialize};

use super::differences::{Differences, mean_r2};
use super::linear::{COLUMNS_MAX, PRODUCTS_MAX, Products, each_row};
use crate::confusion::first_largest;
use crate::error::Result;
use crate::shown::significant;

/// The cost of squares of weights beside that of errors, for features of deviation 1: as in
/// scikit-learn's `Ridge`.
const PENALTY: f64 = 1.0;
/// How good other models are on held-out rows, by the figure that says it of this task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baselines {
    /// `accuracy`, `r2`, or of several columns `mean_r2`.
    pub figure: String,
    /// Of the largest class, or of the mean of the labels.
    pub constant: f64,
    /// Of a linear model; None if it would be too large.
    pub linear: Option<f64>,
    /// Of the labels of these rows, in the units of training, if they are one number.
    #[serde(skip)]
    pub variance: Option<f64>,
}

impl Baselines {
    /// `R² on the held-out rows: this model 0.9512, a linear model 0.9303, their mean -0.003`
    pub(crate) fn text(&self, rows: &str, model: Option<f64>) -> String {
        let [name, constant] = match &*self.figure {
            "accuracy" => ["accuracy", "the largest class"],
            "r2" => ["R²", "their mean"],
            _ => ["mean R²", "their means"],
        };
        let written = |value: f64| match name {
            "accuracy" => format!("{:.2}%", 100.0 * value),
            _ => significant(value, 4),
        };
        let of =
            |who: &str, value: Option<f64>| value.map(|value| format!("{who} {}", written(value)));
        let parts = [
            of("this model", model),
            of("a linear model", self.linear),
            of(constant, Some(self.constant)),
        ];
        format!(
            "{name} {rows}: {}",
            parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
        )
    }
}

/// The scores on `held_out` of models that are fitted to `train`; None if this task has none, or
/// there are too many rows.
pub(crate) fn beside(train: &dyn Dataset, held_out: &dyn Dataset) -> Result<Option<Baselines>> {
    let spec = train.spec();
    let (figure, outputs) = match &spec.task {
        TaskSpec::Classification(classes) if spec.targets.elements() == 1 => {
            ("accuracy", classes.count())
        }
        TaskSpec::Regression { outputs: 1 } => ("r2", 1),
        TaskSpec::Regression { outputs } => ("mean_r2", *outputs),
        TaskSpec::Classification(_) | TaskSpec::NextToken { .. } => return Ok(None),
    };
    let features = spec.inputs.elements();
    let is_small = features + outputs < COLUMNS_MAX;
    let features = if is_small { features } else { 0 };
    let products = usize::try_from(held_out.rows()).unwrap_or(usize::MAX);
    let products = products.saturating_mul((1 + features) * outputs);
    if train.rows() == 0 || held_out.rows() == 0 || products > PRODUCTS_MAX {
        return Ok(None);
    }
    let sums = Products::of(train, features, outputs)?;
    let linear = sums.ridge(PENALTY).filter(|_| is_small);
    let models = [Some(sums.constant()), linear];
    let differences = Differences::of(outputs, None);
    let mut errors = [(); 2].map(|()| vec![0.0; differences.sum_count()]);
    let (mut right, rows) = ([0u64; 2], held_out.rows());
    each_row(held_out, rows, &mut |x, targets| {
        for (at, model) in models.iter().enumerate() {
            let Some(model) = model else { continue };
            let answer = model.predicted(x);
            if figure == "accuracy" {
                right[at] += u64::from(first_largest(&answer) == targets[0] as usize);
            } else {
                let more = differences.sums_of(&answer, targets);
                let all = errors[at].iter_mut().zip(more);
                all.for_each(|(sum, more)| *sum += more);
            }
        }
    })?;
    let value = |at: usize| {
        models[at].as_ref()?;
        match figure {
            "accuracy" => Some(right[at] as f64 / rows as f64),
            _ => mean_r2(&differences.errors(&errors[at])),
        }
    };
    let of_constant = differences.errors(&errors[0]);
    let variance = match (&of_constant[..], value(0)) {
        ([one], Some(r2)) if figure == "r2" => one.rmse.map(|rmse| rmse * rmse / (1.0 - r2)),
        _ => None,
    };
    Ok(value(0).map(|constant| Baselines {
        figure: figure.into(),
        constant,
        linear: value(1),
        variance,
    }))
}

/// The means over `folds`, each with its number of rows; None unless all have one.
pub(crate) fn mean_of_folds(folds: &[(u64, Option<Baselines>)]) -> Option<Baselines> {
    let rows: u64 = folds.iter().map(|(rows, _)| rows).sum();
    let mean = |value: fn(&Baselines) -> Option<f64>| {
        let part =
            |(rows, it): &(u64, Option<Baselines>)| Some(value(it.as_ref()?)? * *rows as f64);
        let sum = folds.iter().map(part).sum::<Option<f64>>();
        sum.map(|sum| sum / rows as f64)
    };
    Some(Baselines {
        figure: folds.first()?.1.as_ref()?.figure.clone(),
        constant: mean(|it| Some(it.constant))?,
        linear: mean(|it| it.linear),
        variance: None,
    })
}

#[cfg(test)]
mod tests;
