//! What a process that trains does from its start to the end of the job, while ranks are lost and
//! come. [`run`] is the rank's part of the time line in docs/elastic.md.

use std::time::Instant;

use ddp_comm::membership::agreement::{Act, RankReport, Regroup};
use ddp_comm::{Change, World};
use ddp_data::Data;
use ddp_kernels::ops::Bf16Order;
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_kernels::{Device, Error as TensorError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::run::{RankRun, StateTransfer};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{self, LogEvent, MetricsLog, RanksEvent};
use crate::setting::{DEVICES_PER_RANK, MIN_RANKS, ZERO};
use crate::step::Step;

/// What a process does.
enum SessionState<R> {
    /// It has come while others train: it opens its data, and they do not wait.
    Joining,
    /// It waits for the next generation of ranks, because of this error or for new ones.
    Meeting(Option<Error>),
    /// The ranks agree where they continue, and get what they lack; but a new one without slices
    /// gets its weights in `Training`.
    Recovering,
    /// They take steps.
    Training(R),
    /// The run is over.
    Ending,
}

/// What follows the training with the ranks of a world.
pub(crate) enum Next {
    /// The run is over, and its files are closed.
    End(Result<()>),
    /// The ranks meet again: because of this error, or to take in processes that have come.
    Meet(Option<Error>),
}

/// What a session asks of the trainer. All ranks of a world call each of these together; a process
/// that joins opens its data alone, in a world of one rank.
pub(crate) trait Trains {
    /// A run that is ready for its first step with the ranks of a world.
    type Ready;

    /// Opens the data of a process that joins others; None if these have chosen something of them.
    fn open_data(&mut self, world: &World) -> Result<Option<Data>>;

    /// Assembles the run of the session with the ranks of `world`. None if it is finished.
    fn recover(&mut self, world: &World, session: &mut Session) -> Result<Option<Self::Ready>>;

    /// Takes steps. An error is one from before the first of them.
    fn train(&mut self, ready: Self::Ready, world: &World, session: &mut Session) -> Result<Next>;
}

/// Trains from the first generation of ranks, `first`, to the last.
pub(crate) fn run<T: Trains>(first: &World, trains: &mut T) -> Result<()> {
    // Between two worlds too, a request to stop is not lost.
    let stops = first.catch_stop();
    let (mut session, mut later) = (Session::default(), None);
    let mut state = if first.is_newcomer() {
        SessionState::Joining
    } else {
        SessionState::Recovering
    };
    loop {
        let world = later.as_ref().unwrap_or(first);
        let next = match state {
            SessionState::Joining => {
                // It has nothing to save, and the others need not wait for it.
                let code = Error::Stopped(String::new()).exit_code();
                let ending = first.leave_when_asked(&stops, code)?;
                session.data = in_phase(Phase::Setup, || trains.open_data(first))?;
                faults::at_step(FaultPoint::Joining, 0)?;
                drop(ending);
                Ok(SessionState::Meeting(None))
            }
            SessionState::Meeting(why) => {
                let next = world.next_generation(why.as_ref().and_then(Error::of_ranks));
                let next = next.map_err(Error::from);
                next.inspect_err(|error| leave_if_alone(error, world))
                    .map(|next| {
                        later = Some(next);
                        SessionState::Recovering
                    })
            }
            SessionState::Recovering => {
                session.unlogged.change.extend(world.change());
                let noticed = &mut session.unlogged.noticed;
                *noticed = noticed.or(world.over_since());
                match in_phase(Phase::Setup, || trains.recover(world, &mut session)) {
                    Ok(ready) => Ok(ready.map_or(SessionState::Ending, SessionState::Training)),
                    Err(error) => session.leave(error, world),
                }
            }
            SessionState::Training(ready) => match trains.train(ready, world, &mut session) {
                Ok(Next::End(result)) => result.map(|()| SessionState::Ending),
                Ok(Next::Meet(why)) => Ok(SessionState::Meeting(why)),
                Err(error) => session.leave(error, world),
            },
            SessionState::Ending => {
                drop(session);
                world.finish();
                return Ok(());
            }
        };
        state = match next {
            Ok(state) => state,
            Err(error) => {
                // Dropped, they would wait for other ranks, or for threads that do not end.
                std::mem::forget(later);
                if !matches!(error, Error::Stopped(_) | Error::NonFinite(_)) {
                    std::mem::forget(session);
                }
                return Err(error);
            }
        };
    }
}

/// The settings of a run.
#[derive(Clone, Copy)]
pub(crate) struct RunSettings<'a> {
    /// The settings the job was started with.
    pub(crate) at_start: &'a Config,
    /// Once a rank has trained: as `at_start`, but resumes from the last checkpoint if no rank
    /// still holds the run.
    pub(crate) of_begun: &'a Config,
}

/// What a process carries from one generation to the next.
#[derive(Default)]
pub(crate) struct Session {
    /// Once they are open.
    pub(crate) data: Option<Data>,
    /// The settings of the run, once they are chosen.
    pub(crate) settled: Option<Map<String, Value>>,
    /// Once its step has its first weights.
    pub(crate) run: Option<RankRun>,
    /// In which its matmuls of bf16 add.
    pub(crate) bf16_order: Option<Bf16Order>,
    /// On rank 0, once it is open.
    pub(crate) metrics_log: Option<MetricsLog>,
    /// Whether any rank has had the run; None for a process that has come and does not know.
    has_begun: Option<bool>,
    /// After which step ranks last met although none was lost or came.
    stalled: Option<u64>,
    pub(crate) unlogged: Unlogged,
}

/// What the metrics log does not tell yet.
#[derive(Default)]
pub(crate) struct Unlogged {
    /// Who was lost and came.
    pub(crate) change: Change,
    /// Since when it is known that the ranks have to meet again.
    pub(crate) noticed: Option<Instant>,
    /// The last generation that it tells of; None before the first one trains.
    pub(crate) logged: Option<u64>,
}

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

/// Exit codes: no memory, and a file that cannot be read or written.
const EXIT_MEMORY: u8 = 71;
const EXIT_IO: u8 = 74;
/// The exit code of a job that ends because a rank was lost or hangs.
pub(crate) const EXIT_LOST: u8 = 77;

impl Session {
    /// The devices of its run.
    pub(crate) fn devices(&self) -> Vec<Device> {
        let run = self.run.as_ref();
        run.map_or(Vec::new(), |run| run.step.devices())
    }

    /// The settings with which the ranks of this world train.
    pub(crate) fn chosen<'a>(&self, settings: RunSettings<'a>) -> &'a Config {
        match self.has_begun {
            Some(false) => settings.at_start,
            Some(true) | None => settings.of_begun,
        }
    }

    /// After an error before the first step: ends what the run does with the ranks of this world,
    /// if they meet again. This process or the job ends after other errors.
    fn leave<R>(&mut self, error: Error, world: &World) -> Result<SessionState<R>> {
        let joined = &self.unlogged.change.joined;
        leave_if_new(&error, world, joined);
        if world.generation() > 1 {
            leave_if_alone(&error, world);
        }
        // A rank that joins with other settings leaves.
        let is_of_new = matches!(error, Error::Comm(ddp_comm::Error::Disagree(_)));
        let is_of_new = is_of_new && world.is_elastic() && !joined.is_empty();
        if !is_of_new && !continues_after(&error, world, &self.devices()) {
            return Err(error);
        }
        world.end_generation(error.of_ranks());
        let halted = self.run.as_mut().map(|run| run.step.halt());
        if let Some(Err(error)) = halted {
            world.leave(&error, EXIT_LOST);
        }
        Ok(SessionState::Meeting(Some(error)))
    }

    /// The run that is assembled.
    pub(crate) fn run(&mut self) -> &mut RankRun {
        self.parts().0
    }

    /// That, its metrics log, and what the metrics log does not tell yet.
    pub(crate) fn parts(&mut self) -> (&mut RankRun, &mut Option<MetricsLog>, &mut Unlogged) {
        let run = self.run.as_mut().expect("a run is assembled");
        (run, &mut self.metrics_log, &mut self.unlogged)
    }

    /// Agrees with the ranks of a new world where they continue, and goes there, as far as this
    /// rank can by itself. None in the first one, where all begin.
    pub(crate) fn agree(&mut self, world: &World) -> Result<Option<Regroup>> {
        if world.rank() > 0 {
            // One with a lower number, perhaps started again, writes it now.
            self.metrics_log = None;
        }
        faults::at_step(FaultPoint::Meeting, world.generation())?;
        if world.generation() < 2 {
            self.has_begun = Some(false);
            return Ok(None);
        }
        if self.unlogged.logged.is_none() {
            // The metrics log was not open yet: all begin again.
            self.run = None;
        }
        if self.run.is_some() {
            self.has_begun = Some(true);
        }
        // A new rank that did not get its state is as one that has just come.
        self.run
            .take_if(|run| matches!(run.late_state, StateTransfer::AwaitsFrom(_)));
        let run = self.run.iter_mut();
        run.for_each(|run| run.late_state = StateTransfer::Complete);
        let mine = Said {
            report: self.run.as_ref().map(RankRun::report).unwrap_or_default(),
            has_data: self.data.is_some(),
            has_log: self.metrics_log.is_some(),
            logged: self.unlogged.logged,
            change: self.unlogged.change.clone(),
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
        (self.unlogged.logged, self.unlogged.change) = (known.logged, known.change.clone());
        // Ranks open data together.
        self.data.take_if(|_| all.iter().any(|said| !said.has_data));
        Ok(Some(plan))
    }

    /// Does this rank's part of the plan.
    fn follow(&mut self, plan: &Regroup, world: &World) -> Result<()> {
        match (&mut self.run, plan.acts[world.rank()]) {
            (Some(run), Act::Stay) => run.stay()?,
            (Some(run), Act::Advance) => run.advance()?,
            (_, Act::Forget) | (None, _) => self.run = None,
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
}

/// Says on rank 0 with whom the run continues after step `step`, and since when it is known that
/// it does not continue with all.
pub(crate) fn say_change(
    log: &mut MetricsLog,
    unlogged: &mut Unlogged,
    world: &World,
    step: u64,
) -> Result<()> {
    let change = std::mem::take(&mut unlogged.change);
    let event = RanksEvent {
        time_unix_s: metrics_log::unix_s(),
        step,
        generation: world.generation(),
        ranks: world.size(),
        min_ranks: world.min_ranks(),
        lost: change.lost,
        joined: change.joined,
        seconds: (unlogged.noticed).map_or(0.0, |noticed| noticed.elapsed().as_secs_f64()),
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
    unlogged.logged = Some(world.generation());
    faults::at_step(FaultPoint::Announced, world.generation())
}

/// Whether the ranks of `world` continue after this error. If a GPU of this rank has failed, this
/// ends the process, and the others continue.
pub(crate) fn continues_after(error: &Error, world: &World, devices: &[Device]) -> bool {
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
pub(crate) fn leave_if_new(error: &Error, world: &World, joined: &[usize]) {
    let is_new = joined.contains(&world.job_rank(world.rank()));
    let is_other = matches!(error, Error::Comm(ddp_comm::Error::Disagree(_)));
    let is_own = || error.reporter().is_none() && !continues_after(error, world, &[]);
    if is_new && (is_other || is_own()) {
        world.leave(error, error.exit_code());
    }
}

/// Ends this process after an error that no other rank need find: no memory, or data that this rank
/// cannot read. Rank 0 writes the run's folder: what is wrong there ends the job.
pub(crate) fn leave_if_alone(error: &Error, world: &World) {
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
pub(crate) fn check(step: &Step, world: &World) -> Result<()> {
    let refuse = |text: &str| Err(Error::Usage(format!("{MIN_RANKS}: {text}")));
    if !world.is_elastic() {
        return Ok(());
    }
    for stage in step.stages() {
        let params = &stage.model().params;
        let is_on_gpu = params.device().is_accelerator();
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
