//! Which CUDA devices this process can use, and why it cannot use others; and the names of devices.

use std::str::FromStr;
use std::sync::OnceLock;

use super::calls;
use crate::Device;
use crate::device::discover;
use crate::error::{Caller, Error, Result};

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

impl FromStr for Device {
    type Err = Error;

    /// `cpu`, `cuda` (the first), `cuda:N`, `auto` (the best that can be used). Whether the device
    /// exists is checked when something is made on it.
    fn from_str(text: &str) -> Result<Device> {
        let refuse = |why: &str| {
            Err(Error::UnknownDevice {
                text: text.to_string(),
                why: why.to_string(),
            })
        };
        if let Some(index) = text.strip_prefix("cuda:") {
            let digits = !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit());
            return match index.parse() {
                Ok(index) if digits => Ok(Device::Cuda(index)),
                _ => refuse("expected a device number after cuda:, as in cuda:1"),
            };
        }
        match text.split(':').next().unwrap_or(text) {
            "cpu" if text == "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            "auto" if text == "auto" => Ok(Device::best()),
            "" => refuse("the name is empty"),
            "gpu" => refuse("write cuda for NVIDIA GPUs"),
            "CPU" | "Cpu" | "CUDA" | "Cuda" | "AUTO" | "Auto" => {
                refuse("device names are lower case")
            }
            "mps" => refuse("Apple GPUs (Metal) are not supported"),
            "xpu" => refuse("Intel GPUs are not supported"),
            "rocm" | "hip" => refuse("AMD GPUs (ROCm) are not supported"),
            "tpu" | "xla" => refuse("TPUs are not supported"),
            _ => refuse("there is no such kind of device"),
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
        assert_eq!(
            Device::Cuda(3).to_string().parse::<Device>().unwrap(),
            Device::Cuda(3)
        );
        assert_eq!("auto".parse::<Device>().unwrap(), Device::best());
    }

    #[test]
    fn other_accelerators_and_typos_name_what_is_supported() {
        for text in [
            "mps", "mps:0", "xpu", "rocm", "gpu", "", "CPU", "cuda:", "cuda:x", "cuda:+1",
            "cuda:-1", "cuda 0",
        ] {
            let error = text.parse::<Device>().unwrap_err().to_string();
            assert!(
                error.contains("supported: cpu, cuda, cuda:N, auto")
                    && error.contains(&format!("{text:?}")),
                "{error}"
            );
        }
        let error = "cuda:99999999999999999999"
            .parse::<Device>()
            .unwrap_err()
            .to_string();
        assert!(error.contains("device number"), "{error}");
    }
}
