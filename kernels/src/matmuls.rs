//! Which of cuBLASLt's algorithms matmuls on GPUs use.
//!
//! Without a call here, each kind of matmul uses the first algorithm of the library's heuristic. A
//! program may have the heuristic's first ones timed and use the fastest, in other processes too.
//! Algorithms differ in their last bits.

use serde::{Deserialize, Serialize};

use crate::device::discover;
use crate::error::{Caller, Result};
use crate::heartbeat::{self, Work};
use crate::launch::Launcher;
use crate::launch::blaslt::Kind as Matmul;
use crate::stream::Stream;
use crate::{Device, choices};

choices! {
    /// Which algorithms are used.
    #[derive(Default)]
    pub enum MatmulChoice {
        /// The first of cuBLASLt's heuristic: the same in every run
        #[default]
        First = "first",
        /// The fastest, measured once for each kind of GPU; last bits may differ from first
        Timed = "timed",
    }
}

/// A kind of matmul: its shape, types and epilogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kind(Matmul);

/// The algorithms of kinds of matmuls, for the ranks of a job and for later runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Algorithms {
    measured_on: String,
    /// In the library's words.
    #[serde(rename = "products")]
    matmuls: Vec<(Kind, [u64; 8])>,
}

#[track_caller]
fn launcher(device: Device) -> Result<Option<Launcher>> {
    let by = Caller::new("matmuls");
    if !device.is_accelerator() {
        return Ok(None);
    }
    let queue = Stream::current_queue(device, by)?;
    Ok(Some(Launcher::new(queue, by)))
}

/// The kinds of matmuls that this process has made on a device. None on the CPU.
#[track_caller]
pub fn kinds(device: Device) -> Result<Vec<Kind>> {
    let Some(gpu) = launcher(device)? else {
        return Ok(Vec::new());
    };
    Ok(gpu.kinds_of_matmuls()?.into_iter().map(Kind).collect())
}

/// What algorithms depend on: the device's model, cuBLASLt and the driver. Empty for the CPU.
#[track_caller]
pub fn measured_on(device: Device) -> Result<String> {
    let Some(gpu) = launcher(device)? else {
        return Ok(String::new());
    };
    let found = discover();
    let known = found.gpus.iter().find(|known| known.index == gpu.gpu.index);
    let name = known.map_or("?", |known| known.name.as_str());
    let version = gpu.cublaslt_version()?;
    let (major, minor) = found.driver_version.unwrap_or_default();
    Ok(format!(
        "{name}, cuBLASLt {version}, driver {major}.{minor}"
    ))
}

/// The version of cuBLASLt that a device uses: `13.1.0`. None for the CPU.
#[track_caller]
pub fn version(device: Device) -> Result<Option<String>> {
    let Some(gpu) = launcher(device)? else {
        return Ok(None);
    };
    let version = gpu.cublaslt_version()?;
    let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
    Ok(Some(format!("{major}.{minor}.{patch}")))
}

/// Where the tanh form of gelu is computed in bf16 and TF32, unless `fastest` decides.
#[track_caller]
pub fn gelu(device: Device) -> Result<&'static str> {
    Ok(match launcher(device)? {
        Some(gpu) if gpu.fuses_gelu()? => "cuBLASLt's epilogue",
        _ => "a separate kernel",
    })
}

/// The fastest algorithms for these kinds on a device, as found on disk or measured now. Waits for
/// the device, and takes memory for a moment.
#[track_caller]
pub fn fastest(device: Device, kinds: Vec<Kind>) -> Result<Algorithms> {
    let mut algorithms = Algorithms {
        measured_on: measured_on(device)?,
        matmuls: Vec::new(),
    };
    let Some(gpu) = launcher(device)? else {
        return Ok(algorithms);
    };
    for kind in kinds {
        heartbeat::beat(Work::Computes);
        if let Some(words) = gpu.fastest(&kind.0, &algorithms.measured_on)? {
            algorithms.matmuls.push((kind, words));
        }
    }
    Ok(algorithms)
}

impl Algorithms {
    /// What they were measured with: as `measured_on`.
    pub fn measured_on(&self) -> &str {
        &self.measured_on
    }

    /// How many matmuls they are for.
    pub fn count(&self) -> usize {
        self.matmuls.len()
    }

    /// Uses these algorithms on `device` from here on. Returns how many cannot be used there:
    /// matmuls of these kinds stay as they are.
    #[track_caller]
    pub fn use_on(&self, device: Device) -> Result<usize> {
        let Some(gpu) = launcher(device)? else {
            return Ok(0);
        };
        let mut refused = 0;
        for (kind, words) in &self.matmuls {
            refused += usize::from(!gpu.use_algorithm(&kind.0, *words)?);
        }
        Ok(refused)
    }
}
