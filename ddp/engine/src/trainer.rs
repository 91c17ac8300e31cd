//! Training runs: set-up, the loop around the step, the end.
//!
//! Start reading at `trainer/training.rs`, which has the loop. `setup` builds what it needs,
//! `opening` the run's folder. `Program` is what the trainer needs of the program around it.

mod agree;
mod carried;
mod matmuls;
mod nonfinite;
mod opening;
mod places;
mod plan;
mod prepare;
mod program;
mod replay;
mod resume;
mod sample;
mod setup;
mod stop_poll;
mod totals;
mod training;
mod trial;

use std::time::Instant;

use ddp_comm::World;
use ddp_kernels::transfer::{Phase, in_phase};

use self::carried::Carried;
pub use self::places::program as program_version;
pub use self::plan::Plan;
pub use self::program::Program;
pub use self::replay::replay;
pub use self::resume::is_same_data;
pub use self::setup::EVAL_TOKENS_MAX;
pub use self::trial::{ModelBytes, Rehearsal, Trial, rehearse};
use crate::config::{Config, Resume};
use crate::error::{Error, Result};
use crate::faults::{self, FaultPoint};
pub use crate::model::{ModelOptions, data_shape};

/// Trains as one of the ranks of `world`. Results are in the folder `options.out`. A run that is
/// asked to stop saves and ends with [`Error::Stopped`]; during set-up it ends the process at once,
/// as [`World::fail`] does. A resumed run that is already finished is left as it is. If the world
/// is elastic, and ranks are lost or come, the ranks meet in a new world and continue there.
///
/// After an error other than `Stopped` and `NonFinite` the process is expected to end: threads of
/// the run may still wait for a disk or another rank, so its memory and the lock of its folder are
/// kept until then.
pub fn train(options: &Config, program: &mut dyn Program, world: &World) -> Result<()> {
    // Between two worlds too, a request to stop is not lost.
    let _stops = world.catch_stop();
    let (mut carried, mut later) = (Carried::default(), None);
    if world.is_newcomer() {
        // A GPU that cannot be used is found while the others do not wait.
        program.devices(world)?;
        let open = || setup::data(options, program, world, None);
        carried.data = Some(in_phase(Phase::Setup, open)?);
        faults::at_step(FaultPoint::Joining, 0)?;
        later = Some(world.next_generation(None)?);
    }
    // If no rank has the run any more, it continues from its last checkpoint.
    let from_checkpoint = Config {
        resume: Resume::Auto,
        ..options.clone()
    };
    loop {
        let now = later.as_ref().unwrap_or(world);
        let options = match now.generation() {
            1 => options,
            _ => &from_checkpoint,
        };
        let why = match train_with(options, program, now, &mut carried) {
            Ok(true) => {
                now.finish();
                return Ok(());
            }
            Ok(false) => None,
            Err(error) if carried::continues_after(&error, now, &carried.devices()) => {
                match error {
                    Error::Comm(error) => Some(error),
                    _ => None,
                }
            }
            Err(error) => {
                // Dropped, it would wait for the other ranks.
                std::mem::forget(later);
                return Err(error);
            }
        };
        carried.noticed.get_or_insert_with(Instant::now);
        let next = now.next_generation(why.as_ref())?;
        later = Some(next);
    }
}

/// Trains with the ranks of `world`. Whether the run is over: if not, processes have come that are
/// to be taken in.
fn train_with(
    options: &Config,
    program: &mut dyn Program,
    world: &World,
    carried: &mut Carried,
) -> Result<bool> {
    let stops = world.catch_stop();
    carried.untold.extend(world.change());
    let trainer = in_phase(Phase::Setup, || {
        training::Trainer::new(options, program, world, stops, carried)
    });
    let trainer = trainer.inspect_err(|error| carried::leave_if_new(error, world))?;
    trainer.map_or(Ok(true), |trainer| trainer.run(carried))
}
