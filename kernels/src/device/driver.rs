//! Asks NVIDIA's driver which GPUs this process can use, and explains its errors.
//!
//! The library is loaded by name, as every CUDA program loads it, and stays loaded.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::search::{Candidate, SearchEnvironment, version_in_name};
use crate::library::{Library, file_of, functions, loader_message};
use crate::message::human_bytes;

/// The names to load, in order.
pub(super) const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

const WHAT: &str = "CUDA driver";
const ADVICE: &str = "the driver's library libcuda.so.1 is needed for any GPU at all. Install the NVIDIA driver from \
     your distribution's packages; in a container, start it with --gpus all, which brings the host's library in; if \
     it is in an unusual place, put its folder in LD_LIBRARY_PATH";

const HELP: &str = "it is not NVIDIA's driver, or one too old: look for another library of that \
     name in LD_LIBRARY_PATH, and update the driver";

/// `cuDeviceGetAttribute`: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
const CAPABILITY: [c_int; 2] = [75, 76];

/// One GPU, as the driver describes it. An unanswered question leaves the field empty or zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundGpu {
    /// Its index in this process: the N of `cuda:N`.
    pub index: usize,
    /// The vendor's name for it.
    pub name: String,
    /// All its memory, free or used.
    pub memory_bytes: u64,
    /// Major and minor, `(9, 0)` for sm_90.
    pub compute_capability: (u32, u32),
    /// `GPU-` (`MIG-` for a slice of a GPU) and 32 hexadecimal digits. The same in every process,
    /// unlike the index.
    pub uuid: String,
}

/// One library of CUDA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaLibrary {
    /// Its name.
    pub what: &'static str,
    /// Its file.
    pub found: Option<PathBuf>,
    /// Its version, as far as file names tell: only `2` for a bare `libnccl.so.2`.
    pub version: Option<String>,
    /// How to fix it if it is missing or broken.
    pub advice: Option<String>,
    /// All files of that name, in the order in which they are tried.
    pub candidates: Vec<Candidate>,
}

impl CudaLibrary {
    /// Whether it was found and looks usable.
    pub fn is_sound(&self) -> bool {
        self.found.is_some() && self.advice.is_none()
    }
}

impl fmt::Display for CudaLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14} ", self.what)?;
        let advice = self.advice.as_deref();
        let Some(path) = &self.found else {
            let advice = advice.unwrap_or("no advice");
            return write!(
                f,
                "{}{advice}",
                if advice.starts_with("broken") {
                    ""
                } else {
                    "not found: "
                }
            );
        };
        write!(f, "{}", path.display())?;
        if let Some(version) = &self.version {
            write!(f, " ({version})")?;
        }
        advice.map_or(Ok(()), |advice| write!(f, ", {advice}"))
    }
}

impl FoundGpu {
    /// Whether no such GPU exists: its name says so.
    pub fn is_simulated(&self) -> bool {
        self.name.contains("Simulated")
    }
}

impl fmt::Display for FoundGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = human_bytes(usize::try_from(self.memory_bytes).unwrap_or(usize::MAX));
        let (major, minor) = self.compute_capability;
        write!(
            f,
            "cuda:{} {}, {memory}, sm_{major}{minor}",
            self.index, self.name
        )?;
        if self.uuid.is_empty() {
            Ok(())
        } else {
            write!(f, ", {}", self.uuid)
        }
    }
}

/// Loads the driver and asks it: its library, the newest CUDA that it supports, and the GPUs or why
/// there are none.
pub(super) fn ask(environment: &SearchEnvironment) -> (CudaLibrary, CudaVersion, GpusOrWhy) {
    let (functions, name) = match load(&environment.driver_names) {
        Ok(loaded) => loaded,
        Err(library) => {
            let why = why_without_library(environment, &library);
            return (library, None, Err(why));
        }
    };
    let found = file_of(functions.cuInit as *const c_void).unwrap_or_else(|| PathBuf::from(name));
    let library = CudaLibrary {
        what: WHAT,
        version: release(&found),
        found: Some(found),
        advice: None,
        candidates: Vec::new(),
    };
    let (version, gpus) = (functions.version(), functions.gpus(environment));
    (library, version, gpus)
}

type CudaVersion = Option<(u32, u32)>;
type GpusOrWhy = Result<Vec<FoundGpu>, String>;

/// The driver's release, `580.65.06`, from the name of the real file.
fn release(path: &Path) -> Option<String> {
    let real = path.canonicalize().ok()?;
    version_in_name("libcuda.so", &real).filter(|version| version.contains('.'))
}

/// The functions of the first library that the loader accepts, with its name; or what is wrong.
fn load(names: &[OsString]) -> Result<(DiscoveryFunctions, &OsStr), CudaLibrary> {
    let unusable = |found, advice| CudaLibrary {
        what: WHAT,
        found,
        version: None,
        advice: Some(advice),
        candidates: Vec::new(),
    };
    let mut broken = None;
    for name in names {
        // SAFETY: opening a library runs its initialisers. The caller names NVIDIA's driver, or a
        // file that a test made; every CUDA program loads the driver by this name. RTLD_NOW: a
        // library with undefined symbols fails here instead of ending the process at a call.
        match unsafe { Loaded::open(Some(name), RTLD_NOW | RTLD_LOCAL) } {
            Ok(handle) => {
                let library = Library::new(handle.into(), WHAT);
                return match DiscoveryFunctions::load(library, HELP) {
                    Ok(functions) => Ok((functions, name)),
                    Err(lacks) => Err(unusable(Some(name.into()), format!("broken: {lacks}"))),
                };
            }
            Err(error) => {
                let message = loader_message(&error);
                if !is_absence(&message, &name.to_string_lossy()) {
                    broken.get_or_insert(message);
                }
            }
        }
    }
    let Some(message) = broken else {
        return Err(unusable(None, ADVICE.to_string()));
    };
    // The loader's message begins with the file at fault.
    let file = message
        .split_once(": ")
        .map(|(file, _)| PathBuf::from(file))
        .filter(|file| file.is_file());
    let advice = format!(
        "broken: the loader says {message:?}. Reinstall the NVIDIA driver, or remove the file if \
         it is not the driver's; without it there is no GPU at all"
    );
    Err(unusable(file, advice))
}

/// Whether the loader found no file of that name, in the words of glibc or musl. If the library
/// exists but needs a missing one, the message names that one.
fn is_absence(message: &str, name: &str) -> bool {
    message.contains("No such file")
        && (message.starts_with(&format!("{name}: "))
            || message.contains(&format!("library {name}: ")))
}

functions! {
    /// The driver's functions that discovery calls, as in NVIDIA's cuda.h.
    struct DiscoveryFunctions {
        fn cuInit(c_uint) -> c_int;
        fn cuDriverGetVersion(*mut c_int) -> c_int;
        fn cuDeviceGetCount(*mut c_int) -> c_int;
        fn cuDeviceGet(*mut c_int, c_int) -> c_int;
        fn cuDeviceGetName(*mut c_char, c_int, c_int) -> c_int;
        fn cuDeviceTotalMem_v2(*mut usize, c_int) -> c_int;
        fn cuDeviceGetAttribute(*mut c_int, c_int, c_int) -> c_int;
        fn cuDeviceGetUuid_v2(*mut [u8; 16], c_int) -> c_int;
    }
}

impl DiscoveryFunctions {
    /// The newest CUDA it supports. It can be asked before cuInit.
    fn version(&self) -> Option<(u32, u32)> {
        // SAFETY: the driver writes one int, and `to` points to one.
        let version = answer(|to| unsafe { (self.cuDriverGetVersion)(to) })?;
        let version = u32::try_from(version).ok().filter(|&version| version > 0)?;
        Some((version / 1000, version % 1000 / 10))
    }

    /// The GPUs, at least one, or why there are none.
    fn gpus(&self, environment: &SearchEnvironment) -> Result<Vec<FoundGpu>, String> {
        // SAFETY: cuInit takes the flags 0, and may be called again and from any thread.
        let code = unsafe { (self.cuInit)(0) };
        if code != 0 {
            return Err(refusal("cuInit", code, environment));
        }
        let mut count = 0;
        // SAFETY: the driver is initialised and writes one int, to `count`.
        let code = unsafe { (self.cuDeviceGetCount)(&mut count) };
        if code != 0 {
            return Err(refusal("cuDeviceGetCount", code, environment));
        }
        let mut gpus = Vec::new();
        let mut refused = None;
        for index in 0..count.max(0) {
            let mut device = 0;
            // SAFETY: the driver is initialised, checks the index and writes one int, to `device`.
            match unsafe { (self.cuDeviceGet)(&mut device, index) } {
                0 => gpus.push(self.describe(index as usize, device)),
                code => refused = Some(refusal("cuDeviceGet", code, environment)),
            }
        }
        if gpus.is_empty() {
            Err(refused.unwrap_or_else(|| why_no_device(environment)))
        } else {
            Ok(gpus)
        }
    }

    /// What the driver says of one device. A question that fails leaves the field empty or zero.
    fn describe(&self, index: usize, device: c_int) -> FoundGpu {
        let name = self
            .name(device)
            .unwrap_or_else(|| "GPU of unknown name".to_string());
        // SAFETY: `device` came from cuDeviceGet, and the driver writes one size_t.
        let memory_bytes = answer(|to| unsafe { (self.cuDeviceTotalMem_v2)(to, device) });
        let [major, minor] = CAPABILITY.map(|attribute| {
            // SAFETY: as above, and one int; the driver checks the attribute.
            let value = answer(|to| unsafe { (self.cuDeviceGetAttribute)(to, attribute, device) });
            value
                .and_then(|value: c_int| value.try_into().ok())
                .unwrap_or(0)
        });
        // SAFETY: as above, and a CUuuid of 16 bytes.
        let uuid = answer(|to| unsafe { (self.cuDeviceGetUuid_v2)(to, device) });
        FoundGpu {
            index,
            memory_bytes: memory_bytes.unwrap_or(0) as u64,
            compute_capability: (major, minor),
            uuid: uuid.map_or_else(String::new, |uuid| uuid_text(&name, uuid)),
            name,
        }
    }

    fn name(&self, device: c_int) -> Option<String> {
        let mut text = [0; 256];
        let size = text.len() as c_int;
        // SAFETY: `device` came from cuDeviceGet, and the driver writes at most `size` bytes.
        let code = unsafe { (self.cuDeviceGetName)(text.as_mut_ptr().cast(), size, device) };
        let text = CStr::from_bytes_until_nul(&text).ok()?;
        (code == 0 && !text.is_empty()).then(|| text.to_string_lossy().into_owned())
    }
}

/// The value that a function of the driver writes, if it succeeds.
fn answer<T: Default>(call: impl FnOnce(*mut T) -> c_int) -> Option<T> {
    let mut value = T::default();
    (call(&mut value) == 0).then_some(value)
}

/// As nvidia-smi and CUDA_VISIBLE_DEVICES write it. A slice's name says that it is one: `NVIDIA
/// H200 MIG 1g.18gb`.
fn uuid_text(name: &str, uuid: [u8; 16]) -> String {
    let mut text = if name.contains(" MIG ") { "MIG" } else { "GPU" }.to_string();
    for (position, byte) in uuid.iter().enumerate() {
        let dash = if matches!(position, 0 | 4 | 6 | 8 | 10) {
            "-"
        } else {
            ""
        };
        text.push_str(&format!("{dash}{byte:02x}"));
    }
    text
}

/// Why there is no GPU where the library cannot be loaded.
fn why_without_library(environment: &SearchEnvironment, library: &CudaLibrary) -> String {
    if let Some(problem) = library
        .advice
        .as_ref()
        .and_then(|advice| advice.strip_prefix("broken: "))
    {
        return format!("the CUDA driver's library is broken: {problem}");
    }
    let absent = "the CUDA driver's library (libcuda.so.1) is not here";
    if environment
        .root
        .join("proc/driver/nvidia/version")
        .is_file()
    {
        return format!(
            "{absent}, although the kernel has the driver: in a container, start it with --gpus all, and with \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility where it sets that; else install the driver's libraries of \
             the same release"
        );
    }
    format!(
        "{absent}: this machine has no NVIDIA driver, or this container was started without --gpus all"
    )
}

/// Why a driver that works shows no device.
fn why_no_device(environment: &SearchEnvironment) -> String {
    if let Some(visible) = &environment.visible_devices {
        let visible = visible.to_string_lossy();
        if visible.trim().is_empty() {
            return "CUDA_VISIBLE_DEVICES is set and empty, which hides every GPU. Unset it, or name GPUs in it, as in \
                    CUDA_VISIBLE_DEVICES=0,1"
                .to_string();
        }
        return format!(
            "CUDA_VISIBLE_DEVICES is {visible:?}, and its first entry is not a GPU of this machine. Unset it, or name \
             GPUs that `nvidia-smi -L` lists; in a batch job, ask the scheduler for GPUs"
        );
    }
    "the driver is here and sees no GPU. In a container, start it with --gpus all; in a batch job, ask the scheduler \
     for GPUs; else see what `nvidia-smi` says"
        .to_string()
}

/// A code of the driver in words, with what to do.
fn refusal(call: &str, code: c_int, environment: &SearchEnvironment) -> String {
    let why = match code {
        100 => return why_no_device(environment),
        2 => {
            "(OUT_OF_MEMORY): the GPU or the host has no memory left. End the other processes on \
             it"
        }
        3 => "(NOT_INITIALIZED): the driver did not initialise. See what `nvidia-smi` says",
        34 => {
            "(STUB_LIBRARY): the library loaded is the toolkit's stand-in for linking. Take its \
             folder `stubs` out of LD_LIBRARY_PATH"
        }
        46 => {
            "(DEVICE_UNAVAILABLE): another process holds the GPU alone, or it has failed. See \
             what `nvidia-smi` says of its compute mode"
        }
        101 => {
            "(INVALID_DEVICE): the driver lists a GPU that it cannot open. See what `nvidia-smi` \
             says"
        }
        304 => {
            "(OPERATING_SYSTEM): the system refused the driver a call. Check that this user may \
             read and write /dev/nvidia*; in a container, start it with --gpus all"
        }
        802 => {
            "(SYSTEM_NOT_READY): the GPUs are not ready. On machines with NVSwitch, the service \
             nvidia-fabricmanager must run, in the driver's release"
        }
        803 => {
            "(SYSTEM_DRIVER_MISMATCH): the kernel has another release of the driver than this \
             library is of, usually after an update. Reboot, or reload the nvidia kernel modules; \
             in a container, remove a libcuda that the image itself brings"
        }
        804 => {
            "(COMPAT_NOT_SUPPORTED_ON_DEVICE): the library loaded is that of a cuda-compat \
             package, which this GPU or this driver does not take. Remove the package or take its \
             folder `compat` out of LD_LIBRARY_PATH, or update the driver"
        }
        805..=807 => {
            "(MPS): the CUDA MPS server cannot be reached. Start or restart \
             nvidia-cuda-mps-control, or unset CUDA_MPS_PIPE_DIRECTORY"
        }
        999 => {
            "(UNKNOWN): the driver does not say why. Usually the kernel module nvidia_uvm is not \
             loaded, or lost the GPU during a suspend: reload it or reboot; in a container, \
             check that /dev/nvidia-uvm exists"
        }
        _ => "(not known to this program): see what `nvidia-smi` says",
    };
    format!("{call} failed with CUDA error {code} {why}")
}

#[cfg(test)]
mod tests;
