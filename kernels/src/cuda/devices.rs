//! Which CUDA devices this process can make tensors on, and why not where it cannot.

use std::sync::OnceLock;

use super::calls;
use crate::Device;
use crate::device::discover;
use crate::error::{Caller, Result};

/// The most devices one process can use: more than any machine has.
pub(crate) const GPUS_MAX: usize = 64;

impl Device {
    /// The first usable CUDA device, else the CPU.
    pub fn best() -> Device {
        if usable_count() > 0 {
            Device::Cuda(0)
        } else {
            Device::Cpu
        }
    }

    /// Every device that tensors can be made on in this process, the CPU first.
    pub fn usable() -> Vec<Device> {
        std::iter::once(Device::Cpu)
            .chain((0..usable_count()).map(Device::Cuda))
            .collect()
    }

    /// Refuses a device that tensors cannot be made on, saying why.
    pub(crate) fn check_usable(self, by: Caller) -> Result<()> {
        match self {
            Device::Cuda(index) if index >= usable_count() => {
                Err(by.absent(self, why_absent(index)))
            }
            _ => Ok(()),
        }
    }
}

fn usable_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| match discover().gpus.len() {
        0 => 0,
        _ if calls::functions().is_err() => 0,
        count => count.min(GPUS_MAX),
    })
}

fn why_absent(index: usize) -> String {
    let found = discover();
    match found.gpus.len() {
        0 => {
            let why = found.why_no_gpu.as_deref();
            let why = why.unwrap_or("this machine has no CUDA device");
            format!("{why}; or use Device::Cpu")
        }
        _ if let Err(why) = calls::functions() => why.to_string(),
        1 => format!("this machine has 1 CUDA device, cuda:0, and no cuda:{index}"),
        n if n > GPUS_MAX => format!("a process can use {GPUS_MAX} of this machine's {n} devices"),
        n => format!("this machine has {n} CUDA devices, up to cuda:{}", n - 1),
    }
}
