//! Built-in data: rows that code makes when they are read. A row is a pure function of the seed,
//! the split and its number, with the same bits on every machine.

use ddp_kernels::Tensor;

use crate::dataset::{Dataset, RowSpec, check_gather, sampled_hash};
use crate::error::Result;
use crate::glyphs::{CLASSES, Glyphs, PIXELS, SIDE};
use crate::mix::derive;
use crate::spec::{DataSpec, SyntheticKind};
use crate::synthetic::Synthetic;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read_rows;

    fn pair(spec: &str) -> [BuiltIn; 2] {
        BuiltIn::pair(&spec.parse().unwrap()).unwrap()
    }

    #[test]
    fn digits_are_standardised_and_equally_frequent() {
        let [train, _] = pair("glyphs,rows=5000,held-out=0");
        let rows: Vec<u64> = (0..5000).collect();
        let [x, classes] = read_rows(&train, &rows).unwrap();
        let (x, classes) = (x.to_vec::<f32>().unwrap(), classes.to_vec::<i64>().unwrap());
        let count = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
        let square = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / count;
        // Images differ in ink by about a quarter of the mean: over 5,000 of them 0.004; constants
        // are kept to a digit more.
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((square - mean * mean - 1.0).abs() < 0.03, "{square}");
        for digit in 0..10 {
            // 500 expected, with a deviation of √(5000 · 0.1 · 0.9) = 21. Five of those.
            let count = classes.iter().filter(|&&class| class == digit).count();
            assert!(count.abs_diff(500) < 106, "{count} of {digit}");
        }
    }

    #[test]
    fn other_seeds_are_other_data() {
        let fingerprint = |spec| pair(spec)[0].fingerprint().unwrap();
        assert_ne!(fingerprint("glyphs,seed=0"), fingerprint("glyphs,seed=1"));
    }
}
