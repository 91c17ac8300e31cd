//! mse and cross_entropy: losses and gradients are bit-identical to the CPU's in each of the
//! kernels for few or many classes or features, and targets that are not a class give NaN. In bf16
//! too, but for many classes within a bound, since threads add in another order.

use ddp_kernels::ops::{self, CrossEntropyOptions, CrossEntropyOut};
use ddp_kernels::{DType, Device, Tensor};

use crate::reductions::{cpu, finite, upload};
use crate::tiles::{around, constant};
use crate::{assert_same_bits, devices, next_device, random_f32};

#[test]
fn mse_has_the_cpu_s_bits_for_every_shape_apart_and_in_place() {
    // Around the rows of a thread block, the features of one block of sums and the blocks that are
    // summed at once.
    let (lanes, block) = (constant!("mse.cu", LANES), constant!("mse.cu", BLOCK));
    let groups = constant!("mse.cu", BLOCK_THREADS) / lanes;
    let mut shapes = [&[0, 3][..], &[3, 0], &[1], &[7], &[5, 3, 33]]
        .map(<[usize]>::to_vec)
        .to_vec();
    shapes.extend(around(groups).map(|rows| vec![rows, 3]));
    shapes.extend(around(lanes).map(|features| vec![2, features]));
    shapes.extend(around(block).map(|features| vec![3, features]));
    shapes.extend([groups * block, 2 * groups * block + 4465].map(|features| vec![2, features]));
    for shape in &shapes {
        let (count, rows) = (shape.iter().product(), shape[0]);
        let (pred, target) = (
            cpu(&random_f32(count, 11), shape),
            cpu(&finite(count, 12), shape),
        );
        let (losses, dpred) = (cpu(&vec![9f32; rows], &[rows]), pred.ones_like().unwrap());
        ops::mse_into(&losses, Some(&dpred), &pred, &target, 0.3, None).unwrap();
        for (device, skipped) in next_device()
            .into_iter()
            .flat_map(|device| [(device, 0), (device, 1)])
        {
            let (p, t) = (
                upload(&pred, device, skipped),
                upload(&target, device, skipped),
            );
            let got = Tensor::full(&[rows], 9.0, DType::F32, device).unwrap();
            let slopes = p.ones_like().unwrap();
            let what = format!("{shape:?} from element {skipped} on");
            ops::mse_into(&got, None, &p, &t, 0.3, None).unwrap();
            assert_same_bits(&got, &losses, &format!("{what}, losses alone"));
            ops::mse_into(&got, Some(&slopes), &p, &t, 0.3, None).unwrap();
            assert_same_bits(&got, &losses, &what);
            assert_same_bits(&slopes, &dpred, &format!("{what}, gradient"));
            ops::mse_into(&got, Some(&p), &p, &t, 0.3, None).unwrap();
            assert_same_bits(&got, &losses, &format!("{what}, in place"));
            assert_same_bits(&p, &dpred, &format!("{what}, gradient in place"));
        }
    }
}

#[test]
fn one_kernel_adds_squared_errors_and_counts_with_the_cpu_s_bits() {
    // Both kernels; one block of rows and several; more than 256 blocks of sums.
    for [rows, features] in [[0, 3], [1, 1], [33, 3], [2050, 2], [262_200, 1], [3, 1025]] {
        let stats_of = |device: Device| {
            let stats = Tensor::from_slice(&[0.5f32, 1.0, 2.0, 3.0], &[4], device).unwrap();
            let losses = Tensor::full(&[rows], 9.0, DType::F32, device).unwrap();
            let count = rows * features;
            let [pred, target] = [11, 12].map(|seed| {
                let values = cpu(&finite(count, seed), &[rows, features]);
                values.to(device).unwrap()
            });
            for dpred in [None, Some(&pred)] {
                ops::mse_into(&losses, dpred, &pred, &target, 1.0, Some(&stats)).unwrap();
            }
            stats
        };
        let expected = stats_of(Device::Cpu);
        let counts = expected.to_vec::<f32>().unwrap();
        let twice = |count: usize| 2.0 * count as f32;
        let whole = [1.0 + twice(rows * features), 2.0, 3.0 + twice(rows)];
        assert_eq!(counts[1..], whole);
        if let Some(device) = next_device() {
            let what = format!("{rows} × {features}");
            assert_same_bits(&stats_of(device), &expected, &what);
        }
    }
}

/// Targets below `classes`, every fifth -100.
fn targets_for(rows: usize, classes: usize) -> Vec<i64> {
    (0..rows)
        .map(|row| {
            if row % 5 == 4 {
                -100
            } else {
                (row * 37 % classes) as i64
            }
        })
        .collect()
}

#[test]
fn mse_of_bf16_has_the_cpu_s_bits_apart_and_in_place() {
    for shape in [
        &[0, 3][..],
        &[3, 0],
        &[7],
        &[33, 3],
        &[1025, 10],
        &[3, 1024],
        &[3, 1025],
        &[2, 70_001],
    ] {
        let (count, rows) = (shape.iter().product(), shape[0]);
        let narrow = cpu(&random_f32(count, 13), shape)
            .to_dtype(DType::BF16)
            .unwrap();
        let target = cpu(&finite(count, 14), shape);
        let (losses, dpred) = (cpu(&vec![9f32; rows], &[rows]), narrow.ones_like().unwrap());
        ops::mse_into(&losses, Some(&dpred), &narrow, &target, 0.3, None).unwrap();
        for (device, skipped) in next_device()
            .into_iter()
            .flat_map(|device| [(device, 0), (device, 1)])
        {
            let (p, t) = (
                upload(&narrow, device, skipped),
                upload(&target, device, skipped),
            );
            let (got, slopes) = (
                Tensor::full(&[rows], 9.0, DType::F32, device).unwrap(),
                p.ones_like().unwrap(),
            );
            let what = format!("{shape:?} in bf16 from element {skipped} on");
            ops::mse_into(&got, Some(&slopes), &p, &t, 0.3, None).unwrap();
            assert_same_bits(&got, &losses, &what);
            assert_same_bits(&slopes, &dpred, &format!("{what}, gradient"));
            ops::mse_into(&got, Some(&p), &p, &t, 0.3, None).unwrap();
            assert_same_bits(&got, &losses, &format!("{what}, in place"));
            assert_same_bits(&p, &dpred, &format!("{what}, gradient in place"));
        }
    }
}

#[test]
fn losses_of_bf16_are_refused_in_bf16_and_on_the_cpu() {
    for device in devices() {
        let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
        let (x, narrow) = (tensor(&[2, 3], DType::BF16), tensor(&[2], DType::BF16));
        let error = ops::mse_into(&narrow, None, &x, &tensor(&[2, 3], DType::F32), 1.0, None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("losses bf16[2]") && error.contains("expected dtype f32, in which bf16"),
            "{error}"
        );
        let error = ops::mse_into(&tensor(&[2], DType::F32), None, &x, &x, 1.0, None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("target bf16[2, 3]")
                && error.contains("expected dtype f32, in which bf16"),
            "{error}"
        );
        let out = CrossEntropyOut {
            losses: &narrow,
            dlogits: None,
            weights: None,
        };
        let targets = tensor(&[2], DType::I64);
        let error = ops::cross_entropy(&x, &targets, out, &CrossEntropyOptions::default(), None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("losses bf16[2]") && error.contains("expected dtype f32, in which bf16"),
            "{error}"
        );
    }
}

/// The outputs of one call, gradient and weights included.
fn outputs(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions<'_>) -> [Tensor; 3] {
    let rows = targets.count();
    let by_row = || Tensor::full(&[rows], 9.0, DType::F32, logits.device()).unwrap();
    let (losses, weights, dlogits) = (by_row(), by_row(), logits.ones_like().unwrap());
    let out = CrossEntropyOut {
        losses: &losses,
        dlogits: Some(&dlogits),
        weights: Some(&weights),
    };
    ops::cross_entropy(logits, targets, out, options, None).unwrap();
    [losses, dlogits, weights]
}

/// Compares what `outputs` gives on a device for logits in bf16 with what it gives on the CPU; then
/// in place. Few classes have the CPU's bits. More are within `bf16_bounds` of what the CPU gives
/// for the same logits in f32: stricter than its bf16, which has a rounding of the same size.
fn check_bf16(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions<'_>, what: &str) {
    let narrow = logits.to_dtype(DType::BF16).unwrap();
    let wide = narrow.to_dtype(DType::F32).unwrap();
    let has_bits = logits.shape()[1] <= constant!("cross_entropy.cu", NARROW_CLASSES_MAX);
    let expected = outputs(if has_bits { &narrow } else { &wide }, targets, options);
    let bounds = bf16_bounds(&wide, &expected[1], options);
    for (device, skipped) in next_device()
        .into_iter()
        .flat_map(|device| [(device, 0), (device, 1)])
    {
        let what = format!("{what} in bf16 from element {skipped} on");
        let class_weights = options
            .class_weights
            .map(|weights| weights.to(device).unwrap());
        let options = CrossEntropyOptions {
            class_weights: class_weights.as_ref(),
            ..*options
        };
        let (logits, targets) = (
            upload(&narrow, device, skipped),
            upload(targets, device, skipped),
        );
        let got = outputs(&logits, &targets, &options);
        for (index, name) in ["losses", "gradient", "weights"].into_iter().enumerate() {
            let (got, expected) = (&got[index], &expected[index]);
            let what = format!("{name} of {what}");
            match bounds.get(index).filter(|_| !has_bits) {
                Some(bounds) => assert_within(got, expected, bounds, &what),
                None => assert_same_bits(got, expected, &what),
            }
        }
        let losses = got[0].zeros_like().unwrap();
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits: Some(&logits),
            weights: None,
        };
        ops::cross_entropy(&logits, &targets, out, &options, None).unwrap();
        let [losses, logits] = [&losses, &logits].map(|of| of.to(Device::Cpu).unwrap());
        assert_same_bits(&got[0], &losses, &format!("{what}, losses in place"));
        assert_same_bits(&got[1], &logits, &format!("{what}, gradient in place"));
    }
}

/// How far many classes in bf16 may be from the CPU's f32, in units u = 2⁻²⁴, for the losses and
/// the gradient.
///
/// With z = x − max x, 2ˣ is off by 4u and its argument by 2u |z|, where |z| eᶻ < 0.4. A thread
/// adds 8 of a pack, C/4096 packs and 9 in a tree; its sum is scaled C/16384 + 2 times, by 5u each.
/// With the CPU's 24u that is under 100u + C/1000 u for ln s, and as much again for the softmax.
/// Products and differences with z add 10u of the row's range R, Σ w z another 200u of it and of
/// |x|.
fn bf16_bounds(x: &Tensor, dlogits: &Tensor, options: &CrossEntropyOptions<'_>) -> [Vec<f64>; 2] {
    const UNIT: f64 = 1.0 / (1 << 24) as f64;
    let classes = x.shape()[1];
    let values =
        |tensor: &Tensor| -> Vec<f64> { tensor.to_dtype(DType::F64).unwrap().to_vec().unwrap() };
    let weights = options.class_weights.map_or(vec![1.0], values);
    let heaviest = weights.into_iter().fold(1.0, f64::max);
    let smoothing = options.label_smoothing;
    let of_sum = 100.0 + classes as f64 / 1000.0;
    let x = values(x);
    let losses = x.chunks(classes).map(|x| {
        let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let range = x
            .iter()
            .map(|x| (largest - x).max(x.abs()))
            .fold(0.0, f64::max);
        let range = range.min(1e3) + (classes as f64).ln();
        heaviest * UNIT * (of_sum + (10.0 + 200.0 * smoothing) * range)
    });
    let of_softmax = heaviest * UNIT * (2.0 * of_sum + 100.0);
    let rounded = values(dlogits)
        .into_iter()
        .map(|d| of_softmax + d.abs() / 255.0);
    [losses.collect(), rounded.collect()]
}

/// NaN is NaN; all else is within its bound.
fn assert_within(got: &Tensor, expected: &Tensor, bounds: &[f64], what: &str) {
    let values = |tensor: &Tensor| -> Vec<f64> {
        let tensor = tensor.to((Device::Cpu, DType::F64)).unwrap();
        tensor.to_vec().unwrap()
    };
    for (index, (got, expected)) in values(got).into_iter().zip(values(expected)).enumerate() {
        let bound = bounds[index];
        assert!(
            got.is_nan() && expected.is_nan() || (got - expected).abs() <= bound || got == expected,
            "{what}: element {index} is {got}, expected {expected} within {bound:e}"
        );
    }
}

#[test]
fn many_classes_of_bf16_count_the_first_of_the_largest_as_the_cpu_does() {
    // Rows at all places in a pack, and more packs than a block loads at once.
    for (rows, classes) in [(40, 65), (33, 130), (16, 1000), (9, 1025), (8, 20_003)] {
        let mut x: Vec<f32> = finite(rows * classes, 9)
            .iter()
            .map(|x| (8.0 * x).round())
            .collect();
        let mut targets = targets_for(rows, classes);
        for (row, x) in x.chunks_mut(classes).enumerate() {
            // Largest alone, with equals before and after, only before, only after; and not the
            // largest.
            let (target, place) = ((row * 61 + 7) % classes, row % 5);
            if place < 4 && targets[row] >= 0 {
                targets[row] = target as i64;
                x[target] = 40.0;
                let equals = [
                    (target > 0 && place % 3 == 1, target / 2),
                    (place > 1, (target + classes) / 2),
                ];
                for (_, at) in equals.into_iter().filter(|(is_equal, _)| *is_equal) {
                    x[at] = 40.0;
                }
            }
        }
        let targets = cpu(&targets, &[rows]);
        let narrow = cpu(&x, &[rows, classes]).to_dtype(DType::BF16).unwrap();
        for label_smoothing in [0.0, 0.1] {
            let options = CrossEntropyOptions {
                label_smoothing,
                ..Default::default()
            };
            // A copy, since its gradient is written in place of it.
            let here = upload(&narrow, Device::Cpu, 0);
            let expected: Vec<f32> = stats_of(&here, &targets, &options).to_vec().unwrap();
            assert!(expected[2] > 2.0, "some rows are correct");
            if let Some(device) = next_device() {
                let targets = targets.to(device).unwrap();
                let got = stats_of(&narrow.to(device).unwrap(), &targets, &options);
                let got: Vec<f32> = got.to_vec().unwrap();
                let what = format!("{rows} × {classes}, {label_smoothing}");
                assert_eq!(got[1..], expected[1..], "{what}");
                assert!(
                    (got[0] / expected[0] - 1.0).abs() < 1e-5,
                    "{what}: {got:?} {expected:?}"
                );
            }
        }
    }
}

#[test]
fn cross_entropy_of_bf16_has_the_cpu_s_bits_or_is_within_its_bound() {
    // One of each kernel, and both sides of its limit.
    for (case, (rows, classes)) in [
        (0, 3),
        (128, 10),
        (40, 64),
        (9, 65),
        (5, 257),
        (5, 1000),
        (6, 1024),
        (6, 1025),
        (2, 10_001),
        (3, 40_000),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = 120 + case as u64;
        let x: Vec<f32> = finite(rows * classes, seed)
            .iter()
            .map(|x| 5.0 * x)
            .collect();
        let w: Vec<f32> = finite(classes, 50 + seed)
            .iter()
            .map(|w| w.abs() + 0.1)
            .collect();
        let (logits, w) = (cpu(&x, &[rows, classes]), cpu(&w, &[classes]));
        let targets = cpu(&targets_for(rows, classes), &[rows]);
        for (label_smoothing, weighted) in [(0.0, false), (0.1, true)] {
            let class_weights = weighted.then_some(&w);
            let options = CrossEntropyOptions {
                label_smoothing,
                class_weights,
                gradient_scale: 0.25,
                ..Default::default()
            };
            check_bf16(
                &logits,
                &targets,
                &options,
                &format!("{rows} × {classes}, {label_smoothing}, {weighted}"),
            );
        }
    }
    for classes in [3, 100, 1500] {
        let mut x = finite(3 * classes, 130);
        x[0] = f32::NAN;
        x[classes] = f32::INFINITY;
        x[2 * classes] = f32::NEG_INFINITY;
        let (logits, targets) = (cpu(&x, &[3, classes]), cpu(&[1u8, 0, 2], &[3]));
        check_bf16(
            &logits,
            &targets,
            &CrossEntropyOptions::default(),
            &format!("{classes} classes, special"),
        );
    }
}

/// Compares all that `outputs` gives on every device with the CPU; then the losses alone, and in
/// place.
fn check(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions<'_>, what: &str) {
    let expected = outputs(logits, targets, options);
    for (device, skipped) in next_device()
        .into_iter()
        .flat_map(|device| [(device, 0), (device, 1)])
    {
        let what = format!("{what} from element {skipped} on");
        let class_weights = options
            .class_weights
            .map(|weights| weights.to(device).unwrap());
        let options = CrossEntropyOptions {
            class_weights: class_weights.as_ref(),
            ..*options
        };
        let (logits, targets) = (
            upload(logits, device, skipped),
            upload(targets, device, skipped),
        );
        let got = outputs(&logits, &targets, &options);
        for ((got, expected), name) in got
            .iter()
            .zip(&expected)
            .zip(["losses", "gradient", "weights"])
        {
            assert_same_bits(got, expected, &format!("{name} of {what}"));
        }
        let losses = got[0].zeros_like().unwrap();
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits: None,
            weights: None,
        };
        ops::cross_entropy(&logits, &targets, out, &options, None).unwrap();
        assert_same_bits(&losses, &expected[0], &format!("{what}, losses alone"));
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits: Some(&logits),
            weights: None,
        };
        ops::cross_entropy(&logits, &targets, out, &options, None).unwrap();
        assert_same_bits(&losses, &expected[0], &format!("{what}, losses in place"));
        assert_same_bits(&logits, &expected[1], &format!("{what}, gradient in place"));
    }
}

#[test]
fn cross_entropy_has_the_cpu_s_bits_for_every_shape_and_option() {
    let narrow = constant!("cross_entropy.cu", NARROW_CLASSES_MAX);
    let block = constant!("cross_entropy.cu", BLOCK);
    let threads = constant!("cross_entropy.cu", WIDE_THREADS);
    let rounds = block * threads / constant!("cross_entropy.cu", WARP);
    let mut shapes = vec![(0, 3), (7, 2), (65, 31), (33, 33), (5, 1000)];
    shapes.extend(around(constant!("cross_entropy.cu", NARROW_ROWS)).map(|rows| (rows, 10)));
    shapes.extend(around(narrow).map(|classes| (9, classes)));
    shapes.extend(around(block).map(|classes| (5, classes)));
    // Several rounds of a block's warps.
    shapes.extend([(3, 2 * block), (3, 3 * block), (2, rounds + 1)]);
    let third = shapes.len().div_ceil(3);
    for (case, (rows, classes)) in
        ddp_testing::cases_of("cross entropy", shapes.into_iter().enumerate(), third)
    {
        let seed = 20 + case as u64;
        let x: Vec<f32> = finite(rows * classes, seed)
            .iter()
            .map(|x| 5.0 * x)
            .collect();
        let w: Vec<f32> = finite(classes, 50 + seed)
            .iter()
            .map(|w| w.abs() + 0.1)
            .collect();
        let (logits, w) = (cpu(&x, &[rows, classes]), cpu(&w, &[classes]));
        let targets = cpu(&targets_for(rows, classes), &[rows]);
        for (label_smoothing, weighted) in [
            (0.0, false),
            (0.0, true),
            (0.1, false),
            (0.1, true),
            (1.0, true),
        ] {
            let class_weights = weighted.then_some(&w);
            let options = CrossEntropyOptions {
                label_smoothing,
                class_weights,
                gradient_scale: 0.25,
                ..Default::default()
            };
            check(
                &logits,
                &targets,
                &options,
                &format!("{rows} × {classes}, {label_smoothing}, {weighted}"),
            );
        }
    }
}

#[test]
fn half_a_million_classes_have_the_cpu_s_bits() {
    // More than the 1,024 blocks of 512 classes whose sums the kernel keeps at once.
    let classes = 1024 * 512 + 700;
    let logits = cpu(&finite(2 * classes, 70), &[2, classes]);
    let options = CrossEntropyOptions {
        label_smoothing: 0.1,
        ..Default::default()
    };
    let expected = outputs(&logits, &cpu(&[5i64, 524_300], &[2]), &options);
    for device in devices() {
        let targets = Tensor::from_slice(&[5i64, 524_300], &[2], device).unwrap();
        let got = outputs(&logits.to(device).unwrap(), &targets, &options);
        got.iter()
            .zip(&expected)
            .for_each(|(got, expected)| assert_same_bits(got, expected, "half a million classes"));
    }
}

#[test]
fn more_rows_than_blocks_in_the_grid_all_get_done() {
    // Rows of many classes go to two blocks a processor, by turns: more rows than that on any
    // machine.
    let (rows, classes) = (700, 1100);
    let logits = cpu(&finite(rows * classes, 71), &[rows, classes]);
    let targets = cpu(&targets_for(rows, classes), &[rows]);
    let expected = outputs(&logits, &targets, &CrossEntropyOptions::default());
    for device in devices() {
        let got = outputs(
            &logits.to(device).unwrap(),
            &targets.to(device).unwrap(),
            &CrossEntropyOptions::default(),
        );
        got.iter()
            .zip(&expected)
            .for_each(|(got, expected)| assert_same_bits(got, expected, "700 rows"));
    }
}

#[test]
fn targets_of_every_type_and_special_logits_give_the_cpu_s_bits() {
    for classes in [3, 100, 1500] {
        let mut x = finite(7 * classes, 80);
        x[classes] = f32::NAN;
        x[2 * classes + 1] = f32::INFINITY;
        x[3 * classes + 1] = f32::NEG_INFINITY;
        x[4 * classes] = f32::NAN;
        x[5 * classes..6 * classes].fill(f32::NEG_INFINITY);
        x[6 * classes..].fill(-0.0);
        let logits = cpu(&x, &[7, classes]);
        // Without an ignored class, all classes count, 0 too.
        for (dtype, ignore_index) in [
            (DType::U8, Some(255)),
            (DType::I32, Some(-100)),
            (DType::I64, Some(-100)),
            (DType::I64, None),
        ] {
            let targets = cpu(&[0, 0, 0, 0, ignore_index.unwrap_or(1), 1, 2], &[7]);
            let options = CrossEntropyOptions {
                ignore_index,
                ..Default::default()
            };
            check(
                &logits,
                &targets.to_dtype(dtype).unwrap(),
                &options,
                &format!("{classes} classes, {dtype}, {ignore_index:?} ignored"),
            );
        }
    }
}

#[test]
fn an_invalid_target_affects_only_its_own_row() {
    for (device, classes) in devices()
        .into_iter()
        .flat_map(|device| [3, 100, 1500].map(|classes| (device, classes)))
    {
        let logits = cpu(&finite(4 * classes, 81), &[4, classes]);
        let w = cpu(
            &finite(classes, 82)
                .iter()
                .map(|w| w.abs() + 0.1)
                .collect::<Vec<f32>>(),
            &[classes],
        );
        for (bad, ignore_index) in [
            (classes as i64, None),
            (-1, Some(-100)),
            (i64::MAX, None),
            (i64::MIN, Some(0)),
        ] {
            for (label_smoothing, weighted) in [(0.0, false), (0.1, true), (1.0, false)] {
                let on = |device| (w.to(device).unwrap(), logits.to(device).unwrap());
                let run = |device: Device, targets: [i64; 4]| {
                    let (w, logits) = on(device);
                    let class_weights = weighted.then_some(&w);
                    let options = CrossEntropyOptions {
                        ignore_index,
                        label_smoothing,
                        class_weights,
                        gradient_scale: 1.0,
                    };
                    let targets = Tensor::from_slice(&targets, &[4], device).unwrap();
                    outputs(&logits, &targets, &options)
                        .map(|tensor| tensor.to_vec::<f32>().unwrap())
                };
                let (got, expected) = (run(device, [1, bad, 2, 1]), run(Device::Cpu, [1, 1, 2, 1]));
                for (got, expected) in got.iter().zip(&expected) {
                    let per_row = got.len() / 4;
                    let (bad, good): (Vec<usize>, Vec<usize>) =
                        (0..got.len()).partition(|i| i / per_row == 1);
                    assert!(
                        bad.iter().all(|&i| got[i].is_nan()),
                        "target {bad:?} of {classes} on {device}"
                    );
                    assert!(
                        good.iter()
                            .all(|&i| got[i].to_bits() == expected[i].to_bits())
                    );
                }
            }
        }
        let (flag, step) = (
            Tensor::zeros(&[1], DType::I64, device).unwrap(),
            Tensor::from_slice(&[3i64], &[1], device),
        );
        let targets = Tensor::from_slice(&[0i64, 1, classes as i64, 2], &[4], device).unwrap();
        let [losses, ..] = outputs(
            &logits.to(device).unwrap(),
            &targets,
            &CrossEntropyOptions::default(),
        );
        ops::mark_nonfinite(&flag, &losses, &step.unwrap()).unwrap();
        assert_eq!(flag.item().unwrap(), 3.0, "mark_nonfinite finds it");
    }
}

/// The statistics after two calls, the second in place of the logits.
fn stats_of(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions<'_>) -> Tensor {
    let rows = targets.count();
    let by_row = || Tensor::full(&[rows], 9.0, DType::F32, logits.device()).unwrap();
    let (losses, weights) = (by_row(), by_row());
    let weights = options.class_weights.map(|_| &weights);
    let stats = Tensor::from_slice(&[0.5f32, 1.0, 2.0, 3.0], &[4], logits.device()).unwrap();
    for dlogits in [None, Some(logits)] {
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits,
            weights,
        };
        ops::cross_entropy(logits, targets, out, options, Some(&stats)).unwrap();
    }
    stats
}

#[test]
fn one_kernel_adds_losses_divisor_and_correct_rows_with_the_cpu_s_bits() {
    // Both kernels; one block of rows and several; blocks of sums, and more than 256 of them.
    for (rows, classes) in [
        (0, 3),
        (1, 1),
        (33, 10),
        (128, 10),
        (2050, 3),
        (262_200, 2),
        (7, 65),
        (600, 130),
        (3, 1025),
    ] {
        let mut x: Vec<f32> = finite(rows * classes, 7).iter().map(|x| 5.0 * x).collect();
        // Equal logits, and NaN before, at and after the target.
        for (row, x) in x.chunks_mut(classes).enumerate() {
            match row % 11 {
                3 => x.fill(0.25),
                6 => x[row % classes] = f32::NAN,
                _ => {}
            }
        }
        let targets = cpu(&targets_for(rows, classes), &[rows]);
        let w: Vec<f32> = finite(classes, 3).iter().map(|w| w.abs() + 0.1).collect();
        let w = cpu(&w, &[classes]);
        for class_weights in [None, Some(&w)] {
            let options = CrossEntropyOptions {
                class_weights,
                ..Default::default()
            };
            let expected = stats_of(&cpu(&x, &[rows, classes]), &targets, &options);
            if let Some(device) = next_device() {
                let class_weights = class_weights.map(|weights| weights.to(device).unwrap());
                let options = CrossEntropyOptions {
                    class_weights: class_weights.as_ref(),
                    ..options
                };
                let logits = cpu(&x, &[rows, classes]).to(device).unwrap();
                let got = stats_of(&logits, &targets.to(device).unwrap(), &options);
                let what = format!("statistics of {rows} rows of {classes}");
                assert_same_bits(&got, &expected, &what);
            }
        }
    }
}
