//! How every entry point of cuBLASLt begins and ends.

use cudarc::cublaslt::sys::cublasStatus_t as Status;

use super::matrix::Refusal;
use crate::error::CUresult;
use crate::machine::{self, Machine, Out};

/// Every entry point that does more than a lookup.
pub(super) fn call(
    name: &'static str,
    body: impl FnOnce(&mut Machine) -> Result<(), Refused>,
) -> Status {
    let of_driver = |code| match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Refused::silently(Status::CUBLAS_STATUS_ALLOC_FAILED),
        _ => Refused::silently(Status::CUBLAS_STATUS_EXECUTION_FAILED),
    };
    let mut is_traced = false;
    let outcome = machine::call_library(name, of_driver, |held| {
        is_traced = held.config.trace;
        body(held)
    });
    let Err(refused) = outcome else {
        return Status::CUBLAS_STATUS_SUCCESS;
    };
    // "No algorithm" is a valid answer: the caller has a fallback.
    let is_answer = name == "cublasLtMatmulAlgoGetHeuristic"
        && refused.status == Status::CUBLAS_STATUS_NOT_SUPPORTED;
    if let Some(why) = refused.why
        && (is_traced || !is_answer)
    {
        eprintln!("simcuda: {name}: {why}");
    }
    refused.status
}

/// A status, and its explanation on stderr.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) status: Status,
    pub(super) why: Option<String>,
}

impl Refused {
    pub(super) fn silently(status: Status) -> Self {
        Self { status, why: None }
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        let (status, why) = match refusal {
            Refusal::Invalid(why) => (Status::CUBLAS_STATUS_INVALID_VALUE, why),
            Refusal::Unsupported(why) => (Status::CUBLAS_STATUS_NOT_SUPPORTED, why),
        };
        Self {
            status,
            why: Some(why),
        }
    }
}

pub(super) fn invalid(why: impl Into<String>) -> Refused {
    Refusal::Invalid(why.into()).into()
}

pub(super) fn put<T>(out: Out<'_, T>, value: T) -> Result<(), Refused> {
    out.ok_or_else(|| invalid("the place for the result is null"))?
        .write(value);
    Ok(())
}
