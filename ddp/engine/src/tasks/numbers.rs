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

    fn survey(&self) -> Box<dyn Survey> {
        Box::new(Range {
            outputs: self.outputs,
            ends: None,
        })
    }
}

/// Adds up the absolute differences of outputs and targets.
struct Differences {
    outputs: usize,
}

impl Differences {
    fn mean(&self, totals: &Totals) -> f64 {
        totals.sum / (totals.rows as f64 * self.outputs as f64)
    }
}

impl Evaluation for Differences {
    fn count(&mut self, output: &Tensor, targets: &Tensor) -> Result<f64> {
        let (output, targets) = (output.to_vec::<f32>()?, targets.to_vec::<f32>()?);
        let difference = |(&a, &b): (&f32, &f32)| (f64::from(a) - f64::from(b)).abs();
        Ok(output.iter().zip(&targets).map(difference).sum())
    }

    fn add_up(&mut self, _group: &Group) -> Result<()> {
        Ok(())
    }

    fn text(&self, totals: &Totals) -> String {
        let (loss, mean) = (totals.loss, self.mean(totals));
        format!("mean squared error {loss:.6}, mean absolute error {mean:.6}")
    }

    fn json(&self, totals: &Totals) -> Value {
        json!({ "mean_squared_error": totals.loss, "mean_absolute_error": self.mean(totals) })
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
