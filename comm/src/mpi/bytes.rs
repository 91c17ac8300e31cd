//! A tensor's elements as bytes.

use std::panic::Location;

use ddp_kernels::Tensor;

use crate::error::Result;

/// Lends a tensor's bytes, read only. The tensor is in host memory: another is refused.
#[track_caller]
pub(crate) fn lend<R>(tensor: &Tensor, body: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
    tensor.with_bytes("collective between hosts", Location::caller(), body)?
}

/// Lends a tensor's bytes. The tensor is in host memory: another is refused.
#[track_caller]
pub(crate) fn lend_mut<R>(tensor: &Tensor, body: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
    tensor.with_bytes_mut("collective between hosts", Location::caller(), body)?
}
