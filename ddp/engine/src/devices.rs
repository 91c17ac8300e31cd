//! Names of devices and versions, and where ranks train; `find.rs` decides on which devices.

mod find;

use std::collections::BTreeMap;

use ddp_comm::World;
use ddp_kernels::device::discover;
use ddp_kernels::{Device, matmuls, simd, threads};

use crate::error::Result;
use crate::exchange;

pub use self::find::{find_devices, help_for, of_run, too_old};

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

/// The same of a real GPU: names of simulated ones are numbered.
pub(crate) fn name_of_real(device: Device) -> Option<&'static str> {
    name_of(device).filter(|_| !is_simulated(device))
}

/// Whether no such device exists: its name says so.
pub fn is_simulated(device: Device) -> bool {
    name_of(device).is_some_and(|name| name.contains("Simulated"))
}

/// Where each rank trains: `cuda:0 NVIDIA H200 on node7, 8 threads`.
pub(crate) fn of_ranks(world: &World, devices: &[Device]) -> Result<Vec<String>> {
    let devices: Vec<String> = devices.iter().map(|&device| described(device)).collect();
    let devices = devices.join(" and ");
    let count = threads::count();
    let (host, s) = (world.host(), if count == 1 { "" } else { "s" });
    let mine = format!("{devices} on {host}, {count} thread{s}");
    exchange::gather(world, &mine)
}

/// How many devices of each model the ranks have. `places` are as `of_ranks` writes them; hosts and
/// numbers of devices do not count.
pub fn models(places: &[String]) -> BTreeMap<&str, u64> {
    let mut models = BTreeMap::new();
    let devices = places.iter().map(|place| place.split(" on ").next());
    for device in devices.flat_map(|devices| devices.unwrap_or_default().split(" and ")) {
        let model = device.split_once(' ').map_or(device, |(_, model)| model);
        *models.entry(model).or_default() += 1;
    }
    models
}

/// This program, with the version of this library.
pub fn program(world: &World) -> String {
    format!("{} {}", world.program(), env!("CARGO_PKG_VERSION"))
}

/// Versions by name: the processor's vector instructions, and on a GPU CUDA's libraries.
pub(crate) fn versions(device: Device) -> BTreeMap<String, String> {
    let simd = format!("{:?}", simd::level()).to_lowercase();
    let mut versions = BTreeMap::from([("simd".into(), simd)]);
    if device.is_accelerator() {
        let found = discover();
        let driver = found
            .driver_version
            .map(|(major, minor)| format!("{major}.{minor}"));
        let libraries = [
            ("cuda-driver", driver),
            ("nvrtc", found.nvrtc.version.clone()),
            // A file's name says less than the library.
            ("cublaslt", matmuls::version(device).ok().flatten()),
            ("nccl", found.nccl.version.clone()),
        ];
        let known = libraries
            .into_iter()
            .filter_map(|(name, version)| Some((name.into(), version?)));
        versions.extend(known);
    }
    versions
}
