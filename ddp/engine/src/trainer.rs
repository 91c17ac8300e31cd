//! Training runs: set-up, the loop around the step, the end.
//!
//! Start reading at `trainer/training.rs`, which has the loop. `setup` builds what it needs,
//! `opening` the run's folder. `Program` is what the trainer needs of the program around it.

mod agree;
mod model;
mod nonfinite;
mod opening;
mod options;
mod places;
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

pub use self::model::{ModelOptions, data_shape};
pub use self::options::{LearningRate, Length, Plan, Reduction, Resume, RunData, RunOptions};
pub use self::program::{Chosen, Program, Settings};
pub use self::resume::is_same_data;
pub use self::setup::EVAL_TOKENS_MAX;
pub use self::trial::{ModelBytes, Rehearsal, Trial, rehearse};
use crate::error::Result;

/// Trains as one of the ranks of `world`. Results are in the folder `options.out`. A run that is
/// asked to stop saves and ends with [`Error::Stopped`](crate::Error::Stopped); during set-up it
/// ends the process at once, as [`World::fail`] does. A resumed run that is already finished is
/// left as it is.
///
/// After an error other than `Stopped` and `NonFinite` the process is expected to end: threads of
/// the run may still wait for a disk or another rank, so its memory and the lock of its folder are
/// kept until then.
pub fn train(options: &RunOptions, program: &mut dyn Program, world: &World) -> Result<()> {
    let stops = world.catch_stop();
    let trainer = in_phase(Phase::Setup, || {
        training::Trainer::new(options, program, world, stops)
    })?;
    match trainer {
        Some(trainer) => trainer.run(),
        None => Ok(()),
    }
}
