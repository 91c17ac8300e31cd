//! A process among the ranks of a job: what data and models need to know of it.

use crate::device::Device;

/// One of the ranks of a job. The world of `ddp-comm` turns into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its number, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
    /// The device that it trains on, if it has chosen one.
    pub device: Option<Device>,
}
