//! The driver's functions that this crate calls. cudarc binds each at its first call and panics if
//! it is missing, so all are looked up before the first call, and an error names the missing ones.

use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUevent, CUresult};

macro_rules! functions {
    ($($name:ident)*) => {
        pub(crate) use cudarc::driver::sys::{$($name),*};
        /// Their names, each ending in a zero byte.
        const NAMES: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
    };
}

functions! {
    cuGetErrorName cuGetErrorString
    cuDeviceGet cuDeviceGetAttribute cuDeviceCanAccessPeer cuDevicePrimaryCtxRetain
    cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize cuCtxGetStreamPriorityRange
    cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent
    cuStreamBeginCapture_v2 cuStreamEndCapture cuThreadExchangeStreamCaptureMode
    cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuEventSynchronize
    cuGraphInstantiateWithFlags cuGraphLaunch cuGraphDestroy cuGraphExecDestroy
    cuGraphGetNodes cuGraphNodeGetType
    cuMemPoolCreate cuMemPoolSetAttribute cuMemPoolGetAttribute cuMemPoolSetAccess cuMemPoolTrimTo
    cuMemAllocFromPoolAsync cuMemFreeAsync cuMemGetInfo_v2 cuMemHostAlloc cuMemFreeHost
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async
    cuModuleLoadData cuModuleGetFunction cuLaunchKernel
}

/// `cuEventElapsedTime`. cudarc binds only its second version, which drivers before CUDA 12.8 lack;
/// the first version, which all drivers have, does the same.
///
/// # Safety
/// As for the driver's function: both events are alive.
pub(crate) unsafe fn elapsed_ms(milliseconds: &mut f32, start: CUevent, end: CUevent) -> CUresult {
    type Function = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
    static FUNCTION: OnceLock<Option<Function>> = OnceLock::new();
    let function = FUNCTION.get_or_init(|| {
        // SAFETY: events exist, so the library is loaded; the symbol has this type in every driver.
        unsafe {
            sys::culib()
                .get::<Function>(b"cuEventElapsedTime\0")
                .ok()
                .map(|symbol| *symbol)
        }
    });
    match function {
        // SAFETY: by the caller's promise.
        Some(function) => unsafe { function(milliseconds, start, end) },
        None => CUresult::CUDA_ERROR_NOT_FOUND,
    }
}

/// Whether the driver has all functions, looked up once; the error names the missing ones.
pub(crate) fn check() -> Result<(), String> {
    static CHECKED: OnceLock<Result<(), String>> = OnceLock::new();
    CHECKED.get_or_init(look).clone()
}

fn look() -> Result<(), String> {
    // SAFETY: opens the driver's library by its usual names, as `discover` did before.
    if !unsafe { sys::is_culib_present() } {
        return Err("the CUDA driver's library cannot be loaded".to_string());
    }
    // SAFETY: the library is there, so this does not panic.
    let library = unsafe { sys::culib() };
    let missing: Vec<&str> = NAMES
        .iter()
        // SAFETY: the symbol is only looked up, never called under this type.
        .filter(|name| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err())
        .map(|name| name.trim_end_matches('\0'))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the CUDA driver lacks {}; help: update the NVIDIA driver to one for CUDA 11.4 or later",
        missing.join(", ")
    ))
}
