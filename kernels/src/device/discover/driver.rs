//! Asks NVIDIA's driver which GPUs this process sees, and puts its refusals in words.
//!
//! The library is loaded by name, as every CUDA program here loads it, and stays loaded. Each function is resolved by
//! itself: a driver that lacks one still answers the other questions.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::search::{SearchEnvironment, version_in_name};
use super::{Gpu, Library};

/// The names the loader is given, in order.
pub(super) const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

const WHAT: &str = "CUDA driver";
const ADVICE: &str = "the driver's library libcuda.so.1 is needed for any GPU at all. Install the NVIDIA driver from \
     your distribution's packages; in a container, start it with --gpus all, which brings the host's library in; if \
     it is in an unusual place, put its folder in LD_LIBRARY_PATH";

/// `cuDeviceGetAttribute`: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
const CAPABILITY: [c_int; 2] = [75, 76];

/// All that the driver said.
pub(super) struct Answer {
    pub(super) library: Library,
    pub(super) version: Option<(u32, u32)>,
    pub(super) gpus: Vec<Gpu>,
    pub(super) why_no_gpu: Option<String>,
}

/// Loads the driver and asks it for its GPUs.
pub(super) fn ask(environment: &SearchEnvironment) -> Answer {
    let (loaded, name) = match load(&environment.driver_names) {
        Ok(loaded) => loaded,
        Err(library) => {
            let why_no_gpu = Some(why_without_library(environment, &library));
            return Answer { library, version: None, gpus: Vec::new(), why_no_gpu };
        }
    };
    let functions = Functions::resolve(&loaded);
    // GPU memory, streams and other threads will hold on to the driver: it is never unloaded.
    std::mem::forget(loaded);
    let found = functions.file().unwrap_or_else(|| PathBuf::from(name));
    let missing = functions.missing();
    let advice = (!missing.is_empty()).then(|| {
        format!(
            "broken: it lacks {}. It is not NVIDIA's driver, or one too old: look for another library of that name in \
             LD_LIBRARY_PATH, and update the driver",
            missing.join(", ")
        )
    });
    let (gpus, why_no_gpu) = match functions.gpus(environment) {
        Ok(gpus) => (gpus, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    let library = Library { what: WHAT, version: release(&found), found: Some(found), advice };
    Answer { library, version: functions.version(), gpus, why_no_gpu }
}

/// The driver's release, `580.65.06`: on Linux the real file bears it, and the soname's `1` says nothing.
fn release(path: &Path) -> Option<String> {
    let real = path.canonicalize().ok()?;
    version_in_name("libcuda.so", &real).filter(|version| version.contains('.'))
}

/// The first name that the loader accepts, or what to say of the library when it accepts none.
fn load(names: &[OsString]) -> Result<(Loaded, &OsStr), Library> {
    let mut broken = None;
    for name in names {
        // SAFETY: opening a library runs its initialisers, so it must be one that may run in this process. The caller
        // names NVIDIA's driver, or a file a test made; the name goes through the loader's ordinary search, which the
        // user controls and by which every CUDA program here loads the very same file. The driver's initialisers ask
        // nothing of their caller. RTLD_NOW: a library with undefined symbols fails here, with a message, where a
        // lazy one would end the process at its first call.
        match unsafe { Loaded::open(Some(name), RTLD_NOW | RTLD_LOCAL) } {
            Ok(loaded) => return Ok((loaded, name)),
            Err(error) => {
                let message = loader_message(&error);
                if !is_absence(&message, &name.to_string_lossy()) {
                    broken.get_or_insert(message);
                }
            }
        }
    }
    let Some(message) = broken else {
        return Err(Library { what: WHAT, found: None, version: None, advice: Some(ADVICE.to_string()) });
    };
    // The loader's message begins with the file at fault.
    let file = message.split_once(": ").map(|(file, _)| PathBuf::from(file)).filter(|file| file.is_file());
    let advice = format!(
        "broken: the loader says {message:?}. Reinstall the NVIDIA driver, or remove the file if it is not the \
         driver's; without it there is no GPU at all"
    );
    Err(Library { what: WHAT, found: file, version: None, advice: Some(advice) })
}

fn loader_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Whether the loader found no file of that name, as glibc and as musl say it. A library that lacks another one is
/// there: its message names the other.
fn is_absence(message: &str, name: &str) -> bool {
    message.contains("No such file")
        && (message.starts_with(&format!("{name}: ")) || message.contains(&format!("library {name}: ")))
}

/// The driver's functions used here. Those that it lacks are None.
#[derive(Default)]
struct Functions {
    init: Option<unsafe extern "C" fn(flags: c_uint) -> c_int>,
    driver_get_version: Option<unsafe extern "C" fn(version: *mut c_int) -> c_int>,
    device_get_count: Option<unsafe extern "C" fn(count: *mut c_int) -> c_int>,
    device_get: Option<unsafe extern "C" fn(device: *mut c_int, index: c_int) -> c_int>,
    device_get_name: Option<unsafe extern "C" fn(name: *mut c_char, size: c_int, device: c_int) -> c_int>,
    device_total_mem: Option<unsafe extern "C" fn(bytes: *mut usize, device: c_int) -> c_int>,
    device_get_attribute: Option<unsafe extern "C" fn(value: *mut c_int, attribute: c_int, device: c_int) -> c_int>,
    device_get_uuid: Option<unsafe extern "C" fn(uuid: *mut [u8; 16], device: c_int) -> c_int>,
}

/// One function of a library, or None. The caller says its type.
macro_rules! function {
    ($library:expr, $name:literal) => {
        // SAFETY: the symbol must have the type that the field it goes to has. Each field repeats the signature that
        // NVIDIA's cuda.h gives the name, unchanged since CUDA 3.2 (its ABI changes by a suffix, as in _v2), with
        // CUresult and CUdevice as int and CUuuid as 16 bytes. The pointer outlives the handle, which `ask` forgets.
        // A symbol that is null becomes None, for the type asked for is an Option.
        unsafe { $library.get($name).ok().and_then(|symbol| *symbol) }
    };
}

impl Functions {
    fn resolve(library: &Loaded) -> Functions {
        Functions {
            init: function!(library, c"cuInit"),
            driver_get_version: function!(library, c"cuDriverGetVersion"),
            device_get_count: function!(library, c"cuDeviceGetCount"),
            device_get: function!(library, c"cuDeviceGet"),
            device_get_name: function!(library, c"cuDeviceGetName"),
            device_total_mem: function!(library, c"cuDeviceTotalMem_v2"),
            device_get_attribute: function!(library, c"cuDeviceGetAttribute"),
            device_get_uuid: function!(library, c"cuDeviceGetUuid_v2")
                .or_else(|| function!(library, c"cuDeviceGetUuid")),
        }
    }

    fn missing(&self) -> Vec<&'static str> {
        let all = [
            (self.init.is_some(), "cuInit"),
            (self.driver_get_version.is_some(), "cuDriverGetVersion"),
            (self.device_get_count.is_some(), "cuDeviceGetCount"),
            (self.device_get.is_some(), "cuDeviceGet"),
            (self.device_get_name.is_some(), "cuDeviceGetName"),
            (self.device_total_mem.is_some(), "cuDeviceTotalMem_v2"),
            (self.device_get_attribute.is_some(), "cuDeviceGetAttribute"),
            (self.device_get_uuid.is_some(), "cuDeviceGetUuid"),
        ];
        all.into_iter().filter(|(present, _)| !present).map(|(_, name)| name).collect()
    }

    /// The file the functions came from.
    fn file(&self) -> Option<PathBuf> {
        use std::os::unix::ffi::OsStrExt;
        let address = self.init.map(|function| function as *const libc::c_void)?;
        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: dladdr takes any address and writes only to `info`, a whole Dl_info of ours.
        if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
            return None;
        }
        // SAFETY: dladdr said it filled `info`, and zeroes are a valid Dl_info in any case: pointers only.
        let name = unsafe { info.assume_init() }.dli_fname;
        if name.is_null() {
            return None;
        }
        // SAFETY: `dli_fname` is the loader's own C string, alive while the library is loaded, which is for good.
        let name = unsafe { CStr::from_ptr(name) };
        Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
    }

    /// The newest CUDA it supports. It can be asked before cuInit.
    fn version(&self) -> Option<(u32, u32)> {
        let version = u32::try_from(answer_int(self.driver_get_version, |function, to| {
            // SAFETY: the driver writes one int, and `to` points to one.
            unsafe { function(to) }
        })?);
        version.ok().filter(|version| *version > 0).map(|version| (version / 1000, version % 1000 / 10))
    }

    /// The GPUs, at least one, or why there are none.
    fn gpus(&self, environment: &SearchEnvironment) -> Result<Vec<Gpu>, String> {
        let (Some(init), Some(device_get_count), Some(device_get)) =
            (self.init, self.device_get_count, self.device_get)
        else {
            return Err(format!("the CUDA driver's library lacks {}. Update the driver", self.missing().join(", ")));
        };
        // SAFETY: cuInit takes the flags 0, may be called at any time, from any thread, and again.
        let code = unsafe { init(0) };
        if code != 0 {
            return Err(refusal("cuInit", code, environment));
        }
        let mut count = 0;
        // SAFETY: the driver is initialised and writes one int, to `count`.
        let code = unsafe { device_get_count(&mut count) };
        if code != 0 {
            return Err(refusal("cuDeviceGetCount", code, environment));
        }
        let mut gpus = Vec::new();
        let mut refused = None;
        for index in 0..count.max(0) {
            let mut device = 0;
            // SAFETY: the driver is initialised, checks the index itself and writes one int, to `device`.
            match unsafe { device_get(&mut device, index) } {
                0 => gpus.extend(usize::try_from(index).ok().map(|index| self.describe(index, device))),
                code => refused = Some(refusal("cuDeviceGet", code, environment)),
            }
        }
        if gpus.is_empty() { Err(refused.unwrap_or_else(|| why_no_device(environment))) } else { Ok(gpus) }
    }

    /// What the driver says of one device. A question it refuses leaves the field empty or zero.
    fn describe(&self, index: usize, device: c_int) -> Gpu {
        let name = self.name(device).unwrap_or_else(|| "GPU of unknown name".to_string());
        let mut memory_bytes = 0;
        let known = self.device_total_mem.is_some_and(|function| {
            // SAFETY: `device` came from cuDeviceGet, and the driver writes one size_t, to `memory_bytes`.
            unsafe { function(&mut memory_bytes, device) == 0 }
        });
        let [major, minor] = CAPABILITY.map(|attribute| {
            let value = answer_int(self.device_get_attribute, |function, to| {
                // SAFETY: `device` came from cuDeviceGet; the driver checks the attribute and writes one int.
                unsafe { function(to, attribute, device) }
            });
            value.and_then(|value| u32::try_from(value).ok()).unwrap_or(0)
        });
        let mut uuid = [0; 16];
        let named = self.device_get_uuid.is_some_and(|function| {
            // SAFETY: `device` came from cuDeviceGet, and the driver writes a CUuuid: 16 bytes, as `uuid` has.
            unsafe { function(&mut uuid, device) == 0 }
        });
        Gpu {
            index,
            memory_bytes: if known { memory_bytes as u64 } else { 0 },
            compute_capability: (major, minor),
            uuid: if named { uuid_text(&name, uuid) } else { String::new() },
            name,
        }
    }

    fn name(&self, device: c_int) -> Option<String> {
        let function = self.device_get_name?;
        let mut text = [0; 256];
        // SAFETY: `device` came from cuDeviceGet, and the driver writes at most 255 bytes and a zero to the 256.
        let code = unsafe { function(text.as_mut_ptr().cast::<c_char>(), 256, device) };
        // Were the zero not there, this would be None, not a read past the end.
        let text = CStr::from_bytes_until_nul(&text).ok().filter(|text| code == 0 && !text.is_empty())?;
        Some(text.to_string_lossy().into_owned())
    }
}

/// What a function writes to an int, where the function is there and succeeds.
fn answer_int<F>(function: Option<F>, call: impl FnOnce(F, *mut c_int) -> c_int) -> Option<c_int> {
    let mut value = 0;
    (call(function?, &mut value) == 0).then_some(value)
}

/// As nvidia-smi and CUDA_VISIBLE_DEVICES write it. A slice's name says that it is one: `NVIDIA H200 MIG 1g.18gb`.
fn uuid_text(name: &str, uuid: [u8; 16]) -> String {
    let mut text = if name.contains(" MIG ") { "MIG" } else { "GPU" }.to_string();
    for (position, byte) in uuid.iter().enumerate() {
        let dash = if matches!(position, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        text.push_str(&format!("{dash}{byte:02x}"));
    }
    text
}

/// Why there is no GPU where the library cannot be loaded.
fn why_without_library(environment: &SearchEnvironment, library: &Library) -> String {
    if let Some(problem) = library.advice.as_ref().and_then(|advice| advice.strip_prefix("broken: ")) {
        return format!("the CUDA driver's library is broken: {problem}");
    }
    let absent = "the CUDA driver's library (libcuda.so.1) is not here";
    if environment.root.join("proc/driver/nvidia/version").is_file() {
        return format!(
            "{absent}, although the kernel has the driver: in a container, start it with --gpus all, and with \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility where it sets that; else install the driver's libraries of \
             the same release"
        );
    }
    format!("{absent}: this machine has no NVIDIA driver, or this container was started without --gpus all")
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
            "CUDA_VISIBLE_DEVICES is {visible:?}, and its first entry is no GPU of this machine. Unset it, or name \
             GPUs that `nvidia-smi -L` lists; in a batch job, ask the scheduler for GPUs"
        );
    }
    "the driver is here and sees no GPU. In a container, start it with --gpus all; in a batch job, ask the scheduler \
     for GPUs; else see what `nvidia-smi` says"
        .to_string()
}

/// A code of the driver in words, with what to do.
fn refusal(call: &str, code: c_int, environment: &SearchEnvironment) -> String {
    let (name, why) = match code {
        100 => return why_no_device(environment),
        2 => ("OUT_OF_MEMORY", "the GPU or the host has no memory left. End the other processes on it"),
        3 => ("NOT_INITIALIZED", "the driver did not initialise. See what `nvidia-smi` says"),
        34 => (
            "STUB_LIBRARY",
            "the library loaded is the toolkit's stand-in for linking. Take its folder `stubs` out of LD_LIBRARY_PATH",
        ),
        46 => (
            "DEVICE_UNAVAILABLE",
            "another process holds the GPU alone, or it has failed. See what `nvidia-smi` says of its compute mode",
        ),
        101 => ("INVALID_DEVICE", "the driver lists a GPU that it cannot open. See what `nvidia-smi` says"),
        304 => (
            "OPERATING_SYSTEM",
            "the system refused the driver a call. Check that this user may read and write /dev/nvidia*; in a \
             container, start it with --gpus all",
        ),
        802 => (
            "SYSTEM_NOT_READY",
            "the GPUs are not ready. On machines with NVSwitch, the service nvidia-fabricmanager must run, in the \
             driver's release",
        ),
        803 => (
            "SYSTEM_DRIVER_MISMATCH",
            "the kernel has another release of the driver than this library is of, mostly after an update. Reboot, or \
             reload the nvidia kernel modules; in a container, remove a libcuda that the image itself brings",
        ),
        804 => (
            "COMPAT_NOT_SUPPORTED_ON_DEVICE",
            "the library loaded is that of a cuda-compat package, which this GPU or this driver does not take. Remove \
             the package or take its folder `compat` out of LD_LIBRARY_PATH, or update the driver",
        ),
        805..=807 => (
            "MPS",
            "the CUDA MPS server cannot be reached. Start or restart nvidia-cuda-mps-control, or unset \
             CUDA_MPS_PIPE_DIRECTORY",
        ),
        999 => (
            "UNKNOWN",
            "the driver does not say why. Mostly the kernel module nvidia_uvm is not loaded, or lost the GPU over a \
             suspend: reload it or reboot; in a container, check that /dev/nvidia-uvm is there",
        ),
        _ => ("not known to this program", "see what `nvidia-smi` says"),
    };
    format!("{call} failed with CUDA error {code} ({name}): {why}")
}

#[cfg(test)]
mod tests;
