//! The part of a run before its folder is changed, which a request to stop ends at once.

use std::path::PathBuf;

use ddp_comm::{Signal, StopSignals, World};

use super::carried::{Carried, Standings};
use super::program::Program;
use super::setup::{self, Assembled, Prepared};
use super::{agree, resume};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::record::{LockedRecord, REPORT_FILE};

/// What rank 0 prints at the first and the second Ctrl-C while the run is set up.
const ON_EARLY_INTERRUPT: [&str; 2] = [
    "\nCtrl-C: ending at once: there is nothing to save during set-up.\n",
    "\nCtrl-C again: ended\n",
];
/// The same from then on.
const ON_INTERRUPT: [&str; 2] = [
    "\nCtrl-C: finishing this step, then saving. Ctrl-C again ends at once, without saving.\n",
    "\nCtrl-C again: ended without saving\n",
];

/// What a run needs, before its folder is changed, and its record if there is one. None for a
/// resumed run that is already finished. In a later world of ranks the run is what they `carried`.
pub(super) fn prepare(
    options: &Config,
    program: &dyn Program,
    world: &World,
    stops: &StopSignals,
    carried: &mut Carried,
) -> Result<Option<(Assembled, Option<LockedRecord>)>> {
    let say = |texts| (world.rank() == 0).then(|| stops.say_on_interrupt(texts));
    // Reading data may take long, and there is nothing to save yet.
    let is_first = world.generation() < 2;
    if is_first {
        say(&ON_EARLY_INTERRUPT);
    }
    let exit_code = stopped_early(Signal::User1).exit_code();
    let text = |signal| stopped_early(signal).to_string();
    let ending = is_first.then(|| world.fail_when_asked(stops, exit_code, text));
    let ending = ending.transpose()?;
    agree::compare_programs(&options.equal_on_all_ranks(), world)?;
    let standings = carried.standings(world, options.zero == 1)?;
    let standings = standings.as_ref();
    let locked = match standings.and_then(Standings::source) {
        Some(_) => None,
        None => resume::lock(options, world)?,
    };
    let prepared = setup::assemble(options, program, world, u64::MAX, carried, standings)?;
    say(&ON_INTERRUPT);
    drop(ending);
    // The folder is changed only when no rank can end the job any more.
    world.barrier()?;
    match prepared {
        Prepared::Ready(run) => Ok(Some((*run, locked))),
        Prepared::TooLarge(_) => Err(Error::Internal(
            "training sets no limit to the size of the model".into(),
        )),
        Prepared::Finished(opened) => {
            tracing::info!(
                "the run in {} has taken all its {} steps: nothing is left to do",
                options.out.display(),
                opened.state.step
            );
            if world.rank() == 0 && !options.out.join(REPORT_FILE).exists() {
                report(program, options);
            }
            Ok(None)
        }
    }
}

/// Makes the report. One that fails is only warned of.
pub(super) fn report(program: &dyn Program, options: &Config) -> Option<PathBuf> {
    let report = program.report(&options.out);
    report
        .inspect_err(|error| tracing::warn!("there is no report: {error}"))
        .ok()
}

/// The end of a run that is asked to stop before its first step.
fn stopped_early(signal: Signal) -> Error {
    Error::Stopped(format!(
        "stopped by {signal} during set-up, before any step: nothing is lost; help: run the same \
         command again"
    ))
}
