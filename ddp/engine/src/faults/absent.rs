//! No faults: what release builds contain in place of `injected.rs`.

use ddp_comm::Field;
use ddp_kernels::Tensor;

use super::point::FaultPoint;
use crate::error::Result;

#[inline(always)]
pub(crate) fn begin(_step: u64) {}

#[inline(always)]
pub(crate) fn at(_point: FaultPoint) -> Result<()> {
    Ok(())
}

#[inline(always)]
pub(crate) fn at_launch() -> Result<()> {
    Ok(())
}

#[inline(always)]
pub(crate) fn at_step(_point: FaultPoint, _step: u64) -> Result<()> {
    Ok(())
}

#[inline(always)]
pub(crate) fn flip(_gradients: &Tensor) -> Result<()> {
    Ok(())
}

#[inline(always)]
pub(crate) fn rows(_step: u64, _rows: &[u64]) {}

#[inline(always)]
pub(crate) fn disagree(_fields: &mut [Field]) {}
