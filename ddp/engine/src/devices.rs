//! Names of devices.

use std::collections::BTreeSet;

use ddp_kernels::Device;
use ddp_kernels::device::discover;

/// The device as people know it: `cuda:0 NVIDIA H200`.
pub fn described(device: Device) -> String {
    name_of(device).map_or_else(|| device.to_string(), |name| format!("{device} {name}"))
}

/// What the driver calls it.
pub fn name_of(device: Device) -> Option<&'static str> {
    let Device::Cuda(index) = device else {
        return None;
    };
    let gpu = discover().gpus.iter().find(|gpu| gpu.index == index);
    gpu.map(|gpu| gpu.name.as_str())
}

/// Whether no such device exists: its name says so.
pub fn is_simulated(device: Device) -> bool {
    name_of(device).is_some_and(|name| name.contains("Simulated"))
}

/// The models of the devices of all ranks: of `cuda:0 NVIDIA H200 on node7, 8 threads`, their hosts
/// and numbers change nothing.
pub fn models(places: &[String]) -> BTreeSet<&str> {
    let devices = places.iter().map(|place| place.split(" on ").next());
    let devices = devices.flat_map(|devices| devices.unwrap_or_default().split(" and "));
    devices
        .map(|device| device.split_once(' ').map_or(device, |(_, model)| model))
        .collect()
}
