//! What `--device` and `--graph` mean on this machine: which device a rank trains on, and why not another. Nothing falls
//! back in silence.

use std::borrow::Cow;

use ddp_kernels::Device;
use ddp_kernels::device::discover;
use ddp_kernels::stream::Stream;

use super::check::refuse;
use super::{DeviceChoice, GraphChoice};
use crate::error::Result;

/// What to train on, and what to say of that.
#[derive(Clone, Debug, PartialEq)]
struct Choice {
    device: Device,
    /// What was wished for without words and is not had.
    warning: Option<String>,
}

/// What this machine has for CUDA.
struct Machine<'a> {
    /// Whether it shows a GPU at all, usable or not.
    has_gpus: bool,
    /// Whether tensors can be made on a device; else why not, and what to do.
    try_device: &'a dyn Fn(Device) -> Result<(), String>,
}

/// The device that a `--device` means for one of `ranks` ranks. Rank 0 says aloud what `auto` passes over.
pub(crate) fn find_device(choice: DeviceChoice, rank: usize, ranks: usize) -> Result<Device> {
    if choice == DeviceChoice::Cpu {
        // The driver need not be started to know that.
        return Ok(Device::Cpu);
    }
    let machine = Machine { has_gpus: !discover().gpus.is_empty(), try_device: &try_device };
    let Choice { device, warning } = choose(choice, ranks, &machine)?;
    if let Some(warning) = warning.filter(|_| rank == 0) {
        tracing::warn!("{warning}");
    }
    Ok(device)
}

/// Makes the device ready, or says why that cannot be.
fn try_device(device: Device) -> Result<(), String> {
    match Stream::default_of(device) {
        Ok(_) => Ok(()),
        Err(ddp_kernels::Error::DeviceAbsent { why, .. }) => Err(why),
        Err(other) => Err(other.to_string()),
    }
}

fn choose(choice: DeviceChoice, ranks: usize, machine: &Machine<'_>) -> Result<Choice> {
    let found = |device| Ok(Choice { device, warning: None });
    let device = match choice {
        DeviceChoice::Cpu => return found(Device::Cpu),
        DeviceChoice::Auto if !machine.has_gpus => return found(Device::Cpu),
        DeviceChoice::Auto | DeviceChoice::Cuda => Device::Cuda(0),
        DeviceChoice::CudaAt(index) => Device::Cuda(index),
    };
    let problem = if ranks > 1 {
        Err(format!("{ranks} ranks cannot train on GPUs yet: several GPUs come in release 0.4"))
    } else {
        (machine.try_device)(device)
    };
    match problem {
        Ok(()) => found(device),
        Err(why) if choice == DeviceChoice::Auto => {
            let warning = format!("training on the CPU although there is a GPU: {}", sentence(&why));
            let way_out = "--device cpu says that this is meant";
            Ok(Choice { device: Device::Cpu, warning: Some(format!("{warning} {way_out}")) })
        }
        Err(why) if ranks > 1 => Err(refuse(
            "--device",
            choice,
            "the CPU, or one rank",
            &format!("{} Give --device cpu, or start one process", sentence(&why)),
        )),
        Err(why) => {
            let way_out = format!("{} Or give --device cpu", sentence(&why));
            Err(refuse("--device", choice, "a device that can be used here", &way_out))
        }
    }
}

/// With a full stop behind it.
fn sentence(text: &str) -> Cow<'_, str> {
    if text.ends_with('.') { text.into() } else { format!("{text}.").into() }
}

/// Refuses `--graph on` where there are no graphs.
pub(crate) fn check_graph(choice: GraphChoice, device: Device) -> Result<()> {
    if choice == GraphChoice::On && !device.is_accelerator() {
        let (expected, way_out) = ("--device cuda: graphs are CUDA's", "Leave --graph out, or train on a GPU");
        return Err(refuse("--graph", "on", expected, way_out));
    }
    Ok(())
}

/// The device as people know it: `cuda:0 NVIDIA H200`.
pub(crate) fn described(device: Device) -> String {
    name_of(device).map_or_else(|| device.to_string(), |name| format!("{device} {name}"))
}

/// What the driver calls it.
fn name_of(device: Device) -> Option<&'static str> {
    let Device::Cuda(index) = device else { return None };
    discover().gpus.iter().find(|gpu| gpu.index == index).map(|gpu| gpu.name.as_str())
}

/// Whether no such device exists: its name says so.
pub(crate) fn is_simulated(device: Device) -> bool {
    name_of(device).is_some_and(|name| name.contains("Simulated"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_GPU: Machine<'_> = Machine { has_gpus: false, try_device: &|_| Err("no driver".into()) };
    const TWO_GPUS: Machine<'_> = Machine {
        has_gpus: true,
        try_device: &|device| {
            if device <= Device::Cuda(1) { Ok(()) } else { Err("this machine has 2 CUDA devices, up to cuda:1".into()) }
        },
    };
    const NO_COMPILER: Machine<'_> = Machine { has_gpus: true, try_device: &|_| Err("libnvrtc is missing.".into()) };

    fn chosen(choice: DeviceChoice, ranks: usize, machine: &Machine<'_>) -> Device {
        let choice = choose(choice, ranks, machine).unwrap();
        assert_eq!(choice.warning, None);
        choice.device
    }

    #[test]
    fn one_rank_trains_on_the_gpu_that_is_named_or_on_the_first() {
        assert_eq!(chosen(DeviceChoice::Auto, 1, &TWO_GPUS), Device::Cuda(0));
        assert_eq!(chosen(DeviceChoice::Cuda, 1, &TWO_GPUS), Device::Cuda(0));
        assert_eq!(chosen(DeviceChoice::CudaAt(1), 1, &TWO_GPUS), Device::Cuda(1));
        assert_eq!(chosen(DeviceChoice::Cpu, 1, &TWO_GPUS), Device::Cpu);
        assert_eq!(chosen(DeviceChoice::Auto, 1, &NO_GPU), Device::Cpu);
        assert_eq!(chosen(DeviceChoice::Auto, 4, &NO_GPU), Device::Cpu);
    }

    #[test]
    fn a_device_that_cannot_be_had_is_refused_with_the_reason() {
        for (choice, ranks, machine, parts) in [
            (DeviceChoice::Cuda, 1, &NO_GPU, ["--device cuda:", "no driver. Or give --device cpu"]),
            (DeviceChoice::CudaAt(9), 1, &TWO_GPUS, ["--device cuda:9:", "up to cuda:1. Or"]),
            (DeviceChoice::Cuda, 1, &NO_COMPILER, ["--device cuda:", "libnvrtc is missing. Or"]),
            (
                DeviceChoice::Cuda,
                2,
                &TWO_GPUS,
                ["--device cuda:", "several GPUs come in release 0.4. Give --device cpu"],
            ),
            (DeviceChoice::CudaAt(1), 4, &TWO_GPUS, ["--device cuda:1:", "or start one process"]),
        ] {
            let error = choose(choice, ranks, machine).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(parts.iter().all(|part| error.to_string().contains(part)), "{error}");
        }
    }

    #[test]
    fn what_auto_passes_over_is_said() {
        for (ranks, machine, part) in
            [(2, &TWO_GPUS, "2 ranks cannot train on GPUs yet"), (1, &NO_COMPILER, "libnvrtc is missing. ")]
        {
            let choice = choose(DeviceChoice::Auto, ranks, machine).unwrap();
            let warning = choice.warning.unwrap();
            assert_eq!(choice.device, Device::Cpu);
            assert!(warning.contains(part) && warning.contains("--device cpu"), "{warning}");
        }
    }

    #[test]
    fn graphs_are_refused_on_the_cpu_where_they_are_asked_for() {
        let error = check_graph(GraphChoice::On, Device::Cpu).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("--graph on: expected --device cuda"), "{error}");
        check_graph(GraphChoice::Auto, Device::Cpu).unwrap();
        check_graph(GraphChoice::On, Device::Cuda(0)).unwrap();
    }
}
