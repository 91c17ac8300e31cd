//! Where a run trains: devices, hosts, threads, versions.

use std::collections::BTreeMap;

use ddp_comm::World;
use ddp_kernels::device::discover;
use ddp_kernels::{Device, matmuls, simd, threads};

use crate::devices::described;
use crate::error::Result;

/// Where each rank trains: `cuda:0 NVIDIA H200 on node7, 8 threads`.
pub(super) fn of_ranks(world: &World, devices: &[Device]) -> Result<Vec<String>> {
    let devices: Vec<String> = devices.iter().map(|&device| described(device)).collect();
    let devices = devices.join(" and ");
    let count = threads::count();
    let (host, s) = (world.host(), if count == 1 { "" } else { "s" });
    let mine = format!("{devices} on {host}, {count} thread{s}");
    let all = world.all_gather_bytes(mine.as_bytes())?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(all.into_iter().map(text).collect())
}

/// This program, with the version of this library.
pub fn program(world: &World) -> String {
    format!("{} {}", world.program(), env!("CARGO_PKG_VERSION"))
}

/// Versions by name: the processor's vector instructions, and on a GPU CUDA's libraries.
pub(super) fn versions(device: Device) -> BTreeMap<String, String> {
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
