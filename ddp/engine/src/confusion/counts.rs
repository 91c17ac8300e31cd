//! Predictions counted by class: whole numbers, so that the order of additions does not matter.
//! Letters: C classes.

use std::cmp::Reverse;

use ddp_comm::{Group, Reduce};
use ddp_data::Batch;
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};

use super::ranking::right_pairs_twice;
use crate::error::Result;

/// Up to this many classes every pair of class and answer is counted: 8 MB.
const TABLE_CLASSES_MAX: usize = 1024;

/// Answers by class.
#[derive(Debug)]
pub struct ClassCounts {
    classes: usize,
    /// Rows of each class (C), answers (C), right answers (C); and the rows of each class by answer
    /// (C, C), unless there are many classes; when added up, also `right_pairs_twice` (1).
    sums: Vec<i64>,
    /// Of two classes: the scores of this rank's rows, by class.
    scores: [Vec<f64>; 2],
}

impl ClassCounts {
    /// Nothing counted yet.
    pub fn of(classes: usize) -> ClassCounts {
        let table = match classes {
            0..=TABLE_CLASSES_MAX => classes * classes,
            _ => 0,
        };
        let (sums, scores) = (vec![0; 3 * classes + table], Default::default());
        ClassCounts {
            classes,
            sums,
            scores,
        }
    }

    /// Counts the answers to a batch of held-out rows: `output` are logits (rows, C).
    pub fn see(&mut self, batch: &Batch, output: &Tensor) -> Result<()> {
        let (outputs, classes) = announced("the confusion matrix", || -> Result<_> {
            let outputs = output.to((Device::Cpu, DType::F32))?.to_vec::<f32>()?;
            let classes = batch.targets.to(Device::Cpu)?.to_dtype(DType::I64)?;
            Ok((outputs, classes.to_vec::<i64>()?))
        })?;
        for (logits, class) in outputs.chunks_exact(self.classes).zip(classes) {
            // The evaluation has refused other targets.
            let class = usize::try_from(class).ok();
            if let Some(class) = class.filter(|class| *class < self.classes) {
                self.count(class, logits);
            }
        }
        Ok(())
    }

    /// Counts an answer for a row of this class.
    pub fn count(&mut self, class: usize, logits: &[f32]) {
        let (classes, answer) = (self.classes, first_largest(logits));
        self.sums[class] += 1;
        self.sums[classes + answer] += 1;
        self.sums[2 * classes + class] += i64::from(class == answer);
        if let Some(count) = self.sums.get_mut(3 * classes + class * classes + answer) {
            *count += 1;
        }
        if classes == 2 {
            self.scores[class].push(f64::from(logits[1]) - f64::from(logits[0]));
        }
    }

    /// Adds up the counts of all ranks, which call it together.
    pub fn add_up(&mut self, group: &Group) -> Result<()> {
        self.sums.push(right_pairs_twice(&mut self.scores, group)?);
        let sums = Tensor::from_slice(&self.sums, &[self.sums.len()], Device::Cpu)?;
        let sums = sums.named("counts of classes");
        group.all_reduce(&sums, Reduce::Sum, &Stream::default_of(Device::Cpu)?)?;
        self.sums = sums.to_vec()?;
        Ok(())
    }

    /// The rows of each class.
    pub fn rows(&self) -> Vec<u64> {
        self.part(0)
    }

    /// How often each class is the answer.
    pub fn answers(&self) -> Vec<u64> {
        self.part(1)
    }

    /// The right answers for each class.
    pub fn right(&self) -> Vec<u64> {
        self.part(2)
    }

    fn part(&self, index: usize) -> Vec<u64> {
        let part = &self.sums[index * self.classes..][..self.classes];
        part.iter().map(|count| count.cast_unsigned()).collect()
    }

    /// The area under the ROC curve, once counts are added up; None unless there are two classes
    /// and both have rows.
    pub fn auc(&self) -> Option<f64> {
        let pairs: f64 = self.rows().iter().map(|rows| *rows as f64).product();
        let right = *self.sums.last()? as f64 / (2.0 * pairs);
        Some(right).filter(|_| self.classes == 2 && pairs > 0.0)
    }

    /// The scores of each class.
    pub(crate) fn scores(&self) -> Vec<ClassScores> {
        class_scores(&self.rows(), &self.answers(), &self.right())
    }

    /// For each class its rows by answer; None if there are many classes.
    pub fn table(&self) -> Option<Vec<Vec<u64>>> {
        let row = |class| self.part(3 + class);
        (self.classes <= TABLE_CLASSES_MAX).then(|| (0..self.classes).map(row).collect())
    }

    /// The most frequent mistakes: class, answer, rows. None if there are many classes.
    pub fn mistakes(&self, most: usize) -> Option<Vec<[u64; 3]>> {
        let mut mistakes = Vec::new();
        for (class, answers) in self.table()?.into_iter().enumerate() {
            let answers = answers.into_iter().enumerate();
            let wrong = answers.filter(|&(answer, rows)| answer != class && rows > 0);
            mistakes.extend(wrong.map(|(answer, rows)| [class as u64, answer as u64, rows]));
        }
        mistakes.sort_by_key(|mistake| Reverse(mistake[2]));
        mistakes.truncate(most);
        Some(mistakes)
    }
}

/// How well one class is found. Each is None where it would divide by 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClassScores {
    /// The share of the class's rows that are predicted as the class.
    pub recall: Option<f64>,
    /// The share of the predictions of the class that are right.
    pub precision: Option<f64>,
    /// The harmonic mean of the two.
    pub f1: Option<f64>,
}

/// The scores of each class, from its rows, its predictions and those that are right.
pub(crate) fn class_scores(rows: &[u64], predicted: &[u64], right: &[u64]) -> Vec<ClassScores> {
    let part = |of: u64, all: u64| (all > 0).then(|| of as f64 / all as f64);
    let score = |((&rows, &predicted), &right): ((&u64, &u64), &u64)| ClassScores {
        recall: part(right, rows),
        precision: part(right, predicted),
        f1: part(right.saturating_mul(2), rows.saturating_add(predicted)),
    };
    rows.iter().zip(predicted).zip(right).map(score).collect()
}

/// The mean recall of the classes that have rows. It equals accuracy where all have equally many,
/// and is that of a guess where only one class is ever predicted.
pub fn balanced_accuracy(scores: &[ClassScores]) -> f64 {
    let recalls: Vec<f64> = scores.iter().filter_map(|class| class.recall).collect();
    recalls.iter().sum::<f64>() / recalls.len() as f64
}

/// The first of the largest logits (C), as cross-entropy counts correct rows: NaN is larger than
/// all numbers.
pub(crate) fn first_largest(logits: &[f32]) -> usize {
    let larger = |a: f32, b: f32| a > b || (a.is_nan() && !b.is_nan());
    (1..logits.len()).fold(0, |best, index| {
        if larger(logits[index], logits[best]) {
            return index;
        }
        best
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_the_one_that_accuracy_counts() {
        for (logits, best) in [
            (vec![1.0, 3.0, 3.0, 2.0], 1),
            (vec![-1.0], 0),
            (vec![-0.0, 0.0], 0),
            (vec![f32::NAN, 9.0], 0),
            (vec![0.0, f32::NAN, f32::NAN], 1),
        ] {
            assert_eq!(first_largest(&logits), best, "{logits:?}");
        }
    }
}
