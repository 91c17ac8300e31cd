//! What is done to features before a model sees them: `(x - shift) * scale`, in f32, the same in training and wherever the model is used.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::scan::Moments;
use super::{Dataset, Targets, Task, sampled_hash};
use crate::config::Normalize;
use crate::error::Result;

/// A shift and a scale for each feature of a row, or one of each for all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Normalization {
    /// What is taken away: one number, or as many as a row has features.
    pub shift: Vec<f32>,
    /// What is multiplied with then; as many.
    pub scale: Vec<f32>,
}

impl Normalization {
    /// Bytes brought to 0 to 1.
    pub(crate) fn of_bytes() -> Normalization {
        Normalization { shift: vec![0.0], scale: vec![1.0 / 255.0] }
    }

    /// As `how` asks of features with these moments.
    pub(crate) fn of(how: Normalize, moments: &Moments) -> Option<Normalization> {
        match how {
            Normalize::None => None,
            Normalize::Unit => Some(Normalization::unit(moments)),
            Normalize::Standard => Some(Normalization::standard(moments)),
        }
    }

    /// All features together from 0 to 1: by the least and the greatest number of all.
    fn unit(moments: &Moments) -> Normalization {
        let least = moments.least.iter().copied().fold(f32::INFINITY, f32::min);
        let greatest = moments.greatest.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // In f64, where the difference of two numbers of f32 is finite.
        let width = f64::from(greatest) - f64::from(least);
        Normalization { shift: vec![least], scale: vec![scale_of(width)] }
    }

    /// Each feature with mean 0 and deviation 1. One that is the same in all rows becomes 0 by a scale of 1.
    fn standard(moments: &Moments) -> Normalization {
        let count = moments.count.max(1) as f64;
        let ends = moments.least.iter().zip(&moments.greatest);
        let spread = moments.squares.iter().zip(ends);
        // A mean of equal numbers may be off by a rounding, and its squares then are no deviation.
        let scale = spread.map(|(squares, (least, greatest))| {
            scale_of(if least == greatest { 0.0 } else { (squares / count).sqrt() })
        });
        let means = moments.mean.iter().zip(moments.least.iter().zip(&moments.greatest));
        let shift = means.map(|(&mean, (&least, &greatest))| if least == greatest { least } else { mean as f32 });
        Normalization { shift: shift.collect(), scale: scale.collect() }
    }

    /// Brings whole rows of `width` features to what the model sees.
    pub fn apply(&self, x: &mut [f32], width: usize) {
        match (&self.shift[..], &self.scale[..]) {
            (&[shift], &[scale]) => x.iter_mut().for_each(|x| *x = (*x - shift) * scale),
            (shift, scale) => {
                assert!(shift.len() == width && scale.len() == width, "as many as a row of {width} features has");
                for row in x.chunks_exact_mut(width) {
                    for ((x, shift), scale) in row.iter_mut().zip(shift).zip(scale) {
                        *x = (*x - shift) * scale;
                    }
                }
            }
        }
    }

    /// Whether it is for rows of so many features.
    pub(crate) fn fits(&self, width: usize) -> bool {
        let count = self.shift.len();
        self.scale.len() == count && (count == 1 || count == width)
    }
}

/// What brings this spread to 1: 1 where there is none, or too little to divide by.
fn scale_of(spread: f64) -> f32 {
    let scale = (1.0 / spread) as f32;
    if scale.is_finite() && scale > 0.0 { scale } else { 1.0 }
}

/// Data whose features are brought to something else as they are asked for.
#[derive(Debug)]
pub(crate) struct Normalized {
    pub(crate) of: Arc<dyn Dataset>,
    pub(crate) by: Normalization,
}

impl Dataset for Normalized {
    fn rows(&self) -> u64 {
        self.of.rows()
    }

    fn row_shape(&self) -> &[usize] {
        self.of.row_shape()
    }

    fn task(&self) -> &Task {
        self.of.task()
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(format!("{} normalized {:016x}", self.of.fingerprint()?, sampled_hash(self)?))
    }

    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()> {
        self.of.gather(rows, x, targets)?;
        self.by.apply(x, self.of.row_shape().iter().product());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(rows: &[[f32; 3]]) -> Moments {
        let mut moments = Moments::none(3);
        rows.iter().for_each(|row| moments.merge(&Moments::of_rows(row, 3)));
        moments
    }

    #[test]
    fn features_get_mean_0_and_deviation_1_and_constant_ones_become_0() {
        let rows = [[1.0, 0.1, -3.0], [2.0, 0.1, 5.0], [6.0, 0.1, 7.0]];
        let standard = Normalization::of(Normalize::Standard, &moments(&rows)).unwrap();
        let mut x = rows.concat();
        standard.apply(&mut x, 3);
        for column in 0..3 {
            let of_column: Vec<f64> = x.iter().skip(column).step_by(3).map(|&x| f64::from(x)).collect();
            let sum: f64 = of_column.iter().sum();
            let squares: f64 = of_column.iter().map(|x| x * x).sum();
            // Three numbers near 1, each some roundings of f32 off.
            assert!(sum.abs() < 1e-5, "{of_column:?}");
            let expected = if column == 1 { 0.0 } else { 3.0 };
            assert!((squares - expected).abs() < 1e-5, "{of_column:?}");
        }
        assert_eq!((standard.shift[1], standard.scale[1]), (0.1, 1.0));
    }

    #[test]
    fn unit_brings_the_least_to_0_and_the_greatest_to_1() {
        let rows = [[1.0, 0.5, -3.0], [2.0, 0.5, 5.0]];
        let unit = Normalization::of(Normalize::Unit, &moments(&rows)).unwrap();
        let mut x = rows.concat();
        unit.apply(&mut x, 3);
        assert_eq!((x[2], x[5]), (0.0, 1.0));
        let widest = moments(&[[f32::MIN, f32::MAX, 0.0]]);
        assert!(Normalization::of(Normalize::Unit, &widest).unwrap().scale[0] > 0.0);
        let none = Normalization::of(Normalize::Unit, &moments(&[[4.0; 3]])).unwrap();
        assert_eq!((none.shift[0], none.scale[0]), (4.0, 1.0));
    }

    #[test]
    fn bytes_become_at_most_1() {
        let mut x = [0.0, 255.0];
        Normalization::of_bytes().apply(&mut x, 2);
        assert_eq!(x, [0.0, 1.0]);
    }
}
