//! Tests of muon_direction and divide_by_norm.

use super::*;
use crate::ops::ChunkTable;
use crate::ops::testing::{SIZES, assert_close, cpu, random_f32, two_chunks};

const NESTEROV: SgdConstants = SgdConstants {
    momentum: 0.95,
    nesterov: true,
};

#[test]
fn twenty_directions_agree_with_f64_and_leave_the_gap_alone() {
    for (size, nesterov) in SIZES
        .into_iter()
        .flat_map(|size| [(size, false), (size, true)])
    {
        let chunks = two_chunks(size);
        let constants = SgdConstants {
            nesterov,
            ..NESTEROV
        };
        let (momentum, scale) = (cpu(&vec![0.0; size], &[size]), cpu(&[0.5], &[1]));
        let mut buffer = vec![0.0f64; size];
        for step in 0..20 {
            let x = random_f32(size, 100 + step);
            let mut expected: Vec<f64> = x.iter().copied().map(f64::from).collect();
            for index in chunks.chunks().iter().flat_map(|chunk| chunk.range()) {
                let grad = 0.5 * expected[index];
                buffer[index] += 0.05 * (grad - buffer[index]);
                expected[index] = if nesterov {
                    grad + 0.95 * (buffer[index] - grad)
                } else {
                    buffer[index]
                };
            }
            let grads = cpu(&x, &[size]);
            let of = UpdateTensors {
                gradient_scale: Some(&scale),
                ..UpdateTensors::new([&grads; 2], &chunks, &grads)
            };
            muon_direction(&of, &momentum, &constants).unwrap();
            // |g| and |m| are below 4. A step rounds m by 2 × 4ε, which fades by 0.95 a step and so
            // stays below 20 of them; its weight is off by ε/2 of 8. The direction adds 2 × 8ε.
            assert_close(&grads.to_vec::<f32>().unwrap(), &expected, |_, _| {
                (20.0 * 12.0 + 16.0) / f64::from(1 << 24)
            });
        }
    }
}

#[test]
fn a_matrix_is_divided_by_its_norm_and_zeros_stay() {
    // The second makes most norms smaller than the least divisor.
    for (size, scale) in SIZES
        .into_iter()
        .flat_map(|size| [(size, 1.0), (size, 1e-10)])
    {
        let x: Vec<f32> = random_f32(size, 7).iter().map(|x| x * scale).collect();
        let norm = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let (values, out) = (cpu(&x, &[size]), cpu(&[1.0, norm as f32], &[2]));
        divide_by_norm(&values, &out).unwrap();
        let expected: Vec<f64> = x.iter().map(|&x| f64::from(x) / norm.max(1e-7)).collect();
        // The norm or 1e-7, and the quotient are rounded, each by half an ε.
        assert_close(&values.to_vec::<f32>().unwrap(), &expected, |_, x| {
            x.abs() * 2.0 * f64::from(f32::EPSILON)
        });
    }
    let zeros = cpu(&[0.0; 3], &[3]);
    divide_by_norm(&zeros, &cpu(&[1.0, 0.0], &[2])).unwrap();
    assert_eq!(zeros.to_vec::<f32>().unwrap(), [0.0; 3]);
}

#[test]
fn after_a_bad_step_nothing_moves() {
    let (grads, momentum) = (cpu(&[1.0, 2.0], &[2]), cpu(&[3.0, 4.0], &[2]));
    let flags = Tensor::from_slice(&[3i64, 0, 4], &[3], crate::Device::Cpu).unwrap();
    let chunks = ChunkTable::whole(2).without_decay();
    let of = UpdateTensors {
        first_bad_step: Some(&flags),
        ..UpdateTensors::new([&grads; 2], &chunks, &grads)
    };
    muon_direction(&of, &momentum, &NESTEROV).unwrap();
    assert_eq!(grads.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    assert_eq!(momentum.to_vec::<f32>().unwrap(), [3.0, 4.0]);
}

#[test]
fn wrong_operands_are_named() {
    let (grads, chunks) = (cpu(&[1.0], &[1]), ChunkTable::whole(1).without_decay());
    let of = UpdateTensors::new([&grads; 2], &chunks, &grads);
    let plain = SgdConstants::default();
    let refusal = |constants| {
        let result = muon_direction(&of, &cpu(&[0.0], &[1]), constants);
        result.unwrap_err().to_string()
    };
    let without = SgdConstants {
        momentum: 0.0,
        ..plain
    };
    assert!(refusal(&without).contains("muon_direction: momentum: expected above 0"));
    let short = muon_direction(&of, &cpu(&[], &[0]), &NESTEROV);
    assert!(short.unwrap_err().to_string().contains("momentum"));
    let norm = divide_by_norm(&grads, &cpu(&[1.0], &[1]))
        .unwrap_err()
        .to_string();
    assert!(
        norm.contains("divide_by_norm: norm") && norm.contains("what clip_scale wrote"),
        "{norm}"
    );
}
