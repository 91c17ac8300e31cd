//! Training runs: set-up, the loop around the step, the end.
//!
//! Start reading at `trainer/training.rs`, which has the loop. `setup` builds what it needs,
//! `opening` the run's folder. `Program` is what the trainer needs of the program around it.

mod agree;
mod nonfinite;
mod opening;
mod places;
mod plan;
mod prepare;
mod products;
mod program;
mod resume;
mod sample;
mod setup;
mod stop_poll;
mod totals;
mod training;
mod trial;

use ddp_comm::World;
use ddp_kernels::transfer::{Phase, in_phase};

pub use self::plan::Plan;
pub use self::program::Program;
pub use self::resume::is_same_data;
pub use self::setup::EVAL_TOKENS_MAX;
pub use self::trial::{ModelBytes, Rehearsal, Trial, rehearse};
use crate::config::Config;
use crate::error::Result;
pub use crate::model::{ModelOptions, data_shape};

/// Trains as one of the ranks of `world`. Results are in the folder `options.out`. A run that is
/// asked to stop saves and ends with [`Error::Stopped`](crate::Error::Stopped); during set-up it
/// ends the process at once, as [`World::fail`] does. A resumed run that is already finished is
/// left as it is.
///
/// After an error other than `Stopped` and `NonFinite` the process is expected to end: threads of
/// the run may still wait for a disk or another rank, so its memory and the lock of its folder are
/// kept until then.
pub fn train(options: &Config, program: &mut dyn Program, world: &World) -> Result<()> {
    let stops = world.catch_stop();
    let trainer = in_phase(Phase::Setup, || {
        training::Trainer::new(options, program, world, stops)
    })?;
    match trainer {
        Some(trainer) => trainer.run(),
        None => Ok(()),
    }
}
