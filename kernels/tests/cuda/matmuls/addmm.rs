//! addmm: every transposition, accumulator, factor and dtype.

use ddp_kernels::graph::Graph;
use ddp_kernels::ops::{self, F32Math, with_f32_math};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use super::{
    EXACT, KINDS, SHAPES, added_bound, assert_within, integers, normals, placed, reference, sliced,
    stored_bound, sum_bound, values,
};
use crate::{assert_same_bits, devices};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Accumulator {
    Apart,
    InPlace,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    mnk: [usize; 3],
    kind: (DType, F32Math),
    transposed: [bool; 2],
    accumulator: Accumulator,
    factors: [f64; 2],
    /// Elements between the start of memory and each operand.
    skip: usize,
}

/// The matrix of this shape, in memory as its transpose where `transposed`.
fn matrix(
    rows: usize,
    columns: usize,
    transposed: bool,
    dtype: DType,
    seed: u64,
    skip: usize,
    device: Device,
) -> Tensor {
    if transposed {
        placed(&normals(&[columns, rows], dtype, seed), skip, device)
            .t()
            .unwrap()
    } else {
        placed(&normals(&[rows, columns], dtype, seed), skip, device)
    }
}

fn check_addmm(case: &Case, device: Device) {
    let Case {
        mnk: [m, n, k],
        kind,
        transposed,
        accumulator,
        factors: [alpha, beta],
        skip,
    } = *case;
    let (dtype, math) = kind;
    let seed = (m * 1000 + n * 100 + k) as u64;
    let mat1 = matrix(m, k, transposed[0], dtype, seed, skip, device);
    let mat2 = matrix(k, n, transposed[1], dtype, seed + 1, skip, device);
    let acc = placed(&normals(&[m, n], dtype, seed + 2), skip, device);
    let acc_values = values(&acc);
    let sums = reference(&values(&mat1), &values(&mat2), [m, n, k]);
    let added = |index: usize| beta * acc_values[index];
    let expected: Vec<f64> = (0..m * n)
        .map(|index| alpha * sums[index].0 + added(index))
        .collect();
    let got = with_f32_math(math, || {
        if accumulator == Accumulator::InPlace {
            ops::addmm_into(&acc, &acc, &mat1, &mat2, alpha, beta).unwrap();
            acc.clone()
        } else {
            ops::addmm(&acc, &mat1, &mat2, alpha, beta).unwrap()
        }
    });
    let bound = |index: usize| {
        let magnitudes = alpha.abs() * sums[index].1 + added(index).abs();
        let of_product = added_bound(alpha * sums[index].0, beta != 0.0, dtype);
        let bound = sum_bound(k, magnitudes, kind) + of_product;
        stored_bound(bound, expected[index], dtype)
    };
    assert_within(&got, &expected, bound, &format!("{case:?}"));
}

#[test]
fn addmm_of_every_transposition_accumulator_factor_and_dtype_is_within_its_bound() {
    for device in devices() {
        for (mnk, kind) in sliced("addmm", &SHAPES) {
            for transposed in [[false, false], [false, true], [true, false], [true, true]] {
                for accumulator in [Accumulator::Apart, Accumulator::InPlace] {
                    for factors in [[1.0, 1.0], [0.5, -2.0], [1.0, 0.0], [2.0, 1.0]] {
                        check_addmm(
                            &Case {
                                mnk,
                                kind,
                                transposed,
                                accumulator,
                                factors,
                                skip: 0,
                            },
                            device,
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn addmm_reads_and_writes_at_odd_addresses_too() {
    for device in devices() {
        for (kind, skip) in KINDS
            .into_iter()
            .flat_map(|kind| [1, 3, 4, 8].map(|skip| (kind, skip)))
        {
            for accumulator in [Accumulator::Apart, Accumulator::InPlace] {
                let (mnk, transposed) = ([33, 20, 47], [false, true]);
                check_addmm(
                    &Case {
                        mnk,
                        kind,
                        transposed,
                        accumulator,
                        factors: [1.0, 1.0],
                        skip,
                    },
                    device,
                );
            }
        }
    }
}

#[test]
fn addmm_does_not_read_an_accumulator_of_factor_zero() {
    for device in devices() {
        let full = |value: f64| Tensor::full(&[4, 4], value, DType::F32, device).unwrap();
        let (nan, one) = (full(f64::NAN), full(1.0));
        assert_eq!(
            values(&ops::addmm(&nan, &one, &one, 1.0, 0.0).unwrap()),
            [4.0; 16]
        );
        ops::addmm_into(&nan, &nan, &one, &one, 1.0, 0.0).unwrap();
        assert_eq!(values(&nan), [4.0; 16]);
    }
}

#[test]
fn addmm_of_no_terms_is_what_beta_keeps_of_the_accumulator() {
    for (device, (dtype, _)) in devices()
        .into_iter()
        .flat_map(|device| KINDS.map(|kind| (device, kind)))
    {
        let none = |shape: &[usize]| Tensor::zeros(shape, dtype, device).unwrap();
        let (dout, x) = (none(&[0, 3]), none(&[0, 5]));
        for (beta, kept) in [(0.0, 0.0), (1.0, 7.0), (0.5, 3.5)] {
            let existing = if beta == 0.0 { f64::NAN } else { 7.0 };
            let acc = Tensor::full(&[3, 5], existing, dtype, device).unwrap();
            let dout = dout.t().unwrap();
            let new = ops::addmm(&acc, &dout, &x, 2.0, beta).unwrap();
            ops::addmm_into(&acc, &acc, &dout, &x, 2.0, beta).unwrap();
            assert_eq!([values(&new), values(&acc)], [[kept; 15], [kept; 15]]);
        }
    }
}

#[test]
fn addmm_of_whole_numbers_is_exact_in_every_dtype() {
    let [m, n, k] = EXACT;
    let (mat1, mat2, acc) = (
        integers(&[m, k], 1),
        integers(&[k, n], 2),
        integers(&[m, n], 3),
    );
    let expected = ops::addmm(&acc, &mat1, &mat2, 1.0, 1.0).unwrap();
    for device in devices() {
        for (dtype, math) in KINDS {
            let [acc, mat1, mat2] =
                [&acc, &mat1, &mat2].map(|x| x.to_dtype(dtype).unwrap().to(device).unwrap());
            let got = with_f32_math(math, || ops::addmm(&acc, &mat1, &mat2, 1.0, 1.0).unwrap());
            assert_same_bits(
                &got,
                &expected.to_dtype(dtype).unwrap(),
                &format!("{dtype} {math:?}"),
            );
        }
    }
}

/// Also of matrices that follow each other at odd distances.
#[test]
fn addmm_of_a_batch_of_whole_numbers_is_exact_in_every_dtype() {
    let batch = 3;
    for [m, n, k] in [EXACT, [8, 16, 8], [5, 3, 7]] {
        for transposed in [[false, false], [false, true], [true, false], [true, true]] {
            let shape = |rows, columns, t: bool| {
                if t {
                    [batch, columns, rows]
                } else {
                    [batch, rows, columns]
                }
            };
            let mat1 = integers(&shape(m, k, transposed[0]), 1);
            let mat2 = integers(&shape(k, n, transposed[1]), 2);
            let acc = integers(&[batch, m, n], 3);
            let turned = |x: &Tensor, t: bool| if t { x.t().unwrap() } else { x.clone() };
            let into = |out: &Tensor, acc: &Tensor, mat1: &Tensor, mat2: &Tensor| {
                let [mat1, mat2] = [turned(mat1, transposed[0]), turned(mat2, transposed[1])];
                ops::addmm_into(out, acc, &mat1, &mat2, 1.0, 2.0).unwrap();
            };
            let expected = Tensor::zeros(&[batch, m, n], DType::F32, Device::Cpu).unwrap();
            into(&expected, &acc, &mat1, &mat2);
            for device in devices() {
                for (dtype, math) in KINDS {
                    let [acc, mat1, mat2] = [&acc, &mat1, &mat2]
                        .map(|x| x.to_dtype(dtype).unwrap().to(device).unwrap());
                    let out = Tensor::zeros(&[batch, m, n], dtype, device).unwrap();
                    with_f32_math(math, || into(&out, &acc, &mat1, &mat2));
                    let case = format!("{m} {n} {k} {transposed:?} {dtype} {math:?}");
                    assert_same_bits(&out, &expected.to_dtype(dtype).unwrap(), &case);
                    with_f32_math(math, || into(&acc, &acc, &mat1, &mat2));
                    assert_same_bits(&acc, &expected.to_dtype(dtype).unwrap(), &case);
                }
            }
        }
    }
}

#[test]
fn addmm_of_a_batch_is_one_node() {
    for device in devices() {
        let x = Tensor::full(&[4, 32, 16], 0.5, DType::BF16, device).unwrap();
        let out = Tensor::zeros(&[4, 32, 32], DType::BF16, device).unwrap();
        let into = || ops::addmm_into(&out, &out, &x, &x.t()?, 1.0, 0.0);
        into().unwrap();
        let stream = Stream::default_of(device).unwrap();
        let graph = Graph::capture(&stream, into).unwrap();
        let [node] = graph.nodes() else {
            panic!("{:?}", graph.nodes())
        };
        assert_eq!(node.work.flop, 2.0 * 4.0 * (32.0 * 32.0 * 16.0));
        assert!(node.name.contains("batch of 4"), "{}", node.name);
    }
}
