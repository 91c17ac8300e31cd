//! A training run on one rank, from its start to its end, while others are lost and come: the
//! rank's part of the time line in docs/elastic.md.
//!
//! Start reading below, at [`train`]: `join`, `recover`, `steps`, `meet` and `finish` follow each
//! other. `training` has the loop around the step, `setup` and `build` make what it needs,
//! `opening` the run's folder. `RunProgram` is what the trainer needs of the program around it.

mod agree;
mod bf16;
mod build;
mod choices;
mod division;
mod fitting;
mod folds;
mod linear_start;
mod matmuls;
mod nonfinite;
mod opening;
mod plan;
mod planned;
mod program;
mod replay;
mod resume;
mod run;
mod sample;
mod setup;
mod stop_poll;
mod training;
mod trial;

use std::mem;

use ddp_comm::{StopSignals, World};
use ddp_data::LeftOpen;
use ddp_kernels::ops::{bf16_order, with_bf16_order};
use ddp_kernels::transfer::{Phase, in_phase};

pub use self::agree::program_blake3;
pub use self::bf16::{factor as bf16_factor, order_of as bf16_order_of};
pub use self::division::{EVAL_TOKENS_MAX, step_options};
pub use self::plan::Plan;
pub use self::planned::{ModelBytes, StepBytes};
pub use self::program::RunProgram;
pub use self::replay::{Logs, Replay};
use self::run::{Meet, Run};
use self::setup::Ready;
use self::training::TrainingRun;
pub use self::trial::{DryRun, TimedTrial, dry_run};
use crate::config::Config;
use crate::devices;
pub use crate::devices::program as program_version;
use crate::elastic::loss::{self, EXIT_LOST};
use crate::error::{EXIT_STOPPED, Error, Result};
use crate::faults::{self, FaultPoint};
pub use crate::model::{ModelOptions, data_shape};

/// Trains as one of the ranks of `world`. Results are in the folder `options.out`. A run that is
/// asked to stop saves and ends with [`Stopped`](crate::Error::Stopped); during set-up it ends the
/// process at once, as [`World::fail`] does. A resumed run that is already finished is left as it
/// is. If the world is elastic, and ranks are lost or come, the ranks meet in a new world and
/// continue there.
///
/// After an error other than `Stopped` and `NonFinite` the process is expected to end: threads of
/// the run may still wait for a disk or another rank, so its memory and the lock of its folder are
/// kept until then.
pub fn train(options: &Config, program: &mut dyn RunProgram, world: &World) -> Result<()> {
    // The run may set another.
    with_bf16_order(bf16_order(), || Run::new(options).train(world, program))
}

impl Run<'_> {
    /// Trains from the first generation of ranks, `first`, to the last. All ranks of a world
    /// call the same methods together, except `join`.
    fn train(mut self, first: &World, program: &mut dyn RunProgram) -> Result<()> {
        // Between two worlds too, a request to stop is not lost.
        let stops = first.catch_stop();
        let mut later = None;
        let mut generations = || -> Result<()> {
            let joins = first.is_newcomer();
            let joined = joins.then(|| self.join(first, &stops, program));
            let mut why = joined.transpose()?;
            while let Some(ready) = self.recover(why, first, &mut later, program)? {
                why = self.steps(ready, later.as_ref().unwrap_or(first), program)?;
                if why.is_none() {
                    break;
                }
            }
            Ok(())
        };
        let result = generations();
        self.finish(result, first, later)
    }

    /// A process that has come while others train opens its data alone, in a world of one rank: the
    /// others do not wait for it.
    fn join(
        &mut self,
        world: &World,
        stops: &StopSignals,
        program: &dyn RunProgram,
    ) -> Result<Meet> {
        self.has_begun = None;
        // It has nothing to save.
        let ending = world.leave_when_asked(stops, EXIT_STOPPED)?;
        let data = in_phase(Phase::Setup, || {
            // A GPU that cannot be used is found while the others do not wait.
            devices::of_run(self.given, world)?;
            build::data(self.given, program, world, None)
        })?;
        // What a table has chosen, a resumed run may have otherwise.
        let request = data.of_table.as_ref();
        let chooses = request.is_some_and(|request| request.left_open != LeftOpen::default());
        self.data = Some(data).filter(|_| !chooses);
        faults::at_step(FaultPoint::Joining, 0)?;
        drop(ending);
        Ok(Meet(None))
    }

    /// Called at the start and after each loss: the ranks meet, agree where they continue, and get
    /// what they lack. A loss meanwhile repeats this. A new rank without slices gets its weights in
    /// `steps`. None if the run is finished.
    fn recover(
        &mut self,
        mut why: Option<Meet>,
        first: &World,
        later: &mut Option<World>,
        program: &dyn RunProgram,
    ) -> Result<Option<Ready>> {
        loop {
            if let Some(Meet(why)) = why {
                // The world before is dropped now. It waits for no rank: its calls have ended.
                *later = Some(Run::meet(later.as_ref().unwrap_or(first), why)?);
            }
            let world = later.as_ref().unwrap_or(first);
            self.change.extend(world.change());
            self.noticed = self.noticed.or(world.over_since());
            match in_phase(Phase::Setup, || self.prepare(world, program)) {
                Ok(ready) => return Ok(ready),
                Err(error) => why = Some(self.leave(error, world)?),
            }
        }
    }

    /// Takes steps with the ranks of `world`. None if the run is over, and its files are closed.
    fn steps(
        &mut self,
        ready: Ready,
        world: &World,
        program: &mut dyn RunProgram,
    ) -> Result<Option<Meet>> {
        let new = || TrainingRun::new(self, ready, world, program);
        match in_phase(Phase::Setup, new) {
            Ok(training) => training.train(),
            Err(error) => self.leave(error, world).map(Some),
        }
    }

    /// After an error before the first step: ends what the run does with the ranks of this world,
    /// if they meet again. This process or the job ends after other errors.
    fn leave(&mut self, error: Error, world: &World) -> Result<Meet> {
        let joined = &self.change.joined;
        loss::leave_if_new(&error, world, joined);
        if world.generation() > 1 {
            loss::leave_if_alone(&error, world);
        }
        // A rank that joins with other settings leaves.
        let is_of_new = matches!(error, Error::Comm(ddp_comm::Error::Disagree(_)));
        let is_of_new = is_of_new && world.is_elastic() && !joined.is_empty();
        if !is_of_new && !loss::continues_after(&error, world, &self.devices()) {
            return Err(error);
        }
        world.end_generation(error.of_ranks());
        let halted = self.rank_run.as_mut().map(|run| run.step.halt());
        if let Some(Err(error)) = halted {
            world.leave(&error, EXIT_LOST);
        }
        Ok(Meet(Some(error)))
    }

    /// Waits for the next generation of ranks.
    fn meet(world: &World, why: Option<Error>) -> Result<World> {
        let next = world.next_generation(why.as_ref().and_then(Error::of_ranks));
        let next = next.map_err(Error::from);
        next.inspect_err(|error| loss::leave_if_alone(error, world))
    }

    /// Ends the run, and with `Ok` the job, in this order: the metrics log and the step are
    /// dropped, then the launcher hears that no loss matters any more, then the last world is
    /// dropped, which waits for its other ranks.
    fn finish(self, result: Result<()>, first: &World, later: Option<World>) -> Result<()> {
        match &result {
            Ok(()) => {
                drop(self);
                later.as_ref().unwrap_or(first).finish();
            }
            Err(error) => {
                // Dropped, they would wait for other ranks, or for threads that do not end. With
                // these two errors all ranks end alike, and no thread waits for another rank.
                mem::forget(later);
                if !matches!(error, Error::Stopped(_) | Error::NonFinite(_)) {
                    mem::forget(self);
                }
            }
        }
        result
    }
}
