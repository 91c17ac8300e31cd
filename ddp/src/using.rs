//! Using a model that was saved: `ddp-train eval` and `ddp-train predict`.

use std::fmt::Display;

use ddp_comm::World;

use crate::config::UseConfig;
use crate::error::{Error, Result};

/// Says how good the model is on data with labels.
pub fn eval(_config: &UseConfig, _world: &World, _say: &mut dyn FnMut(&dyn Display) -> Result<()>) -> Result<()> {
    Err(Error::Internal("eval is not there yet".into()))
}

/// Writes what the model says of each row.
pub fn predict(_config: &UseConfig, _world: &World) -> Result<()> {
    Err(Error::Internal("predict is not there yet".into()))
}
