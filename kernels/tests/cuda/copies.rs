//! Copies between host and devices: every direction, what the host may touch meanwhile, and what
//! the ledger says.

use ddp_kernels::dtype::{bf16, f16};
use ddp_kernels::graph::Graph;
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{self, Ledger, TransferKind};
use ddp_kernels::{DType, Device, Element, Error, Tensor, ops};

use crate::{devices, pairs};

/// Bytes that show where they came from.
fn pattern(count: usize, salt: usize) -> Vec<f32> {
    (0..count)
        .map(|index| (index * 31 + salt * 7919 + 1) as f32)
        .collect()
}

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(device: Device, values: &[T]) {
    let there = Tensor::from_slice(values, &[values.len()], device).unwrap();
    assert_eq!((there.device(), there.dtype()), (device, T::DTYPE));
    assert_eq!(there.to_vec::<T>().unwrap(), values, "{device}");
    for (index, value) in values.iter().enumerate().take(3) {
        assert_eq!(
            there.slice(index..index + 1).unwrap().item().unwrap(),
            value.to_f64(),
            "{device}"
        );
    }
}

#[test]
fn a_round_trip_to_the_device_keeps_every_dtype() {
    for device in devices() {
        for count in [0, 1, 3, 257, 70_001] {
            round_trip(device, &pattern(count, 1));
            round_trip(
                device,
                &(0..count)
                    .map(|i| bf16::from_f32(i as f32))
                    .collect::<Vec<_>>(),
            );
            round_trip(
                device,
                &(0..count)
                    .map(|i| f16::from_f32(i as f32 / 8.0))
                    .collect::<Vec<_>>(),
            );
            round_trip(
                device,
                &(0..count).map(|i| i as f64 + 0.1).collect::<Vec<_>>(),
            );
            round_trip(device, &(0..count).map(|i| i as u8).collect::<Vec<_>>());
            round_trip(device, &(0..count).map(|i| -(i as i32)).collect::<Vec<_>>());
            round_trip(
                device,
                &(0..count).map(|i| i as i64 - (1 << 40)).collect::<Vec<_>>(),
            );
        }
    }
}

#[test]
fn views_are_copied_as_views_and_leave_the_rest_alone() {
    for device in devices() {
        let whole = Tensor::from_slice(&pattern(100, 2), &[100], device).unwrap();
        let part = Tensor::from_slice(&[-1.0f32; 7], &[7], Device::Cpu).unwrap();
        whole.slice(13..20).unwrap().copy_from(&part).unwrap();
        whole
            .slice(50..57)
            .unwrap()
            .copy_from(&whole.slice(13..20).unwrap())
            .unwrap();
        let mut expected = pattern(100, 2);
        expected[13..20].fill(-1.0);
        expected[50..57].fill(-1.0);
        assert_eq!(whole.to_vec::<f32>().unwrap(), expected);
    }
}

#[test]
fn each_crossing_is_booked_once_with_its_bytes() {
    for device in devices() {
        let ledger = Ledger::new();
        transfer::with_ledger(&ledger, || {
            let up = Tensor::zeros(&[1000], DType::F32, Device::Cpu)
                .unwrap()
                .to(device)
                .unwrap();
            up.to(Device::Cpu).unwrap();
            up.slice(0..1).unwrap().item().unwrap();
            up.copy_from(&up.zeros_like().unwrap()).unwrap();
        });
        let mut kinds: Vec<(TransferKind, u64, u64)> = ledger
            .rows()
            .iter()
            .map(|row| (row.kind, row.count, row.bytes))
            .collect();
        kinds.sort();
        assert_eq!(
            kinds,
            [
                (TransferKind::Upload, 1, 4000),
                (TransferKind::Download, 1, 4000),
                (TransferKind::ScalarRead, 1, 4)
            ]
        );
    }
}

#[test]
fn one_device_s_memory_reaches_another_s_and_the_ledger_says_how() {
    for (a, b) in pairs() {
        // Larger than two stages, where it has to go through the host.
        for count in [0usize, 5, 1000, (40 << 20) / 4 + 3] {
            let values = pattern(count, 3);
            let there = Tensor::from_slice(&values, &[count], a).unwrap();
            let ledger = Ledger::new();
            let other = transfer::with_ledger(&ledger, || there.to(b).unwrap());
            assert_eq!(other.device(), b);
            // What is written after the copy on either side does not reach the other.
            ddp_kernels::ops::zero(&there).unwrap();
            assert_eq!(
                other.to_vec::<f32>().unwrap(),
                values,
                "{a} to {b}, {count}"
            );
            let rows = ledger.rows();
            assert!(
                matches!(rows[0].kind, TransferKind::Peer | TransferKind::Staged),
                "{rows:?}"
            );
            let staged = std::env::var_os("SIMCUDA_NO_PEER").is_some();
            assert_eq!(
                rows[0].kind == TransferKind::Staged,
                staged && count > 0,
                "{rows:?}"
            );
        }
    }
}

#[test]
fn pinned_memory_cannot_be_touched_before_its_copy_is_done() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let host = Tensor::zeros_pinned(&[4096], DType::F32)
            .unwrap()
            .named("staging");
        assert!(host.is_pinned());
        let there = Tensor::empty(&[4096], DType::F32, device).unwrap();
        for round in 0..8 {
            host.with_slice_mut(|slots: &mut [f32]| slots.copy_from_slice(&pattern(4096, round)))
                .unwrap();
            let copy = transfer::copy_async(&there, &host, &stream).unwrap();
            // A reader may, a writer may not, unless the copy is done by now.
            assert_eq!(
                host.with_slice(|slots: &[f32]| slots[5]).unwrap(),
                pattern(4096, round)[5]
            );
            match host.with_slice_mut(|slots: &mut [f32]| slots.fill(f32::NAN)) {
                Ok(()) => assert!(copy.is_done()),
                Err(error) => {
                    let text = error.to_string();
                    assert!(matches!(error, Error::Busy { .. }), "{text}");
                    assert!(
                        text.contains("\"staging\"") && text.contains("copy_async"),
                        "{text}"
                    );
                }
            }
            copy.wait().unwrap();
            host.with_slice_mut(|slots: &mut [f32]| slots.fill(f32::NAN))
                .unwrap();
            assert_eq!(there.to_vec::<f32>().unwrap(), pattern(4096, round));
            // And down: the host may not look before it has arrived.
            let copy = transfer::copy_async(&host, &there, &stream).unwrap();
            match host.with_slice(|slots: &[f32]| slots[7]) {
                Ok(value) => assert!(copy.is_done() && value == pattern(4096, round)[7]),
                Err(error) => assert!(
                    error.to_string().contains("is being written by copy_async"),
                    "{error}"
                ),
            }
            drop(copy);
            // The handle is gone, the copy is not.
            if host.with_slice(|_: &[f32]| ()).is_err() {
                stream.synchronize().unwrap();
            }
            assert_eq!(host.to_vec::<f32>().unwrap(), pattern(4096, round));
        }
    }
}

#[test]
fn pinned_memory_dropped_in_flight_is_not_handed_out_before_the_copy_is_done() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let targets: Vec<Tensor> = (0..6)
            .map(|_| Tensor::empty(&[10_000], DType::F32, device).unwrap())
            .collect();
        for (salt, target) in targets.iter().enumerate() {
            let host = Tensor::zeros_pinned(&[10_000], DType::F32).unwrap();
            host.with_slice_mut(|slots: &mut [f32]| slots.copy_from_slice(&pattern(10_000, salt)))
                .unwrap();
            let copy = transfer::copy_async(target, &host, &stream).unwrap();
            drop((host, copy));
        }
        for (salt, target) in targets.iter().enumerate() {
            stream.synchronize().unwrap();
            assert_eq!(
                target.to_vec::<f32>().unwrap(),
                pattern(10_000, salt),
                "{device}"
            );
        }
    }
}

#[test]
fn a_pinned_buffer_s_parts_are_in_flight_one_by_one() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let host = Tensor::zeros_pinned(&[2, 65536], DType::F32).unwrap();
        let there = Tensor::zeros(&[65536], DType::F32, device).unwrap();
        let copy = transfer::copy_async(&there, &host.index(0).unwrap(), &stream).unwrap();
        host.index(1)
            .unwrap()
            .with_slice_mut(|slots: &mut [f32]| slots.fill(3.0))
            .unwrap();
        copy.wait().unwrap();
        assert_eq!(there.slice(9..10).unwrap().item().unwrap(), 0.0);
    }
}

#[test]
fn numbers_of_a_step_arrive_in_order_however_many_are_on_their_way() {
    for device in devices() {
        let mut numbers = transfer::Scalars::new(device, 2).unwrap();
        let (step, rate) = (
            Tensor::zeros(&[1], DType::I64, device).unwrap(),
            Tensor::zeros(&[2], DType::F32, device).unwrap(),
        );
        let seen: Vec<(Tensor, Tensor)> = (0..40i64)
            .map(|k| {
                transfer::forbid_transfers(|| {
                    numbers.send(&step, &[k]).unwrap();
                    numbers.send(&rate, &[k as f32 / 2.0, 1.0]).unwrap();
                });
                (step.zeros_like().unwrap(), rate.zeros_like().unwrap())
            })
            .zip(0..)
            .map(|((a, b), _k): ((Tensor, Tensor), i64)| {
                a.copy_from(&step).unwrap();
                b.copy_from(&rate).unwrap();
                (a, b)
            })
            .collect();
        for (k, (step, rate)) in seen.iter().enumerate() {
            assert_eq!(step.to_vec::<i64>().unwrap(), [k as i64]);
            assert_eq!(rate.to_vec::<f32>().unwrap(), [k as f32 / 2.0, 1.0]);
        }
        let error = numbers.send(&step, &[1.0f32]).unwrap_err().to_string();
        assert!(error.contains("1 of f32"), "{error}");
        Stream::default_of(device).unwrap().synchronize().unwrap();
    }
}

#[test]
fn numbers_that_do_not_fit_are_refused_on_every_device() {
    for device in [Device::Cpu].into_iter().chain(devices()) {
        let mut numbers = transfer::Scalars::new(device, 1).unwrap();
        let pair = Tensor::zeros(&[2], DType::F32, device).unwrap();
        for error in [
            numbers.send(&pair, &[1.0f32; 3]).unwrap_err(),
            numbers.send(&pair, &[1i64; 2]).unwrap_err(),
        ] {
            assert!(
                error.to_string().contains(&format!("on {device}")),
                "{error}"
            );
        }
        numbers.send(&pair, &[1.0f32, 2.0]).unwrap();
        assert_eq!(pair.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    }
    if devices().is_empty() {
        return;
    }
    let absent = transfer::Scalars::new(Device::Cuda(31), 1)
        .unwrap_err()
        .to_string();
    assert!(
        absent.contains("cuda:31") && absent.contains("copies.rs"),
        "{absent}"
    );
}

#[test]
fn numbers_are_no_part_of_a_graph_and_a_capture_that_tried_goes_on() {
    for device in devices() {
        let mut numbers = transfer::Scalars::new(device, 1).unwrap();
        let (number, stream) = (
            Tensor::zeros(&[1], DType::F32, device).unwrap(),
            Stream::new(device).unwrap(),
        );
        // Every slot of the ring has been used, and may be on its way.
        (0..3).for_each(|k| numbers.send(&number, &[k as f32]).unwrap());
        stream
            .scope(|| ops::scale_into(&number, &number, 1.0))
            .unwrap();
        let body = || {
            let error = numbers.send(&number, &[9.0f32]).unwrap_err();
            assert!(matches!(error, Error::Capture { .. }), "{error}");
            assert!(
                error.to_string().contains("same numbers at each launch"),
                "{error}"
            );
            ops::scale_into(&number, &number, 10.0)
        };
        let graph = Graph::capture(&stream, body).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.scope(|| number.item()).unwrap(), 20.0);
    }
}

#[test]
fn pageable_memory_can_be_written_once_its_upload_returns() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let there = Tensor::zeros(&[4096], DType::F32, device).unwrap();
        let host = Tensor::from_slice(&pattern(4096, 8), &[4096], Device::Cpu).unwrap();
        let copy = transfer::copy_async(&there, &host, &stream).unwrap();
        assert!(copy.is_done(), "it was waited for");
        host.with_slice_mut(|slots: &mut [f32]| slots.fill(f32::NAN))
            .unwrap();
        assert_eq!(there.to_vec::<f32>().unwrap(), pattern(4096, 8));
        // And behind work of the device's stream that takes its time.
        (0..5).for_each(|_| ops::scale_into(&there, &there, 1.0).unwrap());
        let before = Stream::default_of(device).unwrap().record().unwrap();
        there.copy_from(&host).unwrap();
        assert!(before.is_done(), "it was waited for");
    }
}

#[test]
fn pinned_memory_is_zero_also_when_it_was_another_s() {
    for _ in devices() {
        for round in 0..4 {
            // Several at once, so that the next round gets some of them whatever other threads
            // take.
            let hosts: Vec<Tensor> = (0..8)
                .map(|_| Tensor::zeros_pinned(&[777], DType::F32).unwrap())
                .collect();
            for host in &hosts {
                assert!(
                    host.to_vec::<f32>().unwrap().iter().all(|&x| x == 0.0),
                    "round {round}"
                );
                host.with_slice_mut(|slots: &mut [f32]| slots.fill(f32::NAN))
                    .unwrap();
            }
        }
    }
}
