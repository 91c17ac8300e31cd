//! The GPUs: how many, their names, and their attributes.

pub mod calls;

use crate::config::Config;
use crate::error::CUresult;

pub use self::calls::{can_access, resolve};

/// One GPU.
#[derive(Debug)]
pub struct Device {
    /// Its number.
    pub ordinal: usize,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// What cuDeviceTotalMem says.
    pub memory_bytes: u64,
    /// What every call on it returns after it was lost.
    pub lost: Option<CUresult>,
    /// How many holders its primary context has.
    pub holders: usize,
    /// Whether it ever had a context, so that a stale handle differs from one that never existed.
    pub had_context: bool,
}

impl Device {
    /// A GPU that is not in use yet.
    pub fn new(ordinal: usize, config: &Config) -> Self {
        let known = &config.capabilities;
        Self {
            ordinal,
            capability: known[ordinal.min(known.len() - 1)],
            memory_bytes: config.memory_bytes,
            lost: None,
            holders: 0,
            had_context: false,
        }
    }

    /// Its name in reports.
    pub fn name(&self) -> String {
        format!("Simulated GPU {} (no hardware)", self.ordinal)
    }
}
