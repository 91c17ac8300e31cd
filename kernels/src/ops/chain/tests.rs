//! Chains against plain loops in f64, element by element.

use super::*;
use crate::{Device, Random};

const CPU: Device = Device::Cpu;

fn randoms(dims: &[usize], seed: u64) -> Tensor {
    Tensor::randn(dims, DType::F64, CPU, &mut Random::new(seed)).unwrap()
}

/// One function of whole tensors.
fn single(function: Function, dims: &[usize], dtype: DType, x: [&Tensor; 3]) -> Tensor {
    let count = function.arguments();
    let mut steps: Vec<ChainStep> = (0..count).map(ChainStep::Load).collect();
    steps.push(ChainStep::Apply(function, [0, 1, 2]));
    steps.push(ChainStep::Store(0, count));
    let views = vec![ChainView::whole(dims); count];
    let chain = Chain::new(
        "chain",
        dims,
        0,
        steps,
        [views, vec![ChainView::whole(dims)]],
    )
    .unwrap();
    let out = Tensor::full(dims, 9.0, dtype, CPU).unwrap();
    chain_into(&chain, &[&out], &x[..count]).unwrap();
    out
}

#[test]
fn functions_of_f32_are_those_of_f64_rounded() {
    let dims = [3, 1111];
    let wide = [1, 2, 3].map(|seed| randoms(&dims, seed));
    for function in Function::ALL {
        let narrow = wide.each_ref().map(|x| x.to_dtype(DType::F32).unwrap());
        let back = narrow.each_ref().map(|x| x.to_dtype(DType::F64).unwrap());
        let got: Vec<f32> = single(function, &dims, DType::F32, narrow.each_ref())
            .to_vec()
            .unwrap();
        let expected: Vec<f64> = single(function, &dims, DType::F64, back.each_ref())
            .to_vec()
            .unwrap();
        for (at, (got, expected)) in got.into_iter().zip(expected).enumerate() {
            let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
            assert!(
                error < 1e-6 || got.is_nan() == expected.is_nan() && got.is_nan(),
                "{function:?} {at}: {got} {expected}"
            );
        }
    }
}

#[test]
fn tanh_is_within_two_ulps_and_keeps_its_limits() {
    let x: Vec<f32> = (-40_000..40_000)
        .map(|i| i as f32 * 3e-4)
        .chain([f32::INFINITY, -f32::INFINITY, f32::NAN, -0.0, 1e-30])
        .collect();
    let tensor = Tensor::from_slice(&x, &[x.len()], CPU).unwrap();
    let got: Vec<f32> = single(Function::Tanh, &[x.len()], DType::F32, [&tensor; 3])
        .to_vec()
        .unwrap();
    for (x, got) in x.into_iter().zip(got) {
        let expected = f64::from(x).tanh();
        let ulp =
            f64::from((expected as f32).abs().max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON);
        assert!(
            x.is_nan() && got.is_nan() || (f64::from(got) - expected).abs() <= 2.0 * ulp,
            "{x}: {got} {expected}"
        );
    }
}

/// softmax, then `out[1]` = the row's largest.
fn softmax(rows: usize, columns: usize) -> Chain {
    use Function::*;
    let steps = vec![
        ChainStep::Load(0),
        ChainStep::Max(0),
        ChainStep::Apply(Sub, [0, 1, 0]),
        ChainStep::Apply(Exp, [2, 0, 0]),
        ChainStep::Sum(3),
        ChainStep::Apply(Div, [3, 4, 0]),
        ChainStep::Store(0, 5),
        ChainStep::Store(1, 1),
    ];
    let dims = [rows, columns];
    let one = ChainView {
        offset: 0,
        strides: vec![1, 0],
    };
    Chain::new(
        "softmax",
        &dims,
        1,
        steps,
        [
            vec![ChainView::whole(&dims)],
            vec![ChainView::whole(&dims), one],
        ],
    )
    .unwrap()
}

#[test]
fn rows_shorter_and_longer_than_a_block_are_reduced() {
    for (rows, columns) in [
        (5, 1),
        (7, 3),
        (40, 1000),
        (3, 1024),
        (2, 1025),
        (2, 5000),
        (0, 4),
    ] {
        let x = randoms(&[rows, columns], 4);
        let (out, max) = (
            x.empty_like().unwrap(),
            Tensor::zeros(&[rows, 1], DType::F64, CPU).unwrap(),
        );
        chain_into(&softmax(rows, columns), &[&out, &max], &[&x]).unwrap();
        let (x, out, max): (Vec<f64>, Vec<f64>, Vec<f64>) = (
            x.to_vec().unwrap(),
            out.to_vec().unwrap(),
            max.to_vec().unwrap(),
        );
        for row in 0..rows {
            let x = &x[row * columns..][..columns];
            let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = x.iter().map(|x| (x - largest).exp()).sum();
            assert_eq!(max[row], largest);
            for (at, x) in x.iter().enumerate() {
                assert!((out[row * columns + at] - (x - largest).exp() / sum).abs() < 1e-14);
            }
        }
    }
}

#[test]
fn views_broadcast_permute_slice_and_place() {
    // out (2, 3, 4), from element 5 on with gaps: a (4, 3, 2) permuted + b (3, 1) broadcast.
    let (dims, a, b) = ([2, 3, 4], randoms(&[4, 3, 2], 5), randoms(&[3, 1], 6));
    let loads = vec![
        ChainView {
            offset: 0,
            strides: vec![1, 2, 6],
        },
        ChainView {
            offset: 0,
            strides: vec![0, 1, 0],
        },
    ];
    let store = ChainView {
        offset: 5,
        strides: vec![20, 5, 1],
    };
    let steps = vec![
        ChainStep::Load(0),
        ChainStep::Load(1),
        ChainStep::Apply(Function::Add, [0, 1, 0]),
        ChainStep::Store(0, 2),
    ];
    let chain = Chain::new("chain", &dims, 0, steps, [loads, vec![store]]).unwrap();
    let out = Tensor::zeros(&[45], DType::F64, CPU).unwrap();
    chain_into(&chain, &[&out], &[&a, &b]).unwrap();
    let (a, b, out): (Vec<f64>, Vec<f64>, Vec<f64>) = (
        a.to_vec().unwrap(),
        b.to_vec().unwrap(),
        out.to_vec().unwrap(),
    );
    let mut expected = vec![0.0; 45];
    for (i, j, k) in (0..24).map(|it| (it / 12, it / 4 % 3, it % 4)) {
        expected[5 + 20 * i + 5 * j + k] = a[i + 2 * j + 6 * k] + b[j];
    }
    assert_eq!(out, expected);
}

#[test]
fn what_does_not_fit_is_refused() {
    let whole = ChainView::whole(&[4]);
    let make = |steps: Vec<ChainStep>, store: ChainView| {
        Chain::new("chain", &[4], 0, steps, [vec![whole.clone()], vec![store]])
    };
    let same = ChainView {
        offset: 0,
        strides: vec![0],
    };
    let copy = || vec![ChainStep::Load(0), ChainStep::Store(0, 0)];
    for (got, expected) in [
        (make(copy(), same), "expected a place for each element"),
        (
            make(vec![ChainStep::Store(0, 1)], whole.clone()),
            "step 0: expected earlier values",
        ),
        (
            make(vec![ChainStep::Load(0), ChainStep::Sum(0)], whole.clone()),
            "step 1: expected earlier values",
        ),
        (
            make(vec![ChainStep::Load(7)], whole.clone()),
            "step 0: expected earlier values",
        ),
    ] {
        let text = got.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
    let chain = make(copy(), whole.clone()).unwrap();
    let (small, large) = (randoms(&[3], 1), randoms(&[4], 1));
    let text = chain_into(&chain, &[&large], &[&small])
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("expected room for the elements of [4]"),
        "{text}"
    );
    assert!(
        chain_into(&chain, &[&large], &[&large]).is_err(),
        "in place"
    );
    let text = chain_into(&chain, &[&large], &[]).unwrap_err().to_string();
    assert!(text.contains("expected 1 and 1, got 0 and 1"), "{text}");
}
