//! NCCL itself: its functions, its version, and what its refusals mean. Types are those of cudarc's bindings; loading is that of
//! `ddp_kernels::foreign`, which finds `libnccl.so.2` where users have it and never panics.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use ddp_kernels::DType;
use ddp_kernels::foreign::{Library, functions};

use crate::error::{Error, NcclFailure};

functions! {
    /// NCCL's functions that are called here. Results are plain numbers: a newer library may know more of them.
    pub(super) struct Functions {
        fn ncclGetVersion(*mut c_int) -> c_int;
        fn ncclGetUniqueId(*mut ncclUniqueId) -> c_int;
        fn ncclCommInitRank(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> c_int;
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

/// The oldest that is used: the oldest whose interface the bindings know, of the time of CUDA 12.1, which is what kernels are compiled by
/// at least.
const OLDEST: Version = Version(2_18_00);

const WAY_OUT: &str = "It is too old or not NVIDIA's: NCCL 2.18 or later is needed, for one the pip wheel nvidia-nccl-cu13 in the \
     active Python environment";

/// NCCL as this process has it.
#[derive(Clone, Copy)]
pub(super) struct Nccl {
    pub(super) functions: &'static Functions,
    pub(super) version: Version,
}

/// A version as NCCL counts: 2.30.7 is 23007.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(c_int);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// The library, loaded at the first call; or what is missing and the way out.
pub(super) fn get() -> Result<Nccl, &'static str> {
    static NCCL: OnceLock<Result<(Functions, Version), String>> = OnceLock::new();
    let (functions, version) = NCCL.get_or_init(load).as_ref().map_err(String::as_str)?;
    Ok(Nccl { functions, version: *version })
}

fn load() -> Result<(Functions, Version), String> {
    let library = Library::nccl()?;
    let functions = Functions::load(library, WAY_OUT)?;
    let mut version = 0;
    // SAFETY: writes an int, to a variable of ours.
    let code = unsafe { (functions.ncclGetVersion)(&mut version) };
    if code != SUCCESS {
        return Err(format!("NCCL does not tell its version (ncclGetVersion said {}). Reinstall it", name(code)));
    }
    let version = Version(version);
    if version < OLDEST {
        return Err(format!("NCCL is of version {version}. {WAY_OUT}"));
    }
    Ok((functions, version))
}

pub(super) const SUCCESS: c_int = ncclResult_t::ncclSuccess as c_int;
pub(super) const IN_PROGRESS: c_int = ncclResult_t::ncclInProgress as c_int;

/// A refusal by NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) function: &'static str,
    pub(super) code: c_int,
}

/// Calls a function of NCCL's and turns its code into a result. It must stand in an unsafe block that argues for the call.
macro_rules! nccl {
    ($functions:expr, $name:ident ( $($argument:expr),* $(,)? )) => {
        $crate::nccl::library::outcome(stringify!($name), ($functions.$name)($($argument),*))
    };
}
pub(super) use nccl;

pub(super) fn outcome(function: &'static str, code: c_int) -> Result<(), Fault> {
    if code == SUCCESS { Ok(()) } else { Err(Fault { function, code }) }
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
    /// A refusal as an error of `call`, with what NCCL says of it.
    pub(super) fn error(&self, call: String, fault: Fault) -> Error {
        let text = |text: *const c_char| {
            // SAFETY: not null, so a C string of the library's, which lives as long as it. The last error's is written under the
            // library's own lock; a message that is replaced meanwhile reads as some message.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string())
        };
        // SAFETY: takes any number, and gives a string that lives as long as the library, or null.
        let meaning = text(unsafe { (self.ncclGetErrorString)(fault.code) }).unwrap_or_default();
        // SAFETY: the communicator is not looked at, and null is allowed for it.
        let last = text(unsafe { (self.ncclGetLastError)(std::ptr::null_mut()) }).unwrap_or_default();
        // They need not be of this call: NCCL keeps them for all.
        let last = if last.is_empty() { last } else { format!("NCCL's last words: {last}") };
        let words = [meaning, last].into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join("; ");
        let (way_out, exit_code) = advice(fault.code, &words);
        let (function, name, way_out) = (fault.function, name(fault.code), way_out.into());
        Error::Nccl(Box::new(NcclFailure { call, function, name, words, way_out, exit_code }))
    }
}

/// What to do about a refusal, and the exit code that it means. What NCCL says goes before its code, which is often that of whatever noticed.
fn advice(code: c_int, words: &str) -> (&'static str, u8) {
    use ncclResult_t as Code;
    let is = |wanted: Code| code == wanted as c_int;
    if code == IN_PROGRESS {
        ("Unset NCCL_COMM_BLOCKING: this program uses communicators that block.", 70)
    } else if words.contains("Duplicate GPU") {
        let way_out = "Give each rank a GPU of its own (to NCCL the MIG slices of a GPU are one); for tests --share-gpus lets several ranks \
                       use one.";
        (way_out, 70)
    } else if words.contains("/dev/shm") {
        ("Give the container more shared memory (--shm-size=1g or --ipc=host).", 70)
    } else if words.to_ascii_lowercase().contains("out of memory") {
        ("The GPU's memory is full: use a smaller batch or model.", 71)
    } else if is(Code::ncclSystemError) || is(Code::ncclRemoteError) || is(Code::ncclTimeout) {
        let way_out = "Look at what other ranks say, and at the network: NCCL_DEBUG=INFO shows what NCCL does, NCCL_SOCKET_IFNAME chooses an \
                       interface.";
        (way_out, 77)
    } else if is(Code::ncclUnhandledCudaError) {
        ("The GPU or its driver failed: NCCL_DEBUG=INFO shows what NCCL did, nvidia-smi -q the GPU.", 70)
    } else {
        ("NCCL_DEBUG=INFO shows what NCCL did.", 70)
    }
}

/// A dtype as NCCL calls it.
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
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_as_people_write_them_and_in_order() {
        assert_eq!([21_800, 22_307, 23_007].map(|v| Version(v).to_string()), ["2.18.0", "2.23.7", "2.30.7"]);
        assert!(Version(21_705) < OLDEST && Version(21_801) > OLDEST);
    }

    #[test]
    fn what_nccl_says_tells_what_to_do_before_its_code_does() {
        let (system, cuda) = (ncclResult_t::ncclSystemError as c_int, ncclResult_t::ncclUnhandledCudaError as c_int);
        for (code, words, part, exit_code) in [
            (system, "Error while creating shared memory segment /dev/shm/nccl-x (size 9)", "--shm-size=1g", 70),
            (cuda, "unhandled cuda error; NCCL's last words: Cuda failure 2 'out of memory'", "smaller batch", 71),
            (cuda, "Cuda failure 700", "nvidia-smi", 70),
            (ncclResult_t::ncclInvalidUsage as c_int, "Duplicate GPU detected : rank 0 and rank 1", "MIG", 70),
            (ncclResult_t::ncclRemoteError as c_int, "", "other ranks", 77),
            (ncclResult_t::ncclInternalError as c_int, "", "NCCL_DEBUG=INFO", 70),
        ] {
            let (way_out, code) = advice(code, words);
            assert!(way_out.contains(part) && code == exit_code, "{words}: {way_out} {code}");
        }
    }

    #[test]
    fn results_have_nccl_s_names_and_those_of_newer_libraries_a_number() {
        assert_eq!(name(ncclResult_t::ncclRemoteError as c_int), "ncclRemoteError");
        assert_eq!(name(ncclResult_t::ncclInProgress as c_int), "ncclInProgress");
        assert_eq!([name(99), name(-1)], ["result 99", "result -1"]);
    }
}
