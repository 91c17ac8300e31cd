//! The GPUs: how many, their names, and their attributes.

pub mod calls;

use crate::error::CUresult;

pub use self::calls::{can_access, resolve};

/// One GPU.
#[derive(Debug)]
pub struct Device {
    /// Its number.
    pub ordinal: usize,
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
    pub fn new(ordinal: usize, memory_bytes: u64) -> Self {
        Self {
            ordinal,
            memory_bytes,
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
