//! Why a call of NCCL fails.

use crate::error::CUresult;

/// Codes of NCCL.
pub(crate) mod code {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const UNHANDLED_CUDA_ERROR: i32 = 1;
    pub(crate) const SYSTEM_ERROR: i32 = 2;
    pub(crate) const INVALID_ARGUMENT: i32 = 4;
    pub(crate) const INVALID_USAGE: i32 = 5;
}

/// A call that fails: what it returns, and what ncclGetLastError says.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) code: i32,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(code::INVALID_ARGUMENT, message)
    }
}

impl From<CUresult> for Refusal {
    fn from(code: CUresult) -> Self {
        Self::new(
            code::UNHANDLED_CUDA_ERROR,
            format!("the CUDA driver says {code:?}"),
        )
    }
}
