//! Learning numbers: the squared error.

use ddp_comm::Group;
use ddp_data::TensorSpec;
use ddp_kernels::{DType, Device, Tensor, npy};
use ddp_nn::{Loss, Mse};
use serde_json::{Value, json};

use super::cells::{cell, put, put_numbers};
use super::task::{
    Evaluation, Format, LossOptions, PredictionOptions, Predictions, Survey, SurveyText, Task,
    Totals,
};
use crate::error::{Error, Result};
use crate::evidence::Evidence;
use crate::shown::significant;
use crate::step::Stats;

/// Some numbers for each row.
#[derive(Clone, Debug)]
pub(super) struct LearnNumbers {
    pub(super) outputs: usize,
}

impl Task for LearnNumbers {
    fn check(&self, options: &LossOptions, data: &str) -> Result<()> {
        let weights: Vec<String> = options.class_weights.iter().map(f64::to_string).collect();
        let (setting, got) = if !weights.is_empty() {
            ("class-weights", weights.join(","))
        } else if options.label_smoothing != 0.0 {
            ("label-smoothing", options.label_smoothing.to_string())
        } else {
            return Ok(());
        };
        Err(Error::Usage(format!(
            "`{setting}` {got}: expected classes, and {data} are learned as numbers; help: leave it out"
        )))
    }

    fn loss(&self, _options: &LossOptions, _device: Device) -> Result<Box<dyn Loss>> {
        Ok(Box::new(Mse))
    }

    fn accuracy(&self, _stats: &Stats) -> Option<f64> {
        None
    }

    fn wrong_target(&self, _target: f64) -> Option<String> {
        None
    }

    fn evidence(&self, _targets: &TensorSpec) -> Option<Evidence> {
        None
    }

    fn evaluation(&self) -> Box<dyn Evaluation> {
        Box::new(Differences {
            outputs: self.outputs,
        })
    }

    fn predictions(&self, options: PredictionOptions) -> Result<Box<dyn Predictions>> {
        let asked = [
            ("probabilities", options.probabilities),
            ("logits", options.logits),
        ];
        if let Some((setting, _)) = asked.iter().find(|(_, asked)| *asked) {
            return Err(Error::Usage(format!(
                "`{setting}`: expected a model for classification, got one for regression; \
                 help: leave `{setting}` out: the numbers are written anyway"
            )));
        }
        Ok(Box::new(NumbersOfRows {
            outputs: self.outputs,
            format: options.format,
            names: options.names.filter(|names| names.len() == self.outputs),
        }))
    }

    fn survey(&self) -> Option<Box<dyn Survey>> {
        Some(Box::new(Range {
            outputs: self.outputs,
            ends: None,
        }))
    }
}

/// Adds up differences of outputs and targets: absolute and squared, then of each output the
/// targets and their squares.
struct Differences {
    outputs: usize,
}

/// How far outputs are from their targets, in the units of the labels.
struct Errors {
    squared: f64,
    absolute: f64,
    /// The part of the targets' variance that is explained; None if they have none.
    r2: Option<f64>,
}

impl Differences {
    fn errors(&self, totals: &Totals) -> Errors {
        let (rows, (differences, targets)) = (totals.rows as f64, totals.sums.split_at(2));
        let variance = |sums: &[f64]| {
            let (mean, mean_square) = (sums[0] / rows, sums[1] / rows);
            // What is less is roundings.
            let variance = mean_square - mean * mean;
            if variance > 1e-12 * mean_square {
                variance
            } else {
                0.0
            }
        };
        let variance: f64 = targets.chunks(2).map(variance).sum();
        let [absolute, squared] = [0, 1].map(|sum| differences[sum] / rows / self.outputs as f64);
        Errors {
            squared,
            absolute,
            r2: (variance > 0.0).then(|| 1.0 - squared * self.outputs as f64 / variance),
        }
    }
}

impl Evaluation for Differences {
    fn width(&self) -> usize {
        2 + 2 * self.outputs
    }

    fn count(&mut self, output: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
        let (output, targets) = (output.to_vec::<f32>()?, targets.to_vec::<f32>()?);
        let mut sums = vec![0.0; self.width()];
        for (index, (&a, &b)) in output.iter().zip(&targets).enumerate() {
            let (target, difference) = (f64::from(b), f64::from(a) - f64::from(b));
            let of_output = 2 + 2 * (index % self.outputs);
            sums[0] += difference.abs();
            sums[1] += difference * difference;
            sums[of_output] += target;
            sums[of_output + 1] += target * target;
        }
        Ok(sums)
    }

    fn add_up(&mut self, _group: &Group) -> Result<()> {
        Ok(())
    }

    fn text(&self, totals: &Totals) -> String {
        let errors = self.errors(totals);
        let [squared, root, absolute] = [errors.squared, errors.squared.sqrt(), errors.absolute]
            .map(|error| significant(error, 6));
        let r2 = errors
            .r2
            .map_or(String::new(), |r2| format!(", R² {}", significant(r2, 6)));
        format!("mean squared error {squared} (RMSE {root}), mean absolute error {absolute}{r2}")
    }

    fn json(&self, totals: &Totals) -> Value {
        let errors = self.errors(totals);
        json!({
            "mean_squared_error": errors.squared,
            "root_mean_squared_error": errors.squared.sqrt(),
            "mean_absolute_error": errors.absolute,
            "r2": errors.r2,
        })
    }
}

/// Writes the numbers of each row.
struct NumbersOfRows {
    outputs: usize,
    format: Format,
    names: Option<Vec<String>>,
}

impl Predictions for NumbersOfRows {
    fn head(&self, rows: usize) -> Result<Vec<u8>> {
        let columns = match self.outputs {
            _ if self.format == Format::Npy => {
                let header = npy::header(DType::F32, &[rows, self.outputs]);
                return Ok(header.expect("numpy has f32"));
            }
            1 => "row,prediction".to_string(),
            outputs => {
                let name = |output: usize| match &self.names {
                    Some(names) => names[output].clone(),
                    None => output.to_string(),
                };
                let column = |output| format!(",{}", cell(&format!("prediction:{}", name(output))));
                format!("row{}", (0..outputs).map(column).collect::<String>())
            }
        };
        Ok((columns + "\n").into_bytes())
    }

    fn row(&self, row: u64, values: &[f32], into: &mut Vec<u8>) {
        match self.format {
            Format::Csv => {
                put(into, format_args!("{row}"));
                put_numbers(into, values);
                into.push(b'\n');
            }
            Format::Npy => into.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        }
    }
}

/// The least and the greatest number.
struct Range {
    outputs: usize,
    ends: Option<[f32; 2]>,
}

impl Survey for Range {
    fn count(&mut self, _first: u64, targets: &Tensor) -> Result<()> {
        for value in targets.to_vec::<f32>()? {
            let [least, greatest] = self.ends.unwrap_or([f32::INFINITY, f32::NEG_INFINITY]);
            self.ends = Some([least.min(value), greatest.max(value)]);
        }
        Ok(())
    }

    fn text(&self) -> SurveyText {
        let range = self.ends.map_or(String::new(), |[least, greatest]| {
            format!(", from {least:?} to {greatest:?}")
        });
        let task = ddp_data::TaskSpec::Regression {
            outputs: self.outputs,
        };
        SurveyText {
            head: format!("{task}{range}"),
            ..SurveyText::default()
        }
    }

    fn json(&self) -> (&'static str, Value) {
        ("labels", json!(self.ends))
    }
}
