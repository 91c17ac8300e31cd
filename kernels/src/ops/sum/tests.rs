//! Tests of sum.

mod add_in_order;
mod columns;
mod rows;

use super::*;
use crate::Device;
use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

fn sum_of(x: &[f32]) -> f32 {
    sum(&cpu(x, &[x.len()])).unwrap().to_vec::<f32>().unwrap()[0]
}

/// The documented order, written the slow way.
fn in_documented_order(x: &[f32]) -> f64 {
    let blocks: Vec<f64> = x
        .chunks(BLOCK)
        .map(|block| {
            let mut lanes: Vec<f64> = (0..LANES)
                .map(|lane| {
                    block
                        .iter()
                        .skip(lane)
                        .step_by(LANES)
                        .map(|&x| f64::from(x))
                        .sum()
                })
                .collect();
            while lanes.len() > 1 {
                let (low, high) = lanes.split_at(lanes.len() / 2);
                lanes = low.iter().zip(high).map(|(low, high)| low + high).collect();
            }
            lanes[0]
        })
        .collect();
    let runs = blocks
        .chunks(blocks.len().div_ceil(RUNS_MAX).max(1))
        .map(|run| run.iter().sum::<f64>());
    runs.fold(0.0, |sum, run| sum + run)
}

#[test]
fn the_bits_are_those_of_the_documented_order_for_every_size_and_any_threads() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    for size in SIZES
        .into_iter()
        .chain([BLOCK * RUNS_MAX - 1, BLOCK * RUNS_MAX + 1, 1_000_003])
    {
        let x: Vec<f64> = random_f32(size, 61)
            .iter()
            .map(|&x| f64::from(x) + 1e-9)
            .collect();
        let x32: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        assert_eq!(
            total(&x32).to_bits(),
            in_documented_order(&x32).to_bits(),
            "{size} elements"
        );
    }
}

#[test]
fn sum_and_mean_are_rounded_once() {
    for size in SIZES.into_iter().filter(|&size| size > 0) {
        let x = random_f32(size, 62);
        // Whole numbers of 2⁻²⁴ below 2³: sums below 2⁵³ of them are exact in i64 and in f64.
        let quanta: Vec<i64> = x
            .iter()
            .map(|&x| (f64::from(x) * f64::from(1 << 24)) as i64)
            .collect();
        let x: Vec<f32> = quanta
            .iter()
            .map(|&quanta| quanta as f32 / (1 << 24) as f32)
            .collect();
        let exact: i64 = x
            .iter()
            .map(|&x| (f64::from(x) * f64::from(1 << 24)) as i64)
            .sum();
        let exact = exact as f64 / f64::from(1 << 24);
        assert_eq!(sum_of(&x), exact as f32);
        let got = mean(&cpu(&x, &[size])).unwrap();
        assert_eq!(
            (got.shape().rank(), got.to_vec::<f32>().unwrap()),
            (0, vec![(exact / size as f64) as f32])
        );
        let wide = cpu(&x, &[size]).to_dtype(DType::F64).unwrap();
        assert_eq!(sum(&wide).unwrap().to_vec::<f64>().unwrap(), [exact]);
    }
}

#[test]
fn the_sum_of_nothing_is_zero_its_mean_nan_and_infinity_and_nan_pass_through() {
    let nothing = Tensor::zeros(&[0, 3], DType::F32, Device::Cpu).unwrap();
    assert_eq!(sum(&nothing).unwrap().item().unwrap(), 0.0);
    assert!(mean(&nothing).unwrap().item().unwrap().is_nan());
    assert_eq!(sum_of(&[1.0, f32::INFINITY]), f32::INFINITY);
    assert!(sum_of(&[f32::INFINITY, f32::NEG_INFINITY]).is_nan() && sum_of(&[f32::NAN]).is_nan());
    // Would be infinite on the way in f32.
    assert_eq!(sum_of(&[f32::MAX, f32::MAX, -f32::MAX]), f32::MAX);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let x = cpu(&[1.0, 2.0], &[2]);
    let error = sum_into(&x, &x).unwrap_err().to_string();
    assert!(
        error.contains("sum: out f32[2] on cpu: expected shape [], that is one number"),
        "{error}"
    );
    let error = mean_into(&cpu_of(&[0.0f64], &[]), &x)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mean: out f64[] on cpu: expected dtype f32, as x has"),
        "{error}"
    );
    let error = sum(&cpu_of(&[1i64], &[1])).unwrap_err().to_string();
    assert!(
        error.contains("sum: there is no version for i64 on cpu"),
        "{error}"
    );
    let one = cpu(&[1.0], &[]);
    let error = sum_into(&one, &one).unwrap_err().to_string();
    assert!(
        error.contains("sum: out f32[] on cpu and x f32[] on cpu share memory"),
        "{error}"
    );
}
