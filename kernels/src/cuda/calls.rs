//! The functions of the driver that this crate calls, by name. cudarc binds them one by one at their first call and panics
//! where one is missing, so all are looked for before the first is called, and what is missing is said.

use std::sync::OnceLock;

use cudarc::driver::sys;

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
    cuCtxSetCurrent cuCtxSynchronize cuCtxGetStreamPriorityRange
    cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent
    cuStreamBeginCapture_v2 cuStreamEndCapture
    cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuEventSynchronize cuEventElapsedTime_v2
    cuGraphInstantiateWithFlags cuGraphLaunch cuGraphDestroy cuGraphExecDestroy
    cuMemPoolCreate cuMemPoolSetAttribute cuMemPoolGetAttribute cuMemPoolSetAccess cuMemPoolTrimTo
    cuMemAllocFromPoolAsync cuMemFreeAsync cuMemGetInfo_v2 cuMemHostAlloc cuMemFreeHost
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async
    cuModuleLoadData cuModuleGetFunction cuLaunchKernel
}

/// Whether the driver has all of them: looked up once. The error names the ones it lacks.
pub(crate) fn check() -> Result<(), String> {
    static CHECKED: OnceLock<Result<(), String>> = OnceLock::new();
    CHECKED.get_or_init(look).clone()
}

fn look() -> Result<(), String> {
    // SAFETY: opens the driver's library by its ordinary names, as `discover` did before without harm.
    if !unsafe { sys::is_culib_present() } {
        return Err("the CUDA driver's library cannot be loaded".to_string());
    }
    // SAFETY: the library is there, so this does not panic.
    let library = unsafe { sys::culib() };
    let missing: Vec<&str> = NAMES
        .iter()
        // SAFETY: the symbol is only looked for, never called under this type.
        .filter(|name| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err())
        .map(|name| name.trim_end_matches('\0'))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the CUDA driver lacks {}. It is too old (CUDA 12.8 or later is needed) or not NVIDIA's: update it",
        missing.join(", ")
    ))
}
