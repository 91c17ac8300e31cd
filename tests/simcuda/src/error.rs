//! The driver's error codes: names, texts, and numbers.

pub mod calls;

use std::ffi::CStr;

use cudarc::driver::sys;

/// A code of the driver: a number, because a planned fault may be one that no version documents.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CUresult(pub u32);

macro_rules! codes {
    ($($name:ident $text:literal)*) => {
        impl CUresult {
            $(
                /// See the driver's documentation.
                pub const $name: CUresult = CUresult(sys::CUresult::$name as u32);
            )*
        }

        /// Every code that CUDA 13.0 documents, with its name and the text of cuGetErrorString.
        const CODES: [(CUresult, &CStr, &CStr); 101] = [$(
            (CUresult::$name, terminated(concat!(stringify!($name), "\0")), $text),
        )*];
    };
}

/// The C string of a text that ends in a zero byte.
const fn terminated(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text has one zero byte, its last"),
    }
}

codes! {
    CUDA_SUCCESS c"no error"
    CUDA_ERROR_INVALID_VALUE c"invalid argument"
    CUDA_ERROR_OUT_OF_MEMORY c"out of memory"
    CUDA_ERROR_NOT_INITIALIZED c"initialization error"
    CUDA_ERROR_DEINITIALIZED c"driver shutting down"
    CUDA_ERROR_PROFILER_DISABLED c"profiler disabled"
    CUDA_ERROR_PROFILER_NOT_INITIALIZED c"profiler not initialized"
    CUDA_ERROR_PROFILER_ALREADY_STARTED c"profiler already started"
    CUDA_ERROR_PROFILER_ALREADY_STOPPED c"profiler already stopped"
    CUDA_ERROR_STUB_LIBRARY c"stub library"
    CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER c"call requires newer driver"
    CUDA_ERROR_DEVICE_UNAVAILABLE c"CUDA-capable device(s) is/are busy or unavailable"
    CUDA_ERROR_NO_DEVICE c"no CUDA-capable device is detected"
    CUDA_ERROR_INVALID_DEVICE c"invalid device ordinal"
    CUDA_ERROR_DEVICE_NOT_LICENSED c"device not licensed"
    CUDA_ERROR_INVALID_IMAGE c"device kernel image is invalid"
    CUDA_ERROR_INVALID_CONTEXT c"invalid device context"
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT c"context already current"
    CUDA_ERROR_MAP_FAILED c"map failed"
    CUDA_ERROR_UNMAP_FAILED c"unmap failed"
    CUDA_ERROR_ARRAY_IS_MAPPED c"array is mapped"
    CUDA_ERROR_ALREADY_MAPPED c"already mapped"
    CUDA_ERROR_NO_BINARY_FOR_GPU c"no kernel image is available for execution on the device"
    CUDA_ERROR_ALREADY_ACQUIRED c"already acquired"
    CUDA_ERROR_NOT_MAPPED c"not mapped"
    CUDA_ERROR_NOT_MAPPED_AS_ARRAY c"not mapped as array"
    CUDA_ERROR_NOT_MAPPED_AS_POINTER c"not mapped as pointer"
    CUDA_ERROR_ECC_UNCORRECTABLE c"uncorrectable ECC error encountered"
    CUDA_ERROR_UNSUPPORTED_LIMIT c"unsupported limit"
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE c"exclusive-thread device already in use by a different thread"
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED c"peer access is not supported between these two devices"
    CUDA_ERROR_INVALID_PTX c"a PTX JIT compilation failed"
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT c"invalid graphics context"
    CUDA_ERROR_NVLINK_UNCORRECTABLE c"uncorrectable NVLink error detected during the execution"
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND c"jit compiler not found"
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION c"the provided PTX was compiled with an unsupported toolchain."
    CUDA_ERROR_JIT_COMPILATION_DISABLED c"jit compilation disabled"
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY c"unsupported exec affinity"
    CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC c"unsupported devside sync"
    CUDA_ERROR_CONTAINED c"contained"
    CUDA_ERROR_INVALID_SOURCE c"invalid source"
    CUDA_ERROR_FILE_NOT_FOUND c"file not found"
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND c"shared object symbol not found"
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED c"shared object init failed"
    CUDA_ERROR_OPERATING_SYSTEM c"OS call failed or operation not supported on this OS"
    CUDA_ERROR_INVALID_HANDLE c"invalid resource handle"
    CUDA_ERROR_ILLEGAL_STATE c"the operation cannot be performed in the present state"
    CUDA_ERROR_LOSSY_QUERY c"lossy query"
    CUDA_ERROR_NOT_FOUND c"named symbol not found"
    CUDA_ERROR_NOT_READY c"device not ready"
    CUDA_ERROR_ILLEGAL_ADDRESS c"an illegal memory access was encountered"
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES c"too many resources requested for launch"
    CUDA_ERROR_LAUNCH_TIMEOUT c"the launch timed out and was terminated"
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING c"launch incompatible texturing"
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED c"peer access is already enabled"
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED c"peer access has not been enabled"
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE c"cannot set while device is active in this process"
    CUDA_ERROR_CONTEXT_IS_DESTROYED c"context is destroyed"
    CUDA_ERROR_ASSERT c"device-side assert triggered"
    CUDA_ERROR_TOO_MANY_PEERS c"peer mapping resources exhausted"
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED c"part or all of the requested memory range is already mapped"
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED c"pointer does not correspond to a registered memory region"
    CUDA_ERROR_HARDWARE_STACK_ERROR c"hardware stack error"
    CUDA_ERROR_ILLEGAL_INSTRUCTION c"an illegal instruction was encountered"
    CUDA_ERROR_MISALIGNED_ADDRESS c"misaligned address"
    CUDA_ERROR_INVALID_ADDRESS_SPACE c"invalid address space"
    CUDA_ERROR_INVALID_PC c"invalid pc"
    CUDA_ERROR_LAUNCH_FAILED c"unspecified launch failure"
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE c"too many blocks in cooperative launch"
    CUDA_ERROR_TENSOR_MEMORY_LEAK c"tensor memory leak"
    CUDA_ERROR_NOT_PERMITTED c"operation not permitted"
    CUDA_ERROR_NOT_SUPPORTED c"operation not supported"
    CUDA_ERROR_SYSTEM_NOT_READY c"system not ready"
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH c"system driver mismatch"
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE c"compat not supported on device"
    CUDA_ERROR_MPS_CONNECTION_FAILED c"mps connection failed"
    CUDA_ERROR_MPS_RPC_FAILURE c"mps rpc failure"
    CUDA_ERROR_MPS_SERVER_NOT_READY c"mps server not ready"
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED c"mps max clients reached"
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED c"mps max connections reached"
    CUDA_ERROR_MPS_CLIENT_TERMINATED c"mps client terminated"
    CUDA_ERROR_CDP_NOT_SUPPORTED c"cdp not supported"
    CUDA_ERROR_CDP_VERSION_MISMATCH c"cdp version mismatch"
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED c"operation not permitted when stream is capturing"
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED c"operation failed due to a previous error during capture"
    CUDA_ERROR_STREAM_CAPTURE_MERGE c"operation would result in a merge of separate capture sequences"
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED c"capture was not ended in the same stream as it began"
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED c"capturing stream has unjoined work"
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION c"dependency created on uncaptured work in another stream"
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT c"operation would make the legacy stream depend on a capturing blocking stream"
    CUDA_ERROR_CAPTURED_EVENT c"operation not permitted on an event last recorded in a capturing stream"
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD c"attempt to terminate a thread-local capture sequence from another thread"
    CUDA_ERROR_TIMEOUT c"timeout"
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update"
    CUDA_ERROR_EXTERNAL_DEVICE c"external device"
    CUDA_ERROR_INVALID_CLUSTER_SIZE c"invalid cluster size"
    CUDA_ERROR_FUNCTION_NOT_LOADED c"function not loaded"
    CUDA_ERROR_INVALID_RESOURCE_TYPE c"invalid resource type"
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION c"invalid resource configuration"
    CUDA_ERROR_KEY_ROTATION c"key rotation"
    CUDA_ERROR_UNKNOWN c"unknown error"
}

impl std::fmt::Debug for CUresult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match entry(self.0) {
            Some((_, name, _)) => f.write_str(&name.to_string_lossy()),
            None => write!(f, "error {}", self.0),
        }
    }
}

fn entry(number: u32) -> Option<&'static (CUresult, &'static CStr, &'static CStr)> {
    CODES.iter().find(|(code, ..)| code.0 == number)
}

/// The code with this name: `CUDA_ERROR_OUT_OF_MEMORY`, or `out_of_memory` for short.
pub fn from_name(name: &str) -> Option<CUresult> {
    let name = name.to_ascii_uppercase();
    CODES.iter().find_map(|(code, full, _)| {
        let full = full.to_str().ok()?;
        (full == name || full.strip_prefix("CUDA_ERROR_") == Some(&name)).then_some(*code)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_found_by_number_and_by_either_name() {
        for (code, name, text) in CODES {
            assert_eq!(entry(code.0).map(|(code, ..)| *code), Some(code));
            assert_eq!(from_name(name.to_str().unwrap()), Some(code));
            assert!(!text.to_bytes().is_empty());
        }
        assert_eq!(
            from_name("out_of_memory"),
            Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
        );
        assert_eq!(format!("{:?}", CUresult(12345)), "error 12345");
    }
}
