//! Training runs: set-up, the loop around the step, the end.
//!
//! Start reading at `trainer/training.rs`, which has the loop. `setup` and `build` make what it
//! needs, `opening` the run's folder. `RunProgram` is what the trainer needs of the program around
//! it.

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
mod sample;
mod setup;
mod stop_poll;
mod training;
mod trial;

use ddp_comm::World;
use ddp_data::{Data, LeftOpen};
use ddp_kernels::ops::{bf16_order, with_bf16_order};
use ddp_kernels::transfer::{Phase, in_phase};

pub use self::agree::program_blake3;
pub use self::bf16::{factor as bf16_factor, order_of as bf16_order_of};
pub use self::division::{EVAL_TOKENS_MAX, step_options};
pub use self::plan::Plan;
pub use self::planned::{ModelBytes, StepBytes};
pub use self::program::RunProgram;
pub use self::replay::{Logs, Replay};
use self::setup::ReadyRun;
use self::training::TrainingRun;
pub use self::trial::{Rehearsal, TimedTrial, rehearse};
use crate::config::{Config, Resume};
use crate::devices;
pub use crate::devices::program as program_version;
use crate::elastic::session::{self, Next, RunSettings, Session, Trains};
use crate::error::Result;
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
    let from_checkpoint = Config {
        resume: Resume::Auto,
        ..options.clone()
    };
    let options = RunSettings {
        at_start: options,
        of_begun: &from_checkpoint,
    };
    let mut training = Training { options, program };
    // The run may set another.
    with_bf16_order(bf16_order(), || session::run(world, &mut training))
}

struct Training<'a> {
    options: RunSettings<'a>,
    program: &'a mut dyn RunProgram,
}

impl Trains for Training<'_> {
    type Ready = ReadyRun;

    fn open_data(&mut self, world: &World) -> Result<Option<Data>> {
        // A GPU that cannot be used is found while the others do not wait.
        devices::of_run(self.options.at_start, world)?;
        let data = build::data(self.options.at_start, self.program, world, None)?;
        // What a table has chosen, a resumed run may have otherwise.
        let chooses = |data: &Data| {
            let table = data.of_table.as_ref();
            table.is_some_and(|request| request.left_open != LeftOpen::default())
        };
        Ok((!chooses(&data)).then_some(data))
    }

    fn recover(&mut self, world: &World, session: &mut Session) -> Result<Option<ReadyRun>> {
        setup::prepare(self.options, self.program, world, session)
    }

    fn train(&mut self, ready: ReadyRun, world: &World, session: &mut Session) -> Result<Next> {
        let program = &mut *self.program;
        let new = || TrainingRun::new(program, world, ready, session);
        Ok(in_phase(Phase::Setup, new)?.train())
    }
}
