//! What a run needs before its first step with the ranks of a world: where they continue, data,
//! model, and the agreement that they train the same. A request to stop ends it at once, until the
//! folder of the run is changed. `build` makes the parts.

use std::borrow::Cow;

use ddp_comm::membership::agreement::Regroup;
use ddp_comm::{Group, Signal, StopSignals, World};
use ddp_data::{Data, InOrder, Loader};
use ddp_kernels::ops::Bf16Order;
use ddp_kernels::{Device, threads};

use super::build::{self, check_batches};
use super::choices::{self, Choices};
use super::division::step_options;
use super::fitting::fitted;
use super::plan::Plan;
use super::program::{self, RunProgram};
use super::sample::Sample;
use super::{agree, bf16, resume};
use crate::checkpoint::Opened;
use crate::config::Config;
use crate::devices::{self, is_simulated};
use crate::elastic::run::{RankRun, StateTransfer};
use crate::elastic::session::{self, RunSettings, Session};
use crate::error::{Error, Result};
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::initial;
use crate::metrics_log::{self, LockedLog, OutOfFold, REPORT_FILE};
use crate::model::data_shape;
use crate::setting::{DEVICE, STOP_AFTER};
use crate::step::gradient_group;

/// A run that is ready to train, before it has a folder. Its step is that of `Session::run`.
pub(super) struct Assembled {
    /// The checkpoint that the run resumes from.
    pub(super) resumed: Option<Opened>,
    /// What `override` allowed.
    pub(super) overridden: Vec<String>,
    pub(super) devices: Vec<Device>,
    pub(super) data: Data,
    /// Of the program itself, with its settings.
    pub(super) own_loss: Option<String>,
    pub(super) plan: Plan,
    pub(super) main: Group,
    /// Whether it was trained before, with other ranks.
    pub(super) continues: bool,
    pub(super) loader: Loader,
    pub(super) held_out: InOrder,
    /// On rank 0.
    pub(super) sample: Option<Sample>,
    /// Bytes of training data in GPU memory.
    pub(super) kept_bytes: Option<usize>,
    /// Where each rank trains.
    pub(super) places: Vec<String>,
    pub(super) bf16_order: Option<Bf16Order>,
    /// What was learned when its length was chosen.
    pub(super) out_of_fold: Option<OutOfFold>,
    /// The settings that were given.
    pub(super) changed: Vec<String>,
    /// The settings, with what the data chose.
    pub(super) settled: Config,
    /// The same, with what `memory` chose.
    pub(super) options: Config,
}

/// A run, or the last checkpoint of a run that is resumed and already finished.
pub(super) enum Prepared {
    Finished(Box<Opened>),
    Ready(Box<Assembled>),
    /// The model has more than the given number of parameters, and was not made.
    TooLarge(Box<Unbuilt>),
}

/// What is known of a run without its model.
pub(super) struct Unbuilt {
    pub(super) data: Data,
    pub(super) plan: Plan,
    pub(super) devices: Vec<Device>,
    pub(super) places: Vec<String>,
    /// Steps that are done.
    pub(super) taken: u64,
    /// The settings, with what `memory` chose.
    pub(super) options: Config,
}

/// What rank 0 prints at the first and the second Ctrl-C while the run is set up.
const ON_EARLY_INTERRUPT: [&str; 2] = [
    "\nCtrl-C: ending at once: there is nothing to save during set-up.\n",
    "\nCtrl-C again: ended\n",
];
/// The same from then on.
const ON_INTERRUPT: [&str; 2] = [
    "\nCtrl-C: finishing this step, then saving. Ctrl-C again ends at once, and what is not saved yet is lost.\n",
    "\nCtrl-C again: ended at once; what was not saved yet is lost\n",
];

/// A run whose ranks can train, before its folder is changed.
pub(super) struct ReadyRun {
    pub(super) run: Assembled,
    /// Its metrics log, if there is one.
    pub(super) locked: Option<LockedLog>,
    pub(super) stops: StopSignals,
}

/// What a run needs, before its folder is changed. None for a resumed run that is already finished.
/// In a later world of ranks the run is that of the `session`.
pub(super) fn prepare(
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
    let prepared = assemble(options, program, world, u64::MAX, session, plan)?;
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
                program::report(program, &options.out);
            }
            Ok(None)
        }
    }
}

/// Opens data and checkpoint, builds the step, and compares all of it between ranks. A model of
/// more than `parameters_max` parameters is not built. If some rank has a run, it is `continued` as
/// the ranks have agreed. What this one has in its `session` is used again.
pub(super) fn assemble(
    options: &Config,
    program: &dyn RunProgram,
    world: &World,
    parameters_max: u64,
    session: &mut Session,
    continued: Option<&Regroup>,
) -> Result<Prepared> {
    let mut resumed = match continued {
        Some(_) => None,
        None => resume::find(options, world)?,
    };
    faults::at_step(FaultPoint::Setup, 0)?;
    threads::set_count(options.threads.unwrap_or_else(|| world.default_threads()))?;
    let devices = devices::of_run(options, world)?;
    let device = devices[0];
    let before = session.devices();
    if !before.is_empty() && before != devices {
        let names = |devices: &[Device]| -> Vec<String> {
            devices.iter().map(ToString::to_string).collect()
        };
        let [expected, got] = [&before, &devices].map(|devices| names(devices).join(", "));
        return Err(Error::Usage(format!(
            "{DEVICE}: expected {expected}, on which this rank has trained so far, got {got}; help: \
             look for a GPU of another rank that cannot be used any more"
        )));
    }
    let of_checkpoint = || bf16::order_of(&resumed.as_ref()?.state.versions);
    let order = session.bf16_order.or_else(of_checkpoint);
    session.bf16_order = bf16::agree(options, device, world, order)?;
    let changed = options.changed();
    let options = &begun(options, session, resumed.as_ref(), continued, world)?;
    let data = match session.data.take() {
        Some(data) => data,
        None => build::data(options, program, world, resumed.as_ref())?,
    };
    session.data = Some(data.clone());
    // A rehearsal limits the size of the model.
    let trains = parameters_max == u64::MAX;
    let begins = resumed.is_none() && continued.is_none();
    let Choices {
        options,
        lines,
        out_of_fold,
    } = choices::choose(options, &data, world, [begins, trains])?;
    options.check()?;
    if world.rank() == 0 {
        lines.iter().for_each(|line| tracing::info!("{line}"));
    }
    session.settled = Some(options.to_json());
    let options = &options;
    let plan = options.plan(&data)?;
    let own_loss = program.loss().map(|loss| resume::described(&*loss));
    let mut overridden = Vec::new();
    if let Some(opened) = &mut resumed {
        overridden = resume::changes(options, &plan, &data, (device, own_loss.as_deref()), opened)?;
        resume::forget_best(options, &data, &mut opened.state)?;
    }
    let is_finished = |opened: &mut Opened| {
        plan.is_over(opened.state.step) || options.has_stopped_early(&opened.state.progress)
    };
    if let Some(opened) = resumed.take_if(is_finished) {
        // It may have been stopped, or its ranks lost, before all of its end was written.
        if exchange::broadcast(world, 0, || Ok(metrics_log::has_ended_well(&options.out)))? {
            return Ok(Prepared::Finished(Box::new(opened)));
        }
        resumed = Some(opened);
    }
    check_batches(options, world, &data)?;
    let settled = options;
    let fitting = match session.run {
        Some(_) => Cow::Borrowed(options),
        None => fitted(options, &data, world, &devices)?,
    };
    let options = &*fitting;
    let shape = data_shape(data.train.spec());
    let parameters = options.model.parameter_count(&shape)?;
    let parameters = u64::try_from(parameters).unwrap_or(u64::MAX);
    if parameters > parameters_max {
        return Ok(Prepared::TooLarge(Box::new(Unbuilt {
            data,
            plan,
            places: devices::of_ranks(world, &devices)?,
            devices,
            taken: resumed.map_or(0, |opened| opened.state.step),
            options: options.clone(),
        })));
    }

    // Weights are used three times a row, if nothing else is known.
    let of_a_row = options.model.flop_of_a_row(&shape);
    let of_a_row = of_a_row.unwrap_or(6.0 * parameters as f64);
    let rows = plan.steps as f64 * options.batch_rows() as f64;
    bf16::advise(options, device, world, of_a_row * rows)?;

    let sample = match world.rank() {
        0 => Sample::of(options, &data)?,
        _ => None,
    };
    let main = world.group("main")?;
    let mut fresh = None;
    let run = match &mut session.run {
        Some(run) => {
            let groups =
                (0..devices.len()).map(|index| gradient_group(world, index, devices[index]));
            let groups = groups.collect::<Result<_>>()?;
            run.step.regroup(groups, &step_options(options, world))?;
            run
        }
        None => {
            let step = build::step(options, world, &data, &devices, program.loss())?;
            session::check(&step, world)?;
            let before = resumed.as_ref().map(|opened| &opened.state);
            let (parts, then) = (
                build::params(&step),
                before.and_then(|state| state.base.as_ref()),
            );
            let base = initial::load_base(options, &parts, world.rank(), then)?;
            let mut run = RankRun::new(step, before, !is_simulated(device));
            run.base = base;
            fresh.insert(run)
        }
    };
    let mut optimizers = Vec::new();
    match (continued, &resumed) {
        (Some(plan), _) => optimizers = run.share_progress(world, &main, plan)?,
        (_, Some(opened)) => resume::restore(options, opened, &mut run.step, &mut overridden)?,
        (_, None) => build::load_initial(options, world, run, &data)?,
    }
    run.make_ready(world, optimizers);
    // From here on it is not lost with this world.
    session.run = fresh.or(session.run.take());
    world.barrier()?;
    let run = session.run();
    // All ranks have their new slices.
    run.advance()?;
    let is_complete = run.late_state == StateTransfer::Complete;
    let fields = agree::fields(&data, &run.step, is_complete, &run.base)?;
    agree::compare(fields, world)?;

    // After the model's memory: data may take what is left.
    let (loader, held_out, kept_bytes) = build::loaders(options, world, &data, &plan, &devices)?;
    let places = devices::of_ranks(world, &devices)?;
    Ok(Prepared::Ready(Box::new(Assembled {
        resumed,
        overridden,
        devices,
        data,
        own_loss,
        plan,
        main,
        continues: continued.is_some(),
        loader,
        held_out,
        sample,
        kept_bytes,
        places,
        bf16_order: session.bf16_order,
        out_of_fold,
        changed,
        settled: settled.clone(),
        options: options.clone(),
    })))
}

/// The settings with what was chosen when the run began: they come from its checkpoint, or from a
/// rank that has the run.
fn begun(
    options: &Config,
    session: &Session,
    resumed: Option<&Opened>,
    continued: Option<&Regroup>,
    world: &World,
) -> Result<Config> {
    if let Some(opened) = resumed {
        // Refuses a value that no setting can have.
        Config::of_checkpoint(opened)?;
        return Ok(choices::taken_over(options, &opened.state.config));
    }
    if continued.is_none() {
        return Ok(options.clone());
    }
    let mut known = exchange::gather(world, &session.settled)?.into_iter();
    let known = known.find_map(|it| it).unwrap_or_default();
    Ok(choices::taken_over(options, &known))
}

/// The end of a run that is asked to stop before its first step.
fn stopped_early(signal: Signal) -> Error {
    Error::Stopped(format!(
        "stopped by {signal} during set-up, before any step: nothing is lost; help: run the same \
         command again"
    ))
}
