//! A group of one rank: every call is already done.

use ddp_kernels::Device;

use crate::collective::{Call, Collective};
use crate::error::Result;

/// The only rank.
#[derive(Debug, Default)]
pub(crate) struct Single {
    /// Its GPU, if the group is for one. It needs no NCCL.
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
    fn run(&self, _: &[Call<'_>]) -> Result<()> {
        Ok(())
    }
}
