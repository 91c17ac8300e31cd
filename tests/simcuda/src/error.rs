//! The driver's error codes: names, texts, and numbers.

pub mod calls;

use std::ffi::CStr;

use cudarc::driver::sys::CUresult;

/// Every code that CUDA 13.0 documents, with its name and the text of cuGetErrorString.
const CODES: [(CUresult, &CStr, &CStr); 101] = [
    (CUresult::CUDA_SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (CUresult::CUDA_ERROR_INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (CUresult::CUDA_ERROR_OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (CUresult::CUDA_ERROR_NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (CUresult::CUDA_ERROR_DEINITIALIZED, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (CUresult::CUDA_ERROR_PROFILER_DISABLED, c"CUDA_ERROR_PROFILER_DISABLED", c"profiler disabled"),
    (CUresult::CUDA_ERROR_PROFILER_NOT_INITIALIZED, c"CUDA_ERROR_PROFILER_NOT_INITIALIZED", c"profiler not initialized"),
    (CUresult::CUDA_ERROR_PROFILER_ALREADY_STARTED, c"CUDA_ERROR_PROFILER_ALREADY_STARTED", c"profiler already started"),
    (CUresult::CUDA_ERROR_PROFILER_ALREADY_STOPPED, c"CUDA_ERROR_PROFILER_ALREADY_STOPPED", c"profiler already stopped"),
    (CUresult::CUDA_ERROR_STUB_LIBRARY, c"CUDA_ERROR_STUB_LIBRARY", c"stub library"),
    (CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", c"call requires newer driver"),
    (CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"CUDA-capable device(s) is/are busy or unavailable"),
    (CUresult::CUDA_ERROR_NO_DEVICE, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (CUresult::CUDA_ERROR_INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (CUresult::CUDA_ERROR_DEVICE_NOT_LICENSED, c"CUDA_ERROR_DEVICE_NOT_LICENSED", c"device not licensed"),
    (CUresult::CUDA_ERROR_INVALID_IMAGE, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (CUresult::CUDA_ERROR_INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (CUresult::CUDA_ERROR_CONTEXT_ALREADY_CURRENT, c"CUDA_ERROR_CONTEXT_ALREADY_CURRENT", c"context already current"),
    (CUresult::CUDA_ERROR_MAP_FAILED, c"CUDA_ERROR_MAP_FAILED", c"map failed"),
    (CUresult::CUDA_ERROR_UNMAP_FAILED, c"CUDA_ERROR_UNMAP_FAILED", c"unmap failed"),
    (CUresult::CUDA_ERROR_ARRAY_IS_MAPPED, c"CUDA_ERROR_ARRAY_IS_MAPPED", c"array is mapped"),
    (CUresult::CUDA_ERROR_ALREADY_MAPPED, c"CUDA_ERROR_ALREADY_MAPPED", c"already mapped"),
    (CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution on the device"),
    (CUresult::CUDA_ERROR_ALREADY_ACQUIRED, c"CUDA_ERROR_ALREADY_ACQUIRED", c"already acquired"),
    (CUresult::CUDA_ERROR_NOT_MAPPED, c"CUDA_ERROR_NOT_MAPPED", c"not mapped"),
    (CUresult::CUDA_ERROR_NOT_MAPPED_AS_ARRAY, c"CUDA_ERROR_NOT_MAPPED_AS_ARRAY", c"not mapped as array"),
    (CUresult::CUDA_ERROR_NOT_MAPPED_AS_POINTER, c"CUDA_ERROR_NOT_MAPPED_AS_POINTER", c"not mapped as pointer"),
    (CUresult::CUDA_ERROR_ECC_UNCORRECTABLE, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered"),
    (CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"unsupported limit"),
    (CUresult::CUDA_ERROR_CONTEXT_ALREADY_IN_USE, c"CUDA_ERROR_CONTEXT_ALREADY_IN_USE", c"exclusive-thread device already in use by a different thread"),
    (CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"peer access is not supported between these two devices"),
    (CUresult::CUDA_ERROR_INVALID_PTX, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (CUresult::CUDA_ERROR_INVALID_GRAPHICS_CONTEXT, c"CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", c"invalid graphics context"),
    (CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE, c"CUDA_ERROR_NVLINK_UNCORRECTABLE", c"uncorrectable NVLink error detected during the execution"),
    (CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND, c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", c"jit compiler not found"),
    (CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the provided PTX was compiled with an unsupported toolchain."),
    (CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED, c"CUDA_ERROR_JIT_COMPILATION_DISABLED", c"jit compilation disabled"),
    (CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, c"CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", c"unsupported exec affinity"),
    (CUresult::CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC, c"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", c"unsupported devside sync"),
    (CUresult::CUDA_ERROR_CONTAINED, c"CUDA_ERROR_CONTAINED", c"contained"),
    (CUresult::CUDA_ERROR_INVALID_SOURCE, c"CUDA_ERROR_INVALID_SOURCE", c"invalid source"),
    (CUresult::CUDA_ERROR_FILE_NOT_FOUND, c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found"),
    (CUresult::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, c"CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", c"shared object symbol not found"),
    (CUresult::CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, c"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", c"shared object init failed"),
    (CUresult::CUDA_ERROR_OPERATING_SYSTEM, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS"),
    (CUresult::CUDA_ERROR_INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (CUresult::CUDA_ERROR_ILLEGAL_STATE, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
    (CUresult::CUDA_ERROR_LOSSY_QUERY, c"CUDA_ERROR_LOSSY_QUERY", c"lossy query"),
    (CUresult::CUDA_ERROR_NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (CUresult::CUDA_ERROR_NOT_READY, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch"),
    (CUresult::CUDA_ERROR_LAUNCH_TIMEOUT, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
    (CUresult::CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, c"CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", c"launch incompatible texturing"),
    (CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled"),
    (CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access has not been enabled"),
    (CUresult::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"cannot set while device is active in this process"),
    (CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (CUresult::CUDA_ERROR_ASSERT, c"CUDA_ERROR_ASSERT", c"device-side assert triggered"),
    (CUresult::CUDA_ERROR_TOO_MANY_PEERS, c"CUDA_ERROR_TOO_MANY_PEERS", c"peer mapping resources exhausted"),
    (CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped"),
    (CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region"),
    (CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR, c"CUDA_ERROR_HARDWARE_STACK_ERROR", c"hardware stack error"),
    (CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION, c"CUDA_ERROR_ILLEGAL_INSTRUCTION", c"an illegal instruction was encountered"),
    (CUresult::CUDA_ERROR_MISALIGNED_ADDRESS, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
    (CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE, c"CUDA_ERROR_INVALID_ADDRESS_SPACE", c"invalid address space"),
    (CUresult::CUDA_ERROR_INVALID_PC, c"CUDA_ERROR_INVALID_PC", c"invalid pc"),
    (CUresult::CUDA_ERROR_LAUNCH_FAILED, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", c"too many blocks in cooperative launch"),
    (CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK, c"CUDA_ERROR_TENSOR_MEMORY_LEAK", c"tensor memory leak"),
    (CUresult::CUDA_ERROR_NOT_PERMITTED, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (CUresult::CUDA_ERROR_NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (CUresult::CUDA_ERROR_SYSTEM_NOT_READY, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not ready"),
    (CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"system driver mismatch"),
    (CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", c"compat not supported on device"),
    (CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED, c"CUDA_ERROR_MPS_CONNECTION_FAILED", c"mps connection failed"),
    (CUresult::CUDA_ERROR_MPS_RPC_FAILURE, c"CUDA_ERROR_MPS_RPC_FAILURE", c"mps rpc failure"),
    (CUresult::CUDA_ERROR_MPS_SERVER_NOT_READY, c"CUDA_ERROR_MPS_SERVER_NOT_READY", c"mps server not ready"),
    (CUresult::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, c"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", c"mps max clients reached"),
    (CUresult::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED, c"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", c"mps max connections reached"),
    (CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED, c"CUDA_ERROR_MPS_CLIENT_TERMINATED", c"mps client terminated"),
    (CUresult::CUDA_ERROR_CDP_NOT_SUPPORTED, c"CUDA_ERROR_CDP_NOT_SUPPORTED", c"cdp not supported"),
    (CUresult::CUDA_ERROR_CDP_VERSION_MISMATCH, c"CUDA_ERROR_CDP_VERSION_MISMATCH", c"cdp version mismatch"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate capture sequences"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"operation would make the legacy stream depend on a capturing blocking stream"),
    (CUresult::CUDA_ERROR_CAPTURED_EVENT, c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream"),
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread"),
    (CUresult::CUDA_ERROR_TIMEOUT, c"CUDA_ERROR_TIMEOUT", c"timeout"),
    (CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update"),
    (CUresult::CUDA_ERROR_EXTERNAL_DEVICE, c"CUDA_ERROR_EXTERNAL_DEVICE", c"external device"),
    (CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE, c"CUDA_ERROR_INVALID_CLUSTER_SIZE", c"invalid cluster size"),
    (CUresult::CUDA_ERROR_FUNCTION_NOT_LOADED, c"CUDA_ERROR_FUNCTION_NOT_LOADED", c"function not loaded"),
    (CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE, c"CUDA_ERROR_INVALID_RESOURCE_TYPE", c"invalid resource type"),
    (CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", c"invalid resource configuration"),
    (CUresult::CUDA_ERROR_KEY_ROTATION, c"CUDA_ERROR_KEY_ROTATION", c"key rotation"),
    (CUresult::CUDA_ERROR_UNKNOWN, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn entry(number: u32) -> Option<&'static (CUresult, &'static CStr, &'static CStr)> {
    CODES.iter().find(|(code, ..)| *code as u32 == number)
}

/// The code with this number, if CUDA has one.
pub fn from_number(number: u32) -> Option<CUresult> {
    entry(number).map(|(code, ..)| *code)
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
            assert_eq!(from_number(code as u32), Some(code));
            assert_eq!(from_name(name.to_str().unwrap()), Some(code));
            assert!(!text.to_bytes().is_empty());
        }
        assert_eq!(
            from_name("out_of_memory"),
            Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
        );
        assert_eq!(from_number(12345), None);
    }
}
