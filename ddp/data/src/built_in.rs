//! Built-in data: rows that code makes when they are read. A row is a pure function of the seed,
//! the split and its number, with the same bits on every machine.

use std::sync::OnceLock;

use ddp_kernels::{Tensor, normalize_levels};

use crate::dataset::{Dataset, RowSpec, check_gather, sampled_hash};
use crate::error::Result;
use crate::glyphs::{self, Image, PIXELS, SIDE};
use crate::sampler::{Draws, derive, normal_of};
use crate::spec::{DataSpec, SyntheticKind, SyntheticSpec};
use crate::task::TaskSpec;

/// The rows of one of the two splits.
#[derive(Debug)]
pub(crate) struct BuiltIn {
    /// What they are, with all options, and the split.
    name: String,
    rows: u64,
    spec: RowSpec,
    maker: Maker,
}

/// What makes rows.
#[derive(Debug)]
enum Maker {
    Glyphs(Glyphs),
    Synthetic(Synthetic),
}

impl BuiltIn {
    /// The rows to train on and those held out; `None` if these are files.
    pub(crate) fn pair(spec: &DataSpec) -> Option<[BuiltIn; 2]> {
        let (seed, counts) = match spec {
            DataSpec::Glyphs(of) => (of.seed, [of.rows, of.held_out]),
            DataSpec::Synthetic(of) => (of.seed, [of.rows, of.held_out]),
            DataSpec::Files(_) | DataSpec::Tokens(_) => return None,
        };
        let made = |split: usize| {
            let (rows, part) = (counts[split], split as u64);
            let (row_spec, maker) = match spec {
                DataSpec::Synthetic(of) => {
                    let outputs = of.outputs;
                    let task = match of.kind {
                        SyntheticKind::Classification => TaskSpec::numbered_classes(outputs),
                        SyntheticKind::Regression => TaskSpec::Regression { outputs },
                    };
                    // Key 0 is the teacher's.
                    let maker = Synthetic::new(of, derive(seed, part + 1));
                    (
                        RowSpec::features(of.features, task),
                        Maker::Synthetic(maker),
                    )
                }
                _ => {
                    let spec = RowSpec {
                        image: vec![SIDE, SIDE],
                        ..RowSpec::features(PIXELS, TaskSpec::numbered_classes(CLASSES))
                    };
                    (spec, Maker::Glyphs(Glyphs::new(derive(seed, part), rows)))
                }
            };
            BuiltIn {
                name: format!("{spec} {}", ["train", "held-out"][split]),
                rows,
                spec: row_spec,
                maker,
            }
        };
        Some([made(0), made(1)])
    }
}

impl Dataset for BuiltIn {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn spec(&self) -> &RowSpec {
        &self.spec
    }

    fn fingerprint(&self) -> Result<String> {
        Ok(format!("{} {:016x}", self.name, sampled_hash(self)?))
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        check_gather(self, rows, inputs, targets);
        match &self.maker {
            Maker::Glyphs(glyphs) => glyphs.gather(rows, inputs, targets),
            Maker::Synthetic(synthetic) => synthetic.gather(rows, inputs, targets),
        }
    }
}

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
            Some(kept) => *kept.get_or_init(|| glyphs::draw(key)),
            None => glyphs::draw(key),
        };
        (image, glyphs::digit(key))
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

/// Rows made from a formula.
#[derive(Debug)]
pub(crate) struct Synthetic {
    spec: SyntheticSpec,
    key: u64,
    teacher: Teacher,
}

/// The hidden width of the teacher: too wide for a linear model to imitate.
const HIDDEN: usize = 32;
/// Partial sums of a dot product: a fixed order that can be vectorized.
const LANES: usize = 16;

/// A fixed random network. F features, H hidden units, O outputs.
#[derive(Debug)]
struct Teacher {
    /// `[H, F]`
    first: Vec<f32>,
    /// `[O, H]`
    second: Vec<f32>,
}

impl Teacher {
    fn new(key: u64, features: usize, outputs: usize) -> Teacher {
        // A hidden unit has deviation 1; the ReLU keeps half of its square, so that an output has
        // deviation 1 too.
        let matrix = |part: u64, count: usize, deviation: f64| {
            let mut draws = Draws::new(derive(key, part));
            (0..count)
                .map(|_| draws.normal() * deviation as f32)
                .collect()
        };
        Teacher {
            first: matrix(0, HIDDEN * features, (1.0 / features as f64).sqrt()),
            second: matrix(1, outputs * HIDDEN, (2.0 / HIDDEN as f64).sqrt()),
        }
    }

    fn hidden(&self, x: &[f32]) -> [f32; HIDDEN] {
        std::array::from_fn(|unit| dot(&self.first[unit * x.len()..][..x.len()], x).max(0.0))
    }

    fn output(&self, hidden: &[f32; HIDDEN], index: usize) -> f32 {
        dot(&self.second[index * HIDDEN..][..HIDDEN], hidden)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks
        .remainder()
        .iter()
        .zip(b_chunks.remainder())
        .map(|(a, b)| a * b)
        .fold(0.0, |sum, term| sum + term);
    for (a, b) in a_chunks.zip(b_chunks) {
        sums.iter_mut()
            .zip(a)
            .zip(b)
            .for_each(|((sum, a), b)| *sum += a * b);
    }
    sums.iter().fold(rest, |sum, lane| sum + lane)
}

impl Synthetic {
    /// Rows of this key, all of them with the teacher of the seed.
    pub(crate) fn new(spec: &SyntheticSpec, key: u64) -> Synthetic {
        Synthetic {
            spec: spec.clone(),
            key,
            teacher: Teacher::new(derive(spec.seed, 0), spec.features, spec.outputs),
        }
    }

    /// Writes one row's features, and returns the random numbers that follow for its noise.
    fn features(&self, row: u64, x: &mut [f32]) -> Draws {
        let mut draws = Draws::new(derive(self.key, row));
        x.iter_mut().for_each(|x| *x = normal_of(draws.bits()));
        draws
    }

    fn class(&self, row: u64, x: &mut [f32]) -> i64 {
        let mut draws = self.features(row, x);
        let hidden = self.teacher.hidden(x);
        let noise = self.spec.noise as f32;
        let mut best = (f32::NEG_INFINITY, 0);
        for class in 0..self.spec.outputs {
            let score = self.teacher.output(&hidden, class) + noise * draws.normal();
            if score > best.0 {
                best = (score, class);
            }
        }
        best.1 as i64
    }

    fn values(&self, row: u64, x: &mut [f32], values: &mut [f32]) {
        let mut draws = self.features(row, x);
        let hidden = self.teacher.hidden(x);
        let noise = self.spec.noise as f32;
        for (index, value) in values.iter_mut().enumerate() {
            *value = self.teacher.output(&hidden, index) + noise * draws.normal();
        }
    }

    /// Writes the features and targets of these rows.
    pub(crate) fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        let (features, outputs) = (self.spec.features, self.spec.outputs);
        inputs.with_slice_mut(|x: &mut [f32]| {
            let rows = rows.iter().zip(x.chunks_exact_mut(features));
            match self.spec.kind {
                SyntheticKind::Classification => targets.with_slice_mut(|classes: &mut [i64]| {
                    for ((&row, x), class) in rows.zip(classes) {
                        *class = self.class(row, x);
                    }
                }),
                SyntheticKind::Regression => targets.with_slice_mut(|values: &mut [f32]| {
                    for ((&row, x), values) in rows.zip(values.chunks_exact_mut(outputs)) {
                        self.values(row, x, values);
                    }
                }),
            }
        })??;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
