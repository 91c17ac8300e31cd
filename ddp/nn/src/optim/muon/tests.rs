//! Muon against the formula in f64 and against PyTorch, and the division of work among ranks.

use ddp_kernels::Device;

use super::*;
use crate::models::Model;
use crate::optim::{Decayed, Optimizer, ParameterGroup};
use crate::{Linear, Sequential};

const RATE: f64 = 0.1;
const DECAY: f64 = 0.5;
const MOMENTUM: f64 = 0.75;

fn rule() -> Rule {
    Rule {
        method: Method::AdamW(Default::default()),
        hidden: Some(Method::Muon(Muon {
            momentum: MOMENTUM,
            nesterov: true,
        })),
        rate: 0.25,
        weight_decay: DECAY,
        decayed: Decayed::Matrices,
    }
}

/// A hidden weight of this many rows and columns, and an output layer.
fn params(rows: usize, columns: usize, dtype: DType) -> Params {
    let layers = Sequential::new()
        .then(Linear::new(rows))
        .then(Linear::new(2).outer());
    let model = Model::new(Box::new(layers), &[columns], dtype, Device::Cpu, 1, &|_| {
        false
    });
    model.unwrap().params
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// Every element of a gradient is a multiple of 1/64: exact in f32.
fn gradient(kind: &str, step: usize, row: usize, column: usize) -> f64 {
    let drawn = ((row * 7919 + column * 104_729 + row * column * 31) % 127) as f64 / 64.0 - 1.0;
    match kind {
        "zero" => 0.0,
        "of rank 1" => (row % 5 + 1) as f64 * (column % 3) as f64 / 4.0,
        _ => drawn + step as f64 * ((row + column) % 3) as f64 / 64.0,
    }
}

fn matmul(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let element = |i: usize| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum();
    (0..m * n).map(element).collect()
}

fn transposed(a: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    (0..rows * columns)
        .map(|i| a[i % rows * columns + i / rows])
        .collect()
}

/// The formula as its authors write it: on the transposed matrix if that is wider.
fn orthogonal(g: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    if rows > columns {
        let turned = orthogonal(&transposed(g, [rows, columns]), [columns, rows]);
        return transposed(&turned, [columns, rows]);
    }
    let norm = g.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut x: Vec<f64> = g.iter().map(|x| x / norm.max(1e-7)).collect();
    for _ in 0..5 {
        let a = matmul(&x, &transposed(&x, [rows, columns]), [rows, columns, rows]);
        let squared = matmul(&a, &a, [rows; 3]);
        let b: Vec<f64> = a
            .iter()
            .zip(squared)
            .map(|(a, s)| -4.7750 * a + 2.0315 * s)
            .collect();
        let added = matmul(&b, &x, [rows, rows, columns]);
        x = x
            .iter()
            .zip(added)
            .map(|(x, added)| 3.4445 * x + added)
            .collect();
    }
    x
}

/// How far rounding by `unit` may move an element of the iteration's result.
///
/// p(s) = a·s + b·s³ + c·s⁵ maps singular values in [0, 1.21] to [0, 1.21], so ‖X‖₂ ≤ S = 1.21 and
/// ‖X‖_F ≤ S√k, k the shorter side, n the longer. A step moves an error in the Frobenius norm by
/// at most the largest divided difference of p on [−S, S]: max |p'| < 4.25. One step adds
/// n·u·‖X‖_F² in A, (|b| + 2|c|S²) times that and k·u·|c|·‖A‖_F² + 2u·‖B‖_F in B, and of
/// these S times in X, besides k·u·‖B‖_F·‖X‖_F. All grow by 1 + 4.25 + … + 4.25⁴ < 428. The input
/// is off by at most 16u: the roundings of the momentum in three steps, and of norm and quotient.
fn bound([rows, columns]: [usize; 2], unit: f64) -> f64 {
    let (k, n) = (rows.min(columns) as f64, rows.max(columns) as f64);
    let s = 1.21f64;
    let (x, a) = (s * k.sqrt(), s * s * k.sqrt());
    let b = 4.775 * a + 2.0315 * s.powi(4) * k.sqrt();
    let in_a = n * x * x;
    let in_b = (4.775 + 2.0 * 2.0315 * s * s) * in_a + k * 2.0315 * a * a + 2.0 * b;
    let in_x = s * in_b + (k + 2.0) * b * x;
    unit * (428.0 * in_x + 4.25f64.powi(5) * 16.0)
}

#[test]
fn three_steps_are_the_formula_in_f64_for_every_shape() {
    let shapes = [[4, 9], [9, 4], [6, 6], [1, 7], [7, 1], [1, 1], [5, 33]];
    let kinds = ["full", "of rank 1", "zero"];
    for ([rows, columns], kind) in shapes.into_iter().flat_map(|s| kinds.map(|kind| (s, kind))) {
        for (dtype, unit) in [(DType::F64, 2f64.powi(-53)), (DType::F32, 2f64.powi(-24))] {
            let params = params(rows, columns, dtype);
            let weight = params.find("0.weight").unwrap().id;
            let mut expected = numbers(params.master(weight));
            let largest = expected.iter().fold(1f64, |most, w| most.max(w.abs()));
            let mut optimizer = Optimizer::new(rule(), &params).unwrap();
            let mut momentum = vec![0.0; rows * columns];
            for step in 1..=3 {
                let g: Vec<f64> = (0..rows * columns)
                    .map(|i| gradient(kind, step, i / columns, i % columns))
                    .collect();
                let host = Tensor::from_slice(&g, &[rows, columns], Device::Cpu).unwrap();
                let target = params.gradient(weight).unwrap();
                target.copy_from(&host.to_dtype(dtype).unwrap()).unwrap();
                optimizer
                    .update(&params, step as u64, RATE, None, None)
                    .unwrap();
                let mut direction = Vec::new();
                for (m, g) in momentum.iter_mut().zip(&g) {
                    *m = MOMENTUM * *m + (1.0 - MOMENTUM) * g;
                    direction.push(g + MOMENTUM * (*m - g));
                }
                let factor = (rows as f64 / columns as f64).max(1.0).sqrt();
                for (w, o) in expected
                    .iter_mut()
                    .zip(orthogonal(&direction, [rows, columns]))
                {
                    *w = *w * (1.0 - RATE * DECAY) - RATE * factor * o;
                }
                // Per step also four roundings of the value, which is at most 2 in all steps.
                let one =
                    RATE * factor * bound([rows, columns], unit) + 4.0 * unit * (largest + 1.0);
                let got = numbers(params.master(weight));
                for (got, expected) in got.iter().zip(&expected) {
                    let error = (got - expected).abs();
                    assert!(
                        error <= step as f64 * one,
                        "{kind} {rows}x{columns} {dtype}, step {step}: {got} for {expected}"
                    );
                }
            }
        }
    }
}

/// How far f32 may be from the numbers below. muon.py checks that PyTorch's iteration in f32 keeps
/// to it, too (it is off by 1.6e-7).
const F32_OFF_MAX: f64 = 1.5e-6;

/// From tests/peers/muon.py: rows 0, 3 and 6 of the weight after three steps of torch.optim.Muon
/// on the gradients of `gradient` times the number, from a weight of zeros, with its iteration in
/// f64. The norms of the second are below PyTorch's ε.
const TORCH: [(f32, [[f64; 3]; 3]); 2] = [
    (
        1.0,
        [
            [0.2724518, -0.1960802, 0.1547352],
            [0.1922876, 0.0474412, -0.1570295],
            [0.1653336, 0.139121, 0.0568858],
        ],
    ),
    (
        1.0 / (1 << 26) as f32,
        [
            [0.2239558, -0.1488994, 0.1001341],
            [0.1896402, 0.0234642, -0.1727419],
            [0.1349929, 0.1052992, 0.0389218],
        ],
    ),
];

#[test]
fn three_steps_are_pytorch_s() {
    for (scale, expected) in TORCH {
        let params = params(7, 3, DType::F32);
        let weight = params.find("0.weight").unwrap().id;
        ddp_kernels::ops::fill_into(params.master(weight), 0.0).unwrap();
        let mut optimizer = Optimizer::new(rule(), &params).unwrap();
        for step in 1..=3 {
            let g: Vec<f32> = (0..21)
                .map(|i| gradient("full", step, i / 3, i % 3) as f32 * scale)
                .collect();
            let host = Tensor::from_slice(&g, &[7, 3], Device::Cpu).unwrap();
            params.gradient(weight).unwrap().copy_from(&host).unwrap();
            optimizer
                .update(&params, step as u64, RATE, None, None)
                .unwrap();
        }
        let got = numbers(params.master(weight));
        for (row, expected) in [0, 3, 6].into_iter().zip(expected) {
            for (column, expected) in expected.into_iter().enumerate() {
                let got = got[row * 3 + column];
                assert!(
                    (got - expected).abs() <= F32_OFF_MAX,
                    "{scale} {row} {column}: {got} for {expected}"
                );
            }
        }
    }
}

#[test]
fn other_parameters_are_adamw_s_with_their_own_rate() {
    let of = |rule: Rule, rate: f64| {
        let params = params(4, 6, DType::F32);
        params.list().iter().for_each(|p| {
            ops::fill_into(params.gradient(p.id).unwrap(), 0.5).unwrap();
        });
        Optimizer::new(rule, &params)
            .unwrap()
            .update(&params, 1, rate, None, None)
            .unwrap();
        let of = |name: &str| numbers(params.master(params.find(name).unwrap().id));
        (["0.bias", "1.weight", "1.bias"].map(of), of("0.weight"))
    };
    let adamw = Rule {
        weight_decay: DECAY,
        ..Rule::adamw()
    };
    let (muon, plain) = (of(rule(), RATE), of(adamw, RATE * 0.25));
    assert_eq!(muon.0, plain.0);
    assert_ne!(muon.1, plain.1);
}

#[test]
fn parts_of_a_weight_are_orthogonalised_one_by_one() {
    let after = |layer: Linear| {
        let layers = Sequential::new().then(layer);
        let params = Model::new(Box::new(layers), &[5], DType::F32, Device::Cpu, 1, &|_| {
            false
        });
        let params = params.unwrap().params;
        let weight = params.find("0.weight").unwrap().id;
        let g: Vec<f32> = (0..50)
            .map(|i| gradient("full", 1, i / 5, i % 5) as f32)
            .collect();
        let host = Tensor::from_slice(&g, &[10, 5], Device::Cpu).unwrap();
        params.gradient(weight).unwrap().copy_from(&host).unwrap();
        let mut optimizer = Optimizer::new(rule(), &params).unwrap();
        let before = numbers(params.master(weight));
        optimizer.update(&params, 1, RATE, None, None).unwrap();
        let after = numbers(params.master(weight));
        before
            .iter()
            .zip(after)
            .map(|(b, a)| (b * (1.0 - RATE * DECAY) - a) / RATE)
            .collect::<Vec<_>>()
    };
    let g: Vec<f64> = (0..50).map(|i| gradient("full", 1, i / 5, i % 5)).collect();
    let parts = [orthogonal(&g[..15], [3, 5]), orthogonal(&g[15..], [7, 5])];
    let tall = (7f64 / 5.0).sqrt();
    let expected = parts[0]
        .iter()
        .copied()
        .chain(parts[1].iter().map(|x| tall * x));
    for (got, expected) in after(Linear::new(10).in_parts(&[3, 7]))
        .into_iter()
        .zip(expected)
    {
        // The weight is off as above; `after` divides by the rate.
        let off = (got - expected).abs();
        assert!(off <= F32_OFF_MAX / RATE, "{got} for {expected}");
    }
}

#[test]
fn a_group_changes_the_numbers_of_its_parameters_alone() {
    for rule in [Rule::adamw(), Rule::sgd(0.9), rule()] {
        let after = |groups: &[ParameterGroup]| {
            let params = params(4, 6, DType::F32);
            params.list().iter().for_each(|p| {
                ops::fill_into(params.gradient(p.id).unwrap(), 0.5).unwrap();
            });
            let all = 0..params.gradients().count();
            let mut optimizer = Optimizer::of_groups(rule, groups, &params, [&[all], &[]]).unwrap();
            optimizer.update(&params, 1, RATE, None, None).unwrap();
            ["0.weight", "0.bias", "1.weight", "1.bias"]
                .map(|name| numbers(params.master(params.find(name).unwrap().id)))
        };
        let group = |pattern, rate, decay| ParameterGroup::new(pattern, rate, decay).unwrap();
        let plain = after(&[]);
        // The first group that matches counts.
        let still = [
            group("0.*", Some(0.0), Some(0.0)),
            group("*", Some(1.0), None),
        ];
        let some = after(&still);
        let before = params(4, 6, DType::F32);
        for (index, name) in ["0.weight", "0.bias"].into_iter().enumerate() {
            let first = numbers(before.master(before.find(name).unwrap().id));
            assert_eq!(some[index], first, "{name} under {rule:?}");
            assert_ne!(plain[index], first);
        }
        if rule.hidden.is_none() {
            assert_eq!(some[2..], plain[2..], "{rule:?}");
        }
        let decays = after(&[group("?.bias", None, Some(0.5))]);
        assert_eq!((&decays[0], &decays[2]), (&plain[0], &plain[2]));
        assert_ne!(decays[1], plain[1], "{rule:?}");
    }
}

#[test]
fn groups_that_nothing_belongs_to_are_refused() {
    let params = params(4, 6, DType::F32);
    let refusal = |patterns: &[&str]| {
        let groups = patterns
            .iter()
            .map(|pattern| ParameterGroup::new(pattern, Some(2.0), None).unwrap());
        let groups: Vec<_> = groups.collect();
        crate::optim::check_groups(&groups, [&params].into_iter()).map_err(|e| e.to_string())
    };
    assert_eq!(refusal(&["0.*", "*.bias"]), Ok(()));
    let text = refusal(&["head.*"]).unwrap_err();
    assert_eq!(
        text,
        "the group head.*: expected a name or pattern of trained parameters, got none; help: the model trains \
         0.weight, 0.bias, 1.weight, 1.bias"
    );
    let text = refusal(&["*", "0.*"]).unwrap_err();
    assert!(text.contains("an earlier group has 0.weight"), "{text}");
    assert!(
        ParameterGroup::new("a[", None, None)
            .unwrap_err()
            .to_string()
            .contains("the group a[")
    );
}

#[test]
fn the_most_expensive_groups_are_dealt_first_to_the_rank_with_the_least() {
    let apart = |sides: &[[usize; 2]], ranks| owners(sides, &groups(sides, 0), ranks);
    assert_eq!(apart(&[[2, 2], [4, 4], [3, 3], [3, 3]], 2), [1, 0, 1, 1]);
    assert_eq!(apart(&[[5, 5]; 5], 3), [0, 1, 2, 0, 1]);
    assert_eq!(apart(&[[1, 9], [9, 1]], 1), [0, 0]);
    assert_eq!(apart(&[], 4), [0usize; 0]);
    // Two of 4 × 4 cost 128, more than one of 5 × 5 with 125.
    assert_eq!(owners(&[[4, 4], [5, 5], [4, 4]], &[0, 1, 0], 2), [0, 1]);
}

#[test]
fn groups_have_one_shape_and_nearly_equal_sizes() {
    // 9 matrices of 2 × 2 elements in A, at most 16 of them: 3 groups of 3 and not 4, 4 and 1.
    assert_eq!(groups(&[[2, 5]; 9], 16), [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    let mixed = [[3, 2], [2, 3], [3, 2], [9, 9], [2, 3], [9, 9]];
    assert_eq!(groups(&mixed, 8), [0, 1, 0, 2, 1, 3]);
    assert_eq!(groups(&mixed, 0), [0, 2, 1, 4, 3, 5]);
    assert_eq!(groups(&[], 8), [0usize; 0]);
    // GPT-2 124M: 48 squares of 768 and 12 each of the two others, 7 at once at most.
    let mut gpt2 = vec![[768, 768]; 48];
    gpt2.extend([[3072, 768]; 12]);
    gpt2.extend([[768, 3072]; 12]);
    let found = groups(&gpt2, GROUP_SQUARES_MAX);
    let size = |group: usize| found.iter().filter(|&&other| other == group).count();
    assert_eq!(
        (0..11).map(size).collect::<Vec<_>>(),
        [7, 7, 7, 7, 7, 7, 6, 6, 6, 6, 6]
    );
}
