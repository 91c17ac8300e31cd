//! Tests of dropout.

use super::*;
use crate::Device;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};
use proptest::prelude::*;

/// Dropout of `x` at [step, first row], in f32.
fn dropped(
    x: &[f32],
    shape: &[usize],
    probability: f64,
    seed: u64,
    layer: u32,
    position: [i64; 2],
) -> Vec<f32> {
    let key = DropoutKey {
        seed,
        layer,
        position: &cpu_of(&position, &[2]),
    };
    dropout(&cpu(x, shape), probability, &key)
        .unwrap()
        .to_vec()
        .unwrap()
}

proptest! {
    #[test]
    fn rows_drop_the_same_elements_wherever_the_batch_is_cut(
        rows in 1usize..12, columns in 1usize..3000, first_row in 0i64..(1 << 40) - 12, step in 0i64..1 << 32,
        cut in 0usize..12, end in 0usize..12, probability in 0.0f64..0.99, layer in 0u32..1 << 16, seed: u64,
    ) {
        let (end, cut) = (end.min(rows).max(cut.min(rows)), cut.min(rows));
        let x = random_f32(rows * columns, seed);
        let whole = dropped(&x, &[rows, columns], probability, seed, layer, [step, first_row]);
        let part = &x[cut * columns..end * columns];
        let position = [step, first_row + cut as i64];
        let part = dropped(part, &[end - cut, columns], probability, seed, layer, position);
        prop_assert_eq!(&whole[cut * columns..end * columns], part);
    }
}

#[test]
fn every_element_follows_its_own_counter_for_every_size_apart_in_place_and_in_f64() {
    // 25,001 columns: parts of a thread begin inside rows and inside blocks of four.
    for (rows, columns) in SIZES
        .map(|size| (size, 1))
        .into_iter()
        .chain([(3, 7), (5, 25_001)])
    {
        let x = random_f32(rows * columns, 81);
        let (seed, layer, step, first_row, probability) =
            (0x1234_5678_9abc_def0_u64, 5, 77, (3 << 32) + 9, 0.3);
        let scale = (1.0 / (1.0 - probability)) as f32;
        let kept = |index: usize| {
            let (row, column) = (first_row + (index / columns) as u64, index % columns);
            let word = 1 << 31 | layer << 8 | (row >> 32) as u32;
            let block = philox4x32(
                [(column / 4) as u32, row as u32, word, step],
                [seed as u32, (seed >> 32) as u32],
            );
            f64::from(crate::random::uniform(block[column % 4])) >= probability
        };
        let expected: Vec<f32> = x
            .iter()
            .enumerate()
            .map(|(index, x)| if kept(index) { x * scale } else { 0.0 })
            .collect();
        let position = cpu_of(&[i64::from(step), first_row as i64], &[2]);
        let key = DropoutKey {
            seed,
            layer,
            position: &position,
        };
        let x = cpu(&x, &[rows, columns]);
        assert_eq!(
            dropout(&x, probability, &key)
                .unwrap()
                .to_vec::<f32>()
                .unwrap(),
            expected
        );
        let wide = dropout(&x.to_dtype(DType::F64).unwrap(), probability, &key)
            .unwrap()
            .to_vec::<f64>()
            .unwrap();
        for (wide, narrow) in wide.iter().zip(&expected) {
            // The f32 scale and product each round by 2⁻²⁴ relative at most, together by f32's
            // EPSILON.
            assert!((wide - f64::from(*narrow)).abs() <= wide.abs() * f64::from(f32::EPSILON));
        }
        dropout_into(&x, &x, probability, &key).unwrap();
        assert_eq!(x.to_vec::<f32>().unwrap(), expected);
    }
}

#[test]
fn the_share_dropped_is_the_probability_and_every_part_of_the_key_matters() {
    const COUNT: usize = 1_000_000;
    let ones = vec![1.0; COUNT];
    let pattern = |seed, layer, step| dropped(&ones, &[1000, 1000], 0.25, seed, layer, [step, 0]);
    let first = pattern(1, 0, 0);
    let zeros = |x: &[f32]| x.iter().filter(|&&x| x == 0.0).count() as f64 / COUNT as f64;
    // Five standard errors of a share near p of a million: 5 √(p (1 − p) / 10⁶), wrong once in 1.7
    // million seeds.
    let margin = |p: f64| 5.0 * (p * (1.0 - p) / COUNT as f64).sqrt();
    assert!(
        (zeros(&first) - 0.25).abs() < margin(0.25),
        "{}",
        zeros(&first)
    );
    for other in [
        pattern(2, 0, 0),
        pattern(1 << 32, 0, 0),
        pattern(1, 1, 0),
        pattern(1, 0, 1),
    ] {
        // Independent patterns drop the same element with probability p².
        let both = first
            .iter()
            .zip(&other)
            .map(|(a, b)| a.max(*b))
            .collect::<Vec<_>>();
        assert!(
            (zeros(&both) - 0.0625).abs() < margin(0.0625),
            "{}",
            zeros(&both)
        );
    }
}

#[test]
fn probability_zero_copies_and_a_dropped_nan_is_zero() {
    let x = [1.5, -0.0, f32::INFINITY, f32::NAN];
    let y = dropped(&x, &[2, 2], 0.0, 1, 1, [0, 0]);
    assert_eq!(
        y.iter().map(|y| y.to_bits()).collect::<Vec<_>>(),
        x.map(f32::to_bits)
    );
    let y = dropped(&[f32::NAN; 64], &[64], 0.5, 1, 1, [0, 0]);
    assert!(y.iter().any(|y| y.is_nan()) && y.contains(&0.0));
}

#[test]
fn what_is_out_of_range_is_named() {
    let x = cpu(&[1.0; 4], &[2, 2]);
    let refused = |probability: f64, layer: u32, position: [i64; 2]| {
        let key = DropoutKey {
            seed: 0,
            layer,
            position: &cpu_of(&position, &[2]),
        };
        dropout(&x, probability, &key).unwrap_err().to_string()
    };
    for (probability, shown) in [(1.0, "1"), (-0.1, "-0.1"), (f64::NAN, "NaN")] {
        let error = refused(probability, 0, [0, 0]);
        let wanted = format!("dropout: probability: expected 0 up to but not 1, got {shown}");
        assert!(error.contains(&wanted), "{error}");
    }
    let error = refused(0.5, 1 << 16, [0, 0]);
    assert!(
        error.contains("dropout: layer: expected below 65536, got 65536"),
        "{error}"
    );
    for position in [
        [-1, 0],
        [1 << 32, 0],
        [0, -1],
        [0, (1 << 40) - 1],
        [0, i64::MAX],
    ] {
        let error = refused(0.5, 0, position);
        assert!(
            error.contains("dropout: position: expected a step from 0 to 4294967295"),
            "{error}"
        );
    }
    let short = Tensor::zeros(&[1], DType::I64, Device::Cpu).unwrap();
    let error = dropout(
        &x,
        0.5,
        &DropoutKey {
            seed: 0,
            layer: 0,
            position: &short,
        },
    )
    .unwrap_err()
    .to_string();
    assert!(
        error.contains("dropout: position i64[1] on cpu: expected shape [2]"),
        "{error}"
    );
    let position = cpu_of(&[0i64, 0], &[2]);
    let key = DropoutKey {
        seed: 0,
        layer: 0,
        position: &position,
    };
    let error = dropout(&cpu(&[1.0], &[]), 0.5, &key)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("dropout: x f32[] on cpu: expected [rows, …]"),
        "{error}"
    );
    let error = dropout_into(&x.slice(0..1).unwrap(), &cpu(&[1.0; 3], &[1, 3]), 0.5, &key)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("dropout: x f32[1, 3] on cpu: expected shape [1, 2], as out has"),
        "{error}"
    );
}
