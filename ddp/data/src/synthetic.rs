//! `synthetic:…`: rows made from a formula when they are read, without memory, with the same bits
//! on every machine.
//!
//! Features are nearly normal with deviation 1; targets come from a fixed random network with one
//! hidden ReLU layer (the teacher), plus noise.

use ddp_kernels::Tensor;

use crate::error::Result;
use crate::mix::{Draws, derive, normal_of};
use crate::spec::{SyntheticKind, SyntheticSpec};

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
