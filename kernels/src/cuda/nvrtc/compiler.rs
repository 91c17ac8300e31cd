//! NVRTC: loading it, what it can compile for, and one compilation. It needs no GPU.

use std::borrow::Cow;
use std::ffi::{CStr, CString, NulError, c_char, c_int, c_void};
use std::fmt;
use std::fs;
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;

use crate::device::discover;
use crate::error::Help;
use crate::heartbeat::{self, Work};
use crate::library::{self, Library};

library::functions! {
    /// NVRTC's functions that we call.
    struct NvrtcFunctions {
        fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        fn nvrtcGetErrorString(c_int) -> *const c_char;
        fn nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcGetSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcCreateProgram(*mut NvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
        fn nvrtcDestroyProgram(*mut NvrtcProgram) -> c_int;
        fn nvrtcCompileProgram(NvrtcProgram, c_int, *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(NvrtcProgram, *mut usize) -> c_int;
        fn nvrtcGetProgramLog(NvrtcProgram, *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(NvrtcProgram, *mut usize) -> c_int;
        fn nvrtcGetCUBIN(NvrtcProgram, *mut c_char) -> c_int;
    }
}

type NvrtcProgram = *mut c_void;

macro_rules! headers {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../ops/", $name)))),*] };
}

/// The headers that kernels include.
const HEADERS: &[(&str, &str)] = headers! {
    "common.cuh" "math.cuh" "activations.cuh" "chunks.cuh" "cross_entropy.cuh" "attention_tiles.cuh" "update.cuh"
    "adamw_rule.cuh" "sgd_rule.cuh" "sgd_momentum_rule.cuh" "muon_rule.cuh"
};

/// The texts of all headers, as `text_of` has them.
pub(super) fn headers() -> impl Iterator<Item = (&'static str, Cow<'static, str>)> {
    let headers = HEADERS.iter();
    headers.map(|&(name, text)| (name, text_of(name, text)))
}

/// Options of every compilation. launch/check-kernels reads them here.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// What to compile for: 90 for sm_90, and whether that is the GPU's architecture, not an older one.
pub(super) type Arch = (u32, bool);

/// The loaded NVRTC.
pub(super) struct Compiler {
    functions: NvrtcFunctions,
    /// 13.0 as (13, 0).
    pub(super) version: (i32, i32),
    /// Length and modification time (ns) of its file, to distinguish builds of one version.
    pub(super) file: (u64, u128),
    /// Architectures it supports, 90 for sm_90, in ascending order.
    architectures: Vec<u32>,
}

/// All options of a compilation of `text` for `sm_ARCHITECTURE`; or for `sm_90a` and the like,
/// whose code runs on that architecture only, if `text` tests `__CUDA_ARCH_FEAT_SM90_ALL`.
pub(super) fn options((architecture, is_exact): Arch, text: &str) -> Vec<String> {
    let asks = text.contains(&format!("__CUDA_ARCH_FEAT_SM{architecture}_ALL"));
    let own = if is_exact && asks { "a" } else { "" };
    let mut options = vec![format!("--gpu-architecture=sm_{architecture}{own}")];
    options.extend(OPTIONS.map(str::to_string));
    options
}

const HELP: &str = "install NVRTC of CUDA 12.0 or later, for example the pip wheel \
     nvidia-cuda-nvrtc in the active Python environment";

/// The compiler, loaded at the first call; or what is missing, with help.
pub(super) fn get() -> Result<&'static Compiler, &'static str> {
    static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
    COMPILER
        .get_or_init(Compiler::load)
        .as_ref()
        .map_err(String::as_str)
}

impl Compiler {
    fn load() -> Result<Compiler, String> {
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        Library::first(&discover().nvrtc, &names, Compiler::of)
    }

    fn of(library: Library) -> Result<Compiler, String> {
        let functions = NvrtcFunctions::load(library, HELP)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: both functions write ints, to local variables.
        unsafe {
            functions.check(
                "nvrtcVersion",
                (functions.nvrtcVersion)(&mut major, &mut minor),
            )?;
            functions.check(
                "nvrtcGetNumSupportedArchs",
                (functions.nvrtcGetNumSupportedArchs)(&mut count),
            )?;
        }
        let refused = |why| format!("NVRTC {major}.{minor} is {why}{}", Help(HELP));
        discover().refuse_cuda(major as u64).map_err(refused)?;
        load_builtins(functions.nvrtcVersion as *const c_void, (major, minor));
        let mut architectures = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the buffer has room for as many ints as it said there are.
        functions.check("nvrtcGetSupportedArchs", unsafe {
            (functions.nvrtcGetSupportedArchs)(architectures.as_mut_ptr())
        })?;
        let mut architectures: Vec<u32> = architectures
            .into_iter()
            .filter_map(|number| number.try_into().ok())
            .collect();
        architectures.sort_unstable();
        let file = file_identity(functions.nvrtcVersion as *const c_void);
        Ok(Compiler {
            functions,
            version: (major, minor),
            file,
            architectures,
        })
    }

    /// What to compile for on a GPU of this compute capability: its own architecture, or an older
    /// one of the same generation, whose code it runs too.
    pub(super) fn target(&self, (major, minor): (u32, u32)) -> Result<Arch, String> {
        let wanted = major * 10 + minor;
        let mut known = self.architectures.iter().rev().copied();
        if let Some(found) = known.find(|known| *known / 10 == major && *known <= wanted) {
            return Ok((found, found == wanted));
        }
        let [oldest, newest] = [self.architectures.first(), self.architectures.last()]
            .map(|known| known.copied().unwrap_or(0));
        Err(format!(
            "{self} compiles for sm_{oldest} to sm_{newest}, and this GPU is sm_{wanted}; help: \
             install the NVRTC of a CUDA release that supports this GPU"
        ))
    }

    /// Compiles `text`, called `name` in messages. The error is the compiler's log.
    pub(super) fn compile(&self, name: &str, text: &str, target: Arch) -> Result<Vec<u8>, String> {
        let functions = &self.functions;
        let zero_byte = |_| format!("{name} has a zero byte in it");
        let (c_name, c_text) = (
            CString::new(name).map_err(zero_byte)?,
            CString::new(text).map_err(zero_byte)?,
        );
        let headers = headers()
            .map(|(name, text)| Ok((CString::new(name)?, CString::new(&*text)?)))
            .collect::<Result<Vec<_>, NulError>>()
            .map_err(zero_byte)?;
        let (header_names, headers): (Vec<_>, Vec<_>) = headers
            .iter()
            .map(|(name, text)| (name.as_ptr(), text.as_ptr()))
            .unzip();
        let options = options(target, text)
            .into_iter()
            .map(CString::new)
            .collect::<Result<Vec<_>, _>>()
            .map_err(zero_byte)?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Made {
            functions,
            program: std::ptr::null_mut(),
        };
        // SAFETY: strings and arrays live to the end of this function. Each header has a
        // name. The program is destroyed once, when `program` is dropped.
        let code = unsafe {
            let made = (functions.nvrtcCreateProgram)(
                &mut program.program,
                c_text.as_ptr(),
                c_name.as_ptr(),
                headers.len() as c_int,
                headers.as_ptr(),
                header_names.as_ptr(),
            );
            functions.check("nvrtcCreateProgram", made)?;
            (functions.nvrtcCompileProgram)(
                program.program,
                options.len() as c_int,
                options.as_ptr(),
            )
        };
        heartbeat::beat(Work::Computes);
        if code != 0 {
            let log = program
                .read(
                    functions.nvrtcGetProgramLogSize,
                    functions.nvrtcGetProgramLog,
                )
                .unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let log = log.trim_end_matches(['\0', '\n']);
            return Err(format!(
                "{self} says {} for sm_{}:\n{log}",
                functions.meaning(code),
                target.0
            ));
        }
        program.read(functions.nvrtcGetCUBINSize, functions.nvrtcGetCUBIN)
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {}.{}", self.version.0, self.version.1)
    }
}

/// A program, destroyed when dropped.
struct Made<'a> {
    functions: &'a NvrtcFunctions,
    program: NvrtcProgram,
}

impl Made<'_> {
    /// The output of a pair of functions: one gives the size, the other the bytes.
    fn read(
        &self,
        size: unsafe extern "C" fn(NvrtcProgram, *mut usize) -> c_int,
        bytes: unsafe extern "C" fn(NvrtcProgram, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut length = 0;
        // SAFETY: the program is alive, and the size goes to a local variable.
        self.functions.check("asking for a size", unsafe {
            size(self.program, &mut length)
        })?;
        let mut read = vec![0u8; length];
        // SAFETY: the program is alive, and the buffer has the size that NVRTC just gave.
        self.functions.check("asking for the result", unsafe {
            bytes(self.program, read.as_mut_ptr().cast())
        })?;
        Ok(read)
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by nvrtcCreateProgram and destroyed only here.
            unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.program) };
        }
    }
}

impl NvrtcFunctions {
    fn check(&self, doing: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            Ok(())
        } else {
            Err(format!("NVRTC: {doing} failed: {}", self.meaning(code)))
        }
    }

    fn meaning(&self, code: c_int) -> String {
        // SAFETY: takes any code, and returns null or a static C string.
        let text = unsafe { (self.nvrtcGetErrorString)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a static C string, as above.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

/// NVRTC loads a second library, by name, at its first compilation. In a pip wheel it does not
/// search its own folder, so the library is loaded here first if it lies there.
fn load_builtins(function: *const c_void, (major, minor): (i32, i32)) {
    // Its real folder: the loader knows NVRTC by the link that it followed.
    let Some(file) = library::file_of(function).and_then(|file| file.canonicalize().ok()) else {
        return;
    };
    let builtins = file.with_file_name(format!("libnvrtc-builtins.so.{major}.{minor}"));
    if builtins.is_file() {
        // SAFETY: loading runs the library's initialisers. It is the library beside NVRTC that
        // NVRTC would load in the same way.
        match unsafe { libloading::Library::new(&builtins) } {
            Ok(loaded) => std::mem::forget(loaded),
            // If NVRTC cannot do without, it reports that itself.
            Err(error) => tracing::debug!("{}: {error}", builtins.display()),
        }
    }
}

/// Length and modification time of the file that contains `function`; zeros if unknown.
fn file_identity(function: *const c_void) -> (u64, u128) {
    let metadata = library::file_of(function).and_then(|path| fs::metadata(path).ok());
    metadata.map_or((0, 0), |metadata| {
        let changed = metadata
            .modified()
            .ok()
            .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        (metadata.len(), changed.map_or(0, |time| time.as_nanos()))
    })
}

#[cfg(test)]
mod tests;

/// The text of a kernel's file. In debug builds a file of that name in the folder
/// `DDP_TEST_KERNELS` takes its place: tests/mutants/run tries wrong kernels.
pub(crate) fn text_of(name: &str, text: &'static str) -> Cow<'static, str> {
    #[cfg(debug_assertions)]
    if let Some(folder) = std::env::var_os("DDP_TEST_KERNELS")
        && let Ok(changed) = std::fs::read_to_string(std::path::Path::new(&folder).join(name))
    {
        return changed.into();
    }
    _ = name;
    text.into()
}
