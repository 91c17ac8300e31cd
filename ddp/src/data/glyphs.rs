//! `glyphs`: handwritten-looking digits of 28×28 grey pixels, drawn by code. Image `row` is a pure function of the seed, the
//! split and the row, the same on every machine; training and held-out images come from different keys.
//!
//! Each digit has a few ways of being written (`strokes.rs`); an image takes one, moves its control points, turns, slants,
//! scales and shifts it, and draws it with a pen of some width and softness, under noise (`draw.rs`).
//!
//! An image is drawn when it is first asked for and kept, a byte a pixel. Asking from many threads is safe: two that draw
//! the same image write the same bytes.

mod draw;
mod strokes;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::mix::derive;
use super::spec::GlyphsSpec;
use super::{DataSpec, Dataset, Targets, Task, check_gather, sampled_hash};
use crate::error::Result;

/// Pixels along a side of an image.
pub const SIDE: usize = 28;
/// Pixels of an image.
pub const PIXELS: usize = SIDE * SIDE;
/// The digits.
pub const CLASSES: usize = 10;

/// One image: grey levels row by row, 0 for the paper and 255 for the darkest ink.
pub type Image = [u8; PIXELS];

/// Mean and deviation of a pixel, in grey levels, over the default training images: features are standardised by them.
const MEAN: f32 = 35.2;
const DEVIATION: f32 = 65.1;

/// Images beyond this many are drawn each time they are asked for, and not kept: these take 100 MiB.
const KEPT_MAX: u64 = 1 << 17;
/// Eight pixels are kept in one word, so that they are read and written at a time.
const WORDS: usize = PIXELS / 8;

/// Digits drawn by code: one of the two splits.
pub struct Glyphs {
    spec: GlyphsSpec,
    /// "train" or "held-out".
    split: &'static str,
    rows: u64,
    key: u64,
    task: Task,
    kept: Vec<Kept>,
}

/// An image once it is drawn.
struct Kept {
    drawn: AtomicBool,
    pixels: [AtomicU64; WORDS],
}

impl Glyphs {
    /// The images to train on.
    pub fn train(spec: &GlyphsSpec) -> Glyphs {
        Glyphs::new(spec, "train", spec.rows, 0)
    }

    /// The images held out.
    pub fn held_out(spec: &GlyphsSpec) -> Glyphs {
        Glyphs::new(spec, "held-out", spec.held_out, 1)
    }

    fn new(spec: &GlyphsSpec, split: &'static str, rows: u64, part: u64) -> Glyphs {
        let names = (0..CLASSES).map(|class| class.to_string()).collect();
        let empty = || Kept { drawn: AtomicBool::new(false), pixels: [const { AtomicU64::new(0) }; WORDS] };
        Glyphs {
            spec: spec.clone(),
            split,
            rows,
            key: derive(spec.seed, part),
            task: Task::Classification { classes: CLASSES, names },
            kept: std::iter::repeat_with(empty).take(rows.min(KEPT_MAX) as usize).collect(),
        }
    }

    /// The image called `row`, and its digit.
    pub fn image(&self, row: u64) -> (Image, u8) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let key = derive(self.key, row);
        let digit = draw::digit(key);
        let Some(kept) = self.kept.get(row as usize) else { return (draw::draw(key), digit) };
        let mut image = [0; PIXELS];
        if kept.drawn.load(Ordering::Acquire) {
            for (pixels, word) in image.chunks_exact_mut(8).zip(&kept.pixels) {
                pixels.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
            return (image, digit);
        }
        image = draw::draw(key);
        for (pixels, word) in image.as_chunks().0.iter().zip(&kept.pixels) {
            word.store(u64::from_le_bytes(*pixels), Ordering::Relaxed);
        }
        // Whoever sees the flag sees the pixels stored before it.
        kept.drawn.store(true, Ordering::Release);
        (image, digit)
    }

    /// The image called `row` as text, for looking at: two characters a pixel.
    pub fn ascii(&self, row: u64) -> String {
        const SHADES: &[u8] = b" .:-=+*#%@";
        let (image, digit) = self.image(row);
        let mut text = format!("row {row}: {digit}\n");
        for line in image.chunks(SIDE) {
            for &pixel in line {
                let shade = char::from(SHADES[usize::from(pixel) * SHADES.len() / 256]);
                text.extend([shade, shade]);
            }
            text.truncate(text.trim_end_matches(' ').len());
            text.push('\n');
        }
        text
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

    fn row_shape(&self) -> &[usize] {
        &[PIXELS]
    }

    fn task(&self) -> &Task {
        &self.task
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(format!("{self:?} {:016x}", sampled_hash(self)?))
    }

    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()> {
        check_gather(self, rows, x, &targets);
        for ((&row, x), class) in rows.iter().zip(x.chunks_exact_mut(PIXELS)).zip(targets.classes()?) {
            let (image, digit) = self.image(row);
            *class = i64::from(digit);
            for (x, pixel) in x.iter_mut().zip(image) {
                *x = (f32::from(pixel) - MEAN) * (1.0 / DEVIATION);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
