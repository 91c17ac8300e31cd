//! Tests of causal_mask.

use super::*;
use crate::ops::testing::cpu;

#[test]
fn every_dtype_and_size_hides_what_lies_above_the_diagonal() {
    for tokens in [0, 1, 2, 7, 64, 300] {
        for dtype in FLOATS_AND_BF16.cpu.iter().copied() {
            let mask = causal_mask(tokens, dtype, Device::Cpu).unwrap();
            with_float!(dtype, T => {
                for (index, got) in mask.to_vec::<T>().unwrap().iter().enumerate() {
                    let (row, column) = (index / tokens, index % tokens);
                    let expected = if column > row { f64::NEG_INFINITY } else { 0.0 };
                    assert_eq!(got.to_f64(), expected, "{dtype} [{row}, {column}] of {tokens}");
                }
            });
        }
    }
}

#[test]
fn other_shapes_dtypes_and_layouts_are_refused() {
    let error = causal_mask_into(&cpu(&[0.0; 6], &[2, 3]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("causal_mask: out f32[2, 3] on cpu: expected shape [2, 2]"),
        "{error}"
    );
    let error = causal_mask_into(&cpu(&[0.0; 6], &[6]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("causal_mask: out f32[6] on cpu: expected 2 dimensions, [tokens, tokens]"),
        "{error}"
    );
    let error = causal_mask(3, DType::I64, Device::Cpu)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("causal_mask: there is no version for i64 on cpu"),
        "{error}"
    );
    let error = causal_mask_into(&cpu(&[0.0; 4], &[2, 2]).t().unwrap())
        .unwrap_err()
        .to_string();
    assert!(error.contains("expected row-major elements"), "{error}");
    assert!(causal_mask(usize::MAX, DType::F32, Device::Cpu).is_err());
}
