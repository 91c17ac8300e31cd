//! Training runs: set-up, the loop around the step, the end.
//!
//! Start reading at `trainer/training.rs`, which has the loop. `setup` builds what it needs,
//! `opening` the run's folder. `Program` is what the trainer needs of the program around it.

mod agree;
mod carried;
mod matmuls;
mod nonfinite;
mod opening;
mod plan;
mod program;
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

use self::carried::{Carried, Next};
pub use self::plan::Plan;
pub use self::program::Program;
pub use self::resume::is_same_data;
pub use self::setup::{EVAL_TOKENS_MAX, step_options};
pub use self::trial::{ModelBytes, Rehearsal, Trial, rehearse, replay};
use crate::config::{Config, Resume};
use crate::devices;
pub use crate::devices::program as program_version;
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
    let stops = world.catch_stop();
    let (mut carried, mut later) = (Carried::default(), None);
    if world.is_newcomer() {
        // A GPU that cannot be used is found while the others do not wait.
        devices::of_run(options, world)?;
        let open = || setup::data(options, program, world, None);
        // It has nothing to save, and the others need not wait for it.
        let ending = world.leave_when_asked(&stops, Error::Stopped(String::new()).exit_code())?;
        carried.data = Some(in_phase(Phase::Setup, open)?);
        faults::at_step(FaultPoint::Joining, 0)?;
        drop(ending);
        later = Some(world.next_generation(None)?);
    }
    // If no rank has the run any more that one had, it continues from its last checkpoint.
    let from_checkpoint = Config {
        resume: Resume::Auto,
        ..options.clone()
    };
    loop {
        let now = later.as_ref().unwrap_or(world);
        match train_with([options, &from_checkpoint], program, now, &mut carried) {
            Ok(Next::End) => {
                drop(carried);
                now.finish();
                return Ok(());
            }
            Ok(Next::Meet(why)) => {
                carried.untold.noticed.get_or_insert_with(Instant::now);
                let next = now.next_generation(why.as_ref().and_then(Error::of_ranks));
                let next = next.map_err(Error::from).inspect_err(|error| {
                    carried::leave_if_alone(error, now);
                })?;
                later = Some(next);
            }
            Err(error) => {
                // Dropped, they would wait for other ranks, or for threads that do not end.
                std::mem::forget(later);
                if !matches!(error, Error::Stopped(_) | Error::NonFinite(_)) {
                    std::mem::forget(carried);
                }
                return Err(error);
            }
        }
    }
}

/// Trains with the ranks of `world`: as the first of `options` say, or as the others if a rank has
/// begun before.
fn train_with(
    options: [&Config; 2],
    program: &mut dyn Program,
    world: &World,
    carried: &mut Carried,
) -> Result<Next> {
    let stops = world.catch_stop();
    carried.untold.change.extend(world.change());
    let trainer = in_phase(Phase::Setup, || {
        training::Trainer::new(options, program, world, stops, carried)
    });
    let error = match trainer {
        Ok(trainer) => return trainer.map_or(Ok(Next::End), training::Trainer::train),
        Err(error) => error,
    };
    let joined = &carried.untold.change.joined;
    carried::leave_if_new(&error, world, joined);
    if world.generation() > 1 {
        carried::leave_if_alone(&error, world);
    }
    // A rank that joins with other settings leaves.
    let is_of_new = matches!(error, Error::Comm(ddp_comm::Error::Disagree(_)));
    let is_of_new = is_of_new && world.is_elastic() && !joined.is_empty();
    if is_of_new || carried::continues_after(&error, world, &carried.devices()) {
        carried.halt(&error, world);
        Ok(Next::Meet(Some(error)))
    } else {
        Err(error)
    }
}
