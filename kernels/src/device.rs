//! Devices: `Device::{Cpu, Cuda(index)}`, their names, and what this machine has.
//!
//! Nothing falls back silently: a device that cannot be used is an error that says why.

mod discover;

use std::fmt;

pub use discover::{Candidate, Discovery, Gpu, Library, discover};

/// The memory that a tensor is in, and the processor that operations on it run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// Host memory and the CPU.
    Cpu,
    /// A CUDA device, by its index among those that this process sees.
    Cuda(usize),
}

impl Device {
    /// Whether this is not the CPU.
    pub fn is_accelerator(self) -> bool {
        self != Device::Cpu
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.pad("cpu"),
            Device::Cuda(index) => f.pad(&format!("cuda:{index}")),
        }
    }
}
