//! `glyphs`: handwritten-looking digits of 28×28 grey pixels, drawn by code.
//!
//! Each digit has a few styles (`strokes.txt`). An image takes one, moves its control points,
//! rotates, slants, scales and shifts it, and draws it with a pen of random width and softness,
//! under noise (`draw.rs`).

mod draw;

use std::sync::OnceLock;

use ddp_kernels::{Tensor, normalize_levels};

pub(crate) use self::draw::{Image, PIXELS, SIDE};
use crate::error::Result;
use crate::mix::derive;

/// The digits.
pub(crate) const CLASSES: usize = 10;

/// Mean and standard deviation of a pixel, in grey levels, over the default training images.
const MEAN: f32 = 35.2;
const DEVIATION: f32 = 65.1;

/// Only this many images are kept once drawn (100 MiB); later ones are drawn each time.
const KEPT_MAX: u64 = 1 << 17;

/// Digits drawn by code.
#[derive(Debug)]
pub(crate) struct Glyphs {
    key: u64,
    /// Images that have been drawn, by row.
    kept: Vec<OnceLock<Image>>,
}

impl Glyphs {
    /// So many images of this key.
    pub(crate) fn new(key: u64, rows: u64) -> Glyphs {
        let kept = rows.min(KEPT_MAX) as usize;
        let kept = std::iter::repeat_with(OnceLock::new).take(kept).collect();
        Glyphs { key, kept }
    }

    /// The image of a row, and its digit.
    pub(crate) fn image(&self, row: u64) -> (Image, u8) {
        let key = derive(self.key, row);
        let image = match self.kept.get(row as usize) {
            Some(kept) => *kept.get_or_init(|| draw::draw(key)),
            None => draw::draw(key),
        };
        (image, draw::digit(key))
    }

    /// Writes the images and digits of these rows.
    pub(crate) fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        inputs.with_slice_mut(|x: &mut [f32]| {
            targets.with_slice_mut(|classes: &mut [i64]| {
                let images = rows.iter().zip(x.chunks_exact_mut(PIXELS));
                for ((&row, x), class) in images.zip(classes) {
                    let (image, digit) = self.image(row);
                    *class = i64::from(digit);
                    normalize_levels(x, &image, MEAN, 1.0 / DEVIATION);
                }
            })
        })??;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
