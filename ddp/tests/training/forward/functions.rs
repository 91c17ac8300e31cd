//! Functions of tensors: their derivatives are those of finite differences, and of PyTorch.

use super::*;

#[test]
fn functions_of_one_value_that_pytorchs_samples_lack() {
    assert_derivatives(&[5], |_, x| {
        (x * x + 0.5).sqrt() + x.tanh() * x.gelu() - x.gelu_tanh()
    });
    assert_derivatives(&[5], |_, x| {
        x.relu() + x.abs() * 0.5 - -x + (x * x + 0.1).pow(1.3)
    });
}

/// Values and derivatives of a formula at these numbers, each of which is a row.
fn derivatives_at(formula: Of, dtype: DType, values: &[f64]) -> Vec<[f64; 2]> {
    let layers = Box::new(Sequential::new().then(Formula(formula)));
    let model = Model::new(layers, &[1], dtype, Device::Cpu, 1, &|_| false).unwrap();
    let x = Tensor::from_slice(values, &[values.len(), 1], Device::Cpu).unwrap();
    let [y, dx] = of_rows(&model, &x.to_dtype(dtype).unwrap());
    y.into_iter().zip(dx).map(|(y, dx)| [y, dx]).collect()
}

/// `pow(1.5)` gave NaN at 0, `pow(-2.0)` an infinite derivative at 1e-10, `pow(33.0)` NaN below 0,
/// and a maximum with NaN the derivative 0.
#[test]
fn derivatives_at_zeros_ties_and_infinities_are_pytorchs() {
    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    let cases: [(&str, Of, &[[f64; 3]]); 19] = [
        (
            "1.5",
            |_, x| x.pow(1.5),
            &[
                [0.0, 0.0, 0.0],
                [4.0, 8.0, 3.0],
                [INF, INF, INF],
                [-1.0, NAN, NAN],
            ],
        ),
        (
            "2.5",
            |_, x| x.pow(2.5),
            &[[0.0, 0.0, 0.0], [4.0, 32.0, 20.0]],
        ),
        (
            "1.25",
            |_, x| x.pow(1.25),
            &[[0.0, 0.0, 0.0], [INF, INF, INF]],
        ),
        ("0.25", |_, x| x.pow(0.25), &[[0.0, 0.0, INF]]),
        (
            "0",
            |_, x| x.pow(0.0),
            &[[0.0, 1.0, 0.0], [INF, 1.0, 0.0], [NAN, 1.0, 0.0]],
        ),
        (
            "-1",
            |_, x| x.pow(-1.0),
            &[[0.0, INF, -INF], [-2.0, -0.5, -0.25]],
        ),
        (
            "-2",
            |_, x| x.pow(-2.0),
            &[[0.0, INF, -INF], [2.0, 0.25, -0.25], [-INF, 0.0, 0.0]],
        ),
        (
            "-1.5",
            |_, x| x.pow(-1.5),
            &[[0.0, INF, -INF], [INF, 0.0, 0.0]],
        ),
        (
            "33",
            |_, x| x.pow(33.0),
            &[[-1.0, -1.0, 33.0], [0.0, 0.0, 0.0]],
        ),
        (
            "sqrt",
            |_, x| x.sqrt(),
            &[[0.0, 0.0, INF], [4.0, 2.0, 0.25]],
        ),
        (
            "rsqrt",
            |_, x| x.rsqrt(),
            &[[0.0, INF, -INF], [4.0, 0.5, -0.0625]],
        ),
        ("abs", |_, x| x.abs(), &[[0.0, 0.0, 0.0], [-2.0, 2.0, -1.0]]),
        (
            "maximum",
            |_, x| x.maximum(&x.number(1.0)),
            &[[0.0, 1.0, 0.0], [1.0, 1.0, 0.5], [NAN, NAN, 1.0]],
        ),
        (
            "minimum",
            |_, x| x.minimum(&x.number(1.0)),
            &[[2.0, 1.0, 0.0], [1.0, 1.0, 0.5], [NAN, NAN, 1.0]],
        ),
        // [value, clamped, gradient]: that of torch.clamp.
        (
            "clamp",
            |_, x| x.clamp(-1.0, 1.0),
            &[
                [-2.0, -1.0, 0.0],
                [-1.0, -1.0, 1.0],
                [0.5, 0.5, 1.0],
                [1.0, 1.0, 1.0],
                [2.0, 1.0, 0.0],
                [INF, 1.0, 0.0],
                [NAN, NAN, 0.0],
            ],
        ),
        (
            "clamp from below",
            |_, x| x.clamp(0.0, f64::INFINITY),
            &[[-1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [INF, INF, 1.0]],
        ),
        (
            "clamp, bounds exchanged",
            |_, x| x.clamp(1.0, -1.0),
            &[[0.0, -1.0, 0.0], [3.0, -1.0, 0.0]],
        ),
        (
            "relu",
            |_, x| x.relu(),
            &[
                [0.0, 0.0, 0.0],
                [-1.0, 0.0, 0.0],
                [2.0, 2.0, 1.0],
                [NAN, NAN, 1.0],
            ],
        ),
        // 0·∞, as in PyTorch: the branch that is not taken is differentiated, too.
        (
            "where",
            |_, x| x.equal(&x.number(0.0)).select(x, &(1.0 / x)),
            &[[0.0, 0.0, NAN], [2.0, 0.5, -0.25]],
        ),
    ];
    for (name, formula, points) in cases {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let values: Vec<f64> = points.iter().map(|it| it[0]).collect();
            let got = derivatives_at(formula, dtype, &values);
            for ([x, value, slope], got) in points.iter().zip(got) {
                for (expected, got) in [*value, *slope].into_iter().zip(got) {
                    let is_near = (got - expected).abs() <= 0.01 * expected.abs();
                    let is_near = is_near && expected.is_finite();
                    let is_same = got == expected || got.is_nan() && expected.is_nan();
                    assert!(
                        is_near || is_same,
                        "{name} at {x}, {dtype}: {got}, in PyTorch {expected}"
                    );
                }
            }
        }
    }
    let [[_, slope]] = derivatives_at(|_, x| x.pow(-2.0), DType::F32, &[1e-10])[..] else {
        panic!("one row")
    };
    assert!((slope / -2e30 - 1.0).abs() < 1e-5, "{slope}");
}

#[test]
fn functions_of_two_values_with_every_broadcast() {
    for shape in [&[4][..], &[1, 4], &[3, 1], &[3, 4], &[2, 3, 4], &[1, 1, 1]] {
        assert_derivatives(shape, |m, x| {
            let own = x.row_shape();
            let mut sum = x * 1.0;
            // Each axis of the parameter is as long as x's, 1, or missing.
            for mask in 0..1 << own.len() {
                for missing in 0..=own.len() {
                    let kept = own.iter().enumerate().skip(missing);
                    let shape: Vec<usize> = kept
                        .map(|(at, &length)| if mask >> at & 1 == 1 { 1 } else { length })
                        .collect();
                    let w = weight(m, &format!("w{mask}.{missing}"), &shape);
                    sum = sum + x * &w - &w / (&w * &w + 1.0) + &w * 0.1;
                }
            }
            sum
        });
    }
    assert_derivatives(&[6], |m, x| {
        x.maximum(&weight(m, "w", &[6])) + x.minimum(&weight(m, "v", &[1]))
    });
    assert_derivatives(&[6], |m, x| {
        let w = weight(m, "w", &[6]);
        let yes = x.less(&w);
        yes.select(&(x * x), &(&w * 2.0)) + x.less_equal(&w) * x + x.equal(x) * &w
    });
}

#[test]
fn several_reductions_of_one_value() {
    assert_derivatives(&[2, 3, 4], |_, x| {
        x.sum(1) * x + x.mean(2) * x.mean(-1) - x * x.largest(1) + x.softmax(2)
    });
    // Longer than a block of values, so that rows are run through several times.
    assert_derivatives(&[1030], |_, x| (x * 0.1).softmax(-1) * 100.0);
}

/// Of no elements the gradient is 0; it was what the memory held.
#[test]
fn what_is_expanded_to_nothing_has_the_gradient_0() {
    for shape in [[0, 3, 2], [0, 3, 1]] {
        let layers = Formula(move |m: &mut Scope<'_>, x: &Var| {
            let w = m.parameter("w", &[1, 3, 1], Init::Constant(2.0));
            let nothing = (&w * &w).expand(&shape);
            x + nothing.sum(0).sum(2).reshape(&[1, 3])
        });
        let layers = Box::new(Sequential::new().then(layers));
        let model = Model::new(layers, &[3], DType::F64, Device::Cpu, 1, &|_| false).unwrap();
        // What buffers hold that are used again.
        let old = || Tensor::from_slice(&[7.0f64; 6], &[6], Device::Cpu).unwrap();
        drop(Vec::from_iter((0..64).map(|_| old())));
        let x = Tensor::ones(&[2, 3], DType::F64, Device::Cpu).unwrap();
        let [y, _] = of_rows(&model, &x);
        assert_eq!(y, [1.0; 6]);
        assert_eq!(model.params.gradients().to_vec::<f64>().unwrap(), [0.0; 3]);
    }
}

#[test]
fn shapes_and_views() {
    assert_derivatives(&[2, 3, 4], |m, x| {
        let turned = x.permute(&[0, 3, 1, 2]) * weight(m, "w", &[4, 2, 3]);
        turned.transpose(1, -1).reshape(&[24])
    });
    assert_derivatives(&[5, 2], |_, x| {
        let parts = x.split(1, &[1, 3, 1]);
        let both = Var::concatenate(&[&parts[2], &(&parts[1] * &parts[0]), &parts[0]], 1);
        both.slice(1, 1..4) * both.slice(1, 0..3) + x.slice(-1, 1..2).slice(1, 0..3)
    });
    assert_derivatives(&[1, 3], |_, x| x.expand(&[4, 3]).permute(&[0, 2, 1]).exp());
}

#[test]
fn windows_steps_and_padding() {
    // Windows apart, side by side and over each other; some leave the end of the axis out.
    for (size, step) in [(1, 1), (2, 1), (3, 2), (2, 3), (3, 3), (7, 1)] {
        let windows = move |x: &Var, axis: isize| (x * x).windows(axis, size, step);
        assert_derivatives_by(&[7], move |_, x| windows(x, 1));
        assert_derivatives_by(&[7, 2], move |m, x| {
            let y = windows(x, -2).softmax(-1);
            y * weight(m, "w", &[size]) + x.sum(1).reshape(&[1, 2, 1])
        });
    }
    assert_derivatives(&[4, 5], |_, x| x.windows(1, 2, 1).windows(2, 3, 2).exp());
    for step in [1, 2, 3, 9] {
        assert_derivatives_by(&[7], move |_, x| x.every(-1, step) * x.every(1, step));
        assert_derivatives_by(&[5, 2], move |_, x| x.exp().every(1, step).tanh());
    }
    for (before, after) in [(0, 0), (1, 0), (0, 2), (3, 1)] {
        assert_derivatives_by(&[3], move |_, x| x.pad(1, before, after).exp());
        assert_derivatives_by(&[3, 2], move |m, x| {
            let padded = (x * x).pad(1, before, after);
            padded * weight(m, "w", &[3 + before + after, 1])
        });
    }
}

#[test]
fn convolutions_with_every_option() {
    let of = |outputs, size: usize| Convolution::new(outputs, size);
    let of_one_axis = of(4, 2).dilation(3).groups(2);
    assert_derivatives_by(&[2, 6], move |m, x| m.conv1d("c", x, of_one_axis));
    let of_two_axes = [
        of(3, 1),
        of(2, 3).padding(1),
        Convolution::new(3, [3, 2]).stride([2, 1]).without_bias(),
        Convolution::new(4, [1, 2]).padding([2, 1]).groups(2),
        of(4, 2)
            .dilation([2, 1])
            .stride(2)
            .padding([0, 1])
            .groups(2),
    ];
    for of in of_two_axes {
        assert_derivatives_by(&[2, 4, 3], move |m, x| m.conv2d("c", &x.tanh(), of));
    }
    // A weight that is computed.
    assert_derivatives(&[2, 4, 3], |m, x| {
        let weight = weight(m, "w", &[2, 2, 2, 3]).tanh();
        x.convolve(&weight, Convolution::new(2, [2, 3])) * x.slice(2, 1..4).mean(-1)
    });
}

#[test]
fn pools_and_norms_of_groups() {
    for (size, stride) in [(2, 1), (3, 2), (2, 3)] {
        assert_derivatives_by(&[2, 5, 4], move |_, x| x.exp().avg_pool2d(size, stride));
    }
    // Of equal ones the first of a window has the gradient; in a window with NaN that has it.
    let layers = Box::new(
        Sequential::new().then(Formula(|_: &mut Scope<'_>, x: &Var| x.max_pool2d(2, 2, 0))),
    );
    let model = Model::new(layers, &[1, 2, 4], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let x = [
        3.0,
        7.0,
        1.0,
        5.0,
        7.0,
        7.0,
        5.0,
        5.0,
        2.0,
        2.0,
        f32::NAN,
        1.0,
        2.0,
        2.0,
        1.0,
        1.0,
    ];
    let x = Tensor::from_slice(&x, &[2, 1, 2, 4], Device::Cpu).unwrap();
    let [y, dx] = of_rows(&model, &x);
    assert_eq!(y[..3], [7.0, 5.0, 2.0]);
    assert!(y[3].is_nan());
    let taken: Vec<usize> = (0..16).filter(|&at| dx[at] != 0.0).collect();
    assert_eq!(taken, [1, 3, 8, 10]);
    // Not by its formula, of which PyTorch's samples are.
    assert_derivatives(&[4, 2, 3], |m, x| m.group_norm("n", x, 2) * x);
}

#[test]
fn matmuls_of_two_to_four_axes_with_broadcast_and_transposed_factors() {
    assert_derivatives(&[4], |m, x| x.matmul(&weight(m, "w", &[4, 3])));
    assert_derivatives(&[4], |m, x| {
        x.matmul(&weight(m, "w", &[3, 4]).transpose(0, 1))
    });
    assert_derivatives(&[2, 4], |m, x| x.matmul(&weight(m, "w", &[4, 3])));
    assert_derivatives(&[2, 4], |m, x| {
        weight(m, "w", &[3, 2]).matmul(x).matmul(&x.transpose(1, 2))
    });
    assert_derivatives(&[2, 3, 4], |m, x| {
        let w = weight(m, "w", &[2, 4, 5]);
        x.matmul(&w).matmul(&w.transpose(-1, -2))
            + x.transpose(-1, -2).matmul(x).sum(-1).transpose(-1, -2)
    });
    assert_derivatives(&[2, 3, 4], |m, x| {
        x.transpose(1, 3)
            .transpose(1, 2)
            .matmul(&weight(m, "w", &[1, 2, 2]))
    });
}
