//! Tests of random.

mod philox;

use super::*;
use crate::{Device, Tensor};

#[test]
fn a_saved_position_continues_with_the_same_numbers() {
    let mut random = Random::new(7);
    let _ = Tensor::randn(&[5], DType::F32, Device::Cpu, &mut random).unwrap();
    let (seed, draw) = random.position();
    let next = Tensor::rand(&[9], DType::F32, Device::Cpu, &mut random).unwrap();
    let again = Tensor::rand(&[9], DType::F32, Device::Cpu, &mut Random::at(seed, draw)).unwrap();
    assert_eq!(
        next.to_vec::<f32>().unwrap(),
        again.to_vec::<f32>().unwrap()
    );
}

#[test]
fn a_long_tensor_filled_by_many_threads_has_the_bits_of_its_pieces() {
    let stream = Draw {
        key: [3, 0],
        draw: 0,
    };
    let long = Tensor::randn(&[100_003], DType::F32, Device::Cpu, &mut Random::new(3)).unwrap();
    let long = long.to_vec::<f32>().unwrap();
    for first in [0, 1, 1023, 77_777, 100_002] {
        let mut one = [0f32];
        stream.convert::<Normal>(first as u64, &mut one);
        assert_eq!(one[0].to_bits(), long[first].to_bits(), "element {first}");
    }
}

#[test]
fn every_dtype_stays_in_range() {
    let mut random = Random::new(1);
    let uniform = Tensor::rand(&[10_000], DType::F64, Device::Cpu, &mut random)
        .unwrap()
        .to_vec::<f64>()
        .unwrap();
    assert!(uniform.iter().all(|u| (0.0..1.0).contains(u)));
    assert!(
        uniform.iter().any(|u| (u * 16_777_216.0).fract() != 0.0),
        "more than 24 bits"
    );
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let uniform = Tensor::rand(&[100_000], dtype, Device::Cpu, &mut random).unwrap();
        let uniform = uniform
            .to_dtype(DType::F64)
            .unwrap()
            .to_vec::<f64>()
            .unwrap();
        assert!(uniform.iter().all(|u| (0.0..1.0).contains(u)), "{dtype}");
        // The mean of n uniforms is off by 1/√(12 n), here 0.0009; five of those, and half a step
        // of bf16.
        let mean = uniform.iter().sum::<f64>() / 100_000.0;
        assert!(
            (mean - 0.5).abs() < 5.0 * 0.0009 + 1.0 / 512.0,
            "{dtype}: {mean}"
        );
    }
    let labels = Tensor::randint(10, &[10_000], DType::I64, Device::Cpu, &mut random).unwrap();
    let labels = labels.to_vec::<i64>().unwrap();
    assert!(
        (0..10).all(|class| labels.contains(&class))
            && labels.iter().all(|&l| (0..10).contains(&l))
    );
}
