//! The NCCL library: its functions, its version, and what its errors mean. The types come from
//! cudarc's bindings; `ddp_kernels::foreign` finds and loads `libnccl.so.2`, and never panics.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use ddp_kernels::DType;
use ddp_kernels::foreign::{Library, functions};

use crate::error::{Error, NcclFailure, Remedy};

functions! {
    /// The functions of NCCL that this crate calls. Results are plain numbers: newer libraries may
    /// return others than these bindings know.
    pub(super) struct Functions {
        fn ncclGetVersion(*mut c_int) -> c_int;
        fn ncclGetUniqueId(*mut ncclUniqueId) -> c_int;
        fn ncclCommInitRank(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> c_int;
        fn ncclCommAbort(ncclComm_t) -> c_int;
        fn ncclCommDestroy(ncclComm_t) -> c_int;
        fn ncclCommGetAsyncError(ncclComm_t, *mut c_int) -> c_int;
        fn ncclGetErrorString(c_int) -> *const c_char;
        fn ncclGetLastError(ncclComm_t) -> *const c_char;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
        fn ncclAllReduce(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void) -> c_int;
        fn ncclReduceScatter(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void) -> c_int;
        fn ncclAllGather(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, *mut c_void) -> c_int;
        fn ncclBroadcast(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> c_int;
        fn ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> c_int;
        fn ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void) -> c_int;
    }
}

/// The oldest version whose interface the bindings know, of the time of CUDA 12.1, the oldest that
/// kernels are compiled with.
const OLDEST: NcclVersion = NcclVersion(2_18_00);

/// The oldest version that frees nothing that a graph needs when a communicator is aborted.
pub(super) const OLDEST_THAT_ABORTS: NcclVersion = NcclVersion(2_26_00);

const HELP: &str = "It is too old or not NVIDIA's: install NCCL 2.18 or later, for example the pip \
    wheel nvidia-nccl-cu13 in the active Python environment";

/// The NCCL library of this process.
#[derive(Clone, Copy)]
pub(super) struct Nccl {
    pub(super) functions: &'static Functions,
    pub(super) version: NcclVersion,
}

/// A version in NCCL's encoding: 2.30.7 is 23007.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NcclVersion(c_int);

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}.{}.{}",
            self.0 / 10_000,
            self.0 / 100 % 100,
            self.0 % 100
        )
    }
}

/// The library, loaded at the first call; or what is missing, with help.
pub(super) fn get() -> Result<Nccl, &'static str> {
    static NCCL: OnceLock<Result<(Functions, NcclVersion), String>> = OnceLock::new();
    let (functions, version) = NCCL.get_or_init(load).as_ref().map_err(String::as_str)?;
    Ok(Nccl {
        functions,
        version: *version,
    })
}

fn load() -> Result<(Functions, NcclVersion), String> {
    Library::nccl(accept)
}

fn accept(library: Library) -> Result<(Functions, NcclVersion), String> {
    let functions = Functions::load(library, HELP)?;
    let mut version = 0;
    // SAFETY: writes an int, to a variable of ours.
    let code = unsafe { (functions.ncclGetVersion)(&mut version) };
    if code != SUCCESS {
        return Err(format!(
            "NCCL does not report its version (ncclGetVersion returned {}). Reinstall it",
            name(code)
        ));
    }
    let version = NcclVersion(version);
    if version < OLDEST {
        return Err(format!("NCCL has version {version}. {HELP}"));
    }
    Ok((functions, version))
}

pub(super) const SUCCESS: c_int = ncclResult_t::ncclSuccess as c_int;
pub(super) const IN_PROGRESS: c_int = ncclResult_t::ncclInProgress as c_int;

/// An error of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) function: &'static str,
    pub(super) code: c_int,
}

/// Calls a function of NCCL and turns its code into a result. Used in an unsafe block with a
/// SAFETY comment for the call.
macro_rules! nccl {
    ($functions:expr, $name:ident ( $($argument:expr),* $(,)? )) => {
        $crate::transport::nccl::library::outcome(stringify!($name), ($functions.$name)($($argument),*))
    };
}
pub(super) use nccl;

pub(super) fn outcome(function: &'static str, code: c_int) -> Result<(), Fault> {
    if code == SUCCESS {
        Ok(())
    } else {
        Err(Fault { function, code })
    }
}

/// NCCL's name for a code.
fn name(code: c_int) -> String {
    const NAMES: [&str; 9] = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];
    let known = usize::try_from(code).ok().and_then(|code| NAMES.get(code));
    known.map_or_else(|| format!("result {code}"), ToString::to_string)
}

impl Functions {
    /// The error of `call`, with NCCL's messages.
    pub(super) fn error(&self, call: String, fault: Fault) -> Error {
        let text = |text: *const c_char| {
            if text.is_null() {
                return None;
            }
            // SAFETY: not null, so a C string that lives as long as the library. NCCL writes its
            // last error under its own lock; a concurrent replacement yields either text.
            let text = unsafe { CStr::from_ptr(text) };
            Some(text.to_string_lossy().trim().to_string())
        };
        // SAFETY: takes any number, and returns a string that lives as long as the library, or
        // null.
        let meaning = text(unsafe { (self.ncclGetErrorString)(fault.code) }).unwrap_or_default();
        // SAFETY: the communicator is not read, and may be null.
        let last =
            text(unsafe { (self.ncclGetLastError)(std::ptr::null_mut()) }).unwrap_or_default();
        // It need not be about this call: NCCL keeps one for all.
        let last = if last.is_empty() {
            last
        } else {
            format!("last error: {last}")
        };
        let details = [meaning, last]
            .into_iter()
            .filter(|text| !text.is_empty())
            .collect::<Vec<_>>()
            .join("; ");
        let (help, remedy, exit_code) = advice(fault.code, &details);
        Error::Nccl(Box::new(NcclFailure {
            call,
            function: fault.function,
            name: name(fault.code),
            details,
            help: help.into(),
            remedy,
            exit_code,
        }))
    }
}

/// What to do about an error, the setting that avoids it, and its exit code. NCCL's message takes
/// precedence over its code, which is often that of the rank that noticed the error.
fn advice(code: c_int, details: &str) -> (&'static str, Option<Remedy>, u8) {
    use ncclResult_t as Code;
    let is = |wanted: Code| code == wanted as c_int;
    if code == IN_PROGRESS {
        let help = "unset NCCL_COMM_BLOCKING: this program uses blocking communicators";
        (help, None, 70)
    } else if details.contains("Duplicate GPU") {
        let help = "give each rank its own GPU (NCCL counts the MIG slices of a GPU as one)";
        (help, Some(Remedy::ShareGpus), 70)
    } else if details.contains("/dev/shm") {
        let help = "give the container more shared memory (--shm-size=1g or --ipc=host)";
        (help, None, 70)
    } else if details.to_ascii_lowercase().contains("out of memory") {
        let help = "the GPU's memory is full: use a smaller batch or model";
        (help, None, 71)
    } else if is(Code::ncclSystemError) || is(Code::ncclRemoteError) || is(Code::ncclTimeout) {
        let help = "look at the messages of other ranks, and at the network: NCCL_DEBUG=INFO shows \
            what NCCL does, NCCL_SOCKET_IFNAME chooses an interface";
        (help, None, 77)
    } else if is(Code::ncclUnhandledCudaError) {
        let help = "the GPU or its driver failed: NCCL_DEBUG=INFO shows what NCCL did, nvidia-smi \
            -q the GPU";
        (help, None, 70)
    } else {
        ("NCCL_DEBUG=INFO shows what NCCL did", None, 70)
    }
}

/// NCCL's name for a dtype.
pub(super) fn type_of(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
    }
}

#[cfg(test)]
mod tests;
