//! In steady state all GPU memory is reused. In a separate file, because the statistics are of the
//! whole process.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ddp_kernels::graph::Graph;
use ddp_kernels::matmuls::WORKSPACE_BYTES;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor, memory, ops, stream};

/// All GPUs, for one test at a time.
fn gpus() -> (Vec<Device>, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    let gpus: Vec<Device> = Device::usable()
        .into_iter()
        .filter(|device| device.is_accelerator())
        .collect();
    if gpus.is_empty() {
        ddp_testing::skip("no CUDA device");
    }
    (gpus, TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A process that trains again and again makes new streams each time.
#[test]
fn a_workspace_is_freed_after_its_stream_and_the_graphs_that_use_it() {
    let (gpus, _turn) = gpus();
    for device in gpus {
        let on_a_new_stream = |captures: bool| {
            let stream = Stream::new(device).unwrap();
            stream.scope(|| {
                let ones = Tensor::full(&[64, 64], 1.0, DType::F32, device).unwrap();
                let out = Tensor::zeros(&[64, 64], DType::F32, device).unwrap();
                let multiply = || ops::addmm_into(&out, &out, &ones, &ones, 1.0, 0.0);
                multiply().unwrap();
                // A loss has counters of its stream.
                let [losses, stats] =
                    [64, 4].map(|length| Tensor::zeros(&[length], DType::F32, device).unwrap());
                ops::mse_into(&losses, None, &out, &ones, 1.0, Some(&stats)).unwrap();
                let graph = captures.then(|| Graph::capture(&stream, multiply).unwrap());
                stream.synchronize().unwrap();
                graph.map(|graph| (graph, out))
            })
        };
        let allocated = || memory::stats(device).allocated_bytes;
        let (graph, out) = on_a_new_stream(true).unwrap();
        let with_graph = allocated();
        for _ in 0..6 {
            on_a_new_stream(false);
        }
        let (own, grown) = (
            WORKSPACE_BYTES..2 * WORKSPACE_BYTES,
            allocated() - with_graph,
        );
        assert!(
            own.contains(&grown),
            "{grown} bytes, of more than the last stream"
        );
        graph.launch().unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), [64.0; 64 * 64]);
        drop((graph, out));
        on_a_new_stream(false);
        assert!(
            own.contains(&allocated()),
            "the graph's stream has left memory"
        );
    }
}

#[test]
fn the_driver_is_asked_for_no_memory_after_the_first_rounds() {
    let (gpus, _turn) = gpus();
    for device in gpus {
        let work = || {
            let x = Tensor::full(&[300_000], 1.0, DType::F32, device).unwrap();
            let y = ops::activate(&x, ops::Activation::Relu).unwrap();
            ops::activate(&y, ops::Activation::Relu).unwrap()
        };
        for _ in 0..3 {
            work();
            stream::synchronize(device).unwrap();
        }
        let before = memory::stats(device);
        for _ in 0..20 {
            work();
            stream::synchronize(device).unwrap();
        }
        let after = memory::stats(device);
        assert_eq!(
            after.system_allocation_count, before.system_allocation_count,
            "{before}\n{after}"
        );
        assert_eq!(after.allocation_count, before.allocation_count + 60);
        assert_eq!(
            (after.allocated_bytes, after.live_count),
            (before.allocated_bytes, before.live_count)
        );
    }
}
