//! Correct answers by class.

use ddp_comm::Group;
use ddp_data::Classes;
use ddp_kernels::{DType, Tensor};
use serde_json::{Value, json};

use crate::error::Result;
use crate::evidence::ClassCounts;
use crate::shown::shown;
use crate::tasks::task::{Evaluation, Totals};

/// The most classes and mistakes that are printed.
const CLASSES_SHOWN: usize = 20;
const MISTAKES_SHOWN: usize = 5;

/// Answers by class.
pub(super) struct Answers {
    classes: Classes,
    counts: ClassCounts,
}

impl Answers {
    pub(super) fn of(classes: &Classes) -> Answers {
        Answers {
            classes: classes.clone(),
            counts: ClassCounts::of(classes.count()),
        }
    }

    /// All rows, and those with the right answer.
    fn sums(&self) -> [u64; 2] {
        [self.counts.rows(), self.counts.right()].map(|counts| counts.iter().sum())
    }

    /// Class, answer and rows of the most frequent mistakes.
    fn mistakes(&self, most: usize) -> impl Iterator<Item = [u64; 3]> {
        self.counts.mistakes(most).into_iter().flatten()
    }

    /// The name of a class, with control characters escaped.
    fn shown(&self, class: usize) -> String {
        shown(&self.classes.name(class))
    }

    /// A line for each class that has rows; if there are many, the worst.
    fn table(&self) -> String {
        let (rows, right) = (self.counts.rows(), self.counts.right());
        let percent = |class: usize| 100.0 * (right[class] as f64 / rows[class] as f64);
        let mut classes: Vec<usize> = (0..rows.len()).filter(|&class| rows[class] > 0).collect();
        let left_out = classes.len().saturating_sub(CLASSES_SHOWN);
        if left_out > 0 {
            classes.sort_by(|&a, &b| percent(a).total_cmp(&percent(b)));
            classes.truncate(CLASSES_SHOWN);
        }
        let names: Vec<String> = classes.iter().map(|&class| self.shown(class)).collect();
        let width = names.iter().map(|name| name.chars().count()).max();
        let width = width.unwrap_or(0).max(5);
        let mut text = format!("{:width$} {:>10} {:>8}", "class", "rows", "right");
        for (&class, name) in classes.iter().zip(&names) {
            let (rows, percent) = (rows[class], percent(class));
            text += &format!("\n{name:width$} {rows:>10} {percent:>7.2}%");
        }
        if left_out > 0 {
            text += &format!("\nand {left_out} more classes, with higher accuracy");
        }
        text
    }
}

impl Evaluation for Answers {
    fn width(&self) -> usize {
        0
    }

    fn count(&mut self, output: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
        let targets = targets.to_dtype(DType::I64)?.to_vec::<i64>()?;
        output.with_slice(|output: &[f32]| {
            for (logits, target) in output.chunks(self.classes.count()).zip(targets) {
                // The loss has refused other targets.
                self.counts.count(target as usize, logits);
            }
        })?;
        Ok(Vec::new())
    }

    fn add_up(&mut self, group: &Group) -> Result<()> {
        self.counts.add_up(group)
    }

    fn text(&self, totals: &Totals) -> String {
        let (rows, loss, [all, right]) = (self.counts.rows(), totals.loss, self.sums());
        let percent = 100.0 * right as f64 / all as f64;
        let mistake = |[class, answer, count]: [u64; 3]| {
            let (name, of) = (self.shown(class as usize), rows[class as usize]);
            let answer = self.shown(answer as usize);
            format!("{name} predicted as {answer} ({count} of {of} rows)")
        };
        let mistakes: Vec<String> = self.mistakes(MISTAKES_SHOWN).map(mistake).collect();
        let mistakes = match mistakes.len() {
            0 => String::new(),
            _ => format!("\n\nmost common mistakes: {}", mistakes.join(", ")),
        };
        format!(
            "loss {loss:.4}, accuracy {percent:.2}% ({right} of {all} rows right)\n\n{}{mistakes}",
            self.table()
        )
    }

    fn json(&self, _totals: &Totals) -> Value {
        let name = |class: u64| self.classes.name(class as usize);
        let by_class = (0..).zip(self.counts.rows().into_iter().zip(self.counts.right()));
        let class = |(class, (rows, right)): (u64, (u64, u64))| json!({ "name": name(class), "rows": rows, "right": right });
        let classes: Value = by_class.map(class).collect();
        let mistake = |[class, answer, rows]: [u64; 3]| json!({ "class": name(class), "prediction": name(answer), "rows": rows });
        let mistakes: Value = self.mistakes(CLASSES_SHOWN).map(mistake).collect();
        let [rows, right] = self.sums();
        let accuracy = right as f64 / rows as f64;
        json!({ "right": right, "accuracy": accuracy, "classes": classes, "mistakes": mistakes })
    }
}
