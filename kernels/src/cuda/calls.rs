//! The driver's functions that this crate calls. All are looked up before the first call, so a
//! driver that lacks some is an error that names them.
//!
//! Results are numbers and not cudarc's enum: a newer driver may return a code that the enum lacks,
//! which would be undefined behaviour.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice_attribute, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUgraphNode, CUmemAccessDesc, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
    CUmodule, CUstream, CUstreamCaptureMode,
};

use crate::device::discover;
use crate::library::{Library, functions};

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
    pub(crate) struct Functions {
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
pub(crate) fn functions() -> Result<&'static Functions, &'static str> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    let load = || {
        let help = "update the NVIDIA driver to one for CUDA 11.4 or later";
        let names = ["libcuda.so.1", "libcuda.so"];
        Library::first(&discover().driver, &names, |library| {
            Functions::load(library, help)
        })
    };
    FUNCTIONS.get_or_init(load).as_ref().map_err(String::as_str)
}
