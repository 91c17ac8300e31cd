//! Chains against plain loops in f64, element by element.

use super::machine_code::compile;
use super::*;
use crate::ops::Activation;
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
    for function in Function::all() {
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
fn slices_of_one_tensor_share_a_kernel() {
    let of = |offset| {
        let slice = ChainView {
            offset,
            strides: vec![100, 1],
        };
        let steps = vec![
            ChainStep::Load(0),
            ChainStep::Apply(Function::Tanh, [0, 0, 0]),
            ChainStep::Store(0, 1),
        ];
        let whole = ChainView::whole(&[8, 4]);
        let chain = Chain::new("chain", &[8, 4], 0, steps, [vec![slice], vec![whole]]).unwrap();
        chain.source([DType::F32; OPERANDS_MAX])
    };
    assert!(std::ptr::eq(of(0), of(92)));
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

fn uniform(random: &mut Random) -> f64 {
    let mut one = [0f64];
    random.next_draw().fill(false, &mut one);
    one[0]
}

/// Random steps over rows: four inputs, of which the last one is the same for each row.
fn random_steps(random: &mut Random, is_reduced: bool) -> Vec<ChainStep> {
    let mut pick = |below: usize| (uniform(random) * below as f64) as usize;
    let mut steps: Vec<ChainStep> = (0..4).map(ChainStep::Load).collect();
    steps.push(ChainStep::Constant(
        [0.0, 1.5, -0.0, f64::INFINITY][pick(4)],
    ));
    let (mut values, mut stores): (Vec<usize>, usize) = ((0..5).collect(), 0);
    if pick(3) == 0 {
        // About as many values at one time as there are registers.
        let many = 9 + pick(9);
        for at in 0..many {
            let function = [Function::Add, Function::Mul][at % 2];
            steps.push(ChainStep::Apply(function, [pick(5), pick(4), 0]));
        }
        for at in (5..4 + many).rev() {
            steps.push(ChainStep::Apply(Function::Sub, [steps.len() - 1, at, 0]));
        }
        let last = steps.len() - 1;
        steps.extend((0..3).map(|store| ChainStep::Store(store, last - store)));
        return steps;
    }
    for _ in 0..3 + pick(30) {
        // Mostly late values.
        let mut value = || values[values.len() - 1 - pick(values.len()).min(pick(values.len()))];
        let arguments = [value(), value(), value()];
        let all = Function::all();
        let function = all[pick(all.len())];
        steps.push(match pick(12) {
            0 if is_reduced => ChainStep::Sum(arguments[0]),
            1 if is_reduced => ChainStep::Max(arguments[0]),
            2 | 3 if stores < 3 => ChainStep::Store(stores, arguments[0]),
            _ => ChainStep::Apply(function, arguments),
        });
        match steps[steps.len() - 1] {
            ChainStep::Store(..) => stores += 1,
            _ => values.push(steps.len() - 1),
        }
    }
    steps.extend((stores..3).map(|store| ChainStep::Store(store, values[values.len() - 1])));
    steps
}

/// Machine code against the loops for each step, bit for bit.
#[test]
fn machine_code_has_the_bits_of_loops() {
    let (mut random, mut with_code) = (Random::new(7), 0);
    for case in 0..600 {
        let is_reduced = case % 2 == 0;
        let columns = [8, 24, 1000, 1024, 1027, 2064][case % 6];
        let dims = [5, columns];
        let mut numbers = |count: usize| -> Tensor {
            let special = [
                0.0,
                -0.0,
                1.0,
                f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                1e-40,
                3e38,
            ];
            let values: Vec<f32> = (0..count)
                .map(|_| match uniform(&mut random) {
                    few if few < 0.05 => special[(few * 160.0) as usize],
                    other => (other * 8.0 - 4.0) as f32,
                })
                .collect();
            Tensor::from_slice(&values, &[count], CPU).unwrap()
        };
        let x = [5 * columns, 5 * columns, 5 * columns, columns].map(&mut numbers);
        let steps = random_steps(&mut random, is_reduced);
        let of_row = ChainView {
            offset: 0,
            strides: vec![0, 1],
        };
        let whole = || vec![ChainView::whole(&dims); 3];
        let make = || {
            let loads = [whole(), vec![of_row.clone()]].concat();
            Chain::new(
                "chain",
                &dims,
                is_reduced.into(),
                steps.clone(),
                [loads, whole()],
            )
            .unwrap()
        };
        let run = |chain: &Chain| -> Vec<Vec<u32>> {
            let out: Vec<Tensor> = (0..3)
                .map(|_| Tensor::full(&dims, 9.0, DType::F32, CPU).unwrap())
                .collect();
            chain_into(chain, &out.iter().collect::<Vec<_>>(), &x.each_ref()).unwrap();
            out.iter()
                .map(|it| it.to_vec::<f32>().unwrap())
                .map(|all| {
                    all.into_iter()
                        .map(|it| if it.is_nan() { 1 } else { it.to_bits() })
                        .collect()
                })
                .collect()
        };
        let (fast, slow) = (make(), make());
        // Loops of other operands are not used.
        let none = [false; OPERANDS_MAX];
        slow.loops
            .set(Box::new((none, compile(&slow, &none))))
            .unwrap();
        let [got, expected] = [run(&fast), run(&slow)];
        with_code += usize::from(
            fast.loops
                .get()
                .is_some_and(|it| (0..steps.len()).any(|step| it.1.at(step).is_some())),
        );
        for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
            for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
                let [got, expected] = [got, expected].map(|it| f32::from_bits(*it));
                assert!(
                    got.to_bits() == expected.to_bits(),
                    "{case}: output {number}, element {at}: {got}, expected {expected}: {fast:?}"
                );
            }
        }
    }
    let has_code = crate::simd::level() > crate::simd::Level::Baseline;
    assert!(
        with_code > 300 || !has_code,
        "{with_code} of 600 have machine code"
    );
}

/// Kernels as formulas make them, which launch/check-kernels compiles and judges as those that are
/// written: a gated GELU, its derivative, and a softmax of rows that are kept in bf16.
fn samples() -> Vec<(Chain, Vec<DType>)> {
    use ChainStep::{Apply, Constant, Load, Max, Store, Sum};
    use Function::{Add, Div, Exp, Mul, Sub};
    let [gelu, gradient] =
        [Function::Activation, Function::Gradient].map(|it| it(Activation::Gelu));
    let make = |dims: &[usize], row, steps: Vec<ChainStep>, counts: [usize; 2]| {
        let views = counts.map(|count| vec![ChainView::whole(dims); count]);
        Chain::new("sample", dims, row, steps, views).unwrap()
    };
    let gated = vec![
        Load(0),
        Load(1),
        Apply(gelu, [0; 3]),
        Apply(Mul, [2, 1, 0]),
        Store(0, 3),
    ];
    let derivative = vec![
        Load(0),
        Load(1),
        Load(2),
        Apply(Mul, [0, 2, 0]),
        Apply(gradient, [3, 1, 0]),
        Store(0, 4),
        Apply(gelu, [1; 3]),
        Apply(Mul, [0, 6, 0]),
        Store(1, 7),
    ];
    let softmax = vec![
        Load(0),
        Constant(0.125),
        Apply(Mul, [0, 1, 0]),
        Max(2),
        Apply(Sub, [2, 3, 0]),
        Apply(Exp, [4; 3]),
        Sum(5),
        Constant(1e-9),
        Apply(Add, [6, 7, 0]),
        Apply(Div, [5, 8, 0]),
        Store(0, 9),
    ];
    vec![
        (make(&[64, 1024], 0, gated, [2, 1]), vec![DType::BF16; 3]),
        (
            make(&[64, 1024], 0, derivative, [3, 2]),
            vec![DType::F32; 5],
        ),
        (
            make(&[64, 1024], 1, softmax, [1, 1]),
            vec![DType::BF16, DType::F32],
        ),
    ]
}

/// With `DDP_TEST_WRITE` it writes them.
#[test]
fn the_samples_of_kernels_are_what_is_made() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chains");
    for (chain, dtypes) in samples() {
        let mut all = [DType::F32; OPERANDS_MAX];
        all[..dtypes.len()].copy_from_slice(&dtypes);
        let text = format!("#include \"chain.cu\"\n{}", chain.kernel(&all));
        let (_, rest) = text.split_once("KERNEL(BLOCK_THREADS) ").unwrap();
        let path = format!("{folder}/{}.cu", rest.split_once('(').unwrap().0);
        if std::env::var_os("DDP_TEST_WRITE").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let sample = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            sample == text,
            "{path} is not what is made: run this test with DDP_TEST_WRITE=1"
        );
    }
}
