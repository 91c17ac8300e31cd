//! Built-in data.

mod glyphs;
mod synthetic;

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
