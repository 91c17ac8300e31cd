//! What a rank carries from one world of ranks to the next, and how ranks agree where they
//! continue.
//!
//! After the loss of a rank, or when one comes, the ranks meet in a new world. All that they share
//! is made anew. Each says which step it has completed, and those that are behind, or new, get
//! weights, moments and counts from the first rank that is furthest. Without ZeRO-1 an update is
//! local and follows the last collective of its step, so a rank is at most one step behind, and
//! never within an update. Under ZeRO-1 a rank that is behind completes its update itself, and
//! slices are cut anew (`reducer/cut.rs`). A GPU may have been given steps that it does not
//! complete: what it has counted is what was taken. Nothing is read from disk.

use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use ddp_comm::{Change, Group, World};
use ddp_data::Data;
use ddp_data::sampler::Sampler;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Error as TensorError, Tensor};

use super::totals::{Clock, Totals};
use crate::audit::Workload;
use crate::checkpoint::{self, Best, State};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{self, Event, MetricsLog, RanksEvent};
use crate::reducer::Cut;
use crate::setting::{DEVICES_PER_RANK, MIN_RANKS, OPTIMIZER, ZERO};
use crate::step::{Stats, Step};

/// What a rank carries.
#[derive(Default)]
pub(super) struct Carried {
    /// Once they are open.
    pub(super) data: Option<Data>,
    /// Once its step has its first weights.
    pub(super) kept: Option<Kept>,
    /// On rank 0, once it is open.
    pub(super) metrics_log: Option<MetricsLog>,
    /// Whether any rank has had the run; None for a process that has come and does not know.
    has_begun: Option<bool>,
    /// After which step ranks last met although none was lost or came.
    stalled: Option<u64>,
    pub(super) untold: Untold,
}

/// What the metrics log does not tell yet.
#[derive(Default)]
pub(super) struct Untold {
    /// Who was lost and came.
    pub(super) change: Change,
    /// When this rank noticed that the ranks have to meet again.
    pub(super) noticed: Option<Instant>,
    /// The last generation that it tells of; None before the first one trains.
    pub(super) told: Option<u64>,
}

/// A run, on one rank.
pub(super) struct Kept {
    pub(super) step: Step,
    pub(super) totals: Totals,
    pub(super) clock: Clock,
    /// This rank's part of the steps.
    pub(super) workload: Workload,
    /// The steps that were complete when this process got the state of the run.
    began: u64,
    /// The step after which ranks were last found to have the same model.
    pub(super) compared: Option<u64>,
    /// Which rank gives its state to which new ones, while the others train already.
    pub(super) gives: Option<(usize, Vec<usize>)>,
    /// Whether this rank is one of the new ones, and has no state yet.
    awaits_state: bool,
}

/// What follows the training with the ranks of a world.
pub(super) enum Next {
    /// The run is over.
    End,
    /// The ranks meet again: because of this error, or to take in processes that have come.
    Meet(Option<Error>),
}

/// Exit codes: no memory, and a file that cannot be read or written.
const EXIT_MEMORY: u8 = 71;
const EXIT_IO: u8 = 74;
/// The exit code of a job that ends because a rank was lost or hangs.
pub(super) const EXIT_LOST: u8 = 77;

/// The last step that was taken, logged, evaluated, saved.
type Progress = [u64; 4];

/// Under ZeRO-1: how many updates a rank has made, and its slices.
type Version = (u64, Cut);

/// The same for all ranks of a version; greater for a later one.
fn number((steps, cut): &Version) -> [u64; 2] {
    [*steps, cut.number]
}

/// The version that ranks continue with: the furthest that one has, or that all can have. By rank,
/// what it has and what it can have.
fn agreed(ranks: &[[Option<Version>; 2]]) -> Option<[u64; 2]> {
    let has_run = |versions: &&[Option<Version>; 2]| versions.iter().any(Option::is_some);
    let next: Vec<_> = ranks.iter().filter(has_run).map(|it| it[1]).collect();
    let common = next.first()?.as_ref().map(number);
    let is_common = next.iter().all(|it| it.as_ref().map(number) == common);
    let cuts: Vec<_> = next.iter().map(|it| it.map(|(_, cut)| cut)).collect();
    let made = ranks.iter().filter_map(|it| it[0].as_ref().map(number));
    let common = common.filter(|_| is_common && Cut::are_whole(&cuts));
    common.or(made.max())
}

/// Where the ranks of a new world stand. They all have the same.
pub(super) struct Standings {
    /// By rank; None without a run.
    progress: Vec<Option<Progress>>,
    /// By rank: its slices, under ZeRO-1.
    cuts: Vec<Option<Cut>>,
    /// Whether all have opened the data.
    pub(super) have_data: bool,
}

impl Standings {
    /// The first of the ranks that are furthest; None if no rank has a run.
    pub(super) fn source(&self) -> Option<usize> {
        let most = self.progress.iter().max()?;
        let source = self.progress.iter().position(|it| it == most);
        source.filter(|_| most.is_some())
    }
}

impl Carried {
    /// The devices of its run.
    pub(super) fn devices(&self) -> Vec<Device> {
        let kept = self.kept.as_ref();
        kept.map_or(Vec::new(), |kept| kept.step.devices())
    }

    /// The first of these settings, with which the job was started, or those of a run that a rank
    /// has had.
    pub(super) fn chosen<'a>(&self, [started, begun]: [&'a Config; 2]) -> &'a Config {
        match self.has_begun {
            Some(false) => started,
            _ => begun,
        }
    }

    /// Ends what the run does with the ranks of this world, which meet again because of `why`.
    pub(super) fn halt(&mut self, why: &Error, world: &World) {
        world.end_generation(why.of_ranks());
        let halted = self.kept.as_mut().map(|kept| kept.step.halt());
        if let Some(Err(error)) = halted {
            world.leave(&error, EXIT_LOST);
        }
    }

    /// The run that is assembled.
    pub(super) fn kept(&mut self) -> &mut Kept {
        self.parts().0
    }

    /// That, its metrics log, and what the metrics log does not tell yet.
    pub(super) fn parts(&mut self) -> (&mut Kept, &mut Option<MetricsLog>, &mut Untold) {
        let kept = self.kept.as_mut().expect("a run is assembled");
        (kept, &mut self.metrics_log, &mut self.untold)
    }

    /// Asks the ranks of a new world where they stand. None in the first one, where all begin.
    pub(super) fn standings(&mut self, world: &World, zero: bool) -> Result<Option<Standings>> {
        if world.rank() > 0 {
            // A rank that was started before this one writes it now.
            self.metrics_log = None;
        }
        if world.generation() < 2 {
            self.has_begun = Some(false);
            return Ok(None);
        }
        if self.untold.told.is_none() {
            // The metrics log was not open yet: all begin again.
            self.kept = None;
        }
        if self.kept.is_some() {
            self.has_begun = Some(true);
        }
        // A new rank that did not get its state is as one that has just come.
        self.kept.take_if(|kept| kept.awaits_state);
        self.kept.iter_mut().for_each(|kept| kept.gives = None);
        faults::at_step(FaultPoint::Meeting, world.generation())?;
        if zero {
            let mine = self.kept.as_ref().map_or([None; 2], Kept::versions);
            let version = agreed(&exchange::gather(world, &mine)?);
            // A rank that cannot come along has nothing that counts.
            if let Some(kept) = &mut self.kept
                && !version.map_or(Ok(false), |version| kept.come_to(version))?
            {
                self.kept = None;
            }
        }
        let kept = self.kept.as_ref();
        let progress = kept.map(|kept| (kept.progress(), kept.step.cut));
        let mine = (
            progress,
            [self.data.is_some(), self.metrics_log.is_some()],
            (self.untold.told, self.untold.change.clone()),
            self.has_begun,
        );
        let all = exchange::gather(world, &mine)?;
        let have_data = all.iter().all(|(_, [has_data, _], ..)| *has_data);
        self.has_begun = all.iter().filter_map(|it| it.3).max();
        let kept = || all.iter().map(|(kept, ..)| kept);
        // A rank 0 that wrote the metrics log knows what it tells; else, of those that know that,
        // those know most that have been there longest.
        let known = all.iter().map(|(.., untold, _)| untold);
        let most = known.max_by_key(|(told, it)| (*told, it.lost.len() + it.joined.len()));
        let (_, [_, has_record], of_first, _) = &all[0];
        let known = most.filter(|_| !has_record).unwrap_or(of_first);
        (self.untold.told, self.untold.change) = known.clone();
        let cuts: Vec<_> = kept().map(|it| it.and_then(|(_, cut)| cut)).collect();
        let mut progress: Vec<_> = kept().map(|it| it.map(|(progress, _)| progress)).collect();
        let most = progress.iter().max().copied().flatten();
        self.check_stall(world, most.map_or(0, |[step, ..]| step))?;
        if !Cut::are_whole(&cuts) {
            if world.rank() == 0 {
                tracing::warn!(
                    "values and moments were lost with the ranks that had them, neighbours in \
                     {ZERO} 1: the run continues from its last checkpoint"
                );
            }
            self.kept = None;
            progress.fill(None);
        }
        if progress.iter().all(Option::is_none) {
            // The run is opened again, and so is its metrics log.
            self.metrics_log = None;
        }
        Ok(Some(Standings {
            progress,
            cuts,
            have_data,
        }))
    }

    /// Ends a job whose ranks have met twice after the same step although none was lost or came.
    fn check_stall(&mut self, world: &World, step: u64) -> Result<()> {
        let now = world.change();
        let are_on_gpus = self.devices().iter().any(|it| it.is_accelerator());
        if !are_on_gpus || !now.lost.is_empty() || !now.joined.is_empty() {
            return Ok(());
        }
        if self.stalled.replace(step) != Some(step) {
            return Ok(());
        }
        let text = format!(
            "step {} has failed twice in NCCL, with all ranks in it; help: NCCL_DEBUG=INFO shows \
             what NCCL does, nvidia-smi -q the GPUs",
            step + 1
        );
        Err(Error::remote(0, text, EXIT_LOST))
    }
}

impl Kept {
    /// A new run, or one that resumes from `state`.
    pub(super) fn new(step: Step, state: Option<&State>, has_rates: bool) -> Kept {
        let totals = Totals::new(state);
        Kept {
            step,
            began: totals.steps,
            totals,
            clock: Clock::new(has_rates),
            workload: Workload::default(),
            compared: None,
            gives: None,
            awaits_state: false,
        }
    }

    /// Counts a step over this many rows.
    pub(super) fn count(&mut self, rows: u64) {
        self.totals.steps += 1;
        self.totals.samples += rows;
        self.clock.count(rows);
    }

    /// Under ZeRO-1: what this rank has, and what it can have without the others.
    fn versions(&self) -> [Option<Version>; 2] {
        let steps = self.totals.steps;
        let next = self.step.can_do();
        let next = next.map(|(rows, cut)| (steps + u64::from(rows.is_some()), cut));
        [self.step.cut.map(|cut| (steps, cut)), next]
    }

    /// Completes what ranks prepare together if that makes it what they have `agreed` on, or else
    /// undoes it. Whether this rank then has that.
    fn come_to(&mut self, agreed: [u64; 2]) -> Result<bool> {
        let can_come = self.versions()[1].as_ref().map(number) == Some(agreed);
        match self.step.can_do().filter(|_| can_come) {
            None => self.step.undo()?,
            Some((None, _)) => self.step.take_slices()?,
            Some((Some(rows), _)) => {
                self.step.complete_update()?;
                self.count(rows);
            }
        }
        Ok(self.versions()[0].as_ref().map(number) == Some(agreed))
    }

    /// Gives the ranks that are behind the state of rank `source`. This one's is replaced only when
    /// all has arrived: if `source` is lost meanwhile, the ranks continue from what they have. New
    /// ranks get it later (`give_state`), unless others are behind, too.
    pub(super) fn level(
        &mut self,
        world: &World,
        group: &Group,
        standings: &Standings,
        source: usize,
    ) -> Result<()> {
        // What ranks do together does not depend on what one of them did alone before.
        self.compared = None;
        let most = &standings.progress[source];
        if standings.cuts[source].is_some() {
            self.step.cut_anew(group, &standings.cuts)?;
            faults::at_step(FaultPoint::Slices, world.generation())?;
        }
        if standings.progress.iter().all(|it| it == most) {
            return Ok(());
        }
        let is_behind = standings.progress[world.rank()] != *most;
        let given = || {
            let mut totals = self.totals.clone();
            // JSON has no other numbers.
            totals.evaluation = totals.evaluation.filter(Stats::is_finite);
            let since = self.step.stages()[0].optimizer().since();
            Ok((totals, since, self.clock.since_began()))
        };
        let (totals, since, began): (Totals, u64, _) = exchange::broadcast(world, source, given)?;
        let is_new = |rank: &usize| standings.progress[*rank].is_none();
        let new: Vec<usize> = (0..world.size()).filter(is_new).collect();
        let old = standings.progress.iter().flatten();
        // Under ZeRO-1 a new rank has slices by now, which must not be lost.
        let has_slices = standings.cuts[source].is_some();
        if !has_slices && old.map(Some).all(|it| it == most.as_ref()) {
            self.awaits_state = new.contains(&world.rank());
            self.gives = Some((source, new));
        } else {
            let stream = Stream::default_of(Device::Cpu)?;
            let pass_on = |tensor: &Tensor| group.broadcast(tensor, source, &stream);
            self.step.share_state(is_behind, pass_on)?;
        }
        if is_behind {
            self.began = totals.steps;
            self.totals = totals;
            self.step.count_moments_from(since);
            self.clock = Clock::new(self.clock.has_rates);
            self.clock.began_before(began);
        }
        Ok(())
    }

    /// Gives new ranks the state of the run, if there are any. The other ranks do not wait: they
    /// meet these at the end of the next step.
    pub(super) fn give_state(&mut self, group: &Group) -> Result<()> {
        let Some((source, new)) = &self.gives else {
            return Ok(());
        };
        let (stream, rank) = (Stream::default_of(Device::Cpu)?, group.rank());
        if rank == *source {
            let give = |tensor: &Tensor| {
                new.iter()
                    .try_for_each(|to| group.send(tensor, *to, &stream))
            };
            self.step.share_state(false, give)?;
        } else if new.contains(&rank) {
            let take = |tensor: &Tensor| group.receive(tensor, *source, &stream);
            self.step.share_state(true, take)?;
        }
        (self.gives, self.awaits_state) = (None, false);
        Ok(())
    }

    /// Ends what it does, of which only complete steps count: a GPU may have been given more.
    pub(super) fn halt(&mut self, sampler: &Sampler) -> Result<()> {
        let Some([counted, prepared]) = self.step.halt()? else {
            return Ok(());
        };
        // It counts from the first step of this process on.
        let (totals, complete) = (&mut self.totals, counted.max(self.began));
        let rows = |steps: Range<u64>| -> u64 {
            let rows = steps.map(|step| sampler.at(step).positions);
            rows.map(|rows| rows.end - rows.start).sum()
        };
        totals.samples -= rows(complete..totals.steps);
        totals.samples += rows(totals.steps..complete);
        totals.steps = complete;
        if prepared == complete + 1 {
            self.step.can_update(rows(complete..prepared));
        }
        Ok(())
    }

    fn progress(&self) -> Progress {
        let of = &self.totals;
        [of.steps, of.logged, of.evaluated, of.saved]
    }

    /// Completes the metrics log for the steps so far, on rank 0, and says what has to be repeated,
    /// the same on all ranks: whether a checkpoint was lost.
    pub(super) fn complete_log(
        &mut self,
        log: Option<&mut MetricsLog>,
        out: &Path,
        world: &World,
    ) -> Result<bool> {
        let totals = &mut self.totals;
        let written = || {
            let log = log.ok_or_else(|| Error::Internal("rank 0 has no log".into()))?;
            let (step, line) = &totals.line;
            if *step > 0 && *step == totals.steps {
                log.write_once(line.clone())?;
            }
            let (step, folder) = (totals.saved, checkpoint::folder(out, totals.saved));
            let is_saved = step == 0 || folder.is_dir();
            if step > 0 && is_saved {
                log.write_checkpoint(step, &folder)?;
            }
            Ok((log.has("eval", totals.steps), is_saved))
        };
        let (is_evaluated, is_saved) = exchange::broadcast(world, 0, written)?;
        if !is_evaluated {
            totals.evaluated = 0;
        }
        if !is_saved {
            // Where the run has continued, the best model so far is lost. A later one replaces it.
            let is_lost = |best: &mut Best| best.step == totals.saved && best.step < totals.steps;
            totals.best.take_if(is_lost);
            totals.saved = 0;
        }
        Ok(!is_saved)
    }
}

/// Says on rank 0 with whom the run continues after step `step`, and since when it is known that
/// it does not continue with all.
pub(super) fn say_change(
    log: &mut MetricsLog,
    untold: &mut Untold,
    world: &World,
    step: u64,
) -> Result<()> {
    let change = std::mem::take(&mut untold.change);
    let event = RanksEvent {
        time_unix_s: metrics_log::unix_s(),
        step,
        generation: world.generation(),
        ranks: world.size(),
        min_ranks: world.min_ranks(),
        lost: change.lost,
        joined: change.joined,
        seconds: (untold.noticed).map_or(0.0, |noticed| noticed.elapsed().as_secs_f64()),
    };
    let text = format!(
        "{event} after step {step}; this took {:.2} s",
        event.seconds
    );
    match event.lost.is_empty() {
        true => tracing::info!("{text}"),
        false => tracing::warn!("{text}"),
    }
    log.write(&Event::Ranks(event))?;
    untold.told = Some(world.generation());
    faults::at_step(FaultPoint::Told, world.generation())
}

/// Whether the ranks of `world` continue after this error. If a GPU of this rank has failed, this
/// ends the process, and the others continue.
pub(super) fn continues_after(error: &Error, world: &World, devices: &[Device]) -> bool {
    if !world.is_elastic() {
        return false;
    }
    use ddp_comm::Error::{Broken, Nccl, Timeout};
    if let Error::Comm(error) = error
        && (matches!(error, Timeout { .. }) || error.is_rank_lost())
    {
        return true;
    }
    // After a failure that stays, a GPU refuses any work.
    let refuses = |device: &Device| Stream::current(*device)?.record().map(drop);
    if devices.iter().any(|device| refuses(device).is_err()) {
        world.leave(error, EXIT_LOST);
    }
    if let Error::Comm(lost @ Nccl(_)) = error
        && lost.exit_code() == EXIT_LOST
    {
        // NCCL missed another rank, or the network: if that lasts, the step does not end again.
        return true;
    }
    // The end of calls that wait for a lost rank is an error for some of them.
    let is_of_calls = match error {
        Error::Tensor(error) | Error::Comm(ddp_comm::Error::Tensor(error)) => {
            matches!(error, TensorError::Cuda(_) | TensorError::Capture(_))
        }
        Error::Comm(error) => matches!(error, Nccl(_) | Broken(_)),
        _ => false,
    };
    is_of_calls && world.ends_generation()
}

/// Ends this process if it is new and cannot take part, because its program, settings or data
/// differ or it has an error of its own. The others continue. `joined` lists the ranks that are new
/// since the last step.
pub(super) fn leave_if_new(error: &Error, world: &World, joined: &[usize]) {
    let is_new = joined.contains(&world.job_rank(world.rank()));
    let is_other = matches!(error, Error::Comm(ddp_comm::Error::Disagree(_)));
    let is_own = || error.reporter().is_none() && !continues_after(error, world, &[]);
    if is_new && (is_other || is_own()) {
        world.leave(error, error.exit_code());
    }
}

/// Ends this process after an error that no other rank need find: no memory, or data that this rank
/// cannot read. Rank 0 writes the run's folder: what is wrong there ends the job.
pub(super) fn leave_if_alone(error: &Error, world: &World) {
    let is_own = match error.exit_code() {
        EXIT_MEMORY => true,
        EXIT_IO => world.rank() > 0,
        _ => false,
    };
    if is_own && error.reporter().is_none() && world.is_elastic() && world.size() > 1 {
        world.leave(error, error.exit_code());
    }
}

/// Refuses what does not survive the loss of a rank yet.
pub(super) fn check(step: &Step, world: &World) -> Result<()> {
    let refuse = |text: &str| Err(Error::Usage(format!("{MIN_RANKS}: {text}")));
    if !world.is_elastic() {
        return Ok(());
    }
    for stage in step.stages() {
        let params = &stage.model().params;
        let is_on_gpu = params.device().is_accelerator();
        let has_matrices = stage.optimizer().rule().hidden.is_some();
        if is_on_gpu && has_matrices && stage.reducer().cut(0).is_some() {
            return refuse(&format!(
                "expected {ZERO} 0 with {OPTIMIZER} muon on GPUs, where directions of whole matrices \
                 have no copy yet; help: leave out one of the three"
            ));
        }
        if is_on_gpu && step.stages().len() > 1 {
            return refuse(&format!(
                "expected {DEVICES_PER_RANK} 1 on GPUs, because the calls of several GPUs of a rank \
                 do not end together; help: leave out one of the two"
            ));
        }
        if params.buffers()?.is_some() {
            return refuse(
                "expected a model without buffers, because a step that is repeated would update \
                 them twice; help: use layers without running statistics",
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ddp_kernels::ops;
    use ddp_nn::optim::Rule;

    use super::*;
    use crate::step::tests::sliced;
    use crate::trainer::setup;

    fn standings(progress: &[Option<Progress>]) -> Standings {
        Standings {
            progress: progress.to_vec(),
            cuts: vec![None; progress.len()],
            have_data: true,
        }
    }

    #[test]
    fn the_first_rank_that_is_furthest_gives_its_state() {
        let at = |step, logged| Some([step, logged, 0, 0]);
        for (progress, source) in [
            (&[None, None][..], None),
            (&[None, at(0, 0)], Some(1)),
            (&[at(6, 5), at(7, 5), at(7, 5)], Some(1)),
            (&[at(6, 5), at(6, 6), None], Some(1)),
            (&[at(6, 6), at(6, 6)], Some(0)),
        ] {
            assert_eq!(standings(progress).source(), source, "{progress:?}");
        }
    }

    /// A run after `step` steps, with values and moments of which all elements are `number`.
    fn kept(world: &World, step: u64, number: f64) -> Kept {
        let options = Config {
            data: "glyphs,rows=64,held-out=16".parse().unwrap(),
            ..Config::default()
        };
        let data = setup::open(&options, None, world, None).unwrap();
        let built = setup::step(&options, world, &data, &[Device::Cpu], None).unwrap();
        let mut kept = Kept::new(built, None, true);
        for tensor in state(&kept) {
            ops::fill_into(&tensor, number).unwrap();
        }
        kept.totals.steps = step;
        kept.totals.samples = 10 * step;
        kept.totals.saved = step;
        kept.totals.line = (step, format!("line {step}"));
        kept
    }

    fn state(kept: &Kept) -> Vec<Tensor> {
        let stages = kept.step.stages().iter();
        let of_stage = |stage: &crate::step::Stage| {
            let moments = stage
                .optimizer()
                .moments()
                .map(|(_, moment)| moment.clone());
            moments
                .chain([stage.model().params.values().clone()])
                .collect::<Vec<_>>()
        };
        stages.flat_map(of_stage).collect()
    }

    #[test]
    fn ranks_that_are_behind_or_new_get_the_state_of_the_one_that_is_furthest() {
        // Rank 3 is new; then two are, and no other is behind.
        for steps in [[6, 7, 7, 0], [7, 7, 0, 0]] {
            get_the_state(steps);
        }
    }

    fn get_the_state(steps: [u64; 4]) {
        let worlds = World::threads(4, Some(5), Duration::from_secs(60)).unwrap();
        let progress = |step: u64| (step > 0).then_some([step, 0, 0, step]);
        let standings = standings(&steps.map(progress));
        let run = |world: World| {
            let step = steps[world.rank()];
            let mut kept = kept(&world, step, step as f64);
            let group = world.group("main").unwrap();
            kept.level(&world, &group, &standings, 1).unwrap();
            kept.give_state(&group).unwrap();
            for tensor in state(&kept) {
                assert_eq!(tensor.to_vec::<f32>().unwrap(), vec![7.0; tensor.count()]);
            }
            assert_eq!(kept.progress(), [7, 0, 0, 7]);
            assert_eq!((kept.totals.samples, &*kept.totals.line.1), (70, "line 7"));
        };
        std::thread::scope(|scope| {
            worlds
                .into_iter()
                .for_each(|world| _ = scope.spawn(|| run(world)));
        });
    }

    #[test]
    fn ranks_agree_on_what_one_has_or_all_can_have() {
        let version = |steps, number, ranks, owns: usize| {
            let keeps = (ranks > 1).then(|| (owns + ranks - 1) % ranks);
            let cut = Cut {
                number,
                ranks,
                owns,
                keeps,
            };
            Some((steps, cut))
        };
        let v = version;
        for (ranks, expected) in [
            // None has a run.
            (vec![[None, None], [None, None]], None),
            // All have the same, one is new.
            (
                vec![[v(6, 1, 2, 0), None], [v(6, 1, 2, 1), None], [None, None]],
                Some([6, 1]),
            ),
            // One has made the update, and the other can.
            (
                vec![[v(6, 1, 3, 0), v(7, 1, 3, 0)], [v(7, 1, 3, 2), None]],
                Some([7, 1]),
            ),
            // One cannot.
            (
                vec![[v(6, 1, 3, 0), v(7, 1, 3, 0)], [v(6, 1, 3, 2), None]],
                Some([6, 1]),
            ),
            // All can.
            (
                vec![
                    [v(6, 1, 3, 0), v(7, 1, 3, 0)],
                    [v(6, 1, 3, 2), v(7, 1, 3, 2)],
                ],
                Some([7, 1]),
            ),
            // One has its new slices for good, and the other can.
            (
                vec![[v(6, 1, 4, 1), v(6, 2, 3, 1)], [v(6, 2, 3, 2), None]],
                Some([6, 2]),
            ),
            // Both can, and one of them is new.
            (
                vec![[v(6, 1, 4, 1), v(6, 2, 3, 1)], [None, v(6, 2, 3, 2)]],
                Some([6, 2]),
            ),
            // Both can, but not all slices of the new cut are left.
            (
                vec![
                    [v(6, 1, 2, 0), v(6, 2, 4, 0)],
                    [v(6, 1, 2, 1), v(6, 2, 4, 1)],
                ],
                Some([6, 1]),
            ),
            // One can, and one that is new cannot.
            (
                vec![[v(6, 1, 1, 0), v(6, 2, 2, 0)], [None, None]],
                Some([6, 2]),
            ),
        ] {
            assert_eq!(agreed(&ranks), expected, "{ranks:?}");
        }
    }

    #[test]
    fn a_rank_completes_or_undoes_what_was_agreed() {
        let worlds = World::threads(2, Some(4), Duration::from_secs(60)).unwrap();
        let run = |world: World| {
            let step = || {
                let mut step = sliced(&world, Rule::muon());
                step.can_have_slices(3);
                let mut kept = Kept::new(step, None, true);
                kept.totals.steps = 6;
                kept
            };
            let numbers = |kept: &Kept| kept.versions().map(|it| it.as_ref().map(number));
            // Not before all ranks have their slices, or one knows that they do.
            let mut kept = step();
            assert_eq!(numbers(&kept), [None, Some([6, 3])]);
            assert!(!kept.come_to([6, 2]).unwrap());
            let mut kept = step();
            assert!(kept.come_to([6, 3]).unwrap());
            assert_eq!(numbers(&kept), [Some([6, 3]), None]);

            // No rank has made the update.
            let before = kept.step.numbers_for_test();
            kept.step.prepare_for_test(0.5, 32);
            assert!(kept.come_to([6, 3]).unwrap());
            assert!(kept.step.numbers_for_test() == before);
            assert_eq!((kept.totals.steps, kept.totals.samples), (6, 0));

            // Another one has, or this one.
            kept.step.prepare_for_test(0.5, 32);
            assert_eq!(numbers(&kept), [Some([6, 3]), Some([7, 3])]);
            assert!(kept.come_to([7, 3]).unwrap());
            let after = kept.step.numbers_for_test();
            assert!(after != before);
            assert_eq!((kept.totals.steps, kept.totals.samples), (7, 32));
            assert!(kept.come_to([7, 3]).unwrap() && kept.step.numbers_for_test() == after);

            // Slices that some rank has already, and slices that none has.
            kept.step.can_have_slices(4);
            assert!(kept.come_to([7, 4]).unwrap());
            kept.step.can_have_slices(5);
            assert!(kept.come_to([7, 4]).unwrap());
            assert_eq!(numbers(&kept), [Some([7, 4]), None]);
            assert!(kept.step.numbers_for_test() == after);

            // What this rank cannot make whole does not count.
            assert!(!kept.come_to([8, 4]).unwrap());
            kept.step.prepare_for_test(0.5, 32);
            assert!(!kept.come_to([9, 4]).unwrap());
        };
        std::thread::scope(|scope| {
            worlds
                .into_iter()
                .for_each(|it| _ = scope.spawn(|| run(it)))
        });
    }
}
