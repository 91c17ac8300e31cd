//! Normalization of features and of numeric targets: `(x - shift) * scale` in f32, the same in
//! training and wherever the model is used.

use serde::{Deserialize, Serialize};

use super::scan::Moments;

ddp_kernels::choices! {
    /// How features are normalized.
    #[derive(Default)]
    pub enum Normalize {
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
}

impl Normalization {
    /// Scales bytes to 0 to 1.
    pub(crate) fn of_bytes() -> Normalization {
        Normalization {
            shift: vec![0.0],
            scale: vec![1.0 / 255.0],
        }
    }

    /// The normalization `how` of features with these moments.
    pub(crate) fn of(how: Normalize, moments: &Moments) -> Option<Normalization> {
        match how {
            Normalize::None => None,
            Normalize::Unit => Some(Normalization::unit(moments)),
            Normalize::Standard => Some(Normalization::standard(moments)),
        }
    }

    /// Scales all features together to 0 to 1.
    fn unit(moments: &Moments) -> Normalization {
        let (least, greatest) = (moments.least.iter(), moments.greatest.iter());
        let least = least.copied().fold(f32::INFINITY, f32::min);
        let greatest = greatest.copied().fold(f32::NEG_INFINITY, f32::max);
        // In f64 the difference of two f32 is finite.
        let width = f64::from(greatest) - f64::from(least);
        Normalization {
            shift: vec![least],
            scale: vec![scale_of(width)],
        }
    }

    /// Scales each feature to mean 0 and deviation 1. A constant one becomes 0, with a scale of 1.
    pub(crate) fn standard(moments: &Moments) -> Normalization {
        let count = moments.count.max(1) as f64;
        let feature = |index: usize| {
            let (least, greatest) = (moments.least[index], moments.greatest[index]);
            // The mean of equal numbers may be off by a rounding, and so give a tiny deviation.
            match least == greatest {
                true => (least, 1.0),
                false => (
                    moments.mean[index] as f32,
                    scale_of((moments.squares[index] / count).sqrt()),
                ),
            }
        };
        let (shift, scale) = (0..moments.mean.len()).map(feature).unzip();
        Normalization { shift, scale }
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

    /// Whether it is for rows of `width` features.
    pub(crate) fn fits(&self, width: usize) -> bool {
        let count = self.shift.len();
        self.scale.len() == count && (count == 1 || count == width)
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

#[cfg(test)]
mod tests;
