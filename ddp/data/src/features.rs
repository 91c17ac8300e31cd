//! How the numbers and cells of files become features: which columns are read and which of them are
//! categories, what replaces missing numbers, and how features and numeric targets are normalized.
//! A model keeps all of it and applies it to other files.
//!
//! Normalization is `(x - shift) * scale` in f32, the same in training and wherever the model is
//! used. Shift and scale come from the moments of the training rows.

use serde::{Deserialize, Serialize};

use crate::error::ensure;

ddp_kernels::choices! {
    /// How missing numbers are treated.
    #[derive(Default)]
    pub enum Missing {
        /// It is an error
        #[default]
        Error = "error",
        /// Replace it by the feature's mean over the training rows
        Mean = "mean",
        /// Replace it by 0
        Zero = "zero",
        /// In tables: as mean, and another feature is 1 where it is missing
        Indicator = "indicator",
    }
}

/// In `TableSettings::categorical`: every column of texts.
pub const AUTO: &str = "auto";
/// In `TableSettings::categorical`: of every column of texts the values that are common; dates
/// become numbers, free text and identifiers are left out.
pub const COMMON: &str = "common";

/// How a user wants the columns of tables to be read. Fields are named after the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableSettings {
    /// Columns that are left out.
    pub drop: Vec<String>,
    /// Columns whose values are categories, or `AUTO`.
    pub categorical: Vec<String>,
    /// How missing numbers are treated.
    pub missing: Missing,
}

/// A column of a table that is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnPlan {
    /// Its name.
    pub name: String,
    /// The values of a categorical column, sorted: each becomes a feature that is 1 where a cell
    /// has this value, else 0. `None` for a column of numbers, which is one feature.
    pub values: Option<Vec<String>>,
    /// Its other features. Versions up to 0.8 had none.
    #[serde(default, skip_serializing_if = "MoreFeatures::is_none")]
    pub more: MoreFeatures,
}

/// What a column becomes besides its number or its values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoreFeatures {
    /// Nothing.
    #[default]
    None,
    /// 1 for other values.
    Other,
    /// 1 where the number is missing.
    Missing,
    /// The column is of dates: its number is days since `first`, which counts from 1970, and these
    /// are sine and cosine of month and weekday.
    Date {
        /// The first day.
        first: i64,
    },
}

impl MoreFeatures {
    fn is_none(&self) -> bool {
        *self == MoreFeatures::None
    }

    /// What their names add to that of the column.
    fn names(self) -> &'static [&'static str] {
        match self {
            MoreFeatures::None => &[],
            MoreFeatures::Other => &["=(other)"],
            MoreFeatures::Missing => &[" (missing)"],
            MoreFeatures::Date { .. } => &[
                " (month, sine)",
                " (month, cosine)",
                " (weekday, sine)",
                " (weekday, cosine)",
            ],
        }
    }
}

/// How cells become features, apart from their normalization.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FeaturePlan {
    /// The columns of a table, in the order of their features; `None` if each is a number.
    pub columns: Option<Vec<ColumnPlan>>,
    /// What replaces missing numbers, one for each feature; `None` if none may be missing.
    pub fill: Option<Vec<f32>>,
}

impl ColumnPlan {
    /// A column of numbers.
    pub fn number(name: &str) -> ColumnPlan {
        ColumnPlan {
            name: name.to_string(),
            values: None,
            more: MoreFeatures::None,
        }
    }

    /// Whether its values are categories.
    pub fn is_categorical(&self) -> bool {
        self.values.is_some()
    }

    /// Whether it is one feature, its number.
    pub fn is_number(&self) -> bool {
        self.values.is_none() && self.more.is_none()
    }

    /// How many features it becomes.
    pub fn width(&self) -> usize {
        self.values.as_ref().map_or(1, Vec::len) + self.more.names().len()
    }

    /// Which of its features are 1 or 0: those of texts, and that a number is missing.
    pub(crate) fn are_flags(&self) -> impl Iterator<Item = bool> {
        let is_flag = |at| self.is_categorical() || self.more == MoreFeatures::Missing && at > 0;
        (0..self.width()).map(is_flag)
    }

    /// The names of its features.
    pub fn feature_names(&self) -> Vec<String> {
        let of_value = |value: &String| format!("{}={value}", self.name);
        let mut names = match &self.values {
            None => vec![self.name.clone()],
            Some(values) => values.iter().map(of_value).collect(),
        };
        let more = self.more.names().iter();
        names.extend(more.map(|more| format!("{}{more}", self.name)));
        names
    }
}

impl FeaturePlan {
    /// Whether features are the numbers in the files as they are.
    pub fn is_plain(&self) -> bool {
        *self == FeaturePlan::default()
    }

    /// What is wrong with a plan for rows of this many features.
    pub fn check(&self, features: usize) -> Result<(), String> {
        let columns = || self.columns.iter().flatten();
        let width = match self.columns {
            Some(_) => columns().map(ColumnPlan::width).sum(),
            None => features,
        };
        ensure!(
            width == features,
            "columns for {width} of {features} features"
        );
        let mut values = columns().filter_map(|column| column.values.as_ref());
        ensure!(
            values.all(|values| values.is_sorted_by(|a, b| a < b)),
            "the values of a column twice, or not in their order"
        );
        let fill = self.fill.as_deref().unwrap_or_default();
        ensure!(
            self.fill.is_none() || fill.len() == features && fill.iter().all(|x| x.is_finite()),
            "{} numbers for what is missing in {features} features, or a non-finite one",
            fill.len()
        );
        Ok(())
    }
}

ddp_kernels::choices! {
    /// How features are normalized.
    #[derive(Default)]
    pub enum Scaling {
        /// Features as they are
        #[default]
        None = "none",
        /// All features to 0 to 1 together: bytes by 255, others by the training data's range
        Unit = "unit",
        /// Each feature and numeric label to mean 0 and standard deviation 1, by the training rows
        Standard = "standard",
    }
}

/// A shift and a scale for each number of a row, or one of each for all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Normalization {
    /// What is subtracted: one number, or one for each feature.
    pub shift: Vec<f32>,
    /// What the difference is multiplied by: as many numbers.
    pub scale: Vec<f32>,
    /// Of numeric labels, the least and the greatest that were trained on, to which predictions are
    /// clipped. Versions up to 0.8 had none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub range: Vec<[f32; 2]>,
}

impl Normalization {
    /// Scales bytes to 0 to 1.
    pub(crate) fn of_bytes() -> Normalization {
        let (shift, scale) = (vec![0.0], vec![1.0 / 255.0]);
        Normalization::new(shift, scale)
    }

    /// Without a range.
    pub fn new(shift: Vec<f32>, scale: Vec<f32>) -> Normalization {
        Normalization {
            shift,
            scale,
            range: Vec::new(),
        }
    }

    /// The same, which clips what it undoes to the range of these moments.
    pub(crate) fn clipping(mut self, moments: &Moments) -> Normalization {
        let ends = moments.least.iter().zip(&moments.greatest);
        self.range = ends.map(|(least, greatest)| [*least, *greatest]).collect();
        self
    }

    /// Scales all features together to 0 to 1.
    pub(crate) fn unit(moments: &Moments) -> Normalization {
        let (least, greatest) = (moments.least.iter(), moments.greatest.iter());
        let least = least.copied().fold(f32::INFINITY, f32::min);
        let greatest = greatest.copied().fold(f32::NEG_INFINITY, f32::max);
        // In f64 the difference of two f32 is finite.
        let width = f64::from(greatest) - f64::from(least);
        Normalization::new(vec![least], vec![scale_of(width)])
    }

    /// Scales each feature to mean 0 and deviation 1. A constant one becomes 0, with a scale of 1.
    pub(crate) fn standard(moments: &Moments) -> Normalization {
        let count = moments.count.max(1) as f64;
        let feature = |index: usize| {
            let (least, greatest) = (moments.least[index], moments.greatest[index]);
            // The mean of equal numbers may be off by a rounding, and so give a tiny deviation.
            if least == greatest {
                (least, 1.0)
            } else {
                (
                    moments.mean[index] as f32,
                    scale_of((moments.squares[index] / count).sqrt()),
                )
            }
        };
        let (shift, scale) = (0..moments.mean.len()).map(feature).unzip();
        Normalization::new(shift, scale)
    }

    /// Only subtracts the mean of these features. Divided by its small deviation, a value of few
    /// rows would be larger than all others, and the model would learn chance from it.
    pub(crate) fn only_centre(&mut self, are_so: impl Iterator<Item = bool>) {
        let all = self.scale.iter_mut().zip(are_so);
        all.filter(|(_, is_so)| *is_so)
            .for_each(|(scale, _)| *scale = 1.0);
    }

    /// Normalizes whole rows of `width` features.
    pub fn apply(&self, x: &mut [f32], width: usize) {
        match (&self.shift[..], &self.scale[..]) {
            (&[shift], &[scale]) => x.iter_mut().for_each(|x| *x = (*x - shift) * scale),
            (shift, scale) => {
                assert!(
                    shift.len() == width && scale.len() == width,
                    "a shift and a scale for each of {width} features"
                );
                for row in x.chunks_exact_mut(width) {
                    for ((x, shift), scale) in row.iter_mut().zip(shift).zip(scale) {
                        *x = (*x - shift) * scale;
                    }
                }
            }
        }
    }

    /// The range in the units that `apply` makes.
    pub fn applied_range(&self) -> Vec<[f32; 2]> {
        if self.range.is_empty() {
            return Vec::new();
        }
        let [mut least, mut greatest] = [0, 1].map(|end| -> Vec<f32> {
            let ends = self.range.iter().map(|range| range[end]);
            ends.collect()
        });
        self.apply(&mut least, self.range.len());
        self.apply(&mut greatest, self.range.len());
        least.into_iter().zip(greatest).map(Into::into).collect()
    }

    /// Clips predictions in the units that `apply` makes.
    pub fn clip(&self, x: &mut [f32], _width: usize) {
        clamp(x, &self.applied_range());
    }

    /// Undoes `apply` on predictions, which are clipped to the range.
    pub fn undo_clipped(&self, x: &mut [f32], width: usize) {
        self.undo(x, width);
        clamp(x, &self.range);
    }

    /// Undoes `apply` on whole rows of `width` numbers. A number with scale 0 becomes its shift.
    pub fn undo(&self, x: &mut [f32], width: usize) {
        for row in x.chunks_exact_mut(width.max(1)) {
            for (column, value) in row.iter_mut().enumerate() {
                let at = column.min(self.shift.len() - 1);
                *value = match self.scale[at] {
                    0.0 => self.shift[at],
                    scale => *value / scale + self.shift[at],
                };
            }
        }
    }

    /// Whether it fits rows of `width` features.
    pub(crate) fn fits(&self, width: usize) -> bool {
        let count = self.shift.len();
        self.scale.len() == count && (count == 1 || count == width)
    }
}

/// Brings each number of whole rows into its range. NaN stays what it is.
fn clamp(x: &mut [f32], range: &[[f32; 2]]) {
    for row in x.chunks_exact_mut(range.len().max(1)) {
        for (value, [least, greatest]) in row.iter_mut().zip(range) {
            *value = value.clamp(*least, *greatest);
        }
    }
}

/// The scale that brings this spread to 1; 1 if it is 0 or too small to divide by.
fn scale_of(spread: f64) -> f32 {
    let scale = (1.0 / spread) as f32;
    if scale.is_finite() && scale > 0.0 {
        scale
    } else {
        1.0
    }
}

/// The moments of F features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moments {
    /// The number of rows.
    pub(crate) count: u64,
    /// `[F]`
    pub(crate) mean: Vec<f64>,
    /// The sum of squares about the mean, `[F]`.
    pub(crate) squares: Vec<f64>,
    /// `[F]`
    pub(crate) least: Vec<f32>,
    /// `[F]`
    pub(crate) greatest: Vec<f32>,
}

impl Moments {
    /// The moments of no rows.
    pub(crate) fn none(width: usize) -> Moments {
        Moments {
            count: 0,
            mean: vec![0.0; width],
            squares: vec![0.0; width],
            // JSON has no infinity.
            least: vec![f32::MAX; width],
            greatest: vec![f32::MIN; width],
        }
    }

    /// The moments of finite rows: first the mean, then the squares about it, so that large numbers
    /// do not cancel.
    pub(crate) fn of_rows(x: &[f32], width: usize) -> Moments {
        let mut moments = Moments::none(width);
        moments.count = (x.len() / width) as u64;
        if moments.count == 0 {
            return moments;
        }
        for row in x.chunks_exact(width) {
            let ends = moments.least.iter_mut().zip(&mut moments.greatest);
            for ((mean, (least, greatest)), &x) in moments.mean.iter_mut().zip(ends).zip(row) {
                *mean += f64::from(x);
                *least = if x < *least { x } else { *least };
                *greatest = if x > *greatest { x } else { *greatest };
            }
        }
        let count = moments.count as f64;
        moments.mean.iter_mut().for_each(|mean| *mean /= count);
        for row in x.chunks_exact(width) {
            let means = moments.squares.iter_mut().zip(&moments.mean);
            for ((squares, mean), &x) in means.zip(row) {
                let off = f64::from(x) - mean;
                *squares += off * off;
            }
        }
        moments
    }

    /// Adds later rows (Chan's formula).
    pub(crate) fn merge(&mut self, later: &Moments) {
        if later.count == 0 {
            return;
        }
        let (here, there) = (self.count as f64, later.count as f64);
        let part = there / (here + there);
        for at in 0..self.mean.len() {
            let apart = later.mean[at] - self.mean[at];
            self.mean[at] += apart * part;
            self.squares[at] += later.squares[at] + apart * apart * (here * part);
            self.least[at] = self.least[at].min(later.least[at]);
            self.greatest[at] = self.greatest[at].max(later.greatest[at]);
        }
        self.count += later.count;
    }
}

#[cfg(test)]
mod tests;
