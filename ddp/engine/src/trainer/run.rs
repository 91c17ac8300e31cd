//! What a rank keeps of a training run while others are lost and come, and what it agrees with them
//! when they meet. Its life is in `trainer.rs`.

use std::borrow::Cow;
use std::mem;
use std::time::Instant;

use ddp_comm::membership::agreement::{Act, RankReport, Regroup};
use ddp_comm::{Change, World};
use ddp_data::Data;
use ddp_kernels::Device;
use ddp_kernels::ops::Bf16Order;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{Config, Resume};
use crate::elastic::loss::EXIT_LOST;
use crate::elastic::run::{RankRun, StateTransfer};
use crate::error::{Error, Result};
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{self, LogEvent, MetricsLog, RanksEvent};
use crate::setting::ZERO;

/// A training run on one rank: what survives a generation of ranks. What belongs to one is an
/// `AgreedRun` (`setup.rs`), and once it takes steps a `TrainingRun` (`training.rs`).
pub(super) struct Run<'a> {
    /// The settings that the job was started with.
    pub(super) given: &'a Config,
    /// Once they are open.
    pub(super) data: Option<Data>,
    /// The settings of the run, once they are chosen.
    pub(super) settled: Option<Map<String, Value>>,
    /// What this rank has trained, once its step has its first weights.
    pub(super) rank_run: Option<RankRun>,
    /// In which its matmuls of bf16 add.
    pub(super) bf16_order: Option<Bf16Order>,
    /// On rank 0, once it is open.
    pub(super) metrics_log: Option<MetricsLog>,
    /// Whether any rank has had the run; None for a process that has come and does not know.
    pub(super) has_begun: Option<bool>,
    /// After which step ranks last met although none was lost or came.
    stalled: Option<u64>,
    /// Who was lost and came; the metrics log does not tell it yet.
    pub(super) change: Change,
    /// Since when it is known that the ranks have to meet again.
    pub(super) noticed: Option<Instant>,
    /// The last generation that the metrics log tells of; None before the first one trains.
    pub(super) logged: Option<u64>,
}

/// Why the ranks meet again: after this error, or to take in processes that have come.
pub(super) struct Meet(pub(super) Option<Error>);

/// What a rank says when ranks have met.
#[derive(Serialize, Deserialize)]
struct Said {
    report: RankReport,
    has_data: bool,
    /// Whether it has written the metrics log.
    has_log: bool,
    logged: Option<u64>,
    change: Change,
    has_begun: Option<bool>,
}

impl<'a> Run<'a> {
    /// A run that is not begun, with these settings.
    pub(super) fn new(given: &'a Config) -> Run<'a> {
        Run {
            given,
            data: None,
            settled: None,
            rank_run: None,
            bf16_order: None,
            metrics_log: None,
            has_begun: Some(false),
            stalled: None,
            change: Change::default(),
            noticed: None,
            logged: None,
        }
    }

    /// The devices of its step.
    pub(super) fn devices(&self) -> Vec<Device> {
        let run = self.rank_run.as_ref();
        run.map_or(Vec::new(), |run| run.step.devices())
    }

    /// The settings with which the ranks train. Once a rank has trained, the run resumes from its
    /// last checkpoint if no rank still has it.
    pub(super) fn chosen(&self) -> Cow<'a, Config> {
        if self.has_begun == Some(false) {
            return Cow::Borrowed(self.given);
        }
        Cow::Owned(Config {
            resume: Resume::Auto,
            ..self.given.clone()
        })
    }

    /// What this rank has trained, once it is built.
    pub(super) fn built(&mut self) -> &mut RankRun {
        self.rank_run.as_mut().expect("the run is built")
    }

    /// Agrees with the ranks of a new world where they continue, and goes there, as far as this
    /// rank can by itself. None if no rank has the run, as in the first world: all begin.
    pub(super) fn agree(&mut self, world: &World) -> Result<Option<Regroup>> {
        if world.rank() > 0 {
            // One with a lower number, perhaps started again, writes it now.
            self.metrics_log = None;
        }
        faults::at_step(FaultPoint::Meeting, world.generation())?;
        if world.generation() < 2 {
            self.has_begun = Some(false);
            return Ok(None);
        }
        if self.logged.is_none() {
            // The metrics log was not open yet: all begin again.
            self.rank_run = None;
        }
        if self.rank_run.is_some() {
            self.has_begun = Some(true);
        }
        // A new rank that did not get its state is as one that has just come.
        self.rank_run
            .take_if(|run| matches!(run.late_state, StateTransfer::AwaitsFrom(_)));
        let run = self.rank_run.iter_mut();
        run.for_each(|run| run.late_state = StateTransfer::Complete);
        let mine = Said {
            report: self
                .rank_run
                .as_ref()
                .map(RankRun::report)
                .unwrap_or_default(),
            has_data: self.data.is_some(),
            has_log: self.metrics_log.is_some(),
            logged: self.logged,
            change: self.change.clone(),
            has_begun: self.has_begun,
        };
        let all = exchange::gather(world, &mine)?;
        let reports: Vec<_> = all.iter().map(|said| said.report).collect();
        let plan = Regroup::of(&reports);
        self.follow(&plan, world)?;
        self.has_begun = all.iter().filter_map(|said| said.has_begun).max();
        // A rank 0 that wrote the metrics log knows what it tells; else, of those that know that,
        // those know most that have been there longest.
        let known = |it: &&Said| (it.logged, it.change.lost.len() + it.change.joined.len());
        let most = all.iter().max_by_key(known);
        let known = most.filter(|_| !all[0].has_log).unwrap_or(&all[0]);
        (self.logged, self.change) = (known.logged, known.change.clone());
        // Ranks open data together.
        self.data.take_if(|_| all.iter().any(|said| !said.has_data));
        Ok(Some(plan).filter(|plan| plan.source().is_some()))
    }

    /// Does this rank's part of the plan.
    fn follow(&mut self, plan: &Regroup, world: &World) -> Result<()> {
        match (&mut self.rank_run, plan.acts[world.rank()]) {
            (Some(run), Act::Stay) => run.stay()?,
            (Some(run), Act::Advance) => run.advance()?,
            (_, Act::Forget) | (None, _) => self.rank_run = None,
        }
        let most = plan.progress.iter().max().copied().flatten();
        self.check_stall(world, most.map_or(0, |it| it.steps))?;
        if plan.has_lost_slices && world.rank() == 0 {
            tracing::warn!(
                "values and moments were lost with the ranks that had them, neighbours in {ZERO} \
                 1: the run continues from its last checkpoint"
            );
        }
        if most.is_none() {
            // The run is opened again, and so is its metrics log.
            self.metrics_log = None;
        }
        Ok(())
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

    /// Waits until the metrics log is open and tells who was lost and came: no rank trains before.
    /// All ranks call it together.
    pub(super) fn announce(&mut self, world: &World, step: u64) -> Result<()> {
        self.log_change(world, step)?;
        world.barrier()?;
        (self.change, self.noticed) = (Change::default(), None);
        self.logged = Some(world.generation());
        Ok(())
    }

    /// Says on rank 0 with whom the run continues after step `step`, and since when it is known
    /// that it does not continue with all.
    fn log_change(&mut self, world: &World, step: u64) -> Result<()> {
        let later = world.generation() > 1;
        let Some(log) = self.metrics_log.as_mut().filter(|_| later) else {
            return Ok(());
        };
        let change = mem::take(&mut self.change);
        let event = RanksEvent {
            time_unix_s: metrics_log::unix_s(),
            step,
            generation: world.generation(),
            ranks: world.size(),
            min_ranks: world.min_ranks(),
            lost: change.lost,
            joined: change.joined,
            seconds: (self.noticed).map_or(0.0, |noticed| noticed.elapsed().as_secs_f64()),
        };
        let text = format!(
            "{event} after step {step}; this took {:.2} s",
            event.seconds
        );
        if event.lost.is_empty() {
            tracing::info!("{text}");
        } else {
            tracing::warn!("{text}");
        }
        log.write(&LogEvent::Ranks(event))?;
        self.logged = Some(world.generation());
        faults::at_step(FaultPoint::Announced, world.generation())
    }
}
