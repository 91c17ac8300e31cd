//! linear forward: every activation, with and without bias and pre-activation.

use ddp_kernels::ops::{self, Activation, F32Math, with_f32_math};
use ddp_kernels::{DType, Device, Random, Tensor};

use super::{
    EXACT, KINDS, Layer, SHAPES, activation_bounds, activations, assert_within, integers, sliced,
    slope, stored_bound, sum_bound, unit, values,
};
use crate::{assert_same_bits, devices, next_device};

fn check_forward(
    mnk: [usize; 3],
    kind: (DType, F32Math),
    activation: Option<Activation>,
    parts: [bool; 2],
    skip: usize,
    device: Device,
) {
    let (dtype, math) = kind;
    let layer = Layer::new(mnk, dtype, parts[0], parts[1], skip, device);
    with_f32_math(math, || layer.forward(activation));
    let sums = layer.reference(mnk);
    let what = format!("{mnk:?} {kind:?} {activation:?} [bias, pre] {parts:?} skip {skip}");
    let z: Vec<f64> = sums.iter().map(|&(z, _)| z).collect();
    // Where the bias is added by a separate pass, what was rounded before is up to |z| + |bias|.
    let bias = layer.bias.as_ref().map_or(vec![0.0; mnk[1]], values);
    let z_bound = |index: usize| {
        let bound =
            sum_bound(mnk[2], sums[index].1, kind) + unit(dtype) * bias[index % mnk[1]].abs();
        stored_bound(bound, z[index], dtype)
    };
    if let Some(pre) = &layer.pre {
        assert_within(pre, &z, z_bound, &format!("pre-activation, {what}"));
    }
    let activated = |z: &Tensor| match activation {
        None => z.clone(),
        Some(activation) => ops::activate(z, activation).unwrap(),
    };
    let expected = values(&activated(
        &Tensor::from_slice(&z, &[z.len()], Device::Cpu).unwrap(),
    ));
    let bound = |index: usize| {
        let bound = slope(activation, z[index]) * z_bound(index)
            + activation_bounds(activation, [z[index], expected[index]], kind)[0];
        stored_bound(bound, expected[index], dtype)
    };
    assert_within(&layer.y, &expected, bound, &what);
    if let (Some(pre), (DType::F32, F32Math::Strict)) = (&layer.pre, kind) {
        let expected = activated(&pre.to(Device::Cpu).unwrap());
        assert_same_bits(&layer.y, &expected, &what);
    }
}

#[test]
fn linear_with_every_activation_bias_pre_activation_and_dtype_is_within_its_bound() {
    for device in devices() {
        for (mnk, kind) in sliced("linear", &SHAPES) {
            for activation in activations() {
                for parts in [[false, false], [false, true], [true, false], [true, true]] {
                    check_forward(mnk, kind, activation, parts, 0, device);
                }
            }
        }
    }
}

/// Without a bias each rounds its sum once.
#[test]
fn linear_in_bf16_on_a_gpu_and_on_the_cpu_agree_within_both_bounds() {
    let (dtype, kind) = (DType::BF16, (DType::BF16, F32Math::Strict));
    for (mnk, device) in SHAPES
        .into_iter()
        .filter_map(|mnk| Some((mnk, next_device()?)))
    {
        let [there, here] = [device, Device::Cpu].map(|device| {
            let layer = Layer::new(mnk, dtype, false, false, 0, device);
            layer.forward(None);
            layer
        });
        let sums = here.reference(mnk);
        let bound = |index: usize| {
            let (sum, magnitudes) = sums[index];
            2.02 * (sum_bound(mnk[2], magnitudes, kind) + unit(dtype) * sum.abs())
        };
        assert_within(&there.y, &values(&here.y), bound, &format!("{mnk:?}"));
    }
}

#[test]
fn linear_reads_and_writes_at_odd_addresses_too() {
    for device in devices() {
        for (kind, skip) in KINDS
            .into_iter()
            .flat_map(|kind| [1, 2, 5].map(|skip| (kind, skip)))
        {
            for activation in activations() {
                check_forward([18, 24, 40], kind, activation, [true, true], skip, device);
                check_forward([18, 24, 40], kind, activation, [true, false], skip, device);
            }
        }
    }
}

#[test]
fn linear_of_nothing_is_the_activation_of_the_bias() {
    for device in devices() {
        for (mnk, kind) in [[0, 3, 4], [3, 0, 4], [3, 5, 0]]
            .into_iter()
            .flat_map(|mnk| KINDS.map(|kind| (mnk, kind)))
        {
            for activation in activations() {
                check_forward(mnk, kind, activation, [true, true], 0, device);
                check_forward(mnk, kind, activation, [false, false], 0, device);
            }
        }
    }
}

#[test]
fn linear_of_whole_numbers_is_exact_in_every_dtype() {
    let [m, n, k] = EXACT;
    let (x, weight, bias) = (
        integers(&[m, k], 1),
        integers(&[n, k], 2),
        integers(&[n], 3),
    );
    let expected = Tensor::zeros(&[m, n], DType::F32, Device::Cpu).unwrap();
    ops::linear_into(
        &expected,
        &x,
        &weight,
        Some(&bias),
        Some(Activation::Relu),
        None,
    )
    .unwrap();
    for device in devices() {
        for (dtype, math) in KINDS {
            let [x, weight, bias] =
                [&x, &weight, &bias].map(|x| x.to_dtype(dtype).unwrap().to(device).unwrap());
            let y = Tensor::empty(&[m, n], dtype, device).unwrap();
            with_f32_math(math, || {
                ops::linear_into(&y, &x, &weight, Some(&bias), Some(Activation::Relu), None)
            })
            .unwrap();
            assert_same_bits(
                &y,
                &expected.to_dtype(dtype).unwrap(),
                &format!("{dtype} {math:?}"),
            );
        }
    }
}

#[test]
fn a_nan_gets_through_every_activation_in_every_dtype() {
    for (device, (dtype, math)) in devices()
        .into_iter()
        .flat_map(|device| KINDS.map(|kind| (device, kind)))
    {
        let x = Tensor::full(&[16, 16], f64::NAN, DType::F32, Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        let x = x.to(device).unwrap();
        let y = Tensor::zeros(&[16, 16], dtype, device).unwrap();
        for (activation, bias) in
            activations().flat_map(|activation| [None, Some(())].map(|bias| (activation, bias)))
        {
            let bias = bias.map(|()| Tensor::ones(&[16], dtype, device).unwrap());
            with_f32_math(math, || {
                ops::linear_into(&y, &x, &x, bias.as_ref(), activation, None)
            })
            .unwrap();
            assert!(
                values(&y).iter().all(|y| y.is_nan()),
                "{dtype} {math:?} {activation:?}"
            );
        }
    }
}

/// The head of a GPT adds −∞ to the logits of padded tokens, by the bias of an epilogue.
#[test]
fn a_bias_of_minus_infinity_masks_columns_and_leaves_the_others() {
    for device in devices().into_iter().filter(|it| it.is_accelerator()) {
        let found = ddp_kernels::device::discover();
        // A real one multiplies a piece of GPT-2's.
        let [m, n, k] = if found.gpus.iter().any(|gpu| gpu.name.contains("Simulated")) {
            [16, 64, 32]
        } else {
            [8192, 50_304, 768]
        };
        let classes = n - 47;
        let mut mask = vec![0.0f32; n];
        mask[classes..].fill(f32::NEG_INFINITY);
        let mask = Tensor::from_slice(&mask, &[n], Device::Cpu).unwrap();
        let mask = mask.to_dtype(DType::BF16).unwrap().to(device).unwrap();
        let [x, weight] = [[m, k], [n, k]].map(|shape| {
            let values = Tensor::randn(&shape, DType::BF16, device, &mut Random::new(k as u64));
            values.unwrap()
        });
        let [masked, plain] =
            [(); 2].map(|()| Tensor::empty(&[m, n], DType::BF16, device).unwrap());
        ops::linear_into(&masked, &x, &weight, Some(&mask), None, None).unwrap();
        ops::linear_into(&plain, &x, &weight, None, None, None).unwrap();
        for row in [0, m / 2, m - 1] {
            let of = |tensor: &Tensor| values(&tensor.slice(row..row + 1).unwrap());
            let (masked, plain) = (of(&masked), of(&plain));
            assert!(
                masked[classes..].iter().all(|&it| it == f64::NEG_INFINITY),
                "row {row}"
            );
            // Another algorithm may add in another order. The k products of standard normals, each
            // 2/π in the mean, add up to about 2k/3; each side is off by its own bound.
            let kind = (DType::BF16, F32Math::Strict);
            let sum = sum_bound(k, k as f64, kind);
            let close =
                |(a, b): (&f64, &f64)| (a - b).abs() <= 2.0 * stored_bound(sum, *b, DType::BF16);
            let kept = masked[..classes].iter().zip(&plain[..classes]);
            assert!(kept.clone().all(close), "row {row} on {device}");
        }
    }
}
