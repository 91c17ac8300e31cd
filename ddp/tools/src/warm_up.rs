//! `ddp-train warm-up`: compiles the GPU kernels before a run needs them, for an image also where
//! there is no GPU.

use std::fmt;
use std::str::FromStr;

use ddp_kernels::ahead;
use ddp_kernels::device::discover;

use crate::error::{Error, Result};
use crate::output::Say;

/// A kind of GPU by its compute capability: `sm_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuArchitecture(u32, u32);

impl FromStr for GpuArchitecture {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<GpuArchitecture, String> {
        let number = text.strip_prefix("sm_").and_then(|it| it.parse().ok());
        match number {
            Some(number @ 75..1000) => Ok(GpuArchitecture(number / 10, number % 10)),
            _ => Err("expected sm_75 or newer, such as sm_80 (A100) or sm_90 (H100, H200)".into()),
        }
    }
}

impl fmt::Display for GpuArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.0, self.1)
    }
}

/// Compiles for `wanted`, or else for the GPUs of this machine.
pub fn warm_up(wanted: &[GpuArchitecture], say: Say<'_>) -> Result<()> {
    let here = discover().gpus.iter().map(|gpu| gpu.compute_capability);
    let mut all: Vec<_> = match wanted {
        [] => here
            .map(|(major, minor)| GpuArchitecture(major, minor))
            .collect(),
        wanted => wanted.to_vec(),
    };
    all.sort_by_key(|it| (it.0, it.1));
    all.dedup();
    if all.is_empty() {
        let why = discover().why_no_gpu.as_deref().unwrap_or("none found");
        return Err(Error::Unhealthy(format!(
            "warm-up: expected a GPU of this machine, got none: {why}; help: name the kinds of GPUs to compile for, such as sm_90"
        )));
    }
    let names: Vec<String> = all.iter().map(GpuArchitecture::to_string).collect();
    let names = names.join(", ");
    let capabilities: Vec<_> = all.iter().map(|it| (it.0, it.1)).collect();
    let compiled = ahead::compile(&capabilities, |files, _| {
        tracing::info!("compiling {files} files for {names}");
    })?;
    let Some((files, folder)) = compiled else {
        return Err(Error::Usage(
            "warm-up: expected a folder for compiled kernels, got DDP_KERNEL_CACHE=off or no HOME; \
             help: let DDP_KERNEL_CACHE name a folder"
                .into(),
        ));
    };
    say(&format!(
        "compiled {files} files for {names}; all are in {folder}"
    ))
}
