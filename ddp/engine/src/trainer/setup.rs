//! What a run needs before its first step with the ranks of a world: where they continue, data,
//! model, and the agreement that they train the same. A request to stop ends it at once, until the
//! folder of the run is changed. `build` makes the parts.

use std::borrow::Cow;

use ddp_comm::membership::agreement::Regroup;
use ddp_comm::{Group, Signal, World};
use ddp_data::{Data, InOrder, Loader};
use ddp_kernels::ops::Bf16Order;
use ddp_kernels::{Device, threads};

use super::build::{self, check_batches};
use super::choices;
use super::division::step_options;
use super::fitting::fitted;
use super::plan::Plan;
use super::program::{self, RunProgram};
use super::run::Run;
use super::sample::Sample;
use super::{agree, bf16, resume};
use crate::checkpoint::Opened;
use crate::config::Config;
use crate::devices::{self, is_simulated};
use crate::elastic::loss;
use crate::elastic::run::{RankRun, StateTransfer};
use crate::error::{EXIT_STOPPED, Error, Result};
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::initial;
use crate::metrics_log::{LockedLog, OutOfFold, REPORT_FILE};
use crate::model::data_shape;
use crate::setting::{DEVICE, STOP_AFTER};
use crate::step::gradient_group;

/// A run as the ranks of one generation have agreed on it.
pub(super) struct AgreedRun {
    /// The checkpoint that the run resumes from.
    pub(super) resumed: Option<Opened>,
    /// What `override` allowed.
    pub(super) overridden: Vec<String>,
    /// Whether the checkpoint is the end of the run, and nothing is left to do.
    pub(super) is_finished: bool,
    /// Whether it was trained before, with other ranks.
    pub(super) continues: bool,
    pub(super) devices: Vec<Device>,
    /// Where each rank trains.
    pub(super) places: Vec<String>,
    pub(super) data: Data,
    /// Of the program itself, with its settings.
    pub(super) own_loss: Option<String>,
    pub(super) plan: Plan,
    pub(super) bf16_order: Option<Bf16Order>,
    /// What was learned when its length was chosen.
    pub(super) out_of_fold: Option<OutOfFold>,
    /// The settings that were given.
    pub(super) changed: Vec<String>,
    /// The settings, with what the data chose.
    pub(super) settled: Config,
    /// The same, with what `memory` chose.
    pub(super) options: Config,
    /// The number of the model's parameters.
    pub(super) parameters: u64,
    /// On rank 0, once it is built.
    pub(super) sample: Option<Sample>,
    /// Bytes of training data in GPU memory, once it is built.
    pub(super) kept_bytes: Option<usize>,
}

/// What steps and evaluations read: the group of all ranks, batches, held-out rows.
pub(super) type StepInputs = (Group, Loader, InOrder);

/// A run that can train, and its metrics log, if there is one.
pub(super) type Ready = (AgreedRun, StepInputs, Option<LockedLog>);

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

impl Run<'_> {
    /// What the run needs before its folder is changed, with the ranks of `world`. None for a
    /// resumed run that is already finished.
    pub(super) fn prepare(
        &mut self,
        world: &World,
        program: &dyn RunProgram,
    ) -> Result<Option<Ready>> {
        let stops = world.catch_stop();
        let say = |texts| (world.rank() == 0).then(|| stops.say_on_interrupt(texts));
        // Reading data may take long, and there is nothing to save yet.
        let is_first = world.generation() < 2;
        if is_first {
            say(&ON_EARLY_INTERRUPT);
        }
        let text = |signal| stopped_early(signal).to_string();
        let ending = is_first.then(|| world.fail_when_asked(&stops, EXIT_STOPPED, text));
        let ending = ending.transpose()?;
        agree::compare_programs(&self.given.equal_on_all_ranks(), world)?;
        let continued = self.agree(world)?;
        let locked = match continued {
            Some(_) => None,
            None => resume::lock(&self.chosen(), world)?,
        };
        let (run, rows) = self.assemble(program, world, u64::MAX, continued.as_ref())?;
        say(&ON_INTERRUPT);
        drop(ending);
        // The folder is changed only when no rank can end the job any more.
        world.barrier()?;
        if rows.is_none() {
            run.say_finished(program, world);
        }
        Ok(rows.map(|rows| (run, rows, locked)))
    }

    /// Opens the run and builds it, unless it is finished or its model has more than
    /// `parameters_max` parameters, as only a run that does not train may have. If some rank has
    /// the run, it is `continued` as the ranks have agreed. All ranks call it together.
    pub(super) fn assemble(
        &mut self,
        program: &dyn RunProgram,
        world: &World,
        parameters_max: u64,
        continued: Option<&Regroup>,
    ) -> Result<(AgreedRun, Option<StepInputs>)> {
        let trains = parameters_max == u64::MAX;
        let mut run = self.open(program, world, continued, trains)?;
        let builds = !run.is_finished && run.parameters <= parameters_max;
        let rows = builds.then(|| self.build(&mut run, program, world, continued));
        let rows = rows.transpose()?;
        Ok((run, rows))
    }

    /// Opens checkpoint and data, and chooses what the settings leave open. Unless the run
    /// `trains`, no folds are trained.
    fn open(
        &mut self,
        program: &dyn RunProgram,
        world: &World,
        continued: Option<&Regroup>,
        trains: bool,
    ) -> Result<AgreedRun> {
        let options = self.chosen();
        let mut resumed = match continued {
            Some(_) => None,
            None => resume::find(&options, world)?,
        };
        faults::at_step(FaultPoint::Setup, 0)?;
        threads::set_count(options.threads.unwrap_or_else(|| world.default_threads()))?;
        let devices = self.same_devices(&options, world)?;
        let of_checkpoint = || bf16::order_of(&resumed.as_ref()?.state.versions);
        let order = self.bf16_order.or_else(of_checkpoint);
        self.bf16_order = bf16::agree(&options, devices[0], world, order)?;
        let changed = options.changed();
        let begins = resumed.is_none() && continued.is_none();
        let options = self.begun(options, resumed.as_ref(), continued, world)?;
        let data = match self.data.take() {
            Some(data) => data,
            None => build::data(&options, program, world, resumed.as_ref())?,
        };
        self.data = Some(data.clone());
        let chosen = choices::choose(&options, &data, world, [begins, trains])?;
        let settled = chosen.options;
        settled.check()?;
        if world.rank() == 0 {
            let lines = chosen.lines.iter();
            lines.for_each(|line| tracing::info!("{line}"));
        }
        self.settled = Some(settled.to_json());
        let plan = settled.plan(&data)?;
        let own_loss = program.loss().map(|loss| resume::described(&*loss));
        let own = (devices[0], own_loss.as_deref());
        let (overridden, is_finished) = match &mut resumed {
            Some(opened) => resume::check(&settled, &plan, &data, own, opened, world)?,
            None => (Vec::new(), false),
        };
        let mut options = Cow::Borrowed(&settled);
        if !is_finished {
            check_batches(&settled, world, &data)?;
            if self.rank_run.is_none() {
                options = fitted(&settled, &data, world, &devices)?;
            }
        }
        let shape = data_shape(data.train.spec());
        let parameters = if is_finished {
            0
        } else {
            options.model.parameter_count(&shape)?
        };
        Ok(AgreedRun {
            resumed,
            overridden,
            is_finished,
            continues: continued.is_some(),
            places: devices::of_ranks(world, &devices)?,
            devices,
            data,
            own_loss,
            plan,
            bf16_order: self.bf16_order,
            out_of_fold: chosen.out_of_fold,
            changed,
            options: options.into_owned(),
            settled,
            parameters: u64::try_from(parameters).unwrap_or(u64::MAX),
            sample: None,
            kept_bytes: None,
        })
    }

    /// This rank's devices: those on which it has trained so far.
    fn same_devices(&self, options: &Config, world: &World) -> Result<Vec<Device>> {
        let devices = devices::of_run(options, world)?;
        let before = self.devices();
        if before.is_empty() || before == devices {
            return Ok(devices);
        }
        let names = |devices: &[Device]| -> Vec<String> {
            devices.iter().map(ToString::to_string).collect()
        };
        let [expected, got] = [&before, &devices].map(|devices| names(devices).join(", "));
        Err(Error::Usage(format!(
            "{DEVICE}: expected {expected}, on which this rank has trained so far, got {got}; help: \
             look for a GPU of another rank that cannot be used any more"
        )))
    }

    /// The settings with what was chosen when the run began: they come from its checkpoint, or from
    /// a rank that has the run.
    fn begun<'a>(
        &self,
        options: Cow<'a, Config>,
        resumed: Option<&Opened>,
        continued: Option<&Regroup>,
        world: &World,
    ) -> Result<Cow<'a, Config>> {
        let known = match (resumed, continued) {
            (None, None) => return Ok(options),
            (Some(opened), _) => {
                // Refuses a value that no setting can have.
                Config::of_checkpoint(opened)?;
                opened.state.config.clone()
            }
            (None, Some(_)) => {
                let mut known = exchange::gather(world, &self.settled)?.into_iter();
                known.find_map(|it| it).unwrap_or_default()
            }
        };
        Ok(Cow::Owned(choices::taken_over(&options, &known)))
    }

    /// Makes the step, or regroups that of the run, gives it the state of the checkpoint or of the
    /// other ranks, compares it between ranks, and makes what its batches come from.
    fn build(
        &mut self,
        run: &mut AgreedRun,
        program: &dyn RunProgram,
        world: &World,
        continued: Option<&Regroup>,
    ) -> Result<StepInputs> {
        let (options, data, devices) = (&run.options, &run.data, &run.devices);
        // Weights are used three times a row, if nothing else is known.
        let of_a_row = options.model.flop_of_a_row(&data_shape(data.train.spec()));
        let of_a_row = of_a_row.unwrap_or(6.0 * run.parameters as f64);
        let rows = run.plan.steps as f64 * options.batch_rows() as f64;
        bf16::advise(options, devices[0], world, of_a_row * rows)?;
        if world.rank() == 0 {
            run.sample = Sample::of(options, data)?;
        }
        let main = world.group("main")?;
        let mut fresh = None;
        let rank_run = match &mut self.rank_run {
            Some(rank_run) => {
                let devices = devices.iter().enumerate();
                let groups = devices.map(|(index, device)| gradient_group(world, index, *device));
                let groups = groups.collect::<Result<_>>()?;
                let step = &mut rank_run.step;
                step.regroup(groups, &step_options(options, world))?;
                rank_run
            }
            None => fresh.insert(run.fresh(program, world)?),
        };
        let mut optimizers = Vec::new();
        match (continued, &run.resumed) {
            (Some(plan), _) => optimizers = rank_run.share_progress(world, &main, plan)?,
            (_, Some(opened)) => {
                resume::restore(options, opened, &mut rank_run.step, &mut run.overridden)?;
            }
            (_, None) => build::load_initial(options, world, rank_run, data)?,
        }
        rank_run.make_ready(world, optimizers);
        // From here on it is not lost with this world.
        self.rank_run = fresh.or(self.rank_run.take());
        world.barrier()?;
        let rank_run = self.built();
        // All ranks have their new slices.
        rank_run.advance()?;
        let is_complete = rank_run.late_state == StateTransfer::Complete;
        let fields = agree::fields(data, &rank_run.step, is_complete, &rank_run.base)?;
        agree::compare(fields, world)?;

        // After the model's memory: data may take what is left.
        let loaders = build::loaders(options, world, data, &run.plan, devices)?;
        let (loader, held_out, kept_bytes) = loaders;
        run.kept_bytes = kept_bytes;
        Ok((main, loader, held_out))
    }
}

impl AgreedRun {
    /// The steps that were taken before the run is resumed.
    pub(super) fn taken(&self) -> u64 {
        let resumed = self.resumed.as_ref();
        resumed.map_or(0, |opened| opened.state.step)
    }

    /// The run before its first step, or with the totals of the checkpoint that it resumes.
    fn fresh(&self, program: &dyn RunProgram, world: &World) -> Result<RankRun> {
        let (options, devices) = (&self.options, &self.devices);
        let step = build::step(options, world, &self.data, devices, program.loss())?;
        loss::check(&step, world)?;
        let before = self.resumed.as_ref().map(|opened| &opened.state);
        let then = before.and_then(|state| state.base.as_ref());
        let base = initial::load_base(options, &build::params(&step), world.rank(), then)?;
        let mut run = RankRun::new(step, before, !is_simulated(devices[0]));
        run.base = base;
        Ok(run)
    }

    /// Says why nothing is left to do, and makes the report if it is missing.
    fn say_finished(&self, program: &dyn RunProgram, world: &World) {
        let Some(Opened { state, .. }) = &self.resumed else {
            return;
        };
        let (options, step) = (&self.settled, state.step);
        let out = options.out.display();
        let what = if step < state.schedule.steps && options.has_stopped_early(&state.progress) {
            format!("stopped early; help: a larger {STOP_AFTER} continues it")
        } else {
            format!("taken all its {step} steps: nothing is left to do")
        };
        tracing::info!("the run in {out} has {what}");
        if world.rank() == 0 && !options.out.join(REPORT_FILE).exists() {
            program::report(program, &options.out);
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
