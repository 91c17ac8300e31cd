//! Everything up to the first step with the ranks of a world. A request to stop ends it at once,
//! until the folder of the run is changed.

use ddp_comm::{Signal, StopSignals, World};

use super::TrainingRun;
use super::ending::report;
use crate::checkpoint::Saver;
use crate::config::Config;
use crate::elastic::run::RankRun;
use crate::elastic::session::{self, RunSettings, Session, Unlogged};
use crate::elastic::totals::Clock;
use crate::error::{Error, Result};
use crate::metrics_log::{LockedLog, MetricsLog, REPORT_FILE};
use crate::model::data_shape;
use crate::setting::STOP_AFTER;
use crate::tasks;
use crate::trace::{RunTrace, TraceSteps};
use crate::trainer::opening::RunFolder;
use crate::trainer::program::RunProgram;
use crate::trainer::setup::{self, Assembled, Prepared};
use crate::trainer::stop_poll::StopPoll;
use crate::trainer::{agree, resume};

impl<'a> TrainingRun<'a> {
    /// Everything else up to the first step.
    pub(in crate::trainer) fn new(
        options: &'a Config,
        program: &'a mut dyn RunProgram,
        world: &'a World,
        ready: ReadyRun,
        session: &'a mut Session,
    ) -> Result<TrainingRun<'a>> {
        let ReadyRun { run, locked, stops } = ready;
        let (rank_run, log, unlogged) = session.parts();
        let folder = RunFolder::new(options, &run, rank_run, world);
        let mut state = folder.state()?;
        let weights = folder.initial_weights()?;
        if world.rank() == 0 && log.is_none() {
            *log = Some(folder.open_log(program, locked, unlogged.logged, weights)?);
        }
        if let (Some(bytes), 0, false) = (run.kept_bytes, world.rank(), run.continues) {
            let mb = bytes as f64 / 1e6;
            tracing::info!("the training data, {mb:.1} MB, are kept on the GPU");
        }
        let held_out = state.held_out.take();
        let lost_checkpoint = if run.continues {
            rank_run.complete_log(log.as_mut(), &options.out, world)?
        } else {
            begin(&run, rank_run);
            false
        };
        rank_run.clock.restart();
        // The best stays what it was while there is nothing to compare.
        let totals = &mut rank_run.totals;
        totals.held_out = held_out.or(totals.held_out.take());
        let taken = totals.steps;
        let stop_poll = StopPoll::new(world, stops, taken)?;
        // Ranks that met again trace what is left.
        let is_left = |steps: &TraceSteps| !run.continues || steps.reach(taken + 1);
        let traced = options.trace.filter(is_left);
        let trace = RunTrace::new(traced, [taken + 1, run.plan.steps], &run.devices, world);
        if let Some(log) = log.as_mut().filter(|_| world.generation() > 1) {
            session::say_change(log, unlogged, world, taken)?;
        }
        // No rank trains before the metrics log is open.
        world.barrier()?;
        *unlogged = Unlogged {
            logged: Some(world.generation()),
            ..Unlogged::default()
        };
        let behind = log.as_ref().map(MetricsLog::handle).transpose()?;
        let tokenizer = run.data.tokenizer.clone();
        let saver = Saver::of_run(world, &options.out, options.keep, behind, tokenizer)?;
        let shape = data_shape(run.data.train.spec());
        Ok(TrainingRun {
            options,
            program,
            world,
            task: tasks::of(run.data.train.task()),
            schedule: options.learning_rate(&run.plan)?,
            saver,
            state,
            lost_checkpoint,
            stop_poll,
            trace,
            flop_of_a_row: options.model.flop_of_a_row(&shape),
            matmul_tflops: None,
            run,
            rank_run,
            metrics_log: log,
            noticed: &mut unlogged.noticed,
        })
    }
}

/// Begins a new run, or one that resumes a checkpoint.
fn begin(run: &Assembled, rank_run: &mut RankRun) {
    rank_run.clock = Clock::new(rank_run.clock.has_rates);
    if let Some(before) = &run.resumed {
        rank_run.totals.held_out = before.state.held_out.clone();
    }
}

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

/// A run whose ranks can train, before its folder is changed.
pub(in crate::trainer) struct ReadyRun {
    run: Assembled,
    /// Its metrics log, if there is one.
    locked: Option<LockedLog>,
    stops: StopSignals,
}

/// What a run needs, before its folder is changed. None for a resumed run that is already finished.
/// In a later world of ranks the run is that of the `session`.
pub(in crate::trainer) fn prepare(
    options: RunSettings<'_>,
    program: &dyn RunProgram,
    world: &World,
    session: &mut Session,
) -> Result<Option<ReadyRun>> {
    let stops = world.catch_stop();
    let say = |texts| (world.rank() == 0).then(|| stops.say_on_interrupt(texts));
    // Reading data may take long, and there is nothing to save yet.
    let is_first = world.generation() < 2;
    if is_first {
        say(&ON_EARLY_INTERRUPT);
    }
    let exit_code = stopped_early(Signal::User1).exit_code();
    let text = |signal| stopped_early(signal).to_string();
    let ending = is_first.then(|| world.fail_when_asked(&stops, exit_code, text));
    let ending = ending.transpose()?;
    agree::compare_programs(&options.at_start.equal_on_all_ranks(), world)?;
    let plan = session.agree(world)?;
    let plan = plan.as_ref().filter(|plan| plan.source().is_some());
    let options = session.chosen(options);
    let locked = match plan {
        Some(_) => None,
        None => resume::lock(options, world)?,
    };
    let prepared = setup::assemble(options, program, world, u64::MAX, session, plan)?;
    say(&ON_INTERRUPT);
    drop(ending);
    // The folder is changed only when no rank can end the job any more.
    world.barrier()?;
    match prepared {
        Prepared::Ready(run) => Ok(Some(ReadyRun {
            run: *run,
            locked,
            stops,
        })),
        Prepared::TooLarge(_) => Err(Error::Internal(
            "training sets no limit to the size of the model".into(),
        )),
        Prepared::Finished(opened) => {
            let (out, state, step) = (options.out.display(), &opened.state, opened.state.step);
            let what = if step < state.schedule.steps && options.has_stopped_early(&state.progress)
            {
                format!("stopped early; help: a larger {STOP_AFTER} continues it")
            } else {
                format!("taken all its {step} steps: nothing is left to do")
            };
            tracing::info!("the run in {out} has {what}");
            if world.rank() == 0 && !options.out.join(REPORT_FILE).exists() {
                report(program, options);
            }
            Ok(None)
        }
    }
}

/// The end of a run that is asked to stop before its first step.
fn stopped_early(signal: Signal) -> Error {
    Error::Stopped(format!(
        "stopped by {signal} during set-up, before any step: nothing is lost; help: run the same \
         command again"
    ))
}
