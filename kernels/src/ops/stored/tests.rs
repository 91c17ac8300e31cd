//! bf16 on the CPU: each operation gives what f32 gives from the same numbers, rounded once.

use crate::dtype::{bf16, bf16_nearest};
use crate::ops::testing::{assert_close, cpu_of, random_f32};
use crate::ops::{
    self, Activation, Bf16Order, CrossEntropyOptions, CrossEntropyOut, DropoutKey, Norm,
    NormGradients, NormOptions, with_bf16_order,
};
use crate::{DType, Device, Tensor};

const ROWS: usize = 70;
const COLUMNS: usize = 96;

/// Numbers that bf16 holds, as bf16 and as f32.
fn both(seed: u64, shape: &[usize]) -> [Tensor; 2] {
    let rounded: Vec<bf16> = random_f32(shape.iter().product(), seed)
        .into_iter()
        .map(bf16_nearest)
        .collect();
    let narrow = cpu_of(&rounded, shape);
    let wide = narrow.to_dtype(DType::F32).unwrap();
    [narrow, wide]
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let rounded = tensor.to_dtype(DType::BF16).unwrap();
    let wide = rounded.to_dtype(DType::F32).unwrap();
    wide.to_vec::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

/// `body` gives the same tensors, rounded, from bf16 and from f32: it gets the inputs of a kind.
#[track_caller]
fn assert_rounded_once<const N: usize>(
    name: &str,
    shapes: [&[usize]; N],
    body: impl Fn([&Tensor; N]) -> Vec<Tensor>,
) {
    let inputs: Vec<[Tensor; 2]> = shapes
        .iter()
        .enumerate()
        .map(|(seed, shape)| both(seed as u64 + 1, shape))
        .collect();
    let [narrow, wide] = [0, 1].map(|kind| body(std::array::from_fn(|index| &inputs[index][kind])));
    assert_eq!(narrow[0].dtype(), DType::BF16, "{name}");
    for (index, (narrow, wide)) in narrow.iter().zip(&wide).enumerate() {
        assert!(bits(narrow) == bits(wide), "{name}, tensor {index}");
    }
}

/// f32 for statistics and sums beside bf16.
fn f32s(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap()
}

#[test]
fn operations_of_elements_are_rounded_once() {
    let two: [&[usize]; 2] = [&[ROWS, COLUMNS]; 2];
    assert_rounded_once("scale, axpy", two, |[a, b]| {
        let [scaled, sum] = [(); 2].map(|()| a.empty_like().unwrap());
        ops::scale_into(&scaled, a, 0.3).unwrap();
        sum.copy_from(a).unwrap();
        ops::axpy(&sum, 0.3, b).unwrap();
        vec![scaled, sum]
    });
    for activation in Activation::all() {
        assert_rounded_once("activation", two, |[dy, saved]| {
            let dx = dy.empty_like().unwrap();
            ops::activate_backward_into(&dx, dy, saved, activation).unwrap();
            vec![ops::activate(saved, activation).unwrap(), dx]
        });
    }
    assert_rounded_once(
        "swiglu",
        [&[ROWS, COLUMNS], &[ROWS, COLUMNS / 2]],
        |[x, dout]| {
            let (out, dx) = (dout.empty_like().unwrap(), x.empty_like().unwrap());
            ops::swiglu_into(&out, x).unwrap();
            ops::swiglu_backward_into(&dx, dout, x).unwrap();
            vec![out, dx]
        },
    );
    assert_rounded_once("dropout", [&[ROWS, COLUMNS]], |[x]| {
        let position = cpu_of(&[3i64, 5], &[2]);
        let key = DropoutKey {
            seed: 7,
            layer: 2,
            position: &position,
        };
        vec![ops::dropout(x, 0.25, &key).unwrap()]
    });
    assert_rounded_once(
        "embedding",
        [&[50, COLUMNS], &[35, COLUMNS]],
        |[table, positions]| {
            let tokens: Vec<i64> = (0..ROWS as i64).map(|row| row * 7 % 50).collect();
            let out = table.new_empty(&[ROWS, COLUMNS]).unwrap();
            let tokens = cpu_of(&tokens, &[ROWS]);
            ops::embedding_into(&out, table, &tokens, Some(positions)).unwrap();
            vec![out]
        },
    );
}

#[test]
fn norms_are_rounded_once_and_sum_in_f32() {
    let shapes: [&[usize]; 4] = [&[ROWS, COLUMNS], &[ROWS, COLUMNS], &[COLUMNS], &[COLUMNS]];
    for norm in [Norm::Layer, Norm::Rms] {
        assert_rounded_once("norm", shapes, |[x, dy, weight, bias]| {
            let options = NormOptions {
                norm,
                epsilon: 1e-5,
                weight: Some(weight),
                bias: Some(bias),
            };
            let stats = f32s(&[ROWS, norm.statistics()]);
            let (out, dx) = (x.empty_like().unwrap(), dy.empty_like().unwrap());
            dx.copy_from(dy).unwrap();
            ops::norm_into(&out, &stats, x, &options).unwrap();
            let blocks = ops::norm_blocks_of(ROWS);
            let sums = [(); 2].map(|()| f32s(&[blocks, COLUMNS]));
            let gradients = NormGradients {
                dx: &dx,
                dresidual: Some(&dx),
                weight_sums: Some(&sums[0]),
                bias_sums: Some(&sums[1]),
                row_sums: None,
            };
            ops::norm_backward_into(&gradients, dy, x, &stats, &options).unwrap();
            let [a, b] = sums;
            vec![out, dx, stats, a, b]
        });
    }
    // What is normalized is the rounded sum, which is what backward reads.
    let [x, residual] = [
        both(1, &[ROWS, COLUMNS])[0].clone(),
        both(2, &[ROWS, COLUMNS])[0].clone(),
    ];
    let options = NormOptions {
        norm: Norm::Layer,
        epsilon: 1e-5,
        weight: None,
        bias: None,
    };
    let [sum, out, expected] = [(); 3].map(|()| x.empty_like().unwrap());
    let stats = f32s(&[ROWS, 2]);
    ops::add_norm_into(&sum, &out, &stats, [&x, &residual], &options).unwrap();
    ops::norm_into(&expected, &stats, &sum, &options).unwrap();
    assert!(bits(&out) == bits(&expected));
    ops::axpy(&x, 1.0, &residual).unwrap();
    assert!(bits(&sum) == bits(&x));
}

#[test]
fn cross_entropy_is_rounded_once() {
    for classes in [10, 700] {
        assert_rounded_once("cross_entropy", [&[ROWS, classes]], |[logits]| {
            let targets: Vec<i64> = (0..ROWS as i64).map(|row| row % 10).collect();
            let targets = cpu_of(&targets, &[ROWS]);
            let (losses, dlogits) = (f32s(&[ROWS]), logits.empty_like().unwrap());
            let out = CrossEntropyOut {
                losses: &losses,
                dlogits: Some(&dlogits),
                weights: None,
            };
            let options = CrossEntropyOptions {
                label_smoothing: 0.1,
                ..Default::default()
            };
            let stats = f32s(&[4]);
            ops::cross_entropy(logits, &targets, out, &options, Some(&stats)).unwrap();
            vec![dlogits, losses, stats]
        });
    }
}

#[test]
fn linear_layers_are_within_the_bound_of_their_roundings() {
    let (rows, inputs, outputs) = (33, 200, 50);
    let [x, weight, dy, bias] = [
        [rows, inputs],
        [outputs, inputs],
        [rows, outputs],
        [1, outputs],
    ]
    .map(|shape| both(shape[1] as u64, &shape));
    let bias = bias.map(|bias| bias.reshape(&[outputs]).unwrap());
    let f64s = |of: &[Tensor; 2]| of[1].to_dtype(DType::F64).unwrap();
    // A sum of `count` products of standard normals, each addition and the result rounded.
    let bound = |count: usize, wide: bool| {
        let count = count as f64;
        move |_: usize, reference: f64| {
            let sums = count * count.sqrt() * 4.0 * f64::powi(2.0, -24);
            sums + if wide {
                0.0
            } else {
                reference.abs() * f64::powi(2.0, -8)
            }
        }
    };
    let got = |tensor: &Tensor| {
        tensor
            .to_dtype(DType::F32)
            .unwrap()
            .to_vec::<f32>()
            .unwrap()
    };
    for order in [Bf16Order::Amx, Bf16Order::Dpbf16] {
        with_bf16_order(order, || {
            let gelu = Some(Activation::Gelu);
            let run = |x: &Tensor, weight: &Tensor, bias: &Tensor, dy: &Tensor, wide: DType| {
                let [y, pre] = [(); 2].map(|()| dy.empty_like().unwrap());
                ops::linear_into(&y, x, weight, Some(bias), gelu, Some(&pre)).unwrap();
                let dx = x.empty_like().unwrap();
                let below = Some((Activation::Relu, x));
                let sums = Tensor::zeros(&ops::row_sums_of(&dx), wide, Device::Cpu).unwrap();
                ops::linear_backward_input_summed_into(&dx, Some(&sums), dy, weight, below)
                    .unwrap();
                let [dw, db] = [&[outputs, inputs][..], &[outputs]]
                    .map(|shape| Tensor::full(shape, 1.0, wide, Device::Cpu).unwrap());
                ops::linear_backward_weight_into(&dw, Some(&db), dy, x, true).unwrap();
                [y, pre, dx, dw, db, sums]
            };
            let reference = run(
                &f64s(&x),
                &f64s(&weight),
                &f64s(&bias),
                &f64s(&dy),
                DType::F64,
            );
            let narrow = run(&x[0], &weight[0], &bias[0], &dy[0], DType::F32);
            let counts = [
                (inputs, false),
                (inputs, false),
                (outputs, false),
                (rows, true),
                (rows, true),
            ];
            for ((reference, narrow), (count, wide)) in reference.iter().zip(&narrow).zip(counts) {
                assert_eq!(narrow.dtype() == DType::F32, wide);
                assert_close(
                    &got(narrow),
                    &reference.to_vec::<f64>().unwrap(),
                    bound(count, wide),
                );
            }
            // The sums of rows are those of what was rounded.
            let rounded = narrow[2]
                .to_dtype(DType::F64)
                .unwrap()
                .to_vec::<f64>()
                .unwrap();
            let sums: Vec<f64> = (0..inputs)
                .map(|column| rounded.iter().skip(column).step_by(inputs).sum())
                .collect();
            assert_close(&got(&narrow[5]), &sums, |_, _| 1e-3);
        });
    }
}

#[test]
fn subnormal_operands_count_as_zero_and_nan_and_infinity_pass() {
    let [tiny, one] = [f32::from_bits(1 << 22), 1.0].map(bf16_nearest);
    for order in [Bf16Order::Amx, Bf16Order::Dpbf16] {
        with_bf16_order(order, || {
            let product = |a: bf16, b: bf16| {
                let [a, b] = [a, b].map(|x| cpu_of(&[x; 16], &[4, 4]));
                let acc = f32s(&[4, 4]).to_dtype(DType::BF16).unwrap();
                ops::addmm(&acc, &a, &b, 1.0, 0.0)
                    .unwrap()
                    .to_vec::<bf16>()
                    .unwrap()[5]
                    .to_f32()
            };
            assert_eq!(product(tiny, one), 0.0);
            assert_eq!(product(one, one), 4.0);
            assert_eq!(product(bf16::INFINITY, one), f32::INFINITY);
            assert!(
                product(bf16::INFINITY, bf16::ZERO).is_nan() && product(bf16::NAN, one).is_nan()
            );
        });
    }
}
