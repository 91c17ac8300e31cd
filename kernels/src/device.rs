//! Where a tensor lives: `Device::{Cpu, Cuda(index)}`, parsed from what people type, and what this machine has.
//!
//! Nothing here falls back in silence: a device that cannot be used is an error that says why.

mod discover;

use std::fmt;
use std::str::FromStr;

pub use discover::{Discovery, Gpu, Library, discover};

use crate::cuda::gpu;
use crate::error::{Error, Result, Site};

/// Where a tensor's storage is and where operations on it run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// Host memory, the processor.
    Cpu,
    /// The CUDA device of this index among those this process sees.
    Cuda(usize),
}

impl Device {
    /// The best device that tensors can be made on in this process: the first CUDA device, else the CPU.
    pub fn best() -> Device {
        if gpu::usable_count() > 0 { Device::Cuda(0) } else { Device::Cpu }
    }

    /// Every device that tensors can be made on in this process, the CPU first.
    pub fn usable() -> Vec<Device> {
        std::iter::once(Device::Cpu).chain((0..gpu::usable_count()).map(Device::Cuda)).collect()
    }

    /// Whether this is anything but the CPU.
    pub fn is_accelerator(self) -> bool {
        self != Device::Cpu
    }

    /// Refuses a device that tensors cannot be made on, saying why.
    pub(crate) fn check_usable(self, op: &'static str, at: Site) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            Device::Cuda(index) if index < gpu::usable_count() => Ok(()),
            Device::Cuda(index) => Err(Error::DeviceAbsent { op, device: self, why: why_absent(index), at }),
        }
    }
}

fn why_absent(index: usize) -> String {
    let found = discover();
    match found.gpus.len() {
        0 => {
            let why = found.why_no_gpu.as_deref().unwrap_or("this machine shows no CUDA device");
            format!("{why}. Or use Device::Cpu: nothing is put there for you")
        }
        _ if let Some(why) = gpu::why_unusable() => why,
        1 => format!("this machine has 1 CUDA device, cuda:0, and no cuda:{index}"),
        n if n > gpu::GPUS_MAX => format!("of this machine's {n} CUDA devices a process can use {}", gpu::GPUS_MAX),
        n => format!("this machine has {n} CUDA devices, up to cuda:{}", n - 1),
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

impl FromStr for Device {
    type Err = Error;

    /// `cpu`, `cuda` (the first), `cuda:N`, `auto` (the best that can be used). Whether the device is there is
    /// asked when something is made on it.
    fn from_str(text: &str) -> Result<Device> {
        let refuse = |why: &str| Err(Error::UnknownDevice { text: text.to_string(), why: why.to_string() });
        match text {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            "auto" => Ok(Device::best()),
            "gpu" => refuse("say which kind: cuda"),
            "" => refuse("it is empty"),
            _ => {
                if let Some(index) = text.strip_prefix("cuda:") {
                    let digits = !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit());
                    return match index.parse() {
                        Ok(index) if digits => Ok(Device::Cuda(index)),
                        _ => refuse("the part after cuda: must be a device number, as in cuda:1"),
                    };
                }
                let kind = text.split(':').next().unwrap_or(text);
                match kind {
                    "CPU" | "Cpu" | "CUDA" | "Cuda" | "AUTO" | "Auto" => refuse("devices are written in lower case"),
                    "mps" => refuse("Apple GPUs (Metal) are not supported"),
                    "xpu" => refuse("Intel GPUs are not supported"),
                    "rocm" | "hip" => refuse("AMD GPUs (ROCm) are not supported"),
                    "tpu" | "xla" => refuse("TPUs are not supported"),
                    _ => refuse("no such kind of device"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_type_parses() {
        for (text, device) in [
            ("cpu", Device::Cpu),
            ("cuda", Device::Cuda(0)),
            ("cuda:0", Device::Cuda(0)),
            ("cuda:17", Device::Cuda(17)),
        ] {
            assert_eq!(text.parse::<Device>().unwrap(), device);
        }
        assert_eq!(Device::Cuda(3).to_string().parse::<Device>().unwrap(), Device::Cuda(3));
        assert_eq!("auto".parse::<Device>().unwrap(), Device::best());
    }

    #[test]
    fn other_accelerators_and_typos_name_what_is_supported() {
        for text in ["mps", "mps:0", "xpu", "rocm", "gpu", "", "CPU", "cuda:", "cuda:x", "cuda:+1", "cuda:-1", "cuda 0"]
        {
            let error = text.parse::<Device>().unwrap_err().to_string();
            assert!(
                error.contains("Supported: cpu, cuda, cuda:N, auto") && error.contains(&format!("{text:?}")),
                "{error}"
            );
        }
        let error = "cuda:99999999999999999999".parse::<Device>().unwrap_err().to_string();
        assert!(error.contains("device number"), "{error}");
    }
}
