//! Rotary positions.

use std::sync::{Arc, Mutex};

use ddp_kernels::ops;
use ddp_kernels::panics;
use ddp_kernels::transfer::announced;
use ddp_kernels::{Device, Tensor};

use crate::error::Result;

/// Rotary positions. Clones share their tables.
#[derive(Clone, Debug)]
pub struct Rope {
    /// The angle between neighbouring positions, for each pair of columns that is turned.
    frequencies: Vec<f64>,
    /// What the turned columns are multiplied by.
    scale: f64,
    /// A table for each device and length, once it was needed.
    tables: Arc<Mutex<Vec<Tensor>>>,
}

impl Rope {
    /// Turns a pair of columns for each of `frequencies`, the angles between neighbouring
    /// positions, and multiplies them by `scale`.
    pub fn new(frequencies: Vec<f64>, scale: f64) -> Rope {
        Rope {
            frequencies,
            scale,
            tables: Arc::default(),
        }
    }

    /// How many columns of a head are turned.
    pub(crate) fn columns(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The table of this many positions on `device`.
    pub(crate) fn table(&self, positions: usize, device: Device) -> Result<Tensor> {
        let mut tables = panics::lock(&self.tables);
        let is_it = |it: &&Tensor| it.device() == device && it.shape()[0] == positions;
        if let Some(table) = tables.iter().find(is_it) {
            return Ok(table.clone());
        }
        let made = announced("rotary positions", || {
            ops::rope_table(positions, &self.frequencies, self.scale, device)
        })?;
        tables.push(made.clone());
        Ok(made)
    }
}
