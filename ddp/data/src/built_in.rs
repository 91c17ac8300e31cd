//! Built-in data: rows that code makes when they are read. A row is a pure function of the seed,
//! the split and its number, with the same bits on every machine.

use std::sync::OnceLock;

use ddp_kernels::{Tensor, normalize_levels};

use crate::dataset::{Dataset, RowSpec, check_gather, sampled_hash};
use crate::error::Result;
use crate::glyphs::{self, Image, PIXELS, SIDE};
use crate::sampler::{Draws, derive};
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
        inputs.with_slice_mut(|x: &mut [f32]| {
            let width = self.spec.inputs.elements();
            let rows = rows.iter().zip(x.chunks_exact_mut(width));
            match (&self.maker, &self.spec.task) {
                (Maker::Synthetic(made), TaskSpec::Regression { outputs }) => targets
                    .with_slice_mut(|values: &mut [f32]| {
                        for ((&row, x), values) in rows.zip(values.chunks_exact_mut(*outputs)) {
                            let outputs = values.iter_mut().zip(made.outputs(row, x));
                            outputs.for_each(|(value, output)| *value = output);
                        }
                    }),
                (maker, _) => targets.with_slice_mut(|classes: &mut [i64]| {
                    for ((&row, x), class) in rows.zip(classes) {
                        *class = match maker {
                            Maker::Glyphs(made) => made.read(row, x),
                            Maker::Synthetic(made) => made.class(row, x),
                        };
                    }
                }),
            }
        })??;
        Ok(())
    }
}

/// The digits.
const CLASSES: usize = 10;

/// Mean and standard deviation of a pixel, in grey levels, over the default training images.
const MEAN: f32 = 35.2;
const DEVIATION: f32 = 65.1;

/// Only this many images are kept once drawn (100 MiB); later ones are drawn each time.
const KEPT_MAX: u64 = 1 << 17;

/// Digits drawn by code.
#[derive(Debug)]
struct Glyphs {
    key: u64,
    /// Images that have been drawn, by row.
    kept: Vec<OnceLock<Image>>,
}

impl Glyphs {
    /// So many images of this key.
    fn new(key: u64, rows: u64) -> Glyphs {
        let kept = rows.min(KEPT_MAX) as usize;
        let kept = std::iter::repeat_with(OnceLock::new).take(kept).collect();
        Glyphs { key, kept }
    }

    /// The image of a row, and its digit.
    fn image(&self, row: u64) -> (Image, u8) {
        let key = derive(self.key, row);
        let image = match self.kept.get(row as usize) {
            Some(kept) => *kept.get_or_init(|| glyphs::draw(key)),
            None => glyphs::draw(key),
        };
        (image, glyphs::digit(key))
    }

    /// Writes the image of a row, and returns its digit.
    fn read(&self, row: u64, x: &mut [f32]) -> i64 {
        let (image, digit) = self.image(row);
        normalize_levels(x, &image, MEAN, 1.0 / DEVIATION);
        digit.into()
    }
}

/// Rows made from a formula, without memory. Features are nearly normal with deviation 1; targets
/// come from a fixed random network with one hidden ReLU layer (the teacher), plus noise. F
/// features, H hidden units, O outputs.
#[derive(Debug)]
struct Synthetic {
    spec: SyntheticSpec,
    key: u64,
    /// The teacher's weights, `[H, F]` and `[O, H]`.
    first: Vec<f32>,
    second: Vec<f32>,
}

/// The hidden width of the teacher: too wide for a linear model to imitate.
const HIDDEN: usize = 32;
/// Partial sums of a dot product: a fixed order that can be vectorized.
const LANES: usize = 16;

impl Synthetic {
    /// Rows of this key, all of them with the teacher of the seed.
    fn new(spec: &SyntheticSpec, key: u64) -> Synthetic {
        // A hidden unit has deviation 1; the ReLU keeps half of its square, so that an output has
        // deviation 1 too.
        let matrix = |part: u64, count: usize, square: f64| {
            let mut draws = Draws(derive(derive(spec.seed, 0), part));
            let deviation = square.sqrt() as f32;
            (0..count).map(|_| draws.normal() * deviation).collect()
        };
        Synthetic {
            first: matrix(0, HIDDEN * spec.features, 1.0 / spec.features as f64),
            second: matrix(1, spec.outputs * HIDDEN, 2.0 / HIDDEN as f64),
            spec: spec.clone(),
            key,
        }
    }

    /// Writes the features of a row, and gives the teacher's outputs with their noise.
    fn outputs(&self, row: u64, x: &mut [f32]) -> impl Iterator<Item = f32> {
        let mut draws = Draws(derive(self.key, row));
        x.iter_mut().for_each(|x| *x = draws.normal());
        let unit = |weights: &[f32]| dot(weights, x).max(0.0);
        let mut units = self.first.chunks_exact(x.len()).map(unit);
        let hidden: [f32; HIDDEN] = std::array::from_fn(|_| units.next().expect("H rows"));
        let noise = self.spec.noise as f32;
        let outputs = self.second.chunks_exact(HIDDEN);
        outputs.map(move |weights| dot(weights, &hidden) + noise * draws.normal())
    }

    /// Writes the features of a row, and returns its class.
    fn class(&self, row: u64, x: &mut [f32]) -> i64 {
        let mut best = (f32::NEG_INFINITY, 0);
        for (class, score) in (0..).zip(self.outputs(row, x)) {
            if score > best.0 {
                best = (score, class);
            }
        }
        best.1
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let products = a_rest.iter().zip(b_rest).map(|(a, b)| a * b);
    let rest = products.fold(0.0, |sum, term| sum + term);
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().fold(rest, |sum, lane| sum + lane)
}

#[cfg(test)]
mod tests;
