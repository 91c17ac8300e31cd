//! Tests of fill.

use super::*;
use crate::ops::testing::{SIZES, cpu, cpu_of};
use crate::{DType, Device, Element};

#[test]
fn every_dtype_and_size_is_filled_and_zeroed() {
    for (size, dtype) in SIZES
        .into_iter()
        .flat_map(|size| DType::ALL.map(|dtype| (size, dtype)))
    {
        let out = Tensor::ones(&[size], dtype, Device::Cpu).unwrap();
        fill_into(&out, 7.0).unwrap();
        with_element!(dtype, T => {
            assert!(out.to_vec::<T>().unwrap().iter().all(|x| x.to_f64() == 7.0), "{dtype} {size}");
            zero(&out).unwrap();
            assert!(out.to_vec::<T>().unwrap().iter().all(|x| x.to_f64() == 0.0), "{dtype} {size}");
        });
    }
}

#[test]
fn floats_round_and_keep_the_sign_of_zero_and_only_the_part_named_is_written() {
    let whole = cpu(&[1.0; 4], &[4]);
    fill_into(&whole.slice(1..2).unwrap(), -0.0).unwrap();
    fill_into(&whole.slice(2..3).unwrap(), 0.1).unwrap();
    zero(&whole.slice(3..4).unwrap()).unwrap();
    let bits: Vec<u32> = whole
        .to_vec::<f32>()
        .unwrap()
        .iter()
        .map(|x| x.to_bits())
        .collect();
    assert_eq!(bits, [1.0, -0.0, 0.1f32, 0.0].map(f32::to_bits));
    fill_into(&whole, f64::NAN).unwrap();
    assert!(whole.to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()));
}

#[test]
fn a_large_output_is_filled_to_its_last_element() {
    // Past the size from which the loops store around the caches, and on no round number of blocks.
    let count = (33 << 20) / 4 + 3;
    let out = Tensor::zeros(&[count], DType::I32, Device::Cpu).unwrap();
    fill_into(&out, -5.0).unwrap();
    assert!(
        out.with_slice::<i32, _>(|out| out.iter().all(|&x| x == -5))
            .unwrap()
    );
}

#[test]
fn a_value_that_an_integer_cannot_hold_is_refused() {
    for (value, dtype) in [(0.5, "u8"), (256.0, "u8"), (-1.0, "u8"), (f64::NAN, "u8")] {
        let error = fill_into(&cpu_of(&[1u8], &[1]), value)
            .unwrap_err()
            .to_string();
        let expected =
            format!("fill: value: expected a whole number that {dtype} holds, got {value}");
        assert!(error.contains(&expected), "{error}");
    }
    // i64 ends one below 2⁶³, which the f64 comparison alone would not tell apart.
    let out = cpu_of(&[1i64], &[1]);
    assert!(fill_into(&out, 2f64.powi(63)).is_err());
    fill_into(&out, -2f64.powi(63)).unwrap();
    assert_eq!(out.to_vec::<i64>().unwrap(), [i64::MIN]);
}
