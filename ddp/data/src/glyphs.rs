//! `glyphs`: handwritten-looking digits of 28×28 grey pixels, drawn by code. The image of a row is
//! a pure function of the seed, the split and the row, with the same bits on every machine.
//!
//! Each digit has a few styles (`strokes.txt`). An image takes one, moves its control points,
//! rotates, slants, scales and shifts it, and draws it with a pen of random width and softness,
//! under noise (`draw.rs`).

mod draw;

use std::sync::OnceLock;

use ddp_kernels::{Tensor, normalize_levels};

pub use self::draw::{Image, PIXELS, SIDE};
use super::dataset::{Dataset, RowSpec, check_gather, sampled_hash};
use super::mix::derive;
use super::spec::{DataSpec, GlyphsSpec};
use super::task::TaskSpec;
use crate::error::Result;

/// The digits.
pub const CLASSES: usize = 10;

/// Mean and standard deviation of a pixel, in grey levels, over the default training images.
const MEAN: f32 = 35.2;
const DEVIATION: f32 = 65.1;

/// Only this many images are kept once drawn (100 MiB); later ones are drawn each time.
const KEPT_MAX: u64 = 1 << 17;

/// Digits drawn by code: one of the two splits.
pub struct Glyphs {
    spec: GlyphsSpec,
    /// "train" or "held-out".
    split: &'static str,
    rows: u64,
    key: u64,
    row_spec: RowSpec,
    /// Images that have been drawn, by row.
    kept: Vec<OnceLock<Image>>,
}

impl Glyphs {
    /// The training images.
    pub fn train(spec: &GlyphsSpec) -> Glyphs {
        Glyphs::new(spec, "train", spec.rows, 0)
    }

    /// The held-out images.
    pub fn held_out(spec: &GlyphsSpec) -> Glyphs {
        Glyphs::new(spec, "held-out", spec.held_out, 1)
    }

    fn new(spec: &GlyphsSpec, split: &'static str, rows: u64, part: u64) -> Glyphs {
        let kept = rows.min(KEPT_MAX) as usize;
        Glyphs {
            spec: spec.clone(),
            split,
            rows,
            key: derive(spec.seed, part),
            row_spec: RowSpec {
                image: vec![SIDE, SIDE],
                ..RowSpec::features(PIXELS, TaskSpec::numbered_classes(CLASSES))
            },
            kept: std::iter::repeat_with(OnceLock::new).take(kept).collect(),
        }
    }

    /// The image of a row, and its digit.
    pub fn image(&self, row: u64) -> (Image, u8) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let key = derive(self.key, row);
        let image = match self.kept.get(row as usize) {
            Some(kept) => *kept.get_or_init(|| draw::draw(key)),
            None => draw::draw(key),
        };
        (image, draw::digit(key))
    }
}

impl std::fmt::Debug for Glyphs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", DataSpec::Glyphs(self.spec.clone()), self.split)
    }
}

impl Dataset for Glyphs {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn spec(&self) -> &RowSpec {
        &self.row_spec
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(format!("{self:?} {:016x}", sampled_hash(self)?))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
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
