//! Predicted classes as `.csv` or `.npy`. Letters: C classes.

use ddp_data::Classes;
use ddp_kernels::{DType, npy};

use crate::confusion::first_largest;
use crate::error::Result;
use crate::tasks::cells::{cell, put, put_numbers};
use crate::tasks::task::{PredictionOptions, Predictions, SaveAs};

/// Writes the class of each row.
pub(super) struct ClassesOfRows {
    options: PredictionOptions,
    names: Vec<String>,
    /// The names as cells.
    cells: Vec<String>,
    /// The names as numbers if all are whole numbers, else 0, 1, 2 …
    numbers: Vec<i64>,
}

impl ClassesOfRows {
    pub(super) fn new(classes: &Classes, options: PredictionOptions) -> ClassesOfRows {
        let names = classes.names();
        let whole = |name: &String| name.parse().ok().filter(|n: &i64| n.to_string() == *name);
        let numbers: Option<Vec<i64>> = names.iter().map(whole).collect();
        ClassesOfRows {
            options,
            numbers: numbers.unwrap_or_else(|| (0..names.len() as i64).collect()),
            cells: names.iter().map(|name| cell(name)).collect(),
            names,
        }
    }

    /// The first line of a table.
    fn columns(&self) -> String {
        let mut line = "row,prediction,probability".to_string();
        let PredictionOptions { logits, .. } = self.options;
        for (prefix, asked) in [("p", self.options.probabilities), ("logit", logits)] {
            for name in self.names.iter().filter(|_| asked) {
                line += &format!(",{}", cell(&format!("{prefix}:{name}")));
            }
        }
        line + "\n"
    }

    fn line(&self, row: u64, logits: &[f32], into: &mut Vec<u8>) {
        let (answer, p) = (first_largest(logits), probabilities(logits));
        let (name, p_of_answer) = (&self.cells[answer], p[answer]);
        put(into, format_args!("{row},{name},{p_of_answer:?}"));
        if self.options.probabilities {
            put_numbers(into, &p);
        }
        if self.options.logits {
            put_numbers(into, logits);
        }
        into.push(b'\n');
    }
}

impl Predictions for ClassesOfRows {
    fn head(&self, rows: usize) -> Result<Vec<u8>> {
        if self.options.format == SaveAs::Csv {
            return Ok(self.columns().into_bytes());
        }
        let header = if self.options.probabilities || self.options.logits {
            npy::header(DType::F32, &[rows, self.names.len()])
        } else {
            npy::header(DType::I64, &[rows])
        };
        Ok(header.expect("numpy has i64 and f32"))
    }

    fn row(&self, row: u64, logits: &[f32], into: &mut Vec<u8>) {
        match self.options.format {
            SaveAs::Csv => self.line(row, logits, into),
            SaveAs::Npy if self.options.probabilities => {
                let p = probabilities(logits);
                into.extend(p.iter().flat_map(|value| value.to_le_bytes()));
            }
            SaveAs::Npy if self.options.logits => {
                into.extend(logits.iter().flat_map(|value| value.to_le_bytes()));
            }
            SaveAs::Npy => into.extend(self.numbers[first_largest(logits)].to_le_bytes()),
        }
    }
}

/// The probabilities of classes, softmax of the logits (C): computed in f64, added in the order of
/// classes, rounded once.
fn probabilities(logits: &[f32]) -> Vec<f32> {
    let largest = f64::from(logits[first_largest(logits)]);
    let part = |&logit: &f32| (f64::from(logit) - largest).exp();
    let sum: f64 = logits.iter().map(part).sum();
    let rounded = |logit| (part(logit) / sum) as f32;
    logits.iter().map(rounded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_softmax_and_no_logit_is_too_large() {
        assert_eq!(probabilities(&[0.0, 0.0, f32::MAX]), [0.0, 0.0, 1.0]);
        let p = probabilities(&[0.0, std::f32::consts::LN_2]);
        // f32 of ln 2 is off by 2^-25 of it at most.
        let thirds = [1.0 / 3.0, 2.0 / 3.0];
        let mut pairs = p.iter().zip(thirds);
        assert!(
            pairs.all(|(p, third)| (f64::from(*p) - third).abs() < 1e-7),
            "{p:?}"
        );
    }
}
