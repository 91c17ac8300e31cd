//! A group of one: nothing to do, for everything is done.

use ddp_kernels::{Device, Tensor};

use crate::collective::{Call, Collective, Reduce};
use crate::error::Result;

/// The only rank.
#[derive(Debug, Default)]
pub(crate) struct Single {
    /// The GPU it is for, if it was made for one. It needs no NCCL.
    pub(crate) device: Option<Device>,
}

impl Collective for Single {
    fn transport(&self) -> &'static str {
        "alone"
    }
    fn device(&self) -> Option<Device> {
        self.device
    }
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        1
    }
    fn all_reduce(&self, _: &Call<'_>, _: &Tensor, _: Reduce) -> Result<()> {
        Ok(())
    }
    fn reduce_scatter(&self, _: &Call<'_>, _: &Tensor, _: Reduce) -> Result<()> {
        Ok(())
    }
    fn all_gather(&self, _: &Call<'_>, _: &Tensor) -> Result<()> {
        Ok(())
    }
    fn broadcast(&self, _: &Call<'_>, _: &Tensor, _: usize) -> Result<()> {
        Ok(())
    }
    fn send(&self, _: &Call<'_>, _: &Tensor, _: usize) -> Result<()> {
        unreachable!("Group refuses to send to this rank itself, and there is no other")
    }
    fn receive(&self, _: &Call<'_>, _: &Tensor, _: usize) -> Result<()> {
        unreachable!("Group refuses to receive from this rank itself, and there is no other")
    }
    fn barrier(&self, _: &Call<'_>) -> Result<()> {
        Ok(())
    }
}
