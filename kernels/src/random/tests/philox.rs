//! Tests of philox.

use super::super::*;
use proptest::prelude::*;

const COUNT: usize = 1_000_000;
const DRAW: Draw = Draw {
    key: [0x0123_4567, 0x89ab_cdef],
    draw: 7,
};

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The three fills of one range, all as bits.
#[inline(always)]
fn every_fill(stream: &Draw, first: u64, count: usize) -> [Vec<u32>; 3] {
    let (mut bits, mut uniforms, mut normals) =
        (vec![0; count], vec![0.0; count], vec![0.0; count]);
    stream.convert::<Bits>(first, &mut bits);
    stream.convert::<Uniform>(first, &mut uniforms);
    stream.convert::<Normal>(first, &mut normals);
    [bits, bits_of(&uniforms), bits_of(&normals)]
}

/// Whether `sum` over `count` samples of a variable with this mean and variance is within 5
/// standard errors: a right generator fails that once in 1.7 million seeds, and the seed is fixed.
#[track_caller]
fn check_mean(name: &str, sum: f64, count: usize, mean: f64, variance: f64) {
    let got = sum / count as f64;
    let errors = (got - mean) / (variance / count as f64).sqrt();
    println!("{name}: {got:.6}, {errors:+.2} standard errors from {mean}");
    assert!(
        errors.abs() <= 5.0,
        "{name}: {got} is {errors} standard errors from {mean}"
    );
}

/// χ² of bin counts that ought to be equal, as a mean: it has mean k − 1 and variance 2 (k − 1) for
/// k bins.
#[track_caller]
fn check_even(name: &str, bins: &[u32]) {
    let expected = bins.iter().sum::<u32>() as f64 / bins.len() as f64;
    let chi_square = bins
        .iter()
        .map(|&bin| (f64::from(bin) - expected).powi(2) / expected)
        .sum::<f64>();
    let freedom = (bins.len() - 1) as f64;
    check_mean(name, chi_square, 1, freedom, 2.0 * freedom);
}

#[test]
fn philox_gives_the_published_known_answers() {
    // Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds.
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    for (counter, key, want) in [
        (
            [0; 4],
            [0; 2],
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
        ),
        (
            [!0; 4],
            [!0; 2],
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
        ),
        (
            pi,
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(
            philox4x32(counter, key),
            want,
            "counter {counter:x?}, key {key:x?}"
        );
    }
}

#[test]
fn uniforms_are_exact_and_stay_below_one() {
    assert_eq!(
        [uniform(0), uniform(255), uniform(256)],
        [0.0, 0.0, UNIFORM_STEP]
    );
    assert_eq!([uniform(1 << 31), uniform(!0)], [0.5, 1.0 - UNIFORM_STEP]);
    assert_eq!([uniform_f64(0, 0), uniform_f64(1 << 31, 0)], [0.0, 0.5]);
    assert_eq!(
        [uniform_f64(0, 1 << 11), uniform_f64(!0, !0)],
        [f64::EPSILON / 2.0, 1.0 - f64::EPSILON / 2.0]
    );
}

#[test]
fn normals_are_finite_at_the_ends_of_the_uniforms() {
    // The radius is largest, √(48 ln 2) = 5.768, for the smallest uniform, and 0 for the largest.
    let [largest, _, _, zero] = normals([0, 0, !0, 0]);
    assert!((largest - 5.768_1).abs() < 1e-4, "{largest}");
    assert_eq!(zero, 0.0);
}

#[test]
fn below_covers_every_value_evenly() {
    assert_eq!(
        [
            below(0, 10),
            below(!0, 10),
            below(!0, 1),
            below(!0, 0),
            below(!0, !0)
        ],
        [0, 9, 0, 0, !0 - 1]
    );
    let mut bits = vec![0; COUNT];
    DRAW.convert::<Bits>(0, &mut bits);
    let mut bins = [0; 10];
    bits.iter()
        .for_each(|&bits| bins[below(bits, 10) as usize] += 1);
    check_even("below 10", &bins);
}

#[test]
fn uniforms_are_even_and_neighbours_are_independent() {
    let mut values = vec![0.0; COUNT];
    DRAW.convert::<Uniform>(0, &mut values);
    let (mut bins, mut pair_bins) = ([0; 256], [0; 256]);
    values
        .iter()
        .for_each(|&value| bins[(value * 256.0) as usize] += 1);
    check_even("χ² of 256 bins", &bins);
    let half_byte = |value: f32| (value * 16.0) as usize;
    values
        .as_chunks::<2>()
        .0
        .iter()
        .for_each(|pair| pair_bins[half_byte(pair[0]) * 16 + half_byte(pair[1])] += 1);
    check_even("χ² of 16 × 16 bins of neighbours", &pair_bins);
}

#[test]
fn normals_have_the_moments_of_a_normal() {
    let mut values = vec![0.0; COUNT];
    DRAW.convert::<Normal>(0, &mut values);
    let power_sum = |power| {
        values
            .iter()
            .map(|&value| f64::from(value).powi(power))
            .sum::<f64>()
    };
    // The k-th moment of a normal is (k − 1)!! for even k, and the variance of xᵏ is E x²ᵏ − (E
    // xᵏ)².
    check_mean("mean", power_sum(1), COUNT, 0.0, 1.0);
    check_mean("second moment", power_sum(2), COUNT, 1.0, 3.0 - 1.0);
    check_mean("third moment", power_sum(3), COUNT, 0.0, 15.0);
    check_mean("fourth moment", power_sum(4), COUNT, 3.0, 105.0 - 9.0);
    // Box–Muller makes pairs, so neighbours are where a mistake would show.
    let neighbours = values
        .windows(2)
        .map(|pair| f64::from(pair[0]) * f64::from(pair[1]))
        .sum::<f64>();
    check_mean("product of neighbours", neighbours, COUNT - 1, 0.0, 1.0);
    let two_sigma = values.iter().filter(|value| value.abs() > 2.0).count() as f64;
    check_mean(
        "beyond 2",
        two_sigma,
        COUNT,
        0.045_500_26,
        0.045_500_26 * (1.0 - 0.045_500_26),
    );
}

#[test]
fn other_keys_draws_and_far_blocks_are_other_numbers() {
    let others = [
        DRAW.block(0),
        DRAW.block(1),
        DRAW.block(1 << 32),
        Draw {
            draw: DRAW.draw + 1,
            ..DRAW
        }
        .block(0),
        Draw {
            draw: DRAW.draw + (1 << 32),
            ..DRAW
        }
        .block(0),
        Draw {
            key: [DRAW.key[0] + 1, DRAW.key[1]],
            ..DRAW
        }
        .block(0),
        Draw {
            key: [DRAW.key[0], DRAW.key[1] + 1],
            ..DRAW
        }
        .block(0),
    ];
    for (i, one) in others.iter().enumerate() {
        assert!(
            others[..i].iter().all(|other| other != one),
            "block {i} repeats"
        );
    }
}

proptest! {
    /// `first` near 0, near the carry into the counter's high word (element 2³⁴), and near the end.
    #[test]
    fn any_split_gives_the_same_bits_as_each_element_alone(
        first in prop_oneof![0..200_u64, (1 << 34) - 200..(1 << 34) + 8_u64, u64::MAX - 500..u64::MAX - 300],
        count in 0..300_usize, cut in 0..300_usize, key: [u32; 2], draw: u64,
    ) {
        let stream = Draw { key, draw };
        let cut = cut.min(count);
        let whole = every_fill(&stream, first, count);
        let left = every_fill(&stream, first, cut);
        let right = every_fill(&stream, first + cut as u64, count - cut);
        for ((whole, left), right) in whole.iter().zip(left).zip(right) {
            prop_assert_eq!(whole, &[left, right].concat());
        }
        for (i, &bits) in whole[0].iter().enumerate() {
            let index = first + i as u64;
            prop_assert_eq!(bits, stream.block(index / 4)[(index % 4) as usize]);
            prop_assert_eq!(whole[1][i], uniform(bits).to_bits());
            prop_assert_eq!(whole[2][i], normals(stream.block(index / 4))[(index % 4) as usize].to_bits());
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn every_simd_level_gives_the_same_bits() {
    #[target_feature(enable = "avx2,fma")]
    fn with_avx2(first: u64, count: usize) -> [Vec<u32>; 3] {
        every_fill(&DRAW, first, count)
    }
    #[target_feature(enable = "avx512f")]
    fn with_avx512(first: u64, count: usize) -> [Vec<u32>; 3] {
        every_fill(&DRAW, first, count)
    }
    let (first, count) = ((1 << 34) - 4001, 10_007);
    let plain = every_fill(&DRAW, first, count);
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has both features, asked on the line above.
        assert!(plain == unsafe { with_avx2(first, count) }, "avx2");
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the feature, asked on the line above.
        assert!(plain == unsafe { with_avx512(first, count) }, "avx512");
    }
}
