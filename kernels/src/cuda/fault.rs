//! Errors of the driver's functions, and how they become errors of an operation at a line.

use std::ffi::CStr;

use super::calls::{self, CUresult};
use crate::Device;
use crate::error::{Caller, Error};

/// A call that the driver refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) function: &'static str,
    pub(crate) code: CUresult,
}

/// The outcome of a call of the driver.
pub(crate) type Outcome<T> = Result<T, Fault>;

/// Calls a function of the driver, as in `driver!(cuStreamSynchronize(stream))`, and turns its code
/// into an `Outcome`. It must be in an unsafe block with a SAFETY comment for the call.
macro_rules! driver {
    ($name:ident ( $($argument:expr),* $(,)? )) => {
        $crate::cuda::fault::outcome(
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
        Err(Fault { function, code })
    }
}

impl Fault {
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
    let driver = calls::functions().ok();
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
            let fault = Fault {
                function: "cuStreamSynchronize",
                code,
            };
            assert!(fault.is_of_a_lost_device(), "{code:?}");
        }
    }
}
