//! What this machine offers for CUDA: the driver and its GPUs, and where cuBLASLt, NVRTC, its headers and NCCL lie.
//!
//! Looking never panics and never fails: a part that is absent or broken comes back with what it is needed for and
//! what to do. Only the driver is loaded, since nothing else can name the GPUs; the other libraries are found as
//! files and stay unloaded (cuBLASLt alone takes hundreds of megabytes). [`driver`] talks to the driver, [`search`]
//! knows the folders.

mod driver;
mod search;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::human_bytes;
use search::{Found, SearchEnvironment};

/// What of CUDA is on this machine, as this process sees it. Its `Display` is a short table.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// The driver's library, `libcuda`: needed for any GPU at all.
    pub driver: Library,
    /// Matrix products: needed for linear layers on a GPU.
    pub cublaslt: Library,
    /// The compiler for CUDA C++ at run time: needed for this project's kernels.
    pub nvrtc: Library,
    /// The folder with `cuda_bf16.h` and `cuda_fp16.h`, which NVRTC does not find by itself and no kernel of this release
    /// needs.
    pub nvrtc_headers: Library,
    /// Collectives: needed for more than one GPU.
    pub nccl: Library,
    /// The newest CUDA that the driver supports, `(13, 0)`.
    pub driver_version: Option<(u32, u32)>,
    /// The GPUs this process sees, by index.
    pub gpus: Vec<Gpu>,
    /// Why there are no GPUs, and what to do. Present exactly when `gpus` is empty.
    pub why_no_gpu: Option<String>,
}

/// One GPU, as the driver describes it. A driver too old to answer a question leaves that field empty or zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its index in this process: the N of `cuda:N`.
    pub index: usize,
    /// What the vendor calls it.
    pub name: String,
    /// All its memory, free or not.
    pub memory_bytes: u64,
    /// Major and minor, `(9, 0)` for sm_90.
    pub compute_capability: (u32, u32),
    /// `GPU-` (`MIG-` for a slice of one) and 32 hexadecimal digits: the same in every process, whatever the indices.
    pub uuid: String,
}

/// One part of CUDA: a library, or a folder of headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// What it is called.
    pub what: &'static str,
    /// Where it is.
    pub found: Option<PathBuf>,
    /// Its version, as far as files tell: of a bare `libnccl.so.2`, only `2`.
    pub version: Option<String>,
    /// What to do about it, where it is missing or broken.
    pub advice: Option<String>,
}

impl Library {
    /// Whether it was found with nothing wrong to be seen.
    pub fn is_sound(&self) -> bool {
        self.found.is_some() && self.advice.is_none()
    }
}

/// What this machine has, looked up on the first call and remembered.
///
/// The first call initialises the driver: later changes of `CUDA_VISIBLE_DEVICES` go unseen, and children forked
/// without an exec cannot use the GPUs.
pub fn discover() -> &'static Discovery {
    static DISCOVERY: OnceLock<Discovery> = OnceLock::new();
    DISCOVERY.get_or_init(|| {
        let driver_names = driver::NAMES.map(OsString::from).to_vec();
        let variable = |name: &str| std::env::var_os(name);
        Discovery::look(&SearchEnvironment::reading(variable, Path::new("/"), driver_names))
    })
}

impl Discovery {
    /// Looks in this environment, remembering nothing.
    fn look(environment: &SearchEnvironment) -> Discovery {
        let driver::Answer { library: driver, version: driver_version, gpus, why_no_gpu } = driver::ask(environment);
        let folders = environment.library_folders();
        let nvrtc = library(NVRTC, search::find_library(NVRTC.stem, &folders));
        let nvrtc_headers = headers(environment, nvrtc.found.as_deref());
        Discovery {
            driver,
            cublaslt: library(CUBLASLT, search::find_library(CUBLASLT.stem, &folders)),
            nvrtc,
            nvrtc_headers,
            nccl: library(NCCL, search::find_library(NCCL.stem, &folders)),
            driver_version,
            gpus,
            why_no_gpu,
        }
    }
}

/// A library to be found as a file.
#[derive(Clone, Copy)]
struct Part {
    what: &'static str,
    /// The file's name up to the version.
    stem: &'static str,
    /// What it is needed for and how people get it.
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

const HEADERS: &str = "NVRTC headers";
const HEADERS_ADVICE: &str = "this release's kernels do without. cuda_bf16.h and cuda_fp16.h are needed for kernels \
     that include them, and NVRTC comes without them. To have them, install your distribution's package of the CUDA \
     runtime's headers, or the pip wheel nvidia-cuda-runtime in the active Python environment, or set \
     DDP_CUDA_INCLUDE to the folder that holds them";

/// What a search for a library's file comes to.
fn library(part: Part, found: Found) -> Library {
    let what = part.what;
    match found {
        Found::Sound { path, version } => Library { what, found: Some(path), version, advice: None },
        Found::Broken { path, why } => {
            let advice = Some(format!("broken: {why}. Reinstall or remove it; {}", part.advice));
            Library { what, found: Some(path), version: None, advice }
        }
        Found::Missing => Library { what, found: None, version: None, advice: Some(part.advice.to_string()) },
    }
}

/// The folder of headers. One asked for by name is taken or complained of, never passed over in silence.
fn headers(environment: &SearchEnvironment, nvrtc: Option<&Path>) -> Library {
    let folders = environment.include_override.clone();
    let asked_for = !folders.is_empty();
    let folders = if asked_for { folders } else { environment.include_folders(nvrtc) };
    if let Some(folder) = search::find_headers(&folders) {
        return Library { what: HEADERS, version: search::headers_version(&folder), found: Some(folder), advice: None };
    }
    let advice = if asked_for {
        let list: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        format!("DDP_CUDA_INCLUDE is {}, which does not hold both: {HEADERS_ADVICE}, or unset it", list.join(":"))
    } else {
        HEADERS_ADVICE.to_string()
    };
    Library { what: HEADERS, found: None, version: None, advice: Some(advice) }
}

impl fmt::Display for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in [&self.driver, &self.cublaslt, &self.nvrtc, &self.nvrtc_headers, &self.nccl] {
            writeln!(f, "{part}")?;
        }
        if let Some((major, minor)) = self.driver_version {
            writeln!(f, "{:<14} {major}.{minor} at most", "driver's CUDA")?;
        }
        if self.gpus.is_empty() {
            return write!(f, "no CUDA device: {}", self.why_no_gpu.as_deref().unwrap_or("for no reason known"));
        }
        for (position, gpu) in self.gpus.iter().enumerate() {
            write!(f, "{}{gpu}", if position == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14} ", self.what)?;
        let advice = self.advice.as_deref();
        let Some(path) = &self.found else {
            let advice = advice.unwrap_or("no advice");
            return write!(f, "{}{advice}", if advice.starts_with("broken") { "" } else { "not found: " });
        };
        write!(f, "{}", path.display())?;
        if let Some(version) = &self.version {
            write!(f, " ({version})")?;
        }
        advice.map_or(Ok(()), |advice| write!(f, ", {advice}"))
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = human_bytes(usize::try_from(self.memory_bytes).unwrap_or(usize::MAX));
        let (major, minor) = self.compute_capability;
        write!(f, "cuda:{} {}, {memory}, sm_{major}{minor}", self.index, self.name)?;
        if self.uuid.is_empty() { Ok(()) } else { write!(f, ", {}", self.uuid) }
    }
}

#[cfg(test)]
mod tests;
