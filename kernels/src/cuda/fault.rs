//! What a function of CUDA's refused, and how that becomes an error with an operation and a line.

use std::ffi::CStr;

use cudarc::driver::sys::CUresult;

use super::calls;
use crate::Device;
use crate::error::{CudaFailure, Error, Site};

/// A refusal by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) function: &'static str,
    pub(crate) code: CUresult,
}

/// What a call of the driver comes to.
pub(crate) type Outcome<T> = Result<T, Fault>;

/// Calls a function of the driver and turns its code into an `Outcome`: `driver!(cuStreamSynchronize(stream))`.
/// It must stand in an unsafe block that argues for the call.
macro_rules! driver {
    ($name:ident ( $($argument:expr),* $(,)? )) => {
        $crate::cuda::fault::outcome(stringify!($name), $crate::cuda::calls::$name($($argument),*))
    };
}
pub(crate) use driver;

pub(crate) fn outcome(function: &'static str, code: CUresult) -> Outcome<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(Fault { function, code }) }
}

impl Fault {
    /// Whether the device does nothing any more for this process, or the driver is going away with it.
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
                | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
                | Code::CUDA_ERROR_DEINITIALIZED
                | Code::CUDA_ERROR_UNKNOWN
        )
    }

    /// As an error of an operation.
    pub(crate) fn of(self, op: &'static str, device: Device, at: Site) -> Error {
        let (name, meaning) = describe(self.code);
        let hint = match self.code {
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT => {
                "The device is lost to this process, and the fault may be of work started earlier: run again with \
                 CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer to see which."
            }
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => {
                "A graph is being captured, by this thread or another: this cannot be part of one, or would break it. Do it before or \
                 after the capture."
            }
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => {
                "A stream joined the capture and was not waited for: let the captured stream wait for an event of it at the end."
            }
            CUresult::CUDA_ERROR_CAPTURED_EVENT
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION => {
                "The event is a place in a graph, or outside the one that is captured: only streams of the same capture, on the \
                 same thread, wait for it."
            }
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR => {
                "The GPU itself is at fault: look at nvidia-smi -q and the kernel log, and take it out of use."
            }
            CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
                "The device is lost to this process, or another one has it for itself: nvidia-smi -q -d COMPUTE tells."
            }
            _ => "",
        };
        let failure = CudaFailure { op, device, function: self.function, name, meaning, hint, at };
        Error::Cuda(Box::new(failure))
    }
}

/// The driver's name for a code, and its words.
pub(crate) fn describe(code: CUresult) -> (String, String) {
    let text = |ask: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: both functions write the address of a string that lives for ever, or null, to a pointer of ours.
        let code = unsafe { ask(code, &mut text) };
        (code == CUresult::CUDA_SUCCESS && !text.is_null())
            // SAFETY: a C string of the driver's, as above.
            .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let name = text(calls::cuGetErrorName).unwrap_or_else(|| format!("error {}", code as u32));
    (name, text(calls::cuGetErrorString).unwrap_or_default())
}
