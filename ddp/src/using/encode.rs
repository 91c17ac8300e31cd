//! Predictions as the bytes of a file: `.csv` for people and tables, `.npy` for numpy. Letters: C classes, O numbers.

use std::io::Write;

use ddp_kernels::{DType, npy};

use super::outputs::{first_largest, probabilities};
use crate::config::using::{Predictions, PredictionsFormat};
use crate::data::Task;
use crate::error::{Error, Result};

/// How predictions are written.
#[derive(Debug)]
pub(super) struct Encoder<'a> {
    asked: &'a Predictions,
    task: &'a Task,
    /// The classes' names as they stand in a table.
    cells: Vec<String>,
}

impl<'a> Encoder<'a> {
    /// As `asked`, for a model of this task.
    pub(super) fn new(asked: &'a Predictions, task: &'a Task) -> Encoder<'a> {
        let cells = match task {
            Task::Classification { names, .. } => names.iter().map(|name| cell(name)).collect(),
            Task::Regression { .. } => Vec::new(),
        };
        Encoder { asked, task, cells }
    }

    /// How many numbers the model gives for a row.
    pub(super) fn outputs(&self) -> usize {
        self.task.outputs()
    }

    /// What comes before the rows.
    pub(super) fn head(&self, rows: u64) -> Result<Vec<u8>> {
        match self.asked.format {
            PredictionsFormat::Csv => Ok(self.columns().into_bytes()),
            PredictionsFormat::Npy => {
                let rows =
                    usize::try_from(rows).map_err(|_| Error::Usage(format!("--out: {rows} rows are too many")))?;
                let (dtype, shape) = match self.task {
                    Task::Classification { .. } if !self.asked.probabilities && !self.asked.logits => {
                        (DType::I64, vec![rows])
                    }
                    task => (DType::F32, vec![rows, task.outputs()]),
                };
                Ok(npy::header(dtype, &shape).expect("numpy has i64 and f32"))
            }
        }
    }

    /// The first line of a table.
    fn columns(&self) -> String {
        let mut names = vec!["row".to_string()];
        match self.task {
            Task::Regression { outputs: 1 } => names.push("prediction".into()),
            Task::Regression { outputs } => names.extend((0..*outputs).map(|output| format!("prediction:{output}"))),
            Task::Classification { names: classes, .. } => {
                names.extend(["prediction".into(), "probability".into()]);
                let each =
                    |prefix: &str| classes.iter().map(|class| cell(&format!("{prefix}:{class}"))).collect::<Vec<_>>();
                if self.asked.probabilities {
                    names.extend(each("p"));
                }
                if self.asked.logits {
                    names.extend(each("logit"));
                }
            }
        }
        names.join(",") + "\n"
    }

    /// Rows of what the model gives, the first of which is row `first` of all.
    pub(super) fn encode(&self, first: u64, values: &[f32], into: &mut Vec<u8>) {
        let mut p = Vec::with_capacity(self.outputs());
        for (row, values) in (first..).zip(values.chunks(self.outputs())) {
            match (self.asked.format, self.task) {
                (PredictionsFormat::Csv, Task::Classification { .. }) => self.class_line(row, values, &mut p, into),
                (PredictionsFormat::Csv, Task::Regression { .. }) => {
                    line(into, format_args!("{row}"));
                    numbers(values, into);
                    into.push(b'\n');
                }
                (PredictionsFormat::Npy, Task::Classification { .. }) if self.asked.probabilities => {
                    probabilities(values, &mut p);
                    into.extend(p.iter().flat_map(|value| value.to_le_bytes()));
                }
                (PredictionsFormat::Npy, Task::Classification { .. }) if !self.asked.logits => {
                    into.extend((first_largest(values) as i64).to_le_bytes());
                }
                (PredictionsFormat::Npy, _) => into.extend(values.iter().flat_map(|value| value.to_le_bytes())),
            }
        }
    }

    fn class_line(&self, row: u64, logits: &[f32], p: &mut Vec<f32>, into: &mut Vec<u8>) {
        let answer = first_largest(logits);
        probabilities(logits, p);
        line(into, format_args!("{row},{},{:?}", self.cells[answer], p[answer]));
        if self.asked.probabilities {
            numbers(p, into);
        }
        if self.asked.logits {
            numbers(logits, into);
        }
        into.push(b'\n');
    }
}

fn line(into: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    into.write_fmt(text).expect("memory takes what is written");
}

/// Each behind a comma, with as few digits as read back as the same number.
fn numbers(values: &[f32], into: &mut Vec<u8>) {
    values.iter().for_each(|value| line(into, format_args!(",{value:?}")));
}

/// A text as a cell of a table: in quotes where it needs them.
fn cell(text: &str) -> String {
    let needs = text.is_empty() || text.contains([',', '"', '\n', '\r']) || text.trim() != text;
    if needs { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(name: &str, probabilities: bool, logits: bool) -> Predictions {
        let format = if name.ends_with("csv") { PredictionsFormat::Csv } else { PredictionsFormat::Npy };
        Predictions { out: name.into(), format, probabilities, logits, overwrite: false }
    }

    fn classes(names: &[&str]) -> Task {
        Task::Classification { classes: names.len(), names: names.iter().map(|name| name.to_string()).collect() }
    }

    fn written(asked: &Predictions, task: &Task, values: &[f32]) -> Vec<u8> {
        let encoder = Encoder::new(asked, task);
        let rows = values.len() / encoder.outputs();
        let mut bytes = encoder.head(rows as u64).unwrap();
        encoder.encode(0, values, &mut bytes);
        bytes
    }

    #[test]
    fn a_table_reads_back_with_names_that_need_quotes() {
        let task = classes(&["plain", "with, comma", "with \"quotes\""]);
        let logits = [0.5, 2.0, -1.0, 3.0, 3.0, -2e-9];
        let bytes = written(&asked("a.csv", true, true), &task, &logits);
        let mut reader = csv::Reader::from_reader(&bytes[..]);
        let heads: Vec<String> = reader.headers().unwrap().iter().map(String::from).collect();
        assert_eq!(heads[..6], ["row", "prediction", "probability", "p:plain", "p:with, comma", "p:with \"quotes\""]);
        assert_eq!(heads[6..], ["logit:plain", "logit:with, comma", "logit:with \"quotes\""]);
        let rows: Vec<Vec<String>> =
            reader.records().map(|row| row.unwrap().iter().map(String::from).collect()).collect();
        assert_eq!((&rows[0][1][..], &rows[1][1][..]), ("with, comma", "plain"));
        for (row, logits) in rows.iter().zip(logits.chunks(3)) {
            let numbers: Vec<f32> = row[2..].iter().map(|text| text.parse().unwrap()).collect();
            assert_eq!(numbers[4..], *logits, "to the bit");
            assert_eq!(numbers[0], numbers[1..4].iter().copied().fold(0.0, f32::max));
            // Three numbers rounded to half an ulp each.
            assert!((numbers[1..4].iter().map(|&p| f64::from(p)).sum::<f64>() - 1.0).abs() < 2e-7);
        }
    }

    #[test]
    fn arrays_are_numpys() {
        let task = classes(&["a", "b"]);
        let load = |asked: &Predictions, task: &Task, values: &[f32]| {
            npy::parse(&written(asked, task, values), ddp_kernels::Device::Cpu).unwrap()
        };
        let logits = [1.0, 2.0, 5.0, 4.0, 0.0, 0.0];
        let classes = load(&asked("a.npy", false, false), &task, &logits);
        assert_eq!((classes.shape().dims(), classes.to_vec::<i64>().unwrap()), (&[3][..], vec![1, 0, 0]));
        let raw = load(&asked("a.npy", false, true), &task, &logits);
        assert_eq!((raw.shape().dims(), raw.to_vec::<f32>().unwrap()), (&[3, 2][..], logits.to_vec()));
        let p = load(&asked("a.npy", true, false), &task, &logits);
        assert_eq!(p.to_vec::<f32>().unwrap()[4..], [0.5, 0.5]);
        let numbers = load(&asked("a.npy", false, false), &Task::Regression { outputs: 2 }, &logits);
        assert_eq!((numbers.shape().dims(), numbers.to_vec::<f32>().unwrap()), (&[3, 2][..], logits.to_vec()));
    }

    #[test]
    fn numbers_have_a_column_each() {
        let one = written(&asked("a.csv", false, false), &Task::Regression { outputs: 1 }, &[0.25, -1e-9]);
        assert_eq!(String::from_utf8(one).unwrap(), "row,prediction\n0,0.25\n1,-1e-9\n");
        let two = written(&asked("a.csv", false, false), &Task::Regression { outputs: 2 }, &[1.0, 2.0]);
        assert_eq!(String::from_utf8(two).unwrap(), "row,prediction:0,prediction:1\n0,1.0,2.0\n");
    }
}
