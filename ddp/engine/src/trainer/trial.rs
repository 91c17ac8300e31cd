//! A trial of a run: everything up to the first step, and a few steps on a model that is then
//! dropped. Nothing of the run is written.

use std::time::{Duration, Instant};

use ddp_comm::World;
use ddp_kernels::stream::synchronize;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_kernels::{DType, Device};

use super::division;
use super::plan::Plan;
use super::planned::{self, ModelBytes, StepBytes};
use super::program::RunProgram;
use super::run::Run;
use super::setup::{AgreedRun, StepInputs};
use crate::config::{Config, Resume};
use crate::devices::is_simulated;
use crate::elastic::run::RankRun;
use crate::elastic::slices::Slices;
use crate::error::Result;
use crate::step::{Stage, Step};
use crate::{exchange, metrics_log, process};

/// About how long the steps of a trial take together, and the bounds of their number.
const TRIAL: Duration = Duration::from_secs(1);
const STEPS_MIN: u64 = 3;
const STEPS_MAX: u64 = 50;
/// Steps before these: the first ones allocate, compile and capture.
const WARM_UP: u64 = 3;

/// Larger models are not made: their size is stated.
const PARAMETERS_MAX: u64 = 1 << 28;

/// Memory, disk space and time of a run.
#[derive(Debug)]
pub struct DryRun {
    /// A description of the data.
    pub data: String,
    /// The rows to evaluate on.
    pub held_out_rows: u64,
    /// The plan of the run.
    pub plan: Plan,
    /// Steps that are already done.
    pub taken: u64,
    /// This rank's devices.
    pub devices: Vec<Device>,
    /// Where each rank trains.
    pub places: Vec<String>,
    /// Bytes of this rank's model, with the most partial sums that any rank has.
    pub model_bytes: ModelBytes,
    /// What a step needs besides, as planned.
    pub step_bytes: StepBytes,
    /// The most bytes that a rank gives to the others in a step; None if the model was not made.
    pub between_ranks_bytes: Option<u64>,
    /// Bytes of a checkpoint, of all ranks together.
    pub checkpoint_bytes: u64,
    /// The most host memory that any rank had, in MB, with the copy that is being saved; None if
    /// the model was too large to be made for a trial.
    pub host_peak_mb: Option<f64>,
    /// The most GPU memory that any rank had, in MB.
    pub device_peak_mb: Option<f64>,
    /// The most bytes of activations that any rank had after the trial's steps; None if the model
    /// was not made.
    pub activation_bytes: Option<u64>,
    /// How long steps took on a GPU; none on the CPU, where a second of steps says little.
    pub trial: Option<TimedTrial>,
}

/// Times of a few steps and an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct TimedTrial {
    /// The median time of a step.
    pub step: Duration,
    /// Of this many steps.
    pub steps: u64,
    /// The time of an evaluation, if there are held-out rows.
    pub evaluation: Option<Duration>,
}

/// Checks everything that can be checked without training, and takes a few steps. None for a
/// resumed run that is already finished. All ranks call it together.
pub fn dry_run(
    options: &Config,
    program: &dyn RunProgram,
    world: &World,
) -> Result<Option<DryRun>> {
    let mut whole = Run::new(options);
    let assemble = || whole.assemble(program, world, PARAMETERS_MAX, None);
    let (run, rows) = in_phase(Phase::Setup, assemble)?;
    if options.resume == Resume::Never && world.rank() == 0 {
        metrics_log::check_free(&options.out)?;
    }
    if run.is_finished {
        return Ok(None);
    }
    let planned = planned_alone(&run, world)?;
    let Some(rows) = rows else {
        return Ok(Some(planned));
    };
    let (rank_run, options) = (whole.built(), &run.options);
    let step = &mut rank_run.step;
    let is_over = run.plan.is_over(planned.taken);
    let trial = (!is_over).then(|| trial(&run, rows, step, world));
    let trial = trial.transpose()?.flatten();
    let (host_peak_mb, device_peak_mb) = peaks(&run, world)?;
    // Ranks have other parts of the tree of shards.
    let most = |mine: u64| -> Result<u64> {
        let all = exchange::gather(world, &mine)?;
        Ok(all.into_iter().max().unwrap_or(mine))
    };
    let mut model_bytes = bytes_of(rank_run);
    model_bytes.partial_sums = most(model_bytes.partial_sums)?;
    let [of_shard, micro] = division::rows_of_shard(options, &run.data, world.size());
    let rounds = match options.same_bits {
        Some(_) => 1,
        None => of_shard.div_ceil(micro.max(1)),
    };
    // The trial saves nothing.
    let host_peak_mb = host_peak_mb + model_bytes.saved() as f64 / 1e6;
    Ok(Some(DryRun {
        model_bytes,
        between_ranks_bytes: Some(most(bytes_between_ranks(&rank_run.step, rounds))?),
        checkpoint_bytes: checkpoint_bytes(&rank_run.step, world)?,
        activation_bytes: Some(most(rank_run.step.activation_bytes() as u64)?),
        host_peak_mb: Some(host_peak_mb),
        device_peak_mb,
        trial,
        ..planned
    }))
}

/// What is known of a run without its model.
fn planned_alone(run: &AgreedRun, world: &World) -> Result<DryRun> {
    let options = &run.options;
    let (model_bytes, step_bytes) = planned::plan(options, &run.data, world, &run.devices)?;
    let shares = division::step_options(options, world)
        .reducer
        .shares(world.size());
    Ok(DryRun {
        model_bytes,
        step_bytes,
        checkpoint_bytes: model_bytes.model + model_bytes.moments * shares as u64,
        between_ranks_bytes: None,
        taken: run.taken(),
        host_peak_mb: None,
        device_peak_mb: None,
        activation_bytes: None,
        trial: None,
        held_out_rows: run.data.held_out.rows(),
        data: run.data.description.clone(),
        plan: run.plan,
        devices: run.devices.clone(),
        places: run.places.clone(),
    })
}

fn bytes_of(rank_run: &RankRun) -> ModelBytes {
    let mut bytes = ModelBytes::default();
    for stage in rank_run.step.stages() {
        let sums = stage.reducer().partial_sum_bytes();
        bytes.add(&stage.model().params, stage.optimizer(), sums);
    }
    bytes.kept_for_others += rank_run.slices.as_ref().map_or(0, Slices::bytes) as u64;
    bytes
}

/// Bytes of gradients, and under ZeRO of values, that a rank gives to the others in a step with
/// this many micro-batches, of which ZeRO-2 reduces each.
fn bytes_between_ranks(step: &Step, micro_batches: usize) -> u64 {
    let of_stage = |stage: &Stage| {
        let (params, reducer) = (&stage.model().params, stage.reducer());
        if reducer.group().size() == 1 {
            return 0;
        }
        let rounds = if reducer.frees_gradients() {
            micro_batches
        } else {
            1
        };
        let gradients = rounds * reducer.given_bytes();
        let values = if reducer.is_shared() {
            params.trained_part().len() * params.read_arena().dtype().bytes()
        } else {
            0
        };
        (gradients + values) as u64
    };
    step.stages().iter().map(of_stage).sum()
}

/// Bytes of the model and of all ranks' moments in files, as f32.
fn checkpoint_bytes(step: &Step, world: &World) -> Result<u64> {
    let stages = step.stages();
    let of_f32 = |elements: usize| (elements * DType::F32.bytes()) as u64;
    let values = |stage: &Stage| -> usize {
        let parameters = stage.model().params.list().iter();
        let saved = parameters.filter(|parameter| !parameter.is_base);
        saved.map(|parameter| parameter.range.len()).sum()
    };
    let moments = |stage: &Stage| -> usize {
        let optimizer = stage.optimizer();
        let owned = optimizer.owned_pieces().iter();
        owned.map(|piece| piece.length * piece.moments.len()).sum()
    };
    let model = of_f32(stages.iter().map(values).sum());
    let mine = of_f32(stages.iter().map(moments).sum());
    let all = exchange::gather(world, &mine)?;
    // Without ZeRO-1 each rank has all moments, and one file holds them.
    let is_shared = stages.iter().any(|stage| stage.model().params.shares() > 1);
    let moments = if is_shared {
        all.into_iter().sum()
    } else {
        mine
    };
    Ok(model + moments)
}

/// Takes a few steps and evaluates, so that memory reaches its peak. On GPUs it takes steps for
/// about a second, the same number on all ranks, and returns their times.
fn trial(
    run: &AgreedRun,
    (main, mut loader, mut held_out): StepInputs,
    step: &mut Step,
    world: &World,
) -> Result<Option<TimedTrial>> {
    let device = run.devices[0];
    let mut next = run.taken();
    let mut take_step = || -> Result<Duration> {
        let began = Instant::now();
        let batch = in_phase(Phase::Step, || loader.load(next))?;
        next = (next + 1).min(run.plan.steps - 1);
        step.run(batch, 0.0)?;
        synchronize(device)?;
        Ok(began.elapsed())
    };
    let mut last = take_step()?;
    let mut times = Vec::new();
    if device.is_accelerator() && !is_simulated(device) {
        for _ in 1..WARM_UP {
            last = take_step()?;
        }
        let count = (TRIAL.as_secs_f64() / last.as_secs_f64().max(1e-6)) as u64;
        // All ranks take rank 0's number.
        let steps = exchange::gather(world, &count.clamp(STEPS_MIN, STEPS_MAX))?[0];
        let all = (0..steps).map(|_| take_step());
        times = all.collect::<Result<Vec<_>>>()?;
    } else {
        take_step()?;
    }
    let began = Instant::now();
    if run.data.held_out.rows() > 0 {
        in_phase(Phase::Evaluation, || step.evaluate(&mut held_out, &main))?;
    }
    let evaluation = (run.data.held_out.rows() > 0).then(|| began.elapsed());
    times.sort();
    Ok(times.get(times.len() / 2).map(|step| TimedTrial {
        step: *step,
        steps: times.len() as u64,
        evaluation,
    }))
}

/// The most memory of the host and of a GPU that any rank had, in MB.
fn peaks(run: &AgreedRun, world: &World) -> Result<(f64, Option<f64>)> {
    let device = process::devices_peak_mb(&run.devices);
    let mine = [process::peak_mb().unwrap_or(0.0), device.unwrap_or(0.0)];
    let all = exchange::gather(world, &mine)?;
    let peak = |index: usize| all.iter().map(|peaks| peaks[index]).fold(0.0, f64::max);
    Ok((peak(0), device.map(|_| peak(1))))
}
