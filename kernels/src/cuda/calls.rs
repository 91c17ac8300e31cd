//! Loading NVIDIA's libraries, the functions of the driver that this crate calls, and their errors.
//! All functions are looked up before the first call, so a driver that lacks some is an error that
//! names them.
//!
//! Results are numbers and not cudarc's enum: a newer driver may return a code that the enum lacks,
//! which would be undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice_attribute, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUgraphNode, CUmemAccessDesc, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
    CUmodule, CUstream, CUstreamCaptureMode,
};

use crate::Device;
use crate::device::{self, discover};
use crate::error::{Caller, Error, Help};
use crate::library::{Library, functions, loader_message};
use crate::panics::lock;

/// The files that were tried and refused, and why.
static REFUSED: Mutex<Vec<(PathBuf, String)>> = Mutex::new(Vec::new());

impl Library {
    /// NCCL: what `accept` makes of the first file that it takes.
    pub fn nccl<T>(accept: impl Fn(Library) -> Result<T, String>) -> Result<T, String> {
        let part = &discover().nccl;
        Library::first(part, &["libnccl.so.2", "libnccl.so"], accept)
    }

    /// The files of all libraries that this process tried and refused, and why.
    pub fn refused() -> Vec<(PathBuf, String)> {
        lock(&REFUSED).clone()
    }

    /// Loads the files that discovery found, then the `names` that the loader knows, until `accept`
    /// takes one; else the first refusal: a file that cannot be used is skipped for the next one.
    /// Not public: a caller could give any path, whose code would run.
    pub(crate) fn first<T>(
        part: &device::CudaLibrary,
        names: &[&str],
        accept: impl Fn(Library) -> Result<T, String>,
    ) -> Result<T, String> {
        let what = part.what;
        let usable = part.candidates.iter().filter(|it| it.skipped.is_none());
        let files = usable.map(|it| it.path.as_path());
        let advice = part.advice.as_deref();
        let mut refusal = None;
        for path in files.chain(names.iter().map(Path::new)) {
            // SAFETY: loading runs the library's initialisers. It is NVIDIA's, from where the user
            // installed it or told this process to look; every CUDA program loads it like this.
            let why = match unsafe { libloading::Library::new(path) } {
                Ok(handle) => match accept(Library::new(handle, what)) {
                    Ok(accepted) => return Ok(accepted),
                    Err(why) => why,
                },
                Err(error) if path.is_absolute() => {
                    let help =
                        "reinstall it, or put the folder of a working one in LD_LIBRARY_PATH";
                    let (message, help) = (loader_message(&error), Help(help));
                    format!("{what} cannot be loaded: {message}{help}")
                }
                Err(_) => continue,
            };
            tracing::debug!("{} is not used: {why}", path.display());
            lock(&REFUSED).push((path.to_owned(), why.clone()));
            refusal.get_or_insert(why);
        }
        Err(match (refusal, advice) {
            (Some(why), _) => why,
            (None, Some(advice)) if part.found.is_some() => {
                format!("{what} cannot be used: {advice}")
            }
            (None, advice) => format!("{what} was not found{}", Help(advice.unwrap_or_default())),
        })
    }
}

/// A result of the driver, known or not.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUresult(pub(crate) u32);

macro_rules! codes {
    ($($name:ident)*) => {
        impl CUresult {
            $(pub(crate) const $name: CUresult = CUresult(sys::CUresult::$name as u32);)*
        }
    };
}

codes! {
    CUDA_ERROR_ASSERT CUDA_ERROR_CAPTURED_EVENT CUDA_ERROR_CONTAINED CUDA_ERROR_CONTEXT_IS_DESTROYED
    CUDA_ERROR_DEINITIALIZED CUDA_ERROR_DEVICE_UNAVAILABLE CUDA_ERROR_ECC_UNCORRECTABLE
    CUDA_ERROR_HARDWARE_STACK_ERROR CUDA_ERROR_ILLEGAL_ADDRESS CUDA_ERROR_ILLEGAL_INSTRUCTION
    CUDA_ERROR_INVALID_ADDRESS_SPACE CUDA_ERROR_INVALID_DEVICE CUDA_ERROR_INVALID_IMAGE
    CUDA_ERROR_INVALID_PC CUDA_ERROR_INVALID_VALUE CUDA_ERROR_LAUNCH_FAILED
    CUDA_ERROR_LAUNCH_TIMEOUT CUDA_ERROR_MISALIGNED_ADDRESS CUDA_ERROR_NOT_FOUND CUDA_ERROR_NOT_INITIALIZED
    CUDA_ERROR_NOT_PERMITTED CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_NO_BINARY_FOR_GPU
    CUDA_ERROR_NVLINK_UNCORRECTABLE CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    CUDA_ERROR_STREAM_CAPTURE_MERGE CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    CUDA_ERROR_TENSOR_MEMORY_LEAK CUDA_ERROR_TOO_MANY_PEERS CUDA_ERROR_UNKNOWN CUDA_SUCCESS
}

functions! {
    /// The driver's functions, as in NVIDIA's cuda.h. What it writes has no enums.
    /// `cuEventElapsedTime` is the first version: drivers before CUDA 12.8 lack the second.
    pub(crate) struct DriverFunctions {
        fn cuGetErrorName(CUresult, *mut *const c_char) -> CUresult;
        fn cuGetErrorString(CUresult, *mut *const c_char) -> CUresult;
        fn cuDeviceGet(*mut c_int, c_int) -> CUresult;
        fn cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, c_int) -> CUresult;
        fn cuDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> CUresult;
        fn cuDevicePrimaryCtxRetain(*mut CUcontext, c_int) -> CUresult;
        fn cuCtxGetCurrent(*mut CUcontext) -> CUresult;
        fn cuCtxSetCurrent(CUcontext) -> CUresult;
        fn cuCtxSynchronize() -> CUresult;
        fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> CUresult;
        fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int) -> CUresult;
        fn cuStreamDestroy_v2(CUstream) -> CUresult;
        fn cuStreamSynchronize(CUstream) -> CUresult;
        fn cuStreamWaitEvent(CUstream, CUevent, c_uint) -> CUresult;
        fn cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) -> CUresult;
        fn cuStreamEndCapture(CUstream, *mut CUgraph) -> CUresult;
        fn cuThreadExchangeStreamCaptureMode(*mut u32) -> CUresult;
        fn cuEventCreate(*mut CUevent, c_uint) -> CUresult;
        fn cuEventDestroy_v2(CUevent) -> CUresult;
        fn cuEventRecord(CUevent, CUstream) -> CUresult;
        fn cuEventQuery(CUevent) -> CUresult;
        fn cuEventSynchronize(CUevent) -> CUresult;
        fn cuEventElapsedTime(*mut f32, CUevent, CUevent) -> CUresult;
        fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong) -> CUresult;
        fn cuGraphLaunch(CUgraphExec, CUstream) -> CUresult;
        fn cuGraphDestroy(CUgraph) -> CUresult;
        fn cuGraphExecDestroy(CUgraphExec) -> CUresult;
        fn cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize) -> CUresult;
        fn cuGraphNodeGetType(CUgraphNode, *mut u32) -> CUresult;
        fn cuMemPoolCreate(*mut CUmemoryPool, *const CUmemPoolProps) -> CUresult;
        fn cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void) -> CUresult;
        fn cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void) -> CUresult;
        fn cuMemPoolSetAccess(CUmemoryPool, *const CUmemAccessDesc, usize) -> CUresult;
        fn cuMemPoolTrimTo(CUmemoryPool, usize) -> CUresult;
        fn cuMemAllocFromPoolAsync(*mut u64, usize, CUmemoryPool, CUstream) -> CUresult;
        fn cuMemFreeAsync(u64, CUstream) -> CUresult;
        fn cuMemGetInfo_v2(*mut usize, *mut usize) -> CUresult;
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> CUresult;
        fn cuMemFreeHost(*mut c_void) -> CUresult;
        fn cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, CUstream) -> CUresult;
        fn cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, CUstream) -> CUresult;
        fn cuMemcpyDtoDAsync_v2(u64, u64, usize, CUstream) -> CUresult;
        fn cuMemcpyPeerAsync(u64, CUcontext, u64, CUcontext, usize, CUstream) -> CUresult;
        fn cuMemsetD8Async(u64, c_uchar, usize, CUstream) -> CUresult;
        fn cuModuleLoadData(*mut CUmodule, *const c_void) -> CUresult;
        fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> CUresult;
        fn cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int) -> CUresult;
        fn cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void
        ) -> CUresult;
    }
}

/// The functions, looked up at the first call; or what is missing, with help.
pub(crate) fn functions() -> Result<&'static DriverFunctions, &'static str> {
    static FUNCTIONS: OnceLock<Result<DriverFunctions, String>> = OnceLock::new();
    let load = || {
        let help = "update the NVIDIA driver to one for CUDA 11.4 or later";
        let names = ["libcuda.so.1", "libcuda.so"];
        Library::first(&discover().driver, &names, |library| {
            DriverFunctions::load(library, help)
        })
    };
    FUNCTIONS.get_or_init(load).as_ref().map_err(String::as_str)
}

/// A call that the driver refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriverFault {
    pub(crate) function: &'static str,
    pub(crate) code: CUresult,
}

/// The outcome of a call of the driver.
pub(crate) type Outcome<T> = Result<T, DriverFault>;

/// Calls a function of the driver, as in `driver!(cuStreamSynchronize(stream))`, and turns its code
/// into an `Outcome`. It must be in an unsafe block with a SAFETY comment for the call.
macro_rules! driver {
    ($name:ident ( $($argument:expr),* $(,)? )) => {
        $crate::cuda::calls::outcome(
            stringify!($name),
            // Without its functions no device is usable.
            $crate::cuda::calls::functions().map_or(
                $crate::cuda::calls::CUresult::CUDA_ERROR_NOT_INITIALIZED,
                |driver| (driver.$name)($($argument),*),
            ),
        )
    };
}
pub(crate) use driver;

pub(crate) fn outcome(function: &'static str, code: CUresult) -> Outcome<()> {
    if code == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(DriverFault { function, code })
    }
}

impl DriverFault {
    /// Whether the device runs no more work of this process.
    pub(crate) fn is_of_a_lost_device(self) -> bool {
        use CUresult as Code;
        matches!(
            self.code,
            Code::CUDA_ERROR_ILLEGAL_ADDRESS
                | Code::CUDA_ERROR_LAUNCH_FAILED
                | Code::CUDA_ERROR_LAUNCH_TIMEOUT
                | Code::CUDA_ERROR_MISALIGNED_ADDRESS
                | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | Code::CUDA_ERROR_INVALID_PC
                | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
                | Code::CUDA_ERROR_ASSERT
                | Code::CUDA_ERROR_ECC_UNCORRECTABLE
                | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | Code::CUDA_ERROR_CONTAINED
                | Code::CUDA_ERROR_TENSOR_MEMORY_LEAK
                | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
                | Code::CUDA_ERROR_DEINITIALIZED
                | Code::CUDA_ERROR_UNKNOWN
        )
    }

    /// The error of an operation that made the call.
    pub(crate) fn of(self, by: Caller, device: Device) -> Error {
        let (name, meaning) = describe(self.code);
        let help = match self.code {
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT => {
                "this process has lost the device, perhaps through work started earlier: run again with \
                 CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer to find it"
            }
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => {
                "this call cannot run while a graph is captured: make it before or after the capture"
            }
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => {
                "a stream joined the capture and was not joined back: at the end, let the captured \
                 stream wait for an event of it"
            }
            CUresult::CUDA_ERROR_CAPTURED_EVENT
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION => {
                "only streams of the same capture, on the same thread, can wait for this event"
            }
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR => {
                "the GPU is faulty: check `nvidia-smi -q` and the kernel log, and take it out of use"
            }
            CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
                "this process has lost the device, or another one holds it exclusively: check \
                 `nvidia-smi -q -d COMPUTE`"
            }
            _ => "",
        };
        by.cuda(device, self.function, [&name, &meaning], help)
    }
}

type Ask = unsafe extern "C" fn(CUresult, *mut *const std::ffi::c_char) -> CUresult;

/// The driver's name for a code, or its number, and its description.
pub(crate) fn describe(code: CUresult) -> (String, String) {
    let driver = functions().ok();
    let text = |ask: Option<Ask>| {
        let mut text = std::ptr::null();
        // SAFETY: both functions write null or the address of a static string to a local pointer.
        let code = unsafe { ask?(code, &mut text) };
        if code != CUresult::CUDA_SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: a static C string of the driver's, as above.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    };
    let name = text(driver.map(|driver| driver.cuGetErrorName));
    let meaning = text(driver.map(|driver| driver.cuGetErrorString));
    (
        name.unwrap_or_else(|| format!("error {}", code.0)),
        meaning.unwrap_or_else(|| "the driver has no text for it".to_string()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_sticky_error_a_device_is_lost() {
        // CUDA's documentation says of these that the process must be ended.
        for code in [
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUresult::CUDA_ERROR_CONTAINED,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
        ] {
            let fault = DriverFault {
                function: "cuStreamSynchronize",
                code,
            };
            assert!(fault.is_of_a_lost_device(), "{code:?}");
        }
    }
}
