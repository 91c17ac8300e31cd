//! Claims about the drawn digits as a dataset.

use std::collections::HashSet;

use twox_hash::XxHash3_128;

use super::*;
use crate::read_rows;

fn spec(rows: u64, held_out: u64) -> GlyphsSpec {
    GlyphsSpec {
        rows,
        held_out,
        seed: 0,
    }
}

#[test]
fn no_image_comes_twice_and_no_held_out_image_is_a_training_image() {
    let spec = GlyphsSpec::default();
    let (train, held_out) = (Glyphs::train(&spec), Glyphs::held_out(&spec));
    let mut seen = HashSet::new();
    assert!((0..spec.rows).all(|row| seen.insert(XxHash3_128::oneshot(&train.image(row).0))));
    assert!(
        (0..spec.held_out).all(|row| seen.insert(XxHash3_128::oneshot(&held_out.image(row).0)))
    );
}

#[test]
fn features_are_standardised_and_digits_are_equally_frequent() {
    let train = Glyphs::train(&spec(5000, 0));
    let rows: Vec<u64> = (0..5000).collect();
    let [x, classes] = read_rows(&train, &rows).unwrap();
    let (x, classes) = (x.to_vec::<f32>().unwrap(), classes.to_vec::<i64>().unwrap());
    let count = x.len() as f64;
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let square = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / count;
    // Images differ in ink by about a quarter of the mean: over 5,000 of them 0.004; constants are
    // kept to a digit more.
    assert!(mean.abs() < 0.02, "{mean}");
    assert!((square - mean * mean - 1.0).abs() < 0.03, "{square}");
    for digit in 0..10 {
        // 500 expected, with a deviation of √(5000 · 0.1 · 0.9) = 21. Five of those.
        let count = classes.iter().filter(|&&class| class == digit).count();
        assert!(count.abs_diff(500) < 106, "{count} of {digit}");
    }
}

#[test]
fn an_image_is_the_same_cached_redrawn_or_threaded() {
    let train = Glyphs::train(&spec(KEPT_MAX + 50, 0));
    let images = |rows: std::ops::Range<u64>| rows.map(|row| train.image(row)).collect::<Vec<_>>();
    let other = Glyphs::train(&spec(200, 0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!((0..200).all(|row| other.image(row) == train.image(row))));
        }
    });
    assert_eq!(images(0..200), images(0..200));
    let beyond = images(KEPT_MAX..KEPT_MAX + 50);
    assert_eq!(beyond, images(KEPT_MAX..KEPT_MAX + 50));
    assert!(
        beyond
            .iter()
            .all(|(image, digit)| *digit < 10 && image.iter().any(|&pixel| pixel > 100))
    );
}

#[test]
fn other_seeds_draw_other_images() {
    let one = Glyphs::train(&spec(100, 0));
    let other = Glyphs::train(&GlyphsSpec {
        seed: 1,
        ..spec(100, 0)
    });
    assert!((0..100).all(|row| one.image(row).0 != other.image(row).0));
    assert_ne!(one.fingerprint().unwrap(), other.fingerprint().unwrap());
}

#[test]
fn images_have_the_bits_they_have_on_every_machine() {
    // Written down once: a change of this number changes the data, and every figure quoted for
    // them.
    let train = Glyphs::train(&GlyphsSpec::default());
    let mut bytes = Vec::new();
    (0..500).for_each(|row| bytes.extend(train.image(row).0));
    assert_eq!(
        format!("{:032x}", XxHash3_128::oneshot(&bytes)),
        "17123ca98204e67616c1ad42824e121c"
    );
}
