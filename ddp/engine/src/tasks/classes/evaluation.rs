//! Correct answers by class.

use ddp_comm::Group;
use ddp_data::Classes;
use ddp_kernels::{DType, Tensor};
use serde_json::{Value, json};

use crate::confusion::{ClassCounts, ClassScores, balanced_accuracy, first_largest, largest_class};
use crate::error::Result;
use crate::shown::{shown, table};
use crate::tasks::best::BestBy;
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
        let (rows, scores) = (self.counts.rows(), self.counts.scores());
        let mut classes: Vec<usize> = (0..rows.len()).filter(|&class| rows[class] > 0).collect();
        let left_out = classes.len().saturating_sub(CLASSES_SHOWN);
        if left_out > 0 {
            classes.sort_by(|&a, &b| {
                let recall = |class: usize| scores[class].recall.unwrap_or(0.0);
                recall(a).total_cmp(&recall(b))
            });
            classes.truncate(CLASSES_SHOWN);
        }
        let percent =
            |part: Option<f64>| part.map_or("–".into(), |part| format!("{:.2}%", 100.0 * part));
        let heading = ["class", "rows", "recall", "precision", "F1"];
        let mut lines = vec![heading.map(String::from).to_vec()];
        for class in classes {
            let of = &scores[class];
            let parts = [of.recall, of.precision, of.f1].map(percent);
            let first = [self.shown(class), rows[class].to_string()];
            lines.push([&first[..], &parts].concat());
        }
        let mut text = table(&lines, 1).join("\n");
        if left_out > 0 {
            text += &format!("\nand {left_out} more classes, with higher recall");
        }
        text
    }
}

impl Evaluation for Answers {
    fn width(&self) -> usize {
        1
    }

    /// The sum of losses without weights of classes and smoothing.
    fn count(&mut self, output: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
        let targets = targets.to_dtype(DType::I64)?.to_vec::<i64>()?;
        let mut sum = 0.0;
        output.with_slice(|output: &[f32]| {
            for (logits, target) in output.chunks(self.classes.count()).zip(targets) {
                // The loss has refused other targets.
                self.counts.count(target as usize, logits);
                sum += cross_entropy(logits, target as usize);
            }
        })?;
        Ok(vec![sum])
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
        let largest = largest_class(&rows).map_or(String::new(), |part| {
            format!("; the largest class has {:.2}% of the rows", 100.0 * part)
        });
        let scores = self.counts.scores();
        let balanced = 100.0 * balanced_accuracy(&scores);
        let text = |auc| format!(", {}", BestBy::Auc.text(auc));
        let auc = self.counts.auc().map_or(String::new(), text);
        // The loss of a row is f32, whose roundings are large beside a small loss.
        let plain = totals.sums[0] / all as f64;
        let plain = if (loss - plain).abs() > 1e-4 * plain.max(1.0) {
            format!(" with class weights or label smoothing, {plain:.4} without")
        } else {
            String::new()
        };
        format!(
            "loss {loss:.4}{plain}, accuracy {percent:.2}% ({right} of {all} rows right{largest}), balanced \
             accuracy {balanced:.2}%{auc}\n\n{}{mistakes}",
            self.table()
        )
    }

    fn json(&self, totals: &Totals) -> Value {
        let name = |class: u64| self.classes.name(class as usize);
        let counts = &self.counts;
        let (all, right, scores) = (counts.rows(), counts.right(), counts.scores());
        let class = |(class, scores): (usize, &ClassScores)| {
            json!({
                "name": name(class as u64), "rows": all[class], "right": right[class],
                "recall": scores.recall, "precision": scores.precision, "f1": scores.f1,
            })
        };
        let classes: Value = scores.iter().enumerate().map(class).collect();
        let mistake = |[class, answer, rows]: [u64; 3]| json!({ "class": name(class), "prediction": name(answer), "rows": rows });
        let mistakes: Value = self.mistakes(CLASSES_SHOWN).map(mistake).collect();
        let [rows, right] = self.sums();
        let [accuracy, plain_loss] = [right as f64, totals.sums[0]].map(|sum| sum / rows as f64);
        json!({
            "plain_loss": plain_loss,
            "right": right, "accuracy": accuracy, "balanced_accuracy": balanced_accuracy(&scores),
            "auc": counts.auc(), "largest_class": largest_class(&all), "classes": classes, "mistakes": mistakes,
        })
    }
}

/// The loss of a row with these logits (C), in f64.
fn cross_entropy(logits: &[f32], target: usize) -> f64 {
    let largest = f64::from(logits[first_largest(logits)]);
    let sum: f64 = logits
        .iter()
        .map(|&it| (f64::from(it) - largest).exp())
        .sum();
    largest + sum.ln() - f64::from(logits[target])
}
