//! Parsing device names.

use std::str::FromStr;

use crate::Device;
use crate::error::{Error, Result};

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
