//! In steady state all GPU memory is reused. In a separate file, because the statistics are of the
//! whole process.

use ddp_kernels::{DType, Device, Tensor, memory, ops, stream};

#[test]
fn the_driver_is_asked_for_no_memory_after_the_first_rounds() {
    let gpus: Vec<Device> = Device::usable()
        .into_iter()
        .filter(|device| device.is_accelerator())
        .collect();
    if gpus.is_empty() {
        ddp_slice::skip("no CUDA device");
    }
    for device in gpus {
        let work = || {
            let x = Tensor::full(&[300_000], 1.0, DType::F32, device).unwrap();
            let y = ops::activate(&x, ops::Activation::Relu).unwrap();
            ops::add(&x, &y).unwrap()
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
