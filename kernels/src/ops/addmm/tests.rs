//! Tests of addmm.

use super::*;
use crate::DType;
use crate::ops::testing::{assert_close, cpu, random_f32};
use crate::{Device, Random};

/// Rounding error of a dot product of length k in any order, of inputs with the given sum of
/// magnitudes: at most k + 3 roundings (products, sums, the two factors), each of 2⁻²⁴ of what is
/// being added.
fn bound(k: usize, magnitudes: f64) -> f64 {
    (k + 3) as f64 * 2f64.powi(-24) * magnitudes
}

struct Case {
    m: usize,
    n: usize,
    k: usize,
    alpha: f64,
    beta: f64,
    mat1_t: bool,
    mat2_t: bool,
}

/// The tensor that is `[rows, columns]` with its elements in the order of the transpose if `t`.
fn matrix(data: &[f32], rows: usize, columns: usize, t: bool) -> Tensor {
    if t {
        cpu(data, &[columns, rows]).t().unwrap()
    } else {
        cpu(data, &[rows, columns])
    }
}

fn check(case: &Case, seed: u64) {
    let Case {
        m,
        n,
        k,
        alpha,
        beta,
        mat1_t,
        mat2_t,
    } = *case;
    let (a, b) = (random_f32(m * k, seed), random_f32(k * n, seed + 1));
    let acc_data = random_f32(m * n, seed + 2);
    let at = |i: usize, l: usize| f64::from(a[if mat1_t { l * m + i } else { i * k + l }]);
    let bt = |l: usize, j: usize| f64::from(b[if mat2_t { j * k + l } else { l * n + j }]);
    let mut reference = Vec::with_capacity(m * n);
    let mut magnitudes = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let acc = beta * f64::from(acc_data[i * n + j]);
            let terms = (0..k).map(|l| alpha * at(i, l) * bt(l, j));
            reference.push(acc + terms.clone().sum::<f64>());
            magnitudes.push(acc.abs() + terms.map(f64::abs).sum::<f64>());
        }
    }
    let (mat1, mat2) = (matrix(&a, m, k, mat1_t), matrix(&b, k, n, mat2_t));
    let acc = cpu(&acc_data, &[m, n]);
    let out = addmm(&acc, &mat1, &mat2, alpha, beta).unwrap();
    assert_close(&out.to_vec::<f32>().unwrap(), &reference, |index, _| {
        bound(k, magnitudes[index])
    });
    addmm_into(&acc, &acc, &mat1, &mat2, alpha, beta).unwrap();
    assert_close(&acc.to_vec::<f32>().unwrap(), &reference, |index, _| {
        bound(k, magnitudes[index])
    });
}

#[test]
fn every_transposition_factor_and_odd_size_agrees_with_f64() {
    let sizes = [
        (1, 1, 1),
        (1, 5, 3),
        (5, 1, 3),
        (3, 4, 1),
        (7, 9, 2),
        (17, 33, 65),
        (66, 10, 129),
        (130, 70, 520),
    ];
    for (seed, (m, n, k)) in sizes.into_iter().enumerate() {
        for bits in 0..4 {
            for (alpha, beta) in [(1.0, 1.0), (0.5, -2.0), (1.0, 0.0), (0.0, 1.0)] {
                let [mat1_t, mat2_t] = [bits & 1 != 0, bits & 2 != 0];
                check(
                    &Case {
                        m,
                        n,
                        k,
                        alpha,
                        beta,
                        mat1_t,
                        mat2_t,
                    },
                    10 * seed as u64,
                );
            }
        }
    }
}

#[test]
fn empty_outputs_are_computed_without_a_matmul() {
    for (m, n, k) in [(0, 3, 4), (3, 0, 4), (0, 0, 1)] {
        check(
            &Case {
                m,
                n,
                k,
                alpha: 1.5,
                beta: 0.5,
                mat1_t: false,
                mat2_t: true,
            },
            3,
        );
    }
}

#[test]
fn the_gradient_of_a_weight_by_no_rows_is_what_beta_keeps_of_the_accumulator() {
    // One output row, tiles and their edges; mat2ᵀ also takes the path of one row.
    for [outputs, inputs] in [[1, 40], [3, 4], [33, 40]] {
        let (dout, x) = (cpu(&[], &[0, outputs]), cpu(&[], &[0, inputs]));
        let right = cpu(&[], &[inputs, 0]);
        for (beta, kept) in [(0.0, 0.0), (1.0, 7.0), (0.5, 3.5)] {
            for mat2 in [&x, &right.t().unwrap()] {
                // What beta = 0 leaves out may be NaN.
                let existing = if beta == 0.0 { f32::NAN } else { 7.0 };
                let acc = cpu(&vec![existing; outputs * inputs], &[outputs, inputs]);
                let dout = dout.t().unwrap();
                let new = addmm(&acc, &dout, mat2, 2.0, beta).unwrap();
                addmm_into(&acc, &acc, &dout, mat2, 2.0, beta).unwrap();
                for got in [new, acc] {
                    assert_eq!(
                        got.to_vec::<f32>().unwrap(),
                        vec![kept; outputs * inputs],
                        "{outputs} {inputs} {beta}"
                    );
                }
            }
        }
    }
}

#[test]
fn an_accumulator_with_factor_zero_is_not_read() {
    let nan = cpu(&[f32::NAN; 4], &[2, 2]);
    let one = cpu(&[1.0; 4], &[2, 2]);
    assert_eq!(
        addmm(&nan, &one, &one, 1.0, 0.0)
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [2.0; 4]
    );
    addmm_into(&nan, &nan, &one, &one, 1.0, 0.0).unwrap();
    assert_eq!(nan.to_vec::<f32>().unwrap(), [2.0; 4]);
}

#[test]
fn the_f64_version_agrees_with_the_f32_version() {
    let mut random = Random::new(5);
    let a = Tensor::randn(&[40, 600], DType::F32, Device::Cpu, &mut random).unwrap();
    let b = Tensor::randn(&[30, 600], DType::F32, Device::Cpu, &mut random)
        .unwrap()
        .t()
        .unwrap();
    let acc = Tensor::randn(&[40, 30], DType::F32, Device::Cpu, &mut random).unwrap();
    let [wide_acc, wide_a, wide_b] = [&acc, &a, &b].map(|x| x.to_dtype(DType::F64).unwrap());
    let wide = addmm(&wide_acc, &wide_a, &wide_b, 1.0, 1.0)
        .unwrap()
        .to_vec::<f64>()
        .unwrap();
    let narrow = addmm(&acc, &a, &b, 1.0, 1.0)
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    // 600 products of standard normals: magnitudes of about 600 · 2/π, at most 600 in practice.
    assert_close(&narrow, &wide, |_, _| bound(600, 600.0));
}

#[test]
fn wrong_operands_are_named_with_help() {
    let x = cpu(&[0.0; 6], &[2, 3]).named("batch");
    let w = cpu(&[0.0; 12], &[4, 3]).named("fc1.weight");
    let bias = cpu(&[0.0; 8], &[2, 4]);
    let error = addmm(&bias, &x, &w, 1.0, 1.0).unwrap_err().to_string();
    assert!(
        error.contains(
            r#"addmm: mat2 "fc1.weight" f32[4, 3] on cpu: expected 3 rows, as mat1 has columns"#
        ) && error.contains("pass it as .t()"),
        "{error}"
    );
    let error = addmm(&cpu(&[0.0; 3], &[3]), &x, &w.t().unwrap(), 1.0, 1.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("acc f32[3] on cpu: expected shape [2, 4]"),
        "{error}"
    );
    let error = addmm(&bias, &x.flatten().unwrap(), &w, 1.0, 1.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("expected 2 dimensions, [rows, inner]"),
        "{error}"
    );
    let square = cpu(&[0.0; 4], &[2, 2]);
    let error = addmm_into(&square, &square, &square, &square, 1.0, 1.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("out f32[2, 2] on cpu and mat1 f32[2, 2] on cpu share memory"),
        "{error}"
    );
    let half = square.to_dtype(DType::F16).unwrap();
    let error = addmm(&half, &half, &half, 1.0, 1.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("addmm: there is no version for f16 on cpu: mat1 f16[2, 2] on cpu"),
        "{error}"
    );
}

#[test]
fn a_batch_has_the_bits_of_its_matrices_one_by_one() {
    let (batch, m, n, k) = (3, 5, 7, 9);
    let (a, b) = (random_f32(batch * m * k, 1), random_f32(batch * k * n, 2));
    let acc_data = random_f32(batch * m * n, 3);
    for transposed in [[false, false], [false, true], [true, false], [true, true]] {
        let shape = |rows, columns, t: bool| {
            if t {
                [batch, columns, rows]
            } else {
                [batch, rows, columns]
            }
        };
        let turned = |x: Tensor, t: bool| if t { x.t().unwrap() } else { x };
        let mat1 = cpu(&a, &shape(m, k, transposed[0]));
        let mat2 = cpu(&b, &shape(k, n, transposed[1]));
        let acc = cpu(&acc_data, &[batch, m, n]);
        let out = cpu(&vec![f32::NAN; batch * m * n], &[batch, m, n]);
        let (left, right) = (
            turned(mat1.clone(), transposed[0]),
            turned(mat2.clone(), transposed[1]),
        );
        addmm_into(&out, &acc, &left, &right, 0.5, -2.0).unwrap();
        let new = addmm(&acc, &left, &right, 0.5, -2.0).unwrap();
        assert_eq!(new.to_vec::<f32>().unwrap(), out.to_vec::<f32>().unwrap());
        for index in 0..batch {
            let of = |x: &Tensor, t: bool| turned(x.index(index).unwrap(), t);
            let (mat1, mat2) = (of(&mat1, transposed[0]), of(&mat2, transposed[1]));
            let alone = addmm(&of(&acc, false), &mat1, &mat2, 0.5, -2.0).unwrap();
            let got = of(&out, false).to_vec::<f32>().unwrap();
            assert_eq!(
                got,
                alone.to_vec::<f32>().unwrap(),
                "{transposed:?} {index}"
            );
        }
    }
}

#[test]
fn operands_of_a_batch_are_checked() {
    let zeros = |shape: &[usize]| cpu(&vec![0.0; shape.iter().product()], shape);
    let refused = |out: &[usize], mat1: &[usize], mat2: &[usize]| {
        let [out, mat1, mat2] = [out, mat1, mat2].map(zeros);
        let made = addmm_into(&out, &out, &mat1, &mat2, 1.0, 1.0);
        made.unwrap_err().to_string()
    };
    for (error, expected) in [
        (
            refused(&[2, 3, 3], &[2, 3, 4], &[3, 4, 3]),
            "addmm: mat2 f32[3, 4, 3] on cpu: expected 2 matrices, as mat1 has",
        ),
        (
            refused(&[2, 3, 3], &[2, 3, 4], &[2, 3, 4]),
            "mat2 f32[2, 3, 4] on cpu: expected 4 rows, as mat1 has columns",
        ),
        (
            refused(&[3, 3], &[2, 3, 4], &[2, 4, 3]),
            "f32[3, 3] on cpu: expected shape [2, 3, 3], that is [matrices, rows of mat1, columns of mat2]",
        ),
        (
            refused(&[2, 3, 3], &[2, 3, 4], &[4, 3]),
            "mat2 f32[4, 3] on cpu: expected 2 matrices, as mat1 has",
        ),
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn only_one_transposed_matrix_is_made_contiguous() {
    let several = cpu(&[0.0; 12], &[2, 3, 2]).t().unwrap();
    assert_eq!(several.shape().dims(), [2, 2, 3]);
    let error = several.contiguous().unwrap_err().to_string();
    assert!(error.contains("expected 2 dimensions"), "{error}");
    let error = cpu(&[0.0; 3], &[3]).t().unwrap_err().to_string();
    assert!(
        error.contains("a matrix (two dimensions) or several"),
        "{error}"
    );
}
