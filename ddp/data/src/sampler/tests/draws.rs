//! Random numbers by key.

use crate::sampler::{Draws, normal_of};

#[test]
fn normals_have_mean_zero_and_variance_one() {
    const COUNT: usize = 200_000;
    let mut draws = Draws(7);
    let (mut sum, mut squares) = (0f64, 0f64);
    for _ in 0..COUNT {
        let number = f64::from(draws.normal());
        sum += number;
        squares += number * number;
    }
    // The mean of n is off by 1/√n = 0.0022; the mean square by √((kurtosis − 1)/n), with
    // kurtosis 2.7: 0.0029. Five of each.
    assert!((sum / COUNT as f64).abs() < 0.011, "{}", sum / COUNT as f64);
    assert!(
        (squares / COUNT as f64 - 1.0).abs() < 0.015,
        "{}",
        squares / COUNT as f64
    );
}

#[test]
fn uniforms_stay_in_range_at_the_ends_of_their_bits() {
    assert_eq!(
        (u64::MAX >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0,
        1.0 - 1.0 / 8_388_608.0
    );
    assert_eq!(normal_of(0), -normal_of(u64::MAX));
    let mut draws = Draws(0);
    assert!((0..10_000).all(|_| (-1.0..1.0).contains(&draws.signed())));
    assert!((0..10_000).all(|_| (0.0..1.0).contains(&draws.unit())));
    assert!((0..10_000).all(|_| draws.below(3) < 3));
}
