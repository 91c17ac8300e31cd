//! Memory and streams that are lent to libraries which another crate calls, and progress that a
//! device reports.

use std::panic::Location;

use ddp_kernels::foreign::{self, Entered, Operand};
use ddp_kernels::graph::Graph;
use ddp_kernels::progress::{DeviceProgress, RING, ReportedWork};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Error, Tensor, ops};

use crate::{devices, pairs};

fn filled(value: f64, device: Device) -> Tensor {
    Tensor::full(&[100], value, DType::F32, device)
        .unwrap()
        .named("x")
}

fn enter<R>(
    stream: &Stream,
    operands: &[Operand<'_>],
    body: impl FnOnce(&Entered<'_>) -> R,
) -> Result<R, Error> {
    let entered = foreign::enter("foreign", stream, Location::caller(), operands)?;
    Ok(body(&entered))
}

#[test]
fn a_call_owns_its_operands_until_it_returns() {
    for device in devices() {
        let (x, stream) = (filled(1.0, device), Stream::new(device).unwrap());
        let operand = |writes| {
            [Operand {
                role: "tensor",
                tensor: &x,
                writes,
            }]
        };
        let clash = enter(&stream, &operand(true), |entered| {
            let addresses = entered.addresses();
            assert!(!entered.stream().is_null() && addresses.len() == 1 && addresses[0] != 0);
            ops::fill_into(&x, 2.0).unwrap_err().to_string()
        });
        assert!(
            clash.unwrap().contains("foreign"),
            "the error names both operations"
        );
        // Readers do not disturb each other.
        enter(&stream, &operand(false), |_| {
            stream
                .scope(|| ops::activate(&x, ops::Activation::Relu))
                .map(drop)
        })
        .unwrap()
        .unwrap();
        stream.scope(|| ops::fill_into(&x, 3.0)).unwrap();
    }
}

#[test]
fn operands_that_a_stream_cannot_work_on_are_refused_by_name() {
    let host = Stream::default_of(Device::Cpu).unwrap();
    let error = enter(&host, &[], |_| ()).unwrap_err().to_string();
    assert!(
        error.contains("foreign: stream: expected one of a GPU, got one on cpu"),
        "{error}"
    );
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let refused = |tensor: &Tensor| {
            let operands = [Operand {
                role: "tensor",
                tensor,
                writes: true,
            }];
            enter(&stream, &operands, |_| ()).unwrap_err().to_string()
        };
        let elsewhere = refused(&filled(1.0, Device::Cpu));
        assert!(
            elsewhere.contains(&format!(
                "expected a tensor on {device}, the stream's device, got \"x\""
            )),
            "{elsewhere}"
        );
        let turned = refused(&filled(1.0, device).reshape(&[10, 10]).unwrap().t().unwrap());
        assert!(turned.contains("rows in order"), "{turned}");
    }
    for (a, b) in pairs() {
        let (stream, x) = (Stream::new(a).unwrap(), filled(1.0, b));
        let operands = [Operand {
            role: "tensor",
            tensor: &x,
            writes: false,
        }];
        assert!(
            enter(&stream, &operands, |_| ())
                .unwrap_err()
                .to_string()
                .contains("the stream's device")
        );
    }
}

#[test]
fn captures_have_numbers_and_other_streams_none() {
    for device in devices() {
        let (stream, other) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
        let x = filled(1.0, device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        let mut numbers = Vec::new();
        for _ in 0..2 {
            assert_eq!(foreign::capture(&stream), None);
            Graph::capture(&stream, || {
                numbers.push(foreign::capture(&stream).unwrap());
                assert_eq!(foreign::capture(&other), None);
                ops::scale_into(&x, &x, 1.0)
            })
            .unwrap();
        }
        assert_ne!(numbers[0], numbers[1]);
    }
}

fn told(progress: &DeviceProgress, lane: usize) -> Vec<ReportedWork> {
    let mut all: Vec<ReportedWork> = progress.board().ring(lane).collect();
    all.sort_by_key(|told| told.number);
    all
}

#[test]
fn a_device_tells_what_it_has_begun_and_ended() {
    for device in devices() {
        let (progress, stream, at) = (
            DeviceProgress::new(device, 2).unwrap(),
            Stream::new(device).unwrap(),
            Location::caller(),
        );
        let board = progress.board();
        assert_eq!(
            (board.begun(0), board.ended(0), told(&progress, 0)),
            ((0, 0), 0, vec![])
        );
        progress.begin(0, 77, 5, &stream, at).unwrap();
        stream.synchronize().unwrap();
        assert_eq!((board.begun(0), board.ended(0)), ((1, 77), 0));
        assert!(matches!(
            told(&progress, 0)[..],
            [ReportedWork {
                number: 1,
                call: 77,
                place: 5,
                ..
            }]
        ));
        progress.end(0, &stream, at).unwrap();
        stream.synchronize().unwrap();
        assert_eq!((board.begun(0), board.ended(0)), ((1, 77), 1));
        // The other lane has heard nothing of it.
        assert_eq!(
            (board.begun(1), board.ended(1), told(&progress, 1)),
            ((0, 0), 0, vec![])
        );
        // More than the ring holds: the last are there, in the other lane too.
        for lane in [0, 1] {
            for call in 0..RING as u32 + 9 {
                progress.begin(lane, call, 0, &stream, at).unwrap();
                progress.end(lane, &stream, at).unwrap();
            }
        }
        stream.synchronize().unwrap();
        let (first, second) = (told(&progress, 0), told(&progress, 1));
        assert_eq!((first.len(), second.len()), (RING, RING));
        assert!(second.iter().all(|told| told.call + 1 == told.number));
        assert!(
            first.iter().all(|told| told.call + 2 == told.number),
            "one came before"
        );
        assert_eq!(board.ended(1), RING as u32 + 9);
    }
}

#[test]
fn call_counts_continue_at_each_graph_launch() {
    for device in devices() {
        let (stream, at) = (Stream::new(device).unwrap(), Location::caller());
        let history = |calls: [u32; 3], captured: bool| {
            let progress = DeviceProgress::new(device, 1).unwrap();
            let step = || -> Result<(), Error> {
                for call in calls {
                    progress.begin(0, call, 0, &stream, at)?;
                    progress.end(0, &stream, at)?;
                }
                Ok(())
            };
            step().unwrap();
            if captured {
                let graph = Graph::capture(&stream, step).unwrap();
                (0..10).for_each(|_| graph.launch().unwrap());
            } else {
                (0..10).for_each(|_| step().unwrap());
            }
            stream.synchronize().unwrap();
            assert_eq!(
                (progress.board().begun(0), progress.board().ended(0)),
                ((33, calls[2]), 33)
            );
            told(&progress, 0)
        };
        let eager = history([1, 2, 3], false);
        assert_eq!(history([1, 2, 3], true), eager);
        let other = history([2, 1, 3], true);
        // Long after it the difference still shows.
        assert!(eager[32].call == other[32].call && eager[32].chain != other[32].chain);
    }
}

#[test]
fn a_graph_keeps_reporting_after_its_lanes_are_dropped() {
    for device in devices() {
        let (stream, at) = (Stream::new(device).unwrap(), Location::caller());
        let progress = DeviceProgress::new(device, 1).unwrap();
        let board = progress.board();
        progress.begin(0, 1, 0, &stream, at).unwrap();
        let graph = Graph::capture(&stream, || progress.begin(0, 2, 0, &stream, at)).unwrap();
        drop(progress);
        // Whoever takes memory now must not get what the graph writes to.
        let others: Vec<Tensor> = (0..4)
            .map(|_| Tensor::zeros_pinned(&[300], DType::I64).unwrap())
            .collect();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        assert_eq!(board.begun(0), (2, 2));
        assert!(
            others
                .iter()
                .all(|other| other.to_vec::<i64>().unwrap().iter().all(|&word| word == 0))
        );
    }
}
