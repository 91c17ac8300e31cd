//! Claims about the drawn digits.

use std::collections::HashSet;

use twox_hash::XxHash3_128;

use super::*;
use crate::spec::GlyphsSpec;

/// The images to train on (0) and those held out (1) of the default seed.
fn images(split: u64, rows: u64) -> Glyphs {
    Glyphs::new(derive(0, split), rows)
}

#[test]
fn no_image_comes_twice_and_no_held_out_image_is_a_training_image() {
    let spec = GlyphsSpec::default();
    let (train, held_out) = (images(0, spec.rows), images(1, spec.held_out));
    let mut seen = HashSet::new();
    assert!((0..spec.rows).all(|row| seen.insert(XxHash3_128::oneshot(&train.image(row).0))));
    assert!(
        (0..spec.held_out).all(|row| seen.insert(XxHash3_128::oneshot(&held_out.image(row).0)))
    );
}

#[test]
fn an_image_is_the_same_cached_redrawn_or_threaded() {
    let train = images(0, KEPT_MAX + 50);
    let drawn = |rows: std::ops::Range<u64>| rows.map(|row| train.image(row)).collect::<Vec<_>>();
    let other = images(0, 200);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!((0..200).all(|row| other.image(row) == train.image(row))));
        }
    });
    assert_eq!(drawn(0..200), drawn(0..200));
    let beyond = drawn(KEPT_MAX..KEPT_MAX + 50);
    assert_eq!(beyond, drawn(KEPT_MAX..KEPT_MAX + 50));
    assert!(
        beyond
            .iter()
            .all(|(image, digit)| *digit < 10 && image.iter().any(|&pixel| pixel > 100))
    );
}

#[test]
fn other_seeds_draw_other_images() {
    let (one, other) = (images(0, 100), Glyphs::new(derive(1, 0), 100));
    assert!((0..100).all(|row| one.image(row).0 != other.image(row).0));
}

#[test]
fn images_have_the_bits_they_have_on_every_machine() {
    // Written down once: a change of this number changes the data, and every figure quoted for
    // them.
    let train = images(0, 500);
    let mut bytes = Vec::new();
    (0..500).for_each(|row| bytes.extend(train.image(row).0));
    assert_eq!(
        format!("{:032x}", XxHash3_128::oneshot(&bytes)),
        "17123ca98204e67616c1ad42824e121c"
    );
}
