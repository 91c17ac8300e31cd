//! What a classification run stores for its report at the last evaluation: the confusion matrix,
//! and some held-out rows, most of them wrongly classified.
//!
//! Counts are integers, summed over the ranks exactly. Samples are the first in the order of rows,
//! so they do not depend on the number of ranks. C is the number of classes.

mod counts;
mod picture;
mod ranking;

use std::fs;
use std::path::Path;

use ddp_comm::{Group, World};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

pub(crate) use self::counts::class_scores;
pub(crate) use self::counts::first_largest;
pub use self::counts::{ClassCounts, ClassScores, balanced_accuracy};
pub use self::picture::Picture;
use crate::error::{Error, Result};
use crate::exchange;
use ddp_data::{Batch, Classes, ColumnPlan, Data, read_rows};
use ddp_kernels::files;

/// The samples that a run keeps for its report.
pub const SAMPLES_FILE: &str = "samples.json";

/// With more classes the metrics log has no table, but the pairs that are mistaken most often.
pub(crate) const SHOWN_CLASSES_MAX: usize = 30;
/// How many of those pairs.
const PAIRS_MAX: usize = 50;
/// Rows that are shown.
const SAMPLES_MAX: usize = 24;
/// The most features of all rows that may be shown: a row with more than this is not shown.
const FEATURES_MAX: usize = 1 << 24;
/// Columns of a row that is not a picture, as they are shown.
const VALUES_MAX: usize = 12;
/// The largest file of samples that is read: many times what a run writes.
const BYTES_MAX: u64 = 32 << 20;

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
        name_of(&self.names, class)
    }
}

fn name_of(names: &[String], class: usize) -> String {
    let name = names.get(class).cloned();
    name.unwrap_or_else(|| class.to_string())
}

/// Some held-out rows and their predictions: `samples.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// After this step.
    pub step: u64,
    /// Names of the columns that are shown, if they have names and are not a picture.
    pub columns: Vec<String>,
    /// Columns of a row.
    pub features: usize,
    /// Wrongly classified rows, and correctly classified ones among them.
    pub samples: Vec<Sample>,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its number among the held-out rows.
    pub row: u64,
    /// Its class.
    pub truth: String,
    /// Its predicted class.
    pub predicted: String,
    /// Whether the two are the same.
    pub is_right: bool,
    /// The probability of the predicted class.
    pub confidence: Option<f32>,
    /// The row, if it looks like a picture.
    pub picture: Option<Picture>,
    /// Otherwise its first columns; None for a non-finite number, or an unknown category.
    pub values: Vec<Option<SampleValue>>,
}

/// The value of a column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SampleValue {
    /// A number.
    Number(f32),
    /// A category.
    Word(String),
}

impl Samples {
    /// Saves them in a run's folder.
    pub fn save(&self, out: &Path) -> Result<()> {
        let text = serde_json::to_vec(self)
            .map_err(|error| Error::Internal(format!("samples do not fit JSON: {error}")))?;
        Ok(files::replace_with(&out.join(SAMPLES_FILE), &text)?)
    }

    /// Reads those of the run in `out`, if it has any. An error says why they cannot be shown.
    pub fn read(out: &Path) -> std::result::Result<Option<Samples>, String> {
        let refused = |why: &str| format!("{SAMPLES_FILE}: {why}");
        let path = out.join(SAMPLES_FILE);
        let Ok(about) = fs::metadata(&path) else {
            return Ok(None);
        };
        if !about.is_file() || about.len() > BYTES_MAX {
            let expected = "expected a plain file of the size that a run writes";
            return Err(refused(expected));
        }
        let bytes = fs::read(&path).map_err(|error| refused(&error.to_string()))?;
        let samples = serde_json::from_slice::<Samples>(&bytes);
        let samples = samples.map_err(|error| refused(&error.to_string()))?;
        if samples.samples.len() > SAMPLES_MAX {
            return Err(refused(&format!("expected at most {SAMPLES_MAX} samples")));
        }
        let mut pictures = samples.samples.iter().filter_map(|it| it.picture.as_ref());
        if pictures.all(Picture::is_sound) {
            return Ok(Some(samples));
        }
        Err(refused("the pixels of a picture do not fit its sizes"))
    }
}

/// The share of the rows that the largest class has; None if it is at most 0.1 above an equal
/// share, so that accuracy says enough.
pub fn largest_class(rows: &[u64]) -> Option<f64> {
    let all: u64 = rows.iter().sum();
    let part = *rows.iter().max()? as f64 / all as f64;
    Some(part).filter(|part| *part > 1.0 / rows.len() as f64 + 0.1)
}

/// Counts and samples that one rank collects during an evaluation.
#[derive(Debug)]
pub struct SampleCollector {
    classes: Classes,
    counts: ClassCounts,
    seen: SampleRows,
}

/// The first rows of this rank that are classified wrongly and correctly.
#[derive(Debug, Default, Serialize, Deserialize)]
struct SampleRows {
    wrong: Vec<SampleRow>,
    right: Vec<SampleRow>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct SampleRow {
    row: u64,
    truth: usize,
    predicted: usize,
    confidence: Option<f32>,
}

impl SampleCollector {
    /// Empty, for rows of these classes.
    pub fn of(classes: &Classes) -> SampleCollector {
        SampleCollector {
            classes: classes.clone(),
            counts: ClassCounts::of(classes.count()),
            seen: SampleRows::default(),
        }
    }

    /// Counts the answers of a batch: `output` (B, C).
    pub fn see(&mut self, batch: &Batch, output: &Tensor) -> Result<()> {
        let (outputs, classes) = announced("the confusion matrix", || -> Result<_> {
            let outputs = output.to((Device::Cpu, DType::F32))?.to_vec::<f32>()?;
            let classes = batch.targets.to(Device::Cpu)?.to_dtype(DType::I64)?;
            Ok((outputs, classes.to_vec::<i64>()?))
        })?;
        let rows = outputs.chunks_exact(self.classes.count()).zip(classes);
        for (row, (logits, truth)) in (batch.first..).zip(rows) {
            // The evaluation has refused other targets.
            let truth = usize::try_from(truth).ok();
            if let Some(truth) = truth.filter(|truth| *truth < self.classes.count()) {
                self.count(row, truth, logits);
            }
        }
        Ok(())
    }

    fn count(&mut self, row: u64, truth: usize, logits: &[f32]) {
        let predicted = self.counts.count(truth, logits);
        let seen = if truth == predicted {
            &mut self.seen.right
        } else {
            &mut self.seen.wrong
        };
        if seen.len() < SAMPLES_MAX {
            let confidence = Some(confidence(logits, predicted));
            let confidence = confidence.filter(|part| part.is_finite());
            seen.push(SampleRow {
                row,
                truth,
                predicted,
                confidence,
            });
        }
    }

    /// Adds up the counts of all ranks, which call it together. Returns by name the balanced
    /// accuracy, and of two classes AUC.
    pub fn add_up(&mut self, group: &Group) -> Result<Vec<(&'static str, f64)>> {
        self.counts.add_up(group)?;
        let balanced = balanced_accuracy(&self.counts.scores());
        let mut figures = vec![("balanced_accuracy", balanced)];
        figures.extend(self.counts.auc().map(|auc| ("auc", auc)));
        Ok(figures)
    }

    /// Gathers the samples of all ranks, which call it together after `add_up`, on rank 0. Rows
    /// that are made from a formula are not pictures.
    pub fn together(
        self,
        step: u64,
        data: &Data,
        may_be_pictures: bool,
        world: &World,
    ) -> Result<Option<(Confusion, Result<Samples>)>> {
        let all = exchange::gather(world, &self.seen)?;
        if world.rank() > 0 {
            return Ok(None);
        }
        let mut shown = SampleRows::default();
        for seen in all {
            shown.wrong.extend(seen.wrong);
            shown.right.extend(seen.right);
        }
        let names = self.classes.names();
        let confusion = confusion(step, &names, &self.counts);
        let samples = shown.samples(step, &names, data, may_be_pictures);
        Ok(Some((confusion, samples)))
    }
}

/// The probability of a class, by softmax.
fn confidence(logits: &[f32], class: usize) -> f32 {
    let relative = |logit: f32| (f64::from(logit) - f64::from(logits[class])).exp();
    (1.0 / logits.iter().map(|&logit| relative(logit)).sum::<f64>()) as f32
}

fn confusion(step: u64, names: &[String], counts: &ClassCounts) -> Confusion {
    let rows = counts.rows();
    Confusion {
        step,
        names: names.to_vec(),
        predicted: counts.answers(),
        right: counts.right(),
        counts: counts.table().filter(|_| rows.len() <= SHOWN_CLASSES_MAX),
        mistakes: counts.mistakes(PAIRS_MAX),
        rows,
    }
}

impl SampleRows {
    /// The rows that are shown, at most this many: two wrong ones, then a right one, and so on.
    fn mixed(mut self, most: usize) -> Vec<SampleRow> {
        self.wrong.sort_by_key(|seen| seen.row);
        self.right.sort_by_key(|seen| seen.row);
        let (mut wrong, mut right) = (self.wrong.into_iter(), self.right.into_iter());
        let mut mixed = Vec::new();
        while mixed.len() < most {
            let next = [wrong.next(), wrong.next(), right.next()];
            if next.iter().all(Option::is_none) {
                break;
            }
            mixed.extend(next.into_iter().flatten());
        }
        mixed.truncate(most);
        mixed
    }

    /// The samples, with their features.
    fn samples(
        self,
        step: u64,
        names: &[String],
        data: &Data,
        may_be_pictures: bool,
    ) -> Result<Samples> {
        let features: usize = data.held_out.row_shape().iter().product();
        let seen = self.mixed(SAMPLES_MAX.min(FEATURES_MAX / features.max(1)));
        let rows: Vec<u64> = seen.iter().map(|seen| seen.row).collect();
        let [x, _] = read_rows(&*data.held_out, &rows)?;
        let mut x = x.to_dtype(DType::F32)?.to_vec::<f32>()?;
        if let Some(normalization) = &data.normalization {
            normalization.undo(&mut x, features);
        }
        let column_names = data.columns.as_deref().unwrap_or_default();
        let may_be_pictures = may_be_pictures && are_like_pixels(column_names);
        let pictures = Picture::of_rows(data.held_out.row_shape(), &x);
        let pictures = pictures.filter(|_| may_be_pictures);
        let mut columns = match pictures {
            Some(_) => Vec::new(),
            None => sample_columns(data, column_names, features),
        };
        let all_columns = columns.len();
        columns.truncate(VALUES_MAX);
        let name = |class: usize| name_of(names, class);
        let sample = |(index, seen): (usize, &SampleRow)| {
            let row = &x[index * features..][..features];
            Sample {
                row: seen.row,
                truth: name(seen.truth),
                predicted: name(seen.predicted),
                is_right: seen.truth == seen.predicted,
                confidence: seen.confidence,
                picture: pictures.as_ref().map(|pictures| pictures[index].clone()),
                values: columns.iter().map(|column| column.value(row)).collect(),
            }
        };
        let samples = seen.iter().enumerate().map(sample).collect();
        let named = columns.iter().any(|column| !column.name.is_empty());
        let names = columns.iter().map(|column| column.name.clone());
        Ok(Samples {
            step,
            columns: names.filter(|_| named).collect(),
            features: all_columns,
            samples,
        })
    }
}

/// A column of samples: where its features begin, and the words that they mean.
struct SampleColumn {
    name: String,
    first: usize,
    words: Option<Vec<String>>,
}

impl SampleColumn {
    /// The number of a row's features (F), or the word whose feature is 1; None if it is missing.
    fn value(&self, row: &[f32]) -> Option<SampleValue> {
        let Some(words) = &self.words else {
            let number = row[self.first];
            return Some(SampleValue::Number(number)).filter(|_| number.is_finite());
        };
        let features = &row[self.first..][..words.len()];
        let word = features.iter().position(|feature| *feature > 0.5)?;
        Some(SampleValue::Word(words[word].clone()))
    }
}

/// The columns of tables, each category as one; of other rows the features.
fn sample_columns(data: &Data, names: &[String], features: usize) -> Vec<SampleColumn> {
    let Some(plan) = &data.plan.columns else {
        let column = |first: usize| SampleColumn {
            name: names.get(first).cloned().unwrap_or_default(),
            first,
            words: None,
        };
        return (0..features).map(column).collect();
    };
    let mut next = 0;
    let column = |plan: &ColumnPlan| {
        let first = next;
        next += plan.values.as_ref().map_or(1, Vec::len);
        SampleColumn {
            name: plan.name.clone(),
            first,
            words: plan.values.clone(),
        }
    };
    plan.iter().map(column).collect()
}

/// Whether columns may be pixels: they have no names, or names that differ only in numbers, as
/// `pixel17` and `3x12`.
fn are_like_pixels(columns: &[String]) -> bool {
    let letters = |name: &String| name.replace(|character: char| character.is_ascii_digit(), "");
    let mut names = columns.iter().map(letters);
    let first = names.next();
    names.all(|name| Some(&name) == first.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confidence_is_a_probability() {
        assert_eq!(confidence(&[1000.0, 1000.0], 0), 0.5);
    }

    #[test]
    fn every_row_is_counted_once_in_each_sum() {
        let mut collector = SampleCollector::of(&Classes::numbered(3));
        let answers = [(0, 0), (0, 1), (1, 1), (2, 1), (2, 1), (2, 2)];
        for (row, (truth, predicted)) in answers.into_iter().enumerate() {
            let logits: Vec<f32> = (0..3)
                .map(|class| if class == predicted { 4.0 } else { 0.0 })
                .collect();
            collector.count(row as u64, truth, &logits);
        }
        let confusion = confusion(9, &["a".into(), "b".into()], &collector.counts);
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
        let rows = |seen: &[SampleRow]| seen.iter().map(|seen| seen.row).collect::<Vec<_>>();
        assert_eq!(
            (rows(&collector.seen.wrong), rows(&collector.seen.right)),
            (vec![1, 3, 4], vec![0, 2, 5])
        );
    }

    #[test]
    fn right_rows_are_shown_among_the_wrong_ones_however_many_are_wrong() {
        let row = |row| SampleRow {
            row,
            truth: 0,
            predicted: 0,
            confidence: None,
        };
        let seen = || SampleRows {
            wrong: (0..24).rev().map(row).collect(),
            right: (50..53).map(row).collect(),
        };
        let shown = |most| {
            seen()
                .mixed(most)
                .iter()
                .map(|seen| seen.row)
                .collect::<Vec<_>>()
        };
        assert_eq!(shown(10), [0, 1, 50, 2, 3, 51, 4, 5, 52, 6]);
        assert_eq!(shown(100).len(), 27);
    }

    #[test]
    fn a_category_of_a_sample_is_a_word() {
        let column = SampleColumn {
            name: "kind".into(),
            first: 1,
            words: Some(vec!["cat".into(), "dog".into()]),
        };
        let word = |row: &[f32]| column.value(row);
        assert_eq!(
            word(&[9.0, 0.0, 1.0]),
            Some(SampleValue::Word("dog".into()))
        );
        assert_eq!(word(&[9.0, 0.0, 0.0]), None);
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

    #[test]
    fn columns_with_names_of_their_own_are_no_pixels() {
        let named = |names: &[&str]| {
            are_like_pixels(
                &names
                    .iter()
                    .map(|name| name.to_string())
                    .collect::<Vec<_>>(),
            )
        };
        assert!(named(&[]) && named(&["pixel0", "pixel1", "pixel22"]) && named(&["1x1", "1x12"]));
        assert!(!named(&["width", "height", "age"]));
    }
}
