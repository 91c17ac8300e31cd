//! The version and abilities of cuBLASLt, which multiplies matrices on GPUs.

use crate::Device;
use crate::error::{Caller, Result};
use crate::launch::GpuLaunch;
use crate::stream::Stream;

/// What matmuls of a stream use besides their operands: memory and, if limited, multiprocessors.
pub use crate::launch::blaslt::{WORKSPACE_BYTES, multiprocessors};

#[track_caller]
fn launcher(device: Device) -> Result<Option<GpuLaunch>> {
    let by = Caller::new("matmuls");
    if !device.is_accelerator() {
        return Ok(None);
    }
    let queue = Stream::current_queue(device, by)?;
    Ok(Some(GpuLaunch::new(queue, by)))
}

/// The version of cuBLASLt that a device uses: `13.1.0`, with `multiprocessors` if that is set,
/// because it may change algorithms and so bits. None for the CPU.
#[track_caller]
pub fn version(device: Device) -> Result<Option<String>> {
    let Some(gpu) = launcher(device)? else {
        return Ok(None);
    };
    let version = gpu.cublaslt_version()?;
    let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
    let planned = multiprocessors().map(|count| format!(" for {count} multiprocessors"));
    let planned = planned.unwrap_or_default();
    Ok(Some(format!("{major}.{minor}.{patch}{planned}")))
}

/// Where the tanh form of gelu is computed in bf16 and TF32.
#[track_caller]
pub fn gelu(device: Device) -> Result<&'static str> {
    Ok(match launcher(device)? {
        Some(gpu) if gpu.fuses_gelu()? => "cuBLASLt's epilogue",
        _ => "a separate kernel",
    })
}
