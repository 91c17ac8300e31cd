//! The confusion matrix of a classification run's last evaluation, balanced accuracy and AUC.
//!
//! Counts are integers, summed over the ranks exactly. C is the number of classes.

mod counts;
mod ranking;

use serde::{Deserialize, Serialize};

pub use self::counts::{ClassCounts, ClassScores, balanced_accuracy};
pub(crate) use self::counts::{class_scores, first_largest};

/// With more classes the metrics log has no table, but the pairs that are mistaken most often.
pub(crate) const SHOWN_CLASSES_MAX: usize = 30;
/// How many of those pairs.
const PAIRS_MAX: usize = 50;

/// The confusion matrix: an event of the metrics log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Confusion {
    /// After this step.
    pub step: u64,
    /// Names of the classes.
    pub names: Vec<String>,
    /// Held-out rows of each class.
    pub rows: Vec<u64>,
    /// Rows that are classified as each class.
    pub predicted: Vec<u64>,
    /// Rows of each class that are classified correctly.
    pub right: Vec<u64>,
    /// Rows by class and predicted class; None with many classes.
    pub counts: Option<Vec<Vec<u64>>>,
    /// The most frequent mistakes: class, predicted class, count. None with very many classes.
    pub mistakes: Option<Vec<[u64; 3]>>,
}

impl Confusion {
    /// Of counts that are added up.
    pub(crate) fn of(step: u64, names: Vec<String>, counts: &ClassCounts) -> Confusion {
        let rows = counts.rows();
        Confusion {
            step,
            names,
            predicted: counts.answers(),
            right: counts.right(),
            counts: counts.table().filter(|_| rows.len() <= SHOWN_CLASSES_MAX),
            mistakes: counts.mistakes(PAIRS_MAX),
            rows,
        }
    }

    /// How well each class is found.
    pub fn scores(&self) -> Vec<ClassScores> {
        class_scores(&self.rows, &self.predicted, &self.right)
    }

    /// Whether the numbers are consistent: a metrics log may have been edited.
    pub fn is_sound(&self) -> bool {
        let classes = self.rows.len();
        let sum = |numbers: &[u64]| {
            let mut numbers = numbers.iter();
            numbers.try_fold(0u64, |sum, &number| sum.checked_add(number))
        };
        let is_table = |counts: &Vec<Vec<u64>>| {
            let mut rows = counts.iter().zip(&self.rows);
            counts.len() == classes
                && classes <= SHOWN_CLASSES_MAX
                && rows.all(|(counts, rows)| counts.len() == classes && sum(counts) == Some(*rows))
        };
        let mut right = self.right.iter().zip(&self.rows);
        let mut mistakes = self.mistakes.iter().flatten();
        classes > 0
            && [self.predicted.len(), self.right.len()] == [classes; 2]
            && sum(&self.rows).is_some()
            && sum(&self.predicted).is_some()
            && right.all(|(right, rows)| right <= rows)
            && self.counts.as_ref().is_none_or(is_table)
            && mistakes.all(|pair| pair[0].max(pair[1]) < classes as u64)
    }

    /// The name of a class.
    pub fn name(&self, class: usize) -> String {
        let name = self.names.get(class).cloned();
        name.unwrap_or_else(|| class.to_string())
    }
}

/// The share of the rows that the largest class has; None if it is at most 0.1 above an equal
/// share, so that accuracy says enough.
pub fn largest_class(rows: &[u64]) -> Option<f64> {
    let all: u64 = rows.iter().sum();
    let part = *rows.iter().max()? as f64 / all as f64;
    Some(part).filter(|part| *part > 1.0 / rows.len() as f64 + 0.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_counted_once_in_each_sum() {
        let mut counts = ClassCounts::of(3);
        let answers = [(0, 0), (0, 1), (1, 1), (2, 1), (2, 1), (2, 2)];
        for (truth, predicted) in answers {
            let logits: Vec<f32> = (0..3)
                .map(|class| if class == predicted { 4.0 } else { 0.0 })
                .collect();
            counts.count(truth, &logits);
        }
        let confusion = Confusion::of(9, vec!["a".into(), "b".into()], &counts);
        assert!(confusion.is_sound());
        assert_eq!(
            (
                &confusion.rows[..],
                &confusion.predicted[..],
                &confusion.right[..]
            ),
            (&[2, 1, 3][..], &[1, 4, 1][..], &[1, 1, 1][..])
        );
        assert_eq!(
            confusion.counts,
            Some(vec![vec![1, 1, 0], vec![0, 1, 0], vec![0, 2, 1]])
        );
        assert_eq!(confusion.mistakes, Some(vec![[2, 1, 2], [0, 1, 1]]));
        assert_eq!([confusion.name(1), confusion.name(2)], ["b", "2"]);
    }

    #[test]
    fn the_largest_class_is_named_where_it_has_far_more_rows_than_the_others() {
        assert_eq!(largest_class(&[85, 15]), Some(0.85));
        assert_eq!(largest_class(&[55, 45]), None);
        assert_eq!(
            largest_class(&[11, 10, 9, 10, 10, 10, 10, 10, 10, 10]),
            None
        );
        assert_eq!(largest_class(&[]), None);
    }

    #[test]
    fn a_guess_of_the_largest_class_has_the_balanced_accuracy_of_a_coin() {
        let scores = class_scores(&[85, 15], &[100, 0], &[85, 0]);
        assert_eq!(balanced_accuracy(&scores), 0.5);
        let of = |class: usize| {
            [
                scores[class].recall,
                scores[class].precision,
                scores[class].f1,
            ]
        };
        assert_eq!(of(0), [Some(1.0), Some(0.85), Some(170.0 / 185.0)]);
        assert_eq!(of(1), [Some(0.0), None, Some(0.0)]);
    }

    #[test]
    fn inconsistent_counts_are_refused() {
        let sound = Confusion {
            step: 1,
            names: vec![],
            rows: vec![1, 1],
            predicted: vec![1, 1],
            right: vec![1, 0],
            counts: Some(vec![vec![1, 0], vec![1, 0]]),
            mistakes: Some(vec![[1, 0, 1]]),
        };
        assert!(sound.is_sound());
        let wrong = [
            Confusion {
                rows: vec![1],
                ..sound.clone()
            },
            Confusion {
                rows: vec![],
                predicted: vec![],
                right: vec![],
                counts: None,
                mistakes: None,
                ..sound.clone()
            },
            Confusion {
                right: vec![2, 0],
                ..sound.clone()
            },
            Confusion {
                counts: Some(vec![vec![1, 0], vec![1]]),
                ..sound.clone()
            },
            Confusion {
                counts: Some(vec![vec![1, 0], vec![u64::MAX, 1]]),
                ..sound.clone()
            },
            Confusion {
                mistakes: Some(vec![[2, 0, 1]]),
                ..sound.clone()
            },
            Confusion {
                rows: vec![u64::MAX, 1],
                counts: None,
                ..sound.clone()
            },
        ];
        for confusion in wrong {
            assert!(!confusion.is_sound(), "{confusion:?}");
        }
    }
}
