//! adamw and sgd over chunk tables: the CPU's bits for every table and alignment, what the flag
//! stops, and the table's way to the device.

use std::sync::Arc;

use ddp_kernels::graph::Graph;
use ddp_kernels::ops::{
    self, AdamwConstants, AdamwScalars, Chunk, ChunkTable, SgdConstants, SgdScalars,
};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{self, Ledger};
use ddp_kernels::{DType, Device, Error, Tensor};

use crate::reductions::{cpu, finite, tables, upload};
use crate::{SIZES, assert_same_bits, devices, next_device, random_f32};

const ADAMW: AdamwConstants = AdamwConstants {
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-6,
};

/// Values, gradients, and moments or momentum: gradients with everything that is special about
/// floats.
fn buffers(count: usize) -> [Tensor; 4] {
    let squares: Vec<f32> = finite(count, 4).iter().map(|x| x * x).collect();
    let first = [
        finite(count, 1),
        random_f32(count, 2),
        finite(count, 3),
        squares,
    ];
    first.map(|data| cpu(&data, &[count]))
}

/// The same with finite gradients but for the one at `bad`.
fn with_one_bad_gradient(count: usize, bad: usize) -> [Tensor; 4] {
    let [values, _, first, second] = buffers(count);
    let mut grads = finite(count, 5);
    if let Some(bad) = grads.get_mut(bad) {
        *bad = f32::NAN;
    }
    [values, cpu(&grads, &[count]), first, second]
}

/// Copies of `buffers` that begin `skipped` elements into theirs.
fn on(device: Device, buffers: &[Tensor; 4], skipped: usize) -> [Tensor; 4] {
    buffers
        .each_ref()
        .map(|buffer| upload(buffer, device, skipped))
}

#[track_caller]
fn assert_all_same(got: &[Tensor; 4], expected: &[Tensor; 4], what: &str) {
    for ((got, expected), name) in got
        .iter()
        .zip(expected)
        .zip(["values", "grads", "first", "second"])
    {
        assert_same_bits(got, expected, &format!("{name}, {what}"));
    }
}

fn adamw_scalars(device: Device, step: u64) -> Tensor {
    let scalars = AdamwScalars {
        learning_rate: 0.01,
        weight_decay: 0.1,
        step,
    }
    .to_array(&ADAMW)
    .unwrap();
    Tensor::from_slice(&scalars, &[4], device).unwrap()
}

fn adamw(
    buffers: &[Tensor; 4],
    chunks: &ChunkTable,
    step: u64,
    scale: Option<&Tensor>,
    flag: Option<&Tensor>,
) {
    let [values, grads, first, second] = buffers;
    let scalars = adamw_scalars(values.device(), step);
    ops::adamw(
        &ops::UpdateTensors {
            gradient_scale: scale,
            first_bad_step: flag,
            ..ops::UpdateTensors::new([values, grads], chunks, &scalars)
        },
        [first, second],
        &ADAMW,
    )
    .unwrap();
}

#[test]
fn two_steps_of_adamw_have_the_cpu_s_bits_for_every_table_and_alignment() {
    for size in SIZES {
        for (index, chunks) in tables(size).into_iter().enumerate() {
            let expected = buffers(size);
            let fresh = buffers(size);
            (1..3).for_each(|step| adamw(&expected, &chunks, step, None, None));
            for (device, skipped) in next_device()
                .into_iter()
                .flat_map(|device| [0, 1, 4].map(|skipped| (device, skipped)))
            {
                let got = on(device, &fresh, skipped);
                (1..3).for_each(|step| adamw(&got, &chunks, step, None, None));
                assert_all_same(
                    &got,
                    &expected,
                    &format!("{size} elements, table {index}, from {skipped} on"),
                );
            }
        }
    }
}

#[test]
fn sgd_of_every_kind_has_the_cpu_s_bits_for_every_table_and_alignment() {
    let kinds = [(0.0, false), (0.9, false), (0.9, true)];
    for (size, (momentum, nesterov)) in SIZES
        .into_iter()
        .flat_map(|size| kinds.map(|kind| (size, kind)))
    {
        let constants = SgdConstants { momentum, nesterov };
        let scalars = SgdScalars {
            learning_rate: 0.1,
            weight_decay: 0.05,
        }
        .to_array()
        .unwrap();
        let step = |[values, grads, buffer, _]: &[Tensor; 4], chunks: &ChunkTable| {
            let scalars = Tensor::from_slice(&scalars, &[2], values.device()).unwrap();
            let buffer = (momentum > 0.0).then_some(buffer);
            ops::sgd(
                &ops::UpdateTensors::new([values, grads], chunks, &scalars),
                buffer,
                &constants,
            )
            .unwrap();
        };
        for (index, chunks) in tables(size).into_iter().enumerate() {
            let (fresh, expected) = (buffers(size), buffers(size));
            (0..2).for_each(|_| step(&expected, &chunks));
            for (device, skipped) in next_device()
                .into_iter()
                .flat_map(|device| [0, 1].map(|skipped| (device, skipped)))
            {
                let got = on(device, &fresh, skipped);
                (0..2).for_each(|_| step(&got, &chunks));
                let what =
                    format!("{size} elements, {constants:?}, table {index}, from {skipped} on");
                assert_all_same(&got, &expected, &what);
            }
        }
    }
}

#[test]
fn the_scale_and_the_flag_are_read_on_the_device() {
    const COUNT: usize = 3001;
    let scalars = SgdScalars {
        learning_rate: 0.1,
        weight_decay: 0.05,
    }
    .to_array()
    .unwrap();
    let sgd = |buffers: &[Tensor; 4],
               chunks: &ChunkTable,
               scale: Option<&Tensor>,
               flag: Option<&Tensor>| {
        let [values, grads, buffer, _] = buffers;
        let constants = SgdConstants {
            momentum: 0.9,
            nesterov: false,
        };
        let scalars = Tensor::from_slice(&scalars, &[2], values.device()).unwrap();
        ops::sgd(
            &ops::UpdateTensors {
                gradient_scale: scale,
                first_bad_step: flag,
                ..ops::UpdateTensors::new([values, grads], chunks, &scalars)
            },
            Some(buffer),
            &constants,
        )
        .unwrap();
    };
    for device in devices() {
        for (chunks, skipped) in tables(COUNT).into_iter().zip([0, 1, 0, 1, 0, 0]) {
            for scale in [cpu(&[0.3f32, 9.0], &[2]), cpu(&[0.3f32], &[1])] {
                let (expected, got) = (buffers(COUNT), on(device, &buffers(COUNT), skipped));
                let (scale_there, flag) = (
                    scale.to(device).unwrap(),
                    cpu(&[0i64], &[1]).to(device).unwrap(),
                );
                adamw(&expected, &chunks, 1, Some(&scale), None);
                adamw(&got, &chunks, 1, Some(&scale_there), Some(&flag));
                sgd(&expected, &chunks, Some(&scale), None);
                sgd(&got, &chunks, Some(&scale_there), Some(&flag));
                assert_all_same(&got, &expected, &format!("scale {scale}"));

                flag.copy_from(&cpu(&[5i64], &[1])).unwrap();
                adamw(&got, &chunks, 2, Some(&scale_there), Some(&flag));
                sgd(&got, &chunks, Some(&scale_there), Some(&flag));
                assert_all_same(&got, &expected, "nothing happens while the flag is set");
            }
        }
    }
}

#[test]
fn buffers_that_begin_at_different_places_of_16_bytes_have_the_cpu_s_bits() {
    const COUNT: usize = 3001;
    let constants = SgdConstants {
        momentum: 0.9,
        nesterov: false,
    };
    let scalars = SgdScalars {
        learning_rate: 0.1,
        weight_decay: 0.05,
    }
    .to_array()
    .unwrap();
    let chunks = ChunkTable::whole(COUNT);
    let step = |buffers: &[Tensor; 4]| {
        adamw(buffers, &chunks, 1, None, None);
        let [values, grads, momentum, _] = buffers;
        let scalars = Tensor::from_slice(&scalars, &[2], values.device()).unwrap();
        ops::sgd(
            &ops::UpdateTensors::new([values, grads], &chunks, &scalars),
            Some(momentum),
            &constants,
        )
        .unwrap();
    };
    let expected = buffers(COUNT);
    step(&expected);
    for (device, odd) in devices()
        .into_iter()
        .flat_map(|device| (0..4).map(move |odd| (device, odd)))
    {
        let mut got = on(device, &buffers(COUNT), 0);
        got[odd] = upload(&buffers(COUNT)[odd], device, 1);
        step(&got);
        assert_all_same(&got, &expected, &format!("buffer {odd} apart"));
    }
}

/// Two chunks with a gap: a table that does not fit into a kernel's parameters.
fn two_chunks() -> ChunkTable {
    let chunk = |offset, len, decay| Chunk { offset, len, decay };
    ChunkTable::new(vec![chunk(0, 1500, true), chunk(2000, 1000, false)]).unwrap()
}

#[test]
fn the_table_goes_to_a_device_once_announced_and_clones_share_it() {
    for device in devices() {
        let (got, scalars) = (on(device, &buffers(3000), 0), adamw_scalars(device, 1));
        let [values, grads, first, second] = &got;
        let ledger = Arc::new(Ledger::default());
        let chunks = two_chunks();
        transfer::with_ledger(&ledger, || {
            transfer::forbid_transfers(|| {
                for chunks in [&chunks, &chunks.clone(), &chunks] {
                    ops::adamw(
                        &ops::UpdateTensors::new([values, grads], chunks, &scalars),
                        [first, second],
                        &ADAMW,
                    )
                    .unwrap();
                }
                ops::adamw(
                    &ops::UpdateTensors::new([values, grads], &ChunkTable::whole(3000), &scalars),
                    [first, second],
                    &ADAMW,
                )
                .unwrap();
            });
        });
        let rows = ledger.rows();
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert_eq!(
            (rows[0].count, rows[0].bytes, rows[0].target),
            (1, 2 * 3 * 8, device)
        );
        assert!(
            rows[0].announced.is_some() && rows[0].site.file().ends_with("optimizers.rs"),
            "{rows:?}"
        );
    }
}

#[test]
fn a_captured_update_has_the_eager_bits_and_needs_its_table() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        stream.scope(|| {
            let (got, expected) = (on(device, &buffers(3000), 0), buffers(3000));
            let (scalars, chunks) = (adamw_scalars(device, 1), two_chunks());
            let [values, grads, first, second] = &got;
            let step = || {
                ops::adamw(
                    &ops::UpdateTensors::new([values, grads], &chunks, &scalars),
                    [first, second],
                    &ADAMW,
                )
            };
            let error = Graph::capture(&stream, step).unwrap_err();
            assert!(matches!(error, Error::Capture { .. }), "{error}");

            step().unwrap();
            let graph = Graph::capture(&stream, step).unwrap();
            (0..2).for_each(|_| graph.launch().unwrap());
            (0..3).for_each(|_| adamw(&expected, &chunks, 1, None, None));
            assert_all_same(&got, &expected, "captured");
        });
    }
}

/// The flags of step 7.
fn flags(device: Device) -> Tensor {
    Tensor::from_slice(&[0i64, 0, 7], &[3], device).unwrap()
}

/// Longer gradients have what is not finite at both ends.
#[test]
fn with_the_flags_of_a_step_updates_guard_against_bad_gradients_like_the_cpu() {
    let sgd = |[values, grads, buffer, _]: &[Tensor; 4], momentum: bool, flags: &Tensor| {
        let constants = SgdConstants {
            momentum: if momentum { 0.9 } else { 0.0 },
            nesterov: false,
        };
        let scalars = Tensor::from_slice(&[0.1f32, 0.05], &[2], values.device()).unwrap();
        let (buffer, chunks) = (
            momentum.then_some(buffer),
            ChunkTable::whole(values.count()),
        );
        ops::sgd(
            &ops::UpdateTensors {
                first_bad_step: Some(flags),
                ..ops::UpdateTensors::new([values, grads], &chunks, &scalars)
            },
            buffer,
            &constants,
        )
        .unwrap();
    };
    for size in SIZES {
        let chunks = ChunkTable::whole(size);
        // One that is not in a warp's first thread, and one after the last 16 bytes.
        let last = size.saturating_sub(1);
        for (rule, bad) in (0..9).map(|case| (case % 3, [None, Some(21), Some(last)][case / 3])) {
            let buffers = |count| match bad {
                Some(bad) => with_one_bad_gradient(count, bad),
                None => buffers(count),
            };
            let step = |buffers: &[Tensor; 4], flags: &Tensor| match rule {
                0 => adamw(buffers, &chunks, 1, None, Some(flags)),
                rule => sgd(buffers, rule == 2, flags),
            };
            let (fresh, expected, marks) = (buffers(size), buffers(size), flags(Device::Cpu));
            step(&expected, &marks);
            if let Some(device) = next_device() {
                let (got, got_marks) = (on(device, &fresh, 0), flags(device));
                step(&got, &got_marks);
                let what = format!("rule {rule}, {size} elements, {bad:?}");
                assert_all_same(&got, &expected, &what);
                assert_same_bits(&got_marks, &marks, &what);
            }
        }
    }
}

#[test]
fn adamw_rounds_into_the_copies_what_a_cast_would() {
    for size in SIZES {
        for (index, chunks) in tables(size).into_iter().enumerate() {
            for (device, skipped) in next_device()
                .into_iter()
                .flat_map(|device| [0, 1, 4].map(|skipped| (device, skipped)))
            {
                let (got, expected) =
                    (on(device, &buffers(size), 0), on(device, &buffers(size), 0));
                let zeros = Tensor::zeros(&[size], DType::BF16, Device::Cpu).unwrap();
                let copies = upload(&zeros, device, skipped);
                let [values, grads, first, second] = &got;
                let scalars = adamw_scalars(device, 1);
                ops::adamw(
                    &ops::UpdateTensors {
                        copies: Some(&copies),
                        ..ops::UpdateTensors::new([values, grads], &chunks, &scalars)
                    },
                    [first, second],
                    &ADAMW,
                )
                .unwrap();
                adamw(&expected, &chunks, 1, None, None);
                let what = format!("{size} elements, table {index}, from {skipped} on");
                assert_all_same(&got, &expected, &what);
                let cast = expected[0].to_dtype(DType::BF16).unwrap();
                for chunk in chunks.chunks().iter().filter(|chunk| chunk.len > 0) {
                    let [of_update, of_cast] =
                        [&copies, &cast].map(|it| it.slice(chunk.range()).unwrap());
                    assert_same_bits(&of_update, &of_cast.to(Device::Cpu).unwrap(), &what);
                }
            }
        }
    }
}

#[test]
fn sgd_rounds_into_the_copies_what_a_cast_would() {
    for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
        let constants = SgdConstants { momentum, nesterov };
        for size in SIZES {
            let chunks = ChunkTable::whole(size);
            for (device, skipped) in next_device()
                .into_iter()
                .flat_map(|device| [0, 1, 4].map(|skipped| (device, skipped)))
            {
                let [values, grads, buffer, _] = on(device, &buffers(size), 0);
                let buffer = Some(&buffer).filter(|_| momentum > 0.0);
                let zeros = Tensor::zeros(&[size], DType::BF16, Device::Cpu).unwrap();
                let copies = upload(&zeros, device, skipped);
                let scalars = Tensor::from_slice(&[0.1f32, 0.01], &[2], device).unwrap();
                ops::sgd(
                    &ops::UpdateTensors {
                        copies: Some(&copies),
                        ..ops::UpdateTensors::new([&values, &grads], &chunks, &scalars)
                    },
                    buffer,
                    &constants,
                )
                .unwrap();
                let cast = values.to_dtype(DType::BF16).unwrap();
                let what = format!("{size} elements, {constants:?}, from {skipped} on");
                assert_same_bits(&copies, &cast.to(Device::Cpu).unwrap(), &what);
            }
        }
    }
}

#[test]
fn directions_and_quotients_of_muon_have_the_cpu_s_bits() {
    for size in SIZES {
        for (chunks, nesterov) in tables(size)
            .into_iter()
            .zip([true, false].into_iter().cycle())
        {
            let constants = SgdConstants {
                momentum: 0.95,
                nesterov,
            };
            let run = |[_, grads, momentum, _]: &[Tensor; 4]| {
                let device = grads.device();
                let norm = Tensor::from_slice(&[0.5f32, 3.0], &[2], device).unwrap();
                let of = ops::UpdateTensors {
                    gradient_scale: Some(&norm),
                    ..ops::UpdateTensors::new([grads; 2], &chunks, grads)
                };
                ops::muon_direction(&of, momentum, &constants).unwrap();
                ops::divide_by_norm(momentum, &norm).unwrap();
                let tiny = Tensor::from_slice(&[1.0f32, 3e-8], &[2], device).unwrap();
                ops::divide_by_norm(momentum, &tiny).unwrap();
            };
            let (expected, fresh) = (buffers(size), buffers(size));
            run(&expected);
            for (device, skipped) in next_device()
                .into_iter()
                .flat_map(|device| [(device, 0), (device, 1)])
            {
                let got = on(device, &fresh, skipped);
                run(&got);
                assert_all_same(
                    &got,
                    &expected,
                    &format!("{size} elements, from {skipped} on"),
                );
            }
        }
    }
}
