//! What a model has to be better than: one answer for all rows, and a linear model. That is ridge
//! regression in closed form, from sums of products of columns, which are added row after row in
//! f64. Its cost is bounded, so one rank computes it alone, with the same bits among any number.

use ddp_data::{Dataset, TaskSpec, read_rows};
use ddp_kernels::DType;
use serde::{Deserialize, Serialize};

use super::differences::{Differences, mean_r2};
use crate::confusion::first_largest;
use crate::error::Result;
use crate::shown::significant;

/// The cost of squares of weights beside that of errors, for features of deviation 1: as in
/// scikit-learn's `Ridge`.
const PENALTY: f64 = 1.0;
/// With more columns, features and targets together, there is no linear model.
const COLUMNS_MAX: usize = 512;
/// The most products that are added up: about two seconds. Of more rows, some are fitted.
const PRODUCTS_MAX: usize = 1 << 32;
/// Rows that are read at a time.
const PIECE_ROWS: usize = 1024;
/// Less of a column's mean square is the rounding error of its variance.
const VARIANCE_MIN: f64 = 1e-10;

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
    let linear = sums.fit().filter(|_| is_small);
    let models = [Some(sums.constant()), linear];
    let differences = Differences::of(outputs, None);
    let mut errors = [(); 2].map(|()| vec![0.0; differences.sum_count()]);
    let (mut right, rows) = ([0u64; 2], held_out.rows());
    each_row(held_out, rows, &mut |x, targets| {
        for (at, model) in models.iter().enumerate() {
            let Some(model) = model else { continue };
            let answer = sums.answer(model, x);
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

/// Gives `count` rows, evenly spread over all, to `each`: inputs and targets.
fn each_row(dataset: &dyn Dataset, count: u64, each: &mut dyn FnMut(&[f32], &[f32])) -> Result<()> {
    let row = |at: u64| (u128::from(at) * u128::from(dataset.rows()) / u128::from(count)) as u64;
    let rows: Vec<u64> = (0..count).map(row).collect();
    let (inputs, targets) = (&dataset.spec().inputs, &dataset.spec().targets);
    for rows in rows.chunks(PIECE_ROWS) {
        let numbers = read_rows(dataset, rows)?.map(|rows| rows.to_dtype(DType::F32));
        let [x, y] = numbers.map(|rows| rows.and_then(|rows| rows.to_vec::<f32>()));
        let (x, y) = (x?, y?);
        let both = x
            .chunks(inputs.elements())
            .zip(y.chunks(targets.elements()));
        both.for_each(|(x, y)| each(x, y));
    }
    Ok(())
}

/// The weights of the one and of each feature; (1 + features, outputs).
type Weights = Vec<f64>;

/// Sums over rows of products of columns: a one, the features and the outputs.
struct Products {
    features: usize,
    outputs: usize,
    /// What is subtracted from features, so that the digits of large ones stay.
    origin: Vec<f64>,
    /// (columns, columns), of which the upper half is used.
    sums: Vec<f64>,
}

impl Products {
    fn of(dataset: &dyn Dataset, features: usize, outputs: usize) -> Result<Products> {
        let columns = 1 + features + outputs;
        let most = (PRODUCTS_MAX / (columns * columns)) as u64;
        let (mut origin, mut row) = (Vec::new(), vec![0.0; columns]);
        let mut sums = vec![0.0; columns * columns];
        each_row(dataset, dataset.rows().min(most), &mut |x, targets| {
            if origin.is_empty() {
                origin = x[..features].to_vec();
            }
            row.fill(0.0);
            row[0] = 1.0;
            for (value, (x, origin)) in row[1..].iter_mut().zip(x.iter().zip(&origin)) {
                *value = f64::from(*x) - f64::from(*origin);
            }
            let own = &mut row[1 + features..];
            match targets {
                [class] if outputs > 1 => own[*class as usize] = 1.0,
                numbers => own
                    .iter_mut()
                    .zip(numbers)
                    .for_each(|(own, it)| *own = f64::from(*it)),
            }
            let rows = sums.chunks_mut(columns).enumerate();
            for (first, sums) in rows.filter(|(first, _)| row[*first] != 0.0) {
                let pairs = sums[first..].iter_mut().zip(&row[first..]);
                pairs.for_each(|(sum, value)| *sum += row[first] * value);
            }
        })?;
        Ok(Products {
            features,
            outputs,
            origin: origin.into_iter().map(f64::from).collect(),
            sums,
        })
    }

    fn mean(&self, column: usize) -> f64 {
        self.sums[column] / self.sums[0]
    }

    /// The mean product of two columns' differences from their means; `first` is not after
    /// `second`.
    fn spread(&self, first: usize, second: usize) -> f64 {
        let columns = 1 + self.features + self.outputs;
        let product = self.sums[first * columns + second] / self.sums[0];
        let spread = product - self.mean(first) * self.mean(second);
        // A column that is the same in all rows.
        let is_rounding = first == second && spread <= VARIANCE_MIN * product;
        if is_rounding { 0.0 } else { spread }
    }

    /// One answer for all rows: the mean of each output.
    fn constant(&self) -> Weights {
        let mean = |output: usize| self.mean(1 + self.features + output);
        let mut weights: Vec<f64> = (0..self.outputs).map(mean).collect();
        weights.resize((1 + self.features) * self.outputs, 0.0);
        weights
    }

    /// The weights with the least squares of errors and, times the penalty, of weights.
    fn fit(&self) -> Option<Weights> {
        let (features, outputs) = (self.features, self.outputs);
        let scale = |column: usize| {
            let deviation = self.spread(column, column).sqrt();
            if deviation > 0.0 {
                1.0 / deviation
            } else {
                0.0
            }
        };
        let scales: Vec<f64> = (1..=features).map(scale).collect();
        let mut factor: Vec<Vec<f64>> = Vec::new();
        // The lower factor of Cholesky's decomposition, a row after those before it.
        for row in 0..features {
            let mut own: Vec<f64> = Vec::with_capacity(row + 1);
            for column in 0..=row {
                let value = self.spread(column + 1, row + 1) * scales[row] * scales[column];
                let other = factor.get(column).unwrap_or(&own);
                let known: f64 = own.iter().zip(other).map(|(a, b)| a * b).sum();
                own.push(match factor.get(column) {
                    Some(other) => (value - known) / other[column],
                    None => (value + PENALTY / self.sums[0] - known).sqrt(),
                });
            }
            factor.push(own);
        }
        let mut weights = self.constant();
        for output in 0..outputs {
            let right = |at: usize| self.spread(at + 1, 1 + features + output) * scales[at];
            let mut solved: Vec<f64> = (0..features).map(right).collect();
            for row in 0..features {
                let known: f64 = factor[row]
                    .iter()
                    .zip(&solved[..row])
                    .map(|(a, b)| a * b)
                    .sum();
                solved[row] = (solved[row] - known) / factor[row][row];
            }
            for row in (0..features).rev() {
                let later = (row + 1..features).map(|at| factor[at][row] * solved[at]);
                solved[row] = (solved[row] - later.sum::<f64>()) / factor[row][row];
            }
            for (at, weight) in solved.iter().enumerate() {
                weights[(at + 1) * outputs + output] = weight * scales[at];
                weights[output] -= weight * scales[at] * self.mean(at + 1);
            }
        }
        weights
            .iter()
            .all(|weight| weight.is_finite())
            .then_some(weights)
    }

    /// What a model answers to a row.
    fn answer(&self, weights: &[f64], x: &[f32]) -> Vec<f32> {
        let mut answer = weights[..self.outputs].to_vec();
        let of_features = weights[self.outputs..].chunks(self.outputs);
        for ((x, origin), weights) in x.iter().zip(&self.origin).zip(of_features) {
            let x = f64::from(*x) - origin;
            answer
                .iter_mut()
                .zip(weights)
                .for_each(|(sum, weight)| *sum += x * weight);
        }
        answer.into_iter().map(|value| value as f32).collect()
    }
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
