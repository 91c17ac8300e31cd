//! Learning numbers: the squared error.

use ddp_kernels::setting::SettingName;
use ddp_kernels::{DType, Device, Tensor, npy};
use ddp_nn::{Loss, Mse};
use serde_json::{Value, json};

use super::cells::{cell, put, put_numbers};
use super::differences::{ColumnErrors, Differences, mean_r2};
use super::task::{Evaluation, LossOptions, PredictionOptions, Predictions, SaveAs, Task, Totals};
use crate::error::{Error, Result};
use crate::shown::{shown, significant, table};

/// Some numbers for each row.
#[derive(Clone, Debug)]
pub(super) struct LearnNumbers {
    pub(super) outputs: usize,
}

impl Task for LearnNumbers {
    fn learns(&self) -> &'static str {
        "numbers"
    }

    fn loss(&self, _options: &LossOptions, _device: Device) -> Result<Box<dyn Loss>> {
        Ok(Box::new(Mse))
    }

    fn evaluation(&self, columns: Option<Vec<String>>) -> Box<dyn Evaluation> {
        Box::new(Differences::of(self.outputs, columns))
    }

    fn differences(&self, columns: Option<Vec<String>>) -> Option<Differences> {
        Some(Differences::of(self.outputs, columns))
    }

    fn predictions(&self, options: PredictionOptions) -> Result<Box<dyn Predictions>> {
        let asked = match (options.probabilities, options.logits) {
            (true, _) => Some("probabilities"),
            (_, is_asked) => is_asked.then_some("logits"),
        };
        if let Some(setting) = asked {
            let setting = SettingName(setting);
            return Err(Error::Usage(format!(
                "{setting}: expected a model for classification, got one for regression; \
                 help: leave {setting} out: the numbers are written anyway"
            )));
        }
        Ok(Box::new(NumbersOfRows {
            outputs: self.outputs,
            format: options.format,
            names: options.names.filter(|names| names.len() == self.outputs),
        }))
    }
}

impl Evaluation for Differences {
    fn width(&self) -> usize {
        self.sum_count()
    }

    fn count(&mut self, output: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
        let (output, targets) = (output.to_vec::<f32>()?, targets.to_vec::<f32>()?);
        Ok(self.sums_of(&output, &targets))
    }

    fn text(&self, totals: &Totals) -> String {
        let columns = self.errors(&totals.sums);
        let number = |value: Option<f64>| value.map_or("–".into(), |value| significant(value, 6));
        if let [one] = &columns[..] {
            let squared = one.rmse.map(|root| root * root);
            let [squared, root, absolute] = [squared, one.rmse, one.mae].map(number);
            let r2 = one.r2.map(|r2| format!(", R² {}", significant(r2, 6)));
            let squared = format!("mean squared error {squared} (RMSE {root})");
            let r2 = r2.unwrap_or_default();
            return format!("{squared}, mean absolute error {absolute}{r2}");
        }
        let mut rows = vec![["column", "RMSE", "MAE", "R²"].map(String::from).to_vec()];
        for column in &columns {
            let numbers = [column.rmse, column.mae, column.r2].map(number);
            rows.push([&[shown(&column.name)][..], &numbers].concat());
        }
        let mean = [String::new(), String::new(), number(mean_r2(&columns))];
        rows.push([&["mean".to_string()][..], &mean].concat());
        table(&rows, 1).join("\n")
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
    format: SaveAs,
    names: Option<Vec<String>>,
}

impl Predictions for NumbersOfRows {
    fn head(&self, rows: usize) -> Result<Vec<u8>> {
        let columns = match self.outputs {
            _ if self.format == SaveAs::Npy => {
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
            SaveAs::Csv => {
                put(into, format_args!("{row}"));
                put_numbers(into, values);
                into.push(b'\n');
            }
            SaveAs::Npy => into.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        }
    }
}
