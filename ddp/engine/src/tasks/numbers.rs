//! Learning numbers: the squared error.

use ddp_comm::{Group, World};
use ddp_data::{Batch, Normalization, TensorSpec};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor, npy};
use ddp_nn::{Loss, Mse};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::cells::{cell, put, put_numbers};
use super::classes::ClassWeights;
use super::task::{
    Evaluation, Format, LossOptions, PredictionOptions, Predictions, Survey, SurveyText, Task,
    Totals,
};
use crate::error::{Error, Result};
use crate::evidence::Evidence;
use crate::shown::{shown, significant};
use crate::step::Stats;

/// Some numbers for each row.
#[derive(Clone, Debug)]
pub(super) struct LearnNumbers {
    pub(super) outputs: usize,
}

impl Task for LearnNumbers {
    fn check(&self, options: &LossOptions, data: &str) -> Result<()> {
        let (setting, got) = if options.class_weights != ClassWeights::Equal {
            ("class-weights", options.class_weights.to_string())
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

    fn evaluation(&self, columns: Option<Vec<String>>) -> Box<dyn Evaluation> {
        Box::new(Differences::of(self.outputs, columns))
    }

    fn differences(&self, columns: Option<Vec<String>>) -> Option<Differences> {
        Some(Differences::of(self.outputs, columns))
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

/// Differences of outputs and targets, by column.
pub struct Differences {
    names: Vec<String>,
    /// Of training, by this rank; an evaluation of a saved model keeps its own.
    sums: Vec<f64>,
}

/// How far a column's outputs are from its targets, in the units of the labels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ColumnErrors {
    /// The name of the column, or its number.
    pub name: String,
    /// The root of the mean squared error.
    pub rmse: Option<f64>,
    /// The mean absolute error.
    pub mae: Option<f64>,
    /// The part of the targets' variance that is explained; None if they have none.
    pub r2: Option<f64>,
}

/// Sums of a column: absolute and squared differences, targets and their squares.
const SUMS: usize = 4;

impl Differences {
    fn of(outputs: usize, names: Option<Vec<String>>) -> Differences {
        let names = names.filter(|names| names.len() == outputs);
        Differences {
            names: names.unwrap_or_else(|| (0..outputs).map(|index| index.to_string()).collect()),
            sums: vec![0.0; 1 + SUMS * outputs],
        }
    }

    /// Adds a batch in training, whose targets were divided by `normalization`.
    pub(crate) fn see(
        &mut self,
        batch: &Batch,
        output: &Tensor,
        normalization: Option<&Normalization>,
    ) -> Result<()> {
        let host = |tensor: &Tensor| -> Result<Vec<f32>> {
            let mut values = tensor.to((Device::Cpu, DType::F32))?.to_vec::<f32>()?;
            let undo = |with: &Normalization| with.undo(&mut values, self.names.len());
            normalization.map(undo);
            Ok(values)
        };
        let both = || -> Result<_> { Ok([host(output)?, host(&batch.targets)?]) };
        let [output, targets] = announced("the errors of held-out rows", both)?;
        let sums = self.sums_of(&output, &targets);
        self.sums
            .iter_mut()
            .zip(sums)
            .for_each(|(all, of_batch)| *all += of_batch);
        Ok(())
    }

    /// The errors over all ranks' rows. All ranks call it together.
    pub(crate) fn together(mut self, world: &World) -> Result<Vec<ColumnErrors>> {
        let mine: Vec<u8> = self.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        self.sums.fill(0.0);
        for of_rank in world.all_gather_bytes(&mine)? {
            let of_rank = of_rank
                .as_chunks()
                .0
                .iter()
                .map(|sum| f64::from_le_bytes(*sum));
            self.sums
                .iter_mut()
                .zip(of_rank)
                .for_each(|(all, sum)| *all += sum);
        }
        Ok(self.errors(&self.sums))
    }

    /// The number of rows, then the sums of each column.
    fn sums_of(&self, output: &[f32], targets: &[f32]) -> Vec<f64> {
        let outputs = self.names.len();
        let mut sums = vec![0.0; 1 + SUMS * outputs];
        sums[0] = (targets.len() / outputs) as f64;
        for (index, (&a, &b)) in output.iter().zip(targets).enumerate() {
            let (target, difference) = (f64::from(b), f64::from(a) - f64::from(b));
            let terms = [
                difference.abs(),
                difference * difference,
                target,
                target * target,
            ];
            let of_column = &mut sums[1 + SUMS * (index % outputs)..];
            of_column
                .iter_mut()
                .zip(terms)
                .for_each(|(sum, term)| *sum += term);
        }
        sums
    }

    fn errors(&self, sums: &[f64]) -> Vec<ColumnErrors> {
        let column = |(name, sums_of): (&String, &[f64])| {
            let mean = |sum: usize| sums_of[sum] / sums[0];
            let variance = mean(3) - mean(2) * mean(2);
            // What is less is roundings.
            let varies = variance > 1e-12 * mean(3);
            let finite = |value: f64| Some(value).filter(|value| value.is_finite());
            ColumnErrors {
                name: name.clone(),
                rmse: finite(mean(1).sqrt()),
                mae: finite(mean(0)),
                r2: finite(1.0 - mean(1) / variance).filter(|_| varies),
            }
        };
        self.names
            .iter()
            .zip(sums[1..].chunks(SUMS))
            .map(column)
            .collect()
    }
}

/// The mean of R² over the columns that have it, each of which counts the same.
pub fn mean_r2(columns: &[ColumnErrors]) -> Option<f64> {
    let known: Vec<f64> = columns.iter().filter_map(|column| column.r2).collect();
    (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
}

/// What an evaluation in training says of these columns, by name: RMSE only of a single one, since
/// several may have different units.
pub fn numbers_figures(columns: &[ColumnErrors]) -> Vec<(&'static str, f64)> {
    let figures = match columns {
        [one] => vec![("rmse", one.rmse), ("r2", one.r2)],
        _ => vec![("mean_r2", mean_r2(columns))],
    };
    let known = figures.into_iter();
    known
        .filter_map(|(name, figure)| Some((name, figure?)))
        .collect()
}

impl Evaluation for Differences {
    fn width(&self) -> usize {
        self.sums.len()
    }

    fn count(&mut self, output: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
        let (output, targets) = (output.to_vec::<f32>()?, targets.to_vec::<f32>()?);
        Ok(self.sums_of(&output, &targets))
    }

    fn add_up(&mut self, _group: &Group) -> Result<()> {
        Ok(())
    }

    fn text(&self, totals: &Totals) -> String {
        let columns = self.errors(&totals.sums);
        let number = |value: Option<f64>| value.map_or("–".into(), |value| significant(value, 6));
        if let [one] = &columns[..] {
            let [squared, root, absolute] =
                [one.rmse.map(|root| root * root), one.rmse, one.mae].map(number);
            let r2 = one
                .r2
                .map_or(String::new(), |r2| format!(", R² {}", significant(r2, 6)));
            return format!(
                "mean squared error {squared} (RMSE {root}), mean absolute error {absolute}{r2}"
            );
        }
        let names: Vec<String> = columns.iter().map(|column| shown(&column.name)).collect();
        let width = names
            .iter()
            .map(|name| name.chars().count())
            .max()
            .unwrap_or(0)
            .max(6);
        let line = |name: &str, cells: [String; 3]| {
            let cells = cells.map(|cell| format!(" {cell:>12}")).concat();
            format!("{name:width$}{cells}")
        };
        let mut lines = vec![line("column", ["RMSE", "MAE", "R²"].map(String::from))];
        for (name, column) in names.iter().zip(&columns) {
            lines.push(line(name, [column.rmse, column.mae, column.r2].map(number)));
        }
        lines.push(line(
            "mean",
            [String::new(), String::new(), number(mean_r2(&columns))],
        ));
        lines.join("\n")
    }

    fn json(&self, totals: &Totals) -> Value {
        let columns = self.errors(&totals.sums);
        let of_column = |column: &ColumnErrors| {
            json!({
                "mean_squared_error": column.rmse.map(|root| root * root),
                "root_mean_squared_error": column.rmse,
                "mean_absolute_error": column.mae,
                "r2": column.r2,
            })
        };
        if let [one] = &columns[..] {
            return of_column(one);
        }
        let named = |column: &ColumnErrors| {
            let mut json = of_column(column);
            json["name"] = json!(column.name);
            json
        };
        let all: Vec<Value> = columns.iter().map(named).collect();
        json!({ "columns": all, "mean_r2": mean_r2(&columns) })
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
