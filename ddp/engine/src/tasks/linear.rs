//! Linear models in closed form: ridge regression of numbers, and linear discriminants of classes.
//! They follow from sums of products of columns, which are added row after row in f64. The cost is
//! bounded, and the bits are the same wherever it is done.

use ddp_data::{Dataset, TaskSpec, read_rows};
use ddp_kernels::DType;

use crate::error::Result;

/// With more columns, features and targets together, there is no linear model.
pub(super) const COLUMNS_MAX: usize = 512;
/// The most products that are added up: about two seconds. Of more rows, some are fitted.
pub(super) const PRODUCTS_MAX: usize = 1 << 32;
/// Rows that are read at a time.
const PIECE_ROWS: usize = 1024;
/// Less of a column's mean square is the rounding error of its variance.
const VARIANCE_MIN: f64 = 1e-10;
/// A class of fewer rows is as likely as one of so many.
const CLASS_ROWS_MIN: f64 = 0.5;

/// Gives `count` rows, evenly spread over all, to `each`: inputs and targets.
pub(super) fn each_row(
    dataset: &dyn Dataset,
    count: u64,
    each: &mut dyn FnMut(&[f32], &[f32]),
) -> Result<()> {
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

/// An answer for each output: a constant and a sum of weighted features.
pub(crate) struct Linear {
    /// (outputs)
    bias: Vec<f64>,
    /// (features, outputs)
    weights: Vec<f64>,
    /// What is subtracted from features, so that the digits of large ones stay.
    origin: Vec<f64>,
    /// Of numbers, the least and the greatest of each output, to which predictions are clipped.
    ranges: Vec<[f32; 2]>,
}

impl Linear {
    pub(super) fn predicted(&self, x: &[f32]) -> Vec<f32> {
        let mut answer = self.answer(x);
        for (value, [least, greatest]) in answer.iter_mut().zip(&self.ranges) {
            *value = value.clamp(*least, *greatest);
        }
        answer
    }

    pub(super) fn answer(&self, x: &[f32]) -> Vec<f32> {
        let mut answer = self.bias.clone();
        let of_features = self.weights.chunks(self.bias.len());
        for ((x, origin), weights) in x.iter().zip(&self.origin).zip(of_features) {
            let x = f64::from(*x) - origin;
            answer
                .iter_mut()
                .zip(weights)
                .for_each(|(sum, weight)| *sum += x * weight);
        }
        answer.into_iter().map(|value| value as f32).collect()
    }

    /// The weights (outputs, features) and the bias of a layer that answers the same.
    pub(crate) fn layer(&self) -> [Vec<f32>; 2] {
        let outputs = self.bias.len();
        let zero = vec![0.0; self.origin.len()];
        let of_output = |output: usize| self.weights.iter().skip(output).step_by(outputs);
        let weights = (0..outputs).flat_map(of_output).map(|it| *it as f32);
        [weights.collect(), self.answer(&zero)]
    }
}

/// Sums over rows of products of columns: a one, the features and the outputs.
pub(crate) struct Products {
    features: usize,
    outputs: usize,
    origin: Vec<f64>,
    ranges: Vec<[f32; 2]>,
    /// (columns, columns), of which the upper half is used.
    sums: Vec<f64>,
}

impl Products {
    pub(super) fn of(dataset: &dyn Dataset, features: usize, outputs: usize) -> Result<Products> {
        let columns = 1 + features + outputs;
        let most = (PRODUCTS_MAX / (columns * columns)) as u64;
        let (mut origin, mut row) = (Vec::new(), vec![0.0; columns]);
        let mut ranges = Vec::new();
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
                numbers => {
                    ranges.resize(numbers.len(), [f32::INFINITY, f32::NEG_INFINITY]);
                    let all = own.iter_mut().zip(&mut ranges).zip(numbers);
                    for ((own, [least, greatest]), it) in all {
                        *own = f64::from(*it);
                        (*least, *greatest) = (least.min(*it), greatest.max(*it));
                    }
                }
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
            ranges,
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
    pub(super) fn constant(&self) -> Linear {
        let mean = |output: usize| self.mean(1 + self.features + output);
        Linear {
            bias: (0..self.outputs).map(mean).collect(),
            weights: vec![0.0; self.features * self.outputs],
            origin: self.origin.clone(),
            ranges: self.ranges.clone(),
        }
    }

    /// The model with the least squares of errors and, times the penalty, of weights, for features
    /// of deviation 1.
    pub(super) fn ridge(&self, penalty: f64) -> Option<Linear> {
        let first = 1 + self.features;
        self.solve(
            penalty,
            &|row, column| self.spread(row, column),
            &|column, output| self.spread(column, first + output),
            &|output, _| self.mean(first + output),
        )
    }

    /// The logarithms of the classes' probabilities, but for a constant, if the rows of each are
    /// spread alike about their mean. The penalty is that of ridge regression.
    pub(super) fn discriminant(&self, penalty: f64) -> Option<Linear> {
        let (first, least) = (1 + self.features, CLASS_ROWS_MIN / self.sums[0]);
        let part = |class: usize| self.mean(first + class).max(least);
        // The difference of a class's mean from that of all rows.
        let apart = |column: usize, class: usize| self.spread(column, first + class) / part(class);
        self.solve(
            penalty,
            &|row, column| {
                let between = |class| part(class) * apart(row, class) * apart(column, class);
                self.spread(row, column) - (0..self.outputs).map(between).sum::<f64>()
            },
            &apart,
            &|class, weights| {
                let halves = (0..self.features).map(|at| weights[at] * apart(1 + at, class) / 2.0);
                part(class).ln() - halves.sum::<f64>()
            },
        )
    }

    /// For each output the weights that `matrix` of two columns turns into `right` of a column and
    /// the output, and the answer to the mean row. The penalty is added to the diagonal for
    /// features of deviation 1.
    fn solve(
        &self,
        penalty: f64,
        matrix: &dyn Fn(usize, usize) -> f64,
        right: &dyn Fn(usize, usize) -> f64,
        at_mean: &dyn Fn(usize, &[f64]) -> f64,
    ) -> Option<Linear> {
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
                let value = matrix(column + 1, row + 1) * scales[row] * scales[column];
                let other = factor.get(column).unwrap_or(&own);
                let known: f64 = own.iter().zip(other).map(|(a, b)| a * b).sum();
                own.push(match factor.get(column) {
                    Some(other) => (value - known) / other[column],
                    None => (value + penalty / self.sums[0] - known).sqrt(),
                });
            }
            factor.push(own);
        }
        let mut model = self.constant();
        for output in 0..outputs {
            let right = |at: usize| right(at + 1, output) * scales[at];
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
            let scaled = solved.iter_mut().zip(&scales);
            scaled.for_each(|(weight, scale)| *weight *= scale);
            model.bias[output] = at_mean(output, &solved);
            for (at, weight) in solved.iter().enumerate() {
                model.weights[at * outputs + output] = *weight;
                model.bias[output] -= weight * self.mean(at + 1);
            }
        }
        let mut all = model.weights.iter().chain(&model.bias);
        all.all(|weight| weight.is_finite()).then_some(model)
    }
}

/// Linear models of a table's rows.
pub(crate) struct LinearModels {
    products: Products,
    is_of_classes: bool,
}

impl LinearModels {
    /// None if the table has too many columns, or this task no such model.
    pub(crate) fn of(rows: &dyn Dataset) -> Result<Option<LinearModels>> {
        let spec = rows.spec();
        let (is_of_classes, outputs) = match &spec.task {
            TaskSpec::Classification(classes) if spec.targets.elements() == 1 => {
                (true, classes.count())
            }
            TaskSpec::Regression { outputs } => (false, *outputs),
            TaskSpec::Classification(_) | TaskSpec::NextToken { .. } => return Ok(None),
        };
        let features = spec.inputs.elements();
        if features + outputs >= COLUMNS_MAX || rows.rows() == 0 {
            return Ok(None);
        }
        Ok(Some(LinearModels {
            products: Products::of(rows, features, outputs)?,
            is_of_classes,
        }))
    }

    pub(crate) fn fit(&self, penalty: f64) -> Option<Linear> {
        if self.is_of_classes {
            self.products.discriminant(penalty)
        } else {
            self.products.ridge(penalty)
        }
    }

    /// The sum of the losses of `rows`: squared errors, or the negative logarithms of the
    /// probabilities of their classes.
    pub(crate) fn losses(&self, models: &[Option<Linear>], rows: &dyn Dataset) -> Result<Vec<f64>> {
        let mut sums = vec![0.0; models.len()];
        each_row(rows, rows.rows(), &mut |x, targets| {
            for (sum, model) in sums.iter_mut().zip(models) {
                let Some(model) = model else {
                    *sum = f64::INFINITY;
                    continue;
                };
                let answer = model.predicted(x);
                *sum += if self.is_of_classes {
                    let own = answer[targets[0] as usize];
                    let odds = answer.iter().map(|it| f64::from(it - own).exp());
                    odds.sum::<f64>().ln()
                } else {
                    let errors = answer.iter().zip(targets);
                    errors.map(|(a, b)| f64::from(a - b).powi(2)).sum()
                };
            }
        })?;
        Ok(sums)
    }
}
