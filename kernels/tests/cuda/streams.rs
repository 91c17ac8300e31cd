//! Streams and events: what is ordered, and the memory rule across streams.

use ddp_kernels::stream::{Stream, Timer};
use ddp_kernels::{DType, Device, Tensor, ops, transfer};

use crate::{devices, pairs};

const COUNT: usize = 30_000;

fn filled(value: f64, device: Device) -> Tensor {
    Tensor::full(&[COUNT], value, DType::F32, device).unwrap()
}

fn assert_all(tensor: &Tensor, value: f32) {
    assert!(
        tensor.to_vec::<f32>().unwrap().iter().all(|&x| x == value),
        "{tensor} is not {value} everywhere"
    );
}

#[test]
fn a_stream_that_waits_for_an_event_sees_what_was_done_before_it() {
    for device in devices() {
        let (first, second) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
        assert_ne!(first, second);
        let (x, y) = (filled(0.0, device), filled(0.0, device));
        for round in 1..6 {
            first
                .scope(|| ops::fill_into(&x, f64::from(round)))
                .unwrap();
            second.wait(&first.record().unwrap()).unwrap();
            second.scope(|| ops::axpy(&y, 1.0, &x)).unwrap();
            // The next round writes x on the first stream: after the second has read it.
            first.wait(&second.record().unwrap()).unwrap();
        }
        second.synchronize().unwrap();
        assert_eq!(
            Stream::current(device).unwrap(),
            Stream::default_of(device).unwrap()
        );
        Stream::default_of(device)
            .unwrap()
            .wait(&second.record().unwrap())
            .unwrap();
        assert_all(&y, 15.0);
    }
}

#[test]
fn events_order_work_of_two_devices() {
    for (a, b) in pairs() {
        let (on_a, on_b) = (Stream::new(a).unwrap(), Stream::new(b).unwrap());
        let (x, y) = (filled(1.0, a), filled(0.0, b));
        for round in 2..5 {
            on_a.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
            on_b.wait(&on_a.record().unwrap()).unwrap();
            let copy = transfer::copy_async(&y, &x, &on_b).unwrap();
            on_a.wait(copy.event()).unwrap();
            on_b.scope(|| ops::scale_into(&y, &y, f64::from(round)))
                .unwrap();
        }
        on_b.synchronize().unwrap();
        assert_all(&y, 32.0);
    }
}

#[test]
fn memory_dropped_while_another_stream_uses_it_is_not_handed_out_too_early() {
    for device in devices() {
        let side = Stream::new(device).unwrap();
        let total = filled(0.0, device);
        for round in 0..20 {
            // Made on the default stream, read on another, dropped at once; the next one may get
            // the same memory.
            let x = filled(1.0, device);
            side.wait(&Stream::default_of(device).unwrap().record().unwrap())
                .unwrap();
            side.scope(|| ops::axpy(&total, 1.0, &x)).unwrap();
            drop(x);
            let overwriter = filled(f64::from(round) * 1e6, device);
            drop(overwriter);
        }
        side.synchronize().unwrap();
        Stream::default_of(device)
            .unwrap()
            .wait(&side.record().unwrap())
            .unwrap();
        assert_all(&total, 20.0);
    }
}

#[test]
fn the_first_use_on_another_stream_comes_after_the_allocation() {
    for device in devices() {
        let side = Stream::new(device).unwrap();
        for _ in 0..10 {
            // The memory of `old` may still be written on the default stream when `new` gets it.
            let old = filled(5.0, device);
            ops::scale_into(&old, &old, 3.0).unwrap();
            drop(old);
            let new = Tensor::empty(&[COUNT], DType::F32, device).unwrap();
            side.scope(|| ops::fill_into(&new, 2.0)).unwrap();
            assert_all(&side.scope(|| new.to(Device::Cpu)).unwrap(), 2.0);
        }
    }
}

#[test]
fn time_is_the_device_s_and_only_of_events_that_keep_it() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        let x = filled(1.0, device);
        let start = stream.record_timed().unwrap();
        stream.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
        let end = stream.record_timed().unwrap();
        assert!(end.since(&start).unwrap() > std::time::Duration::ZERO);
        assert!(end.is_done() && start.is_done());
        let plain = stream.record().unwrap();
        let error = plain.since(&start).unwrap_err().to_string();
        assert!(error.contains("record_timed"), "{error}");
        let timer = Timer::start(device).unwrap();
        stream.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
        assert!(timer.elapsed().unwrap() > std::time::Duration::ZERO);
        assert_eq!(end.device(), device);
    }
}

#[test]
fn the_cpu_waits_for_a_device_s_event_where_its_stream_is_told_to() {
    for device in devices() {
        let (gpu, cpu) = (
            Stream::new(device).unwrap(),
            Stream::new(Device::Cpu).unwrap(),
        );
        let host = Tensor::zeros_pinned(&[COUNT], DType::F32).unwrap();
        let x = filled(4.0, device);
        gpu.wait(&Stream::default_of(device).unwrap().record().unwrap())
            .unwrap();
        let copy = transfer::copy_async(&host, &x, &gpu).unwrap();
        cpu.wait(copy.event()).unwrap();
        host.with_slice(|slots: &[f32]| assert!(slots.iter().all(|&x| x == 4.0)))
            .unwrap();
    }
}
