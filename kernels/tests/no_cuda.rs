//! On a machine without a GPU nothing can be made on a CUDA device, and nothing falls back to the
//! CPU.

use ddp_kernels::stream::{Stream, Timer};
use ddp_kernels::{DType, Device, Error, Random, Tensor, memory};

/// The first CUDA device that is not there.
fn absent() -> Device {
    Device::Cuda(Device::usable().len() - 1)
}

#[test]
fn making_anything_on_a_device_that_is_not_there_says_why_and_draws_no_numbers() {
    let gpu = absent();
    let mut random = Random::new(0);
    let host = Tensor::ones(&[2], DType::F32, Device::Cpu).unwrap();
    let refused = [
        Tensor::empty(&[2], DType::F32, gpu),
        Tensor::zeros(&[2], DType::F32, gpu),
        Tensor::ones(&[2], DType::F32, gpu),
        Tensor::full(&[2], 2.0, DType::F32, gpu),
        Tensor::arange(2, DType::F32, gpu),
        Tensor::rand(&[2], DType::F32, gpu, &mut random),
        Tensor::randn(&[2], DType::F32, gpu, &mut random),
        Tensor::randint(2, &[2], DType::I64, gpu, &mut random),
        Tensor::from_slice(&[1.0f32], &[1], gpu),
        Tensor::from_slice::<f32>(&[], &[0], gpu),
        host.to(gpu),
        host.to((gpu, DType::BF16)),
    ];
    for outcome in refused {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, Error::DeviceAbsent { device, .. } if device == gpu),
            "{error:?}"
        );
        let text = error.to_string();
        let why = if gpu == Device::Cuda(0) {
            "or use Device::Cpu"
        } else {
            "this machine has"
        };
        assert!(text.contains(why) && text.contains("no_cuda.rs"), "{text}");
    }
    if gpu == Device::Cuda(0) {
        assert!(matches!(
            Tensor::zeros_pinned(&[2], DType::F32),
            Err(Error::DeviceAbsent { .. })
        ));
    }
    assert!(Stream::new(gpu).is_err() && Timer::start(gpu).is_err());
    assert_eq!(random, Random::new(0), "what was refused drew no numbers");
    assert_eq!(memory::stats(gpu), memory::MemoryStats::default());
    assert_eq!(memory::empty_cache(Device::Cuda(usize::MAX)), 0);
}

#[test]
fn auto_is_a_usable_device_without_cuda() {
    let device: Device = "auto".parse().unwrap();
    assert_eq!(
        device,
        if absent() == Device::Cuda(0) {
            Device::Cpu
        } else {
            Device::Cuda(0)
        }
    );
    assert_eq!(
        Tensor::zeros(&[1], DType::F32, device).unwrap().device(),
        Device::Cpu
    );
}
