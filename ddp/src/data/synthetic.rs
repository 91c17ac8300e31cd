//! `synthetic:…`: rows made from a formula when they are asked for. No memory, any number of rows, the same on every machine.
//!
//! Classification and regression: features are nearly normal with deviation 1; targets come from a fixed random network
//! with one hidden layer of ReLU (the teacher), plus noise. Row number: features and targets spell the row.

use super::mix::{Draws, derive, normal_of};
use super::spec::{SyntheticKind, SyntheticSpec};
use super::{Dataset, Targets, Task, check_gather, sampled_hash};
use crate::error::Result;

/// Rows made from a formula.
#[derive(Debug)]
pub struct Synthetic {
    spec: SyntheticSpec,
    /// "train" or "held-out".
    split: &'static str,
    rows: u64,
    row_key: u64,
    shape: [usize; 1],
    task: Task,
    teacher: Teacher,
}

/// The hidden width of the teacher: enough that a linear model cannot follow it.
const HIDDEN: usize = 32;
/// Running sums of a dot product, in an order that no compiler changes and that vectors.
const LANES: usize = 16;

/// A fixed random network. Letters: F features, H hidden, O outputs.
#[derive(Debug, Default)]
struct Teacher {
    /// `[H, F]`
    first: Vec<f32>,
    /// `[O, H]`
    second: Vec<f32>,
}

impl Teacher {
    fn new(key: u64, features: usize, outputs: usize) -> Teacher {
        // Each hidden number has deviation 1; half of its square survives the ReLU, so that an output has deviation 1 too.
        let matrix = |part: u64, count: usize, deviation: f64| {
            let mut draws = Draws::new(derive(key, part));
            (0..count).map(|_| draws.normal() * deviation as f32).collect()
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
    let rest =
        a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).fold(0.0, |sum, term| sum + term);
    for (a, b) in a_chunks.zip(b_chunks) {
        sums.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
    }
    sums.iter().fold(rest, |sum, lane| sum + lane)
}

/// What a key derived from the seed is for.
#[derive(Clone, Copy)]
enum Purpose {
    Teacher,
    Train,
    HeldOut,
}

impl Synthetic {
    /// The rows to train on, and those held out: the same teacher, other rows.
    pub fn pair(spec: &SyntheticSpec) -> (Synthetic, Synthetic) {
        (
            Synthetic::new(spec, "train", spec.rows, Purpose::Train),
            Synthetic::new(spec, "held-out", spec.held_out, Purpose::HeldOut),
        )
    }

    fn new(spec: &SyntheticSpec, split: &'static str, rows: u64, purpose: Purpose) -> Synthetic {
        let task = match spec.kind {
            SyntheticKind::Classification => {
                let names = (0..spec.outputs).map(|class| class.to_string()).collect();
                Task::Classification { classes: spec.outputs, names }
            }
            SyntheticKind::Regression | SyntheticKind::RowNumber => Task::Regression { outputs: spec.outputs },
        };
        let teacher = match spec.kind {
            SyntheticKind::RowNumber => Teacher::default(),
            _ => Teacher::new(derive(spec.seed, Purpose::Teacher as u64), spec.features, spec.outputs),
        };
        let row_key = derive(spec.seed, purpose as u64);
        Synthetic { spec: spec.clone(), split, rows, row_key, shape: [spec.features], task, teacher }
    }

    /// Fills one row's features; returns the random numbers that go on with its noise.
    fn features(&self, row: u64, x: &mut [f32]) -> Draws {
        let mut draws = Draws::new(derive(self.row_key, row));
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
        if self.spec.kind == SyntheticKind::RowNumber {
            spell(row, x);
            return spell(row, values);
        }
        let mut draws = self.features(row, x);
        let hidden = self.teacher.hidden(x);
        let noise = self.spec.noise as f32;
        for (index, value) in values.iter_mut().enumerate() {
            *value = self.teacher.output(&hidden, index) + noise * draws.normal();
        }
    }
}

/// Bits of the row in one feature: with them every feature is exact in f32, and in [0, 1).
const DIGIT_BITS: u32 = 10;

fn spell(row: u64, digits: &mut [f32]) {
    let base = 1u64 << DIGIT_BITS;
    for (index, digit) in digits.iter_mut().enumerate() {
        *digit = ((row >> (DIGIT_BITS * index as u32)) % base) as f32 / base as f32;
    }
}

/// The row whose features, or targets, these are: of `synthetic:row-number`.
pub fn row_number(digits: &[f32]) -> u64 {
    let base = (1u64 << DIGIT_BITS) as f32;
    digits.iter().rev().fold(0, |row, digit| row << DIGIT_BITS | (digit * base) as u64)
}

impl Dataset for Synthetic {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn row_shape(&self) -> &[usize] {
        &self.shape
    }

    fn task(&self) -> &Task {
        &self.task
    }

    fn fingerprint(&self) -> Result<String> {
        let spec = super::DataSpec::Synthetic(self.spec.clone());
        Ok(format!("{spec} {} {:016x}", self.split, sampled_hash(self)?))
    }

    fn gather(&self, rows: &[u64], x: &mut [f32], targets: Targets<'_>) -> Result<()> {
        check_gather(self, rows, x, &targets);
        let x = x.chunks_exact_mut(self.spec.features);
        match self.task {
            Task::Classification { .. } => {
                for ((&row, x), class) in rows.iter().zip(x).zip(targets.classes()?) {
                    *class = self.class(row, x);
                }
            }
            Task::Regression { outputs } => {
                for ((&row, x), values) in rows.iter().zip(x).zip(targets.values()?.chunks_exact_mut(outputs)) {
                    self.values(row, x, values);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::spec::ROWS_MAX;

    fn pair(text: &str) -> (Synthetic, Synthetic) {
        match text.parse().unwrap() {
            super::super::DataSpec::Synthetic(spec) => Synthetic::pair(&spec),
            spec => panic!("{spec}"),
        }
    }

    fn classes(data: &Synthetic, rows: &[u64]) -> (Vec<f32>, Vec<i64>) {
        let (mut x, mut targets) = (vec![0.0; rows.len() * data.shape[0]], vec![0; rows.len()]);
        data.gather(rows, &mut x, Targets::Classes(&mut targets)).unwrap();
        (x, targets)
    }

    fn values(data: &Synthetic, rows: &[u64]) -> (Vec<f32>, Vec<f32>) {
        let (mut x, mut targets) = (vec![0.0; rows.len() * data.shape[0]], vec![0.0; rows.len() * data.spec.outputs]);
        data.gather(rows, &mut x, Targets::Values(&mut targets)).unwrap();
        (x, targets)
    }

    #[test]
    fn a_row_is_the_same_in_any_company() {
        let (train, _) = pair("synthetic:classification,features=37,rows=1000000000000");
        let rows = [0, 17, ROWS_MAX - 1, 5];
        let (x, targets) = classes(&train, &rows);
        for (index, &row) in rows.iter().enumerate() {
            let (one, class) = classes(&train, &[row]);
            assert_eq!((one.as_slice(), class[0]), (&x[index * 37..][..37], targets[index]));
        }
    }

    #[test]
    fn every_class_comes_and_held_out_rows_are_others() {
        let (train, held_out) = pair("synthetic:classification,features=16,classes=5");
        let rows: Vec<u64> = (0..2000).collect();
        let (x, targets) = classes(&train, &rows);
        for class in 0..5 {
            let count = targets.iter().filter(|&&target| target == class).count();
            assert!(count > 40, "class {class} has {count} of 2000 rows");
        }
        let (held, _) = classes(&held_out, &rows);
        assert!(x.chunks(16).zip(held.chunks(16)).all(|(a, b)| a != b));
        assert_ne!(train.fingerprint().unwrap(), held_out.fingerprint().unwrap());
    }

    #[test]
    fn targets_have_a_deviation_of_about_one_and_noise_adds_what_it_says() {
        let rows: Vec<u64> = (0..4000).collect();
        let (_, clean) = values(&pair("synthetic:regression,outputs=8,noise=0").0, &rows);
        let (_, noisy) = values(&pair("synthetic:regression,outputs=8,noise=0.5").0, &rows);
        let mean_square = |values: &[f32]| values.iter().map(|v| f64::from(v * v)).sum::<f64>() / values.len() as f64;
        // A teacher of 32 hidden units is itself drawn: its outputs' mean squares scatter by some tens of percent.
        assert!((0.3..3.0).contains(&mean_square(&clean)), "{}", mean_square(&clean));
        let noise: Vec<f32> = clean.iter().zip(&noisy).map(|(clean, noisy)| noisy - clean).collect();
        // 32,000 draws: the mean square is known to √((2.7 − 1)/32000) = 0.7%. Five of those.
        assert!((mean_square(&noise) / 0.25 - 1.0).abs() < 0.037, "{}", mean_square(&noise));
    }

    #[test]
    fn a_row_number_is_spelled_exactly() {
        let (train, _) = pair("synthetic:row-number,rows=1000000000000");
        let rows = [0, 1, 1023, 1024, 123_456_789_012, ROWS_MAX - 1];
        let (x, targets) = values(&train, &rows);
        for (index, &row) in rows.iter().enumerate() {
            assert_eq!(row_number(&x[index * 4..][..4]), row);
            assert_eq!(row_number(&targets[index * 4..][..4]), row);
        }
    }

    #[test]
    fn rows_have_the_bits_they_have_on_every_machine() {
        // Written down once: a change of these numbers is a change of everybody's data.
        let (train, _) = pair("synthetic:regression,features=33,outputs=2,seed=3");
        assert_eq!(train.fingerprint().unwrap().split(' ').next_back(), Some("f424aa9a0d5b1fbc"));
        let (train, _) = pair("synthetic:classification,features=100");
        assert_eq!(train.fingerprint().unwrap().split(' ').next_back(), Some("b24225451344c489"));
    }
}
