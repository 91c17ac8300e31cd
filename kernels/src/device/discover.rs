//! What this machine has for CUDA: the driver and its GPUs, and the files of cuBLASLt, NVRTC and
//! NCCL.
//!
//! Discovery never panics or fails: a missing or broken part is reported with what it is needed for
//! and how to fix it. Only the driver is loaded, because only it can list GPUs; the other libraries
//! are found as files (cuBLASLt alone takes hundreds of megabytes). [`driver`] talks to the driver,
//! [`search`] knows the folders.

mod driver;
mod found;
mod search;

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

pub use found::{Gpu, Library};
use search::{Found, SearchEnvironment};

/// What this process can use of CUDA. `Display` shows a short table.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// The driver's library, `libcuda`: needed for any GPU.
    pub driver: Library,
    /// Matrix products: needed for linear layers on a GPU.
    pub cublaslt: Library,
    /// The compiler for CUDA C++ at run time: needed for this project's kernels.
    pub nvrtc: Library,
    /// Collectives: needed for more than one GPU.
    pub nccl: Library,
    /// The newest CUDA that the driver supports, `(13, 0)`.
    pub driver_version: Option<(u32, u32)>,
    /// The GPUs this process sees, by index.
    pub gpus: Vec<Gpu>,
    /// Why there are no GPUs, with help; None if there are some.
    pub why_no_gpu: Option<String>,
}

/// What this machine has, looked up at the first call.
///
/// The first call initialises the driver: later changes of `CUDA_VISIBLE_DEVICES` have no effect,
/// and children forked without an exec cannot use the GPUs.
pub fn discover() -> &'static Discovery {
    static DISCOVERY: OnceLock<Discovery> = OnceLock::new();
    DISCOVERY.get_or_init(|| {
        let driver_names = driver::NAMES.map(OsString::from).to_vec();
        let variable = |name: &str| std::env::var_os(name);
        Discovery::look(&SearchEnvironment::reading(
            variable,
            Path::new("/"),
            driver_names,
        ))
    })
}

impl Discovery {
    /// Looks in this environment; nothing is kept.
    fn look(environment: &SearchEnvironment) -> Discovery {
        let driver::Answer {
            library: driver,
            version: driver_version,
            gpus,
            why_no_gpu,
        } = driver::ask(environment);
        let folders = environment.library_folders();
        Discovery {
            driver,
            cublaslt: library(CUBLASLT, search::find_library(CUBLASLT.stem, &folders)),
            nvrtc: library(NVRTC, search::find_library(NVRTC.stem, &folders)),
            nccl: library(NCCL, search::find_library(NCCL.stem, &folders)),
            driver_version,
            gpus,
            why_no_gpu,
        }
    }
}

/// A library to find as a file.
#[derive(Clone, Copy)]
struct Part {
    what: &'static str,
    /// The file's name up to the version.
    stem: &'static str,
    /// What it is needed for and how to install it.
    advice: &'static str,
}

const CUBLASLT: Part = Part {
    what: "cuBLASLt",
    stem: "libcublasLt.so",
    advice: "it is needed for linear layers on a GPU. Install your distribution's package of cuBLAS or of the CUDA \
             toolkit, or the pip wheel nvidia-cublas in the active Python environment, or put the folder that holds \
             libcublasLt.so.13 in LD_LIBRARY_PATH",
};

const NVRTC: Part = Part {
    what: "NVRTC",
    stem: "libnvrtc.so",
    advice: "it is needed for compiling this project's kernels for a GPU. Install your distribution's package of NVRTC \
             or of the CUDA toolkit, or the pip wheel nvidia-cuda-nvrtc in the active Python environment, or put the \
             folder that holds libnvrtc.so.13 in LD_LIBRARY_PATH",
};

const NCCL: Part = Part {
    what: "NCCL",
    stem: "libnccl.so",
    advice: "it is needed for training on more than one GPU. Install your distribution's package libnccl2, or the pip \
             wheel nvidia-nccl-cu13 in the active Python environment, or put the folder that holds libnccl.so.2 in \
             LD_LIBRARY_PATH",
};

/// Describes the result of a search for a library's file.
fn library(part: Part, found: Found) -> Library {
    let what = part.what;
    match found {
        Found::Sound { path, version } => Library {
            what,
            found: Some(path),
            version,
            advice: None,
        },
        Found::Broken { path, why } => {
            let advice = Some(format!(
                "broken: {why}. Reinstall or remove it; {}",
                part.advice
            ));
            Library {
                what,
                found: Some(path),
                version: None,
                advice,
            }
        }
        Found::Missing => Library {
            what,
            found: None,
            version: None,
            advice: Some(part.advice.to_string()),
        },
    }
}

impl fmt::Display for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.driver, &self.cublaslt, &self.nvrtc, &self.nccl] {
            writeln!(f, "{part}")?;
        }
        if let Some((major, minor)) = self.driver_version {
            writeln!(f, "{:<14} {major}.{minor} at most", "driver's CUDA")?;
        }
        if self.gpus.is_empty() {
            return write!(
                f,
                "no CUDA device: {}",
                self.why_no_gpu.as_deref().unwrap_or("for no reason known")
            );
        }
        for (position, gpu) in self.gpus.iter().enumerate() {
            write!(f, "{}{gpu}", if position == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
