//! Devices: `Device::{Cpu, Cuda(index)}`, their names, which one a rank uses, and what this machine
//! has for CUDA: the driver and its GPUs, and the files of cuBLASLt, NVRTC and NCCL.
//!
//! Nothing falls back silently: a device that cannot be used is an error that says why. Discovery
//! never panics or fails: a missing or broken part is reported with what it is needed for and how
//! to fix it. Only the driver is loaded, because only it can list GPUs; the other libraries are
//! found as files (cuBLASLt alone takes hundreds of megabytes). `driver.rs` talks to the driver,
//! `search.rs` knows the folders.

mod driver;
mod search;

pub use driver::{CudaLibrary, FoundGpu};
pub use search::Candidate;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use search::SearchEnvironment;

/// The memory that a tensor is in, and the processor that operations on it run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// Host memory and the CPU.
    Cpu,
    /// A CUDA device, by its index among those that this process sees.
    Cuda(usize),
}

impl Device {
    /// A GPU that does not exist. Tensors on it have no memory, and operations check nothing but
    /// what they check before they run, and do nothing: to learn what a model would need.
    pub const PLANNED: Device = Device::Cuda(usize::MAX);
    /// The same for what runs on the CPU.
    pub const PLANNED_CPU: Device = Device::Cuda(usize::MAX - 1);

    /// The device without memory on which a model takes what it would take on this one.
    pub fn planned(self) -> Device {
        if self.is_accelerator() {
            Device::PLANNED
        } else {
            Device::PLANNED_CPU
        }
    }

    /// Whether this is a device without memory.
    pub fn is_planned(self) -> bool {
        matches!(self, Device::PLANNED | Device::PLANNED_CPU)
    }

    /// Whether this is not the CPU.
    pub fn is_accelerator(self) -> bool {
        !matches!(self, Device::Cpu | Device::PLANNED_CPU)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Device::Cpu => f.pad("cpu"),
            Device::PLANNED_CPU => f.pad("cpu (planned)"),
            Device::PLANNED => f.pad("cuda (planned)"),
            Device::Cuda(index) => f.pad(&format!("cuda:{index}")),
        }
    }
}

/// A process among the ranks of a job: what data and models need to know of it. The world of
/// `ddp-comm` turns into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its number, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
    /// The device that it trains on, if it has chosen one.
    pub device: Option<Device>,
}

/// What this process can use of CUDA. `Display` shows a short table.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// The driver's library, `libcuda`: needed for any GPU.
    pub driver: CudaLibrary,
    /// Matmuls: needed for linear layers on a GPU.
    pub cublaslt: CudaLibrary,
    /// The compiler for CUDA C++ at run time: needed for this project's kernels.
    pub nvrtc: CudaLibrary,
    /// Collectives: needed for more than one GPU.
    pub nccl: CudaLibrary,
    /// The newest CUDA that the driver supports, `(13, 0)`.
    pub driver_version: Option<(u32, u32)>,
    /// The GPUs this process sees, by index.
    pub gpus: Vec<FoundGpu>,
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
        let program = std::env::current_exe().ok();
        let environment = SearchEnvironment::reading(variable, Path::new("/"), driver_names);
        Discovery::look(environment.of_program(program.as_deref()))
    })
}

impl Discovery {
    /// Looks in this environment; nothing is kept.
    fn look(mut environment: SearchEnvironment) -> Discovery {
        let (driver, driver_version, answer) = driver::ask(&environment);
        let (gpus, why_no_gpu) = match answer {
            Ok(gpus) => (gpus, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        let find = |environment: &SearchEnvironment| {
            let folders = environment.library_folders();
            [CUBLASLT, NVRTC, NCCL].map(|part| library(part, &folders, driver_version))
        };
        let mut found = find(&environment);
        // Starting Python takes time, so it is asked only where something is missing.
        let is_short = !gpus.is_empty() && found.iter().any(|library| !library.is_sound());
        if is_short && environment.ask_python() {
            found = find(&environment);
        }
        let [cublaslt, nvrtc, nccl] = found;
        Discovery {
            driver,
            cublaslt,
            nvrtc,
            nccl,
            driver_version,
            gpus,
            why_no_gpu,
        }
    }

    /// Why no GPU can be used although there is a driver; None if one can, or without a driver.
    pub fn why_unusable(&self) -> Option<&str> {
        let has_driver = self.driver.found.is_some() || Path::new("/proc/driver/nvidia").exists();
        self.why_no_gpu.as_deref().filter(|_| has_driver)
    }

    /// Why a library of this major version of CUDA cannot be used here.
    pub(crate) fn refuse_cuda(&self, major: u64) -> Result<(), String> {
        CUBLASLT
            .refuse(&[major], self.driver_version)
            .map_or(Ok(()), Err)
    }
}

/// A library to find as a file.
#[derive(Clone, Copy)]
struct LibraryFile {
    what: &'static str,
    /// The file's name up to the version.
    stem: &'static str,
    /// The oldest usable version.
    oldest: &'static [u64],
    /// Whether its version is that of CUDA, which must not be newer than the driver's.
    has_cuda_version: bool,
    /// What it is needed for and how to install it.
    advice: &'static str,
}

const CUBLASLT: LibraryFile = LibraryFile {
    what: "cuBLASLt",
    stem: "libcublasLt.so",
    oldest: &[12],
    has_cuda_version: true,
    advice: "it is needed for linear layers on a GPU. Install your distribution's package of cuBLAS or of the CUDA \
             toolkit, or the pip wheel nvidia-cublas in the active Python environment, or put the folder that holds \
             libcublasLt.so.13 in LD_LIBRARY_PATH",
};

const NVRTC: LibraryFile = LibraryFile {
    what: "NVRTC",
    stem: "libnvrtc.so",
    oldest: &[12],
    has_cuda_version: true,
    advice: "it is needed for compiling this project's kernels for a GPU. Install your distribution's package of NVRTC \
             or of the CUDA toolkit, or the pip wheel nvidia-cuda-nvrtc in the active Python environment, or put the \
             folder that holds libnvrtc.so.13 in LD_LIBRARY_PATH",
};

const NCCL: LibraryFile = LibraryFile {
    what: "NCCL",
    stem: "libnccl.so",
    oldest: &[2, 18],
    has_cuda_version: false,
    advice: "it is needed for training on more than one GPU. Install your distribution's package libnccl2, or the pip \
             wheel nvidia-nccl-cu13 in the active Python environment, or put the folder that holds libnccl.so.2 in \
             LD_LIBRARY_PATH",
};

impl LibraryFile {
    /// Why a version cannot be used with this driver. A major version alone may be new enough.
    fn refuse(&self, version: &[u64], driver: Option<(u32, u32)>) -> Option<String> {
        let common = version.len().min(self.oldest.len());
        if version[..common] < self.oldest[..common] {
            let oldest: Vec<String> = self.oldest.iter().map(u64::to_string).collect();
            return Some(format!("too old: expected {} or later", oldest.join(".")));
        }
        let (major, minor) = driver.filter(|_| self.has_cuda_version)?;
        (version.first()? > &major.into())
            .then(|| format!("too new: the driver supports CUDA {major}.{minor} at most"))
    }
}

/// Searches for a library's file.
fn library(part: LibraryFile, folders: &[PathBuf], driver: Option<(u32, u32)>) -> CudaLibrary {
    let candidates = search::candidates(part.stem, folders, |version| part.refuse(version, driver));
    let usable = candidates.iter().find(|file| file.skipped.is_none());
    let first = usable.or(candidates.first());
    let advice = match first.map(|file| file.skipped.as_deref()) {
        Some(None) => None,
        Some(Some(why)) => Some(format!("{why}. Reinstall or remove it; {}", part.advice)),
        None => Some(part.advice.to_string()),
    };
    CudaLibrary {
        what: part.what,
        found: first.map(|file| file.path.clone()),
        version: first.and_then(|file| file.version.clone()),
        advice,
        candidates,
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
