//! Training steps of any model, timed: the loop of `bench mlp` and `bench gpt`.

use std::time::{Duration, Instant};

use ddp_comm::World;
use ddp_kernels::setting::SettingName;
use ddp_kernels::stream::{Stream, synchronize};
use ddp_kernels::{DType, Device, Random, Tensor, graph, threads};
use serde_json::{Value, json};

use super::measure::{BenchOptions, begin, largest, line, round, round_or_null, rounds, start};
use super::{explain, timed};
use crate::config::Config;
use crate::data::sampler::Shards;
use crate::data::{Batch, SlotId};
use crate::error::{Error, Result};
use crate::models::Model;
use crate::nn::{Loss, Sequential};
use crate::optim::Optimizer;
use crate::optim::muon::OneRank;
use crate::output::Say;
use crate::params::Numerics;
use crate::setting::{DEVICE, GRAPH};
use crate::step::{Step, StepOptions};
use crate::trainer::step_options;
use crate::{process, reducer};

/// A model that is trained on random rows.
pub struct Subject {
    pub(super) layers: Sequential,
    pub(super) loss: Box<dyn Loss>,
    pub(super) inputs: RandomRows,
    pub(super) targets: RandomRows,
    /// Rows of a step, over all ranks.
    pub(super) batch: u64,
    /// Rows of a micro-batch; 0 for all.
    pub(super) micro_batch: u64,
    /// The norm to which gradients are clipped; 0 for no clipping.
    pub(super) clip_norm: f64,
    /// Multiplications and additions of a step.
    pub(super) flop: f64,
    /// The first fields of the line.
    pub(super) described: Value,
    /// What a row counts as, and how often: `samples`, 1.
    pub(super) unit: (&'static str, u64),
}

/// Random values of a row, by its shape.
pub(super) enum RandomRows {
    /// Numbers of mean 0 and variance 1.
    Normal(Vec<usize>),
    /// Whole numbers below this one.
    Below(usize, Vec<usize>),
}

impl RandomRows {
    pub(super) fn row_shape(&self) -> &[usize] {
        let (RandomRows::Normal(shape) | RandomRows::Below(_, shape)) = self;
        shape
    }

    pub(super) fn make(&self, rows: usize, device: Device, random: &mut Random) -> Result<Tensor> {
        let shape = [&[rows], self.row_shape()].concat();
        Ok(match self {
            RandomRows::Normal(_) => Tensor::randn(&shape, DType::F32, device, random)?,
            RandomRows::Below(end, _) => {
                Tensor::randint(*end as u32, &shape, DType::I64, device, random)?
            }
        })
    }
}

/// Each rank steps through about this many rows, so that a batch is not in cache from the step
/// before.
const ROWS: usize = 4096;
/// Updates between two events, and how often that is timed.
const UPDATES: usize = 20;
const UPDATE_ROUNDS: usize = 5;

/// Measures training steps on all ranks. Some figures of the line are this rank's own. `explain`
/// lists the nodes of a captured step instead, and with `is_timed` those of an eager step, with
/// their times.
pub fn steps(
    subject: Subject,
    (explain, is_timed): (bool, bool),
    bench: &BenchOptions,
    world: &World,
    say: Say<'_>,
) -> Result<()> {
    let device = if explain && !is_timed {
        begin(bench, world)?
    } else {
        start(bench, world)?
    };
    let config = &bench.config;
    crate::step::check_graph(config.graph, device)?;
    let format = Numerics::from(config.dtype);
    let began = Instant::now();
    let main = &world.group("main")?;
    let batches = batches(&subject, device, world, config.same_bits)?;
    let described = subject.described.clone();
    let ((unit, of_row), batch, flop) = (subject.unit, subject.batch, subject.flop);
    let units = (batch * of_row) as f64;
    let mut step = step(config, subject, device, world)?;
    let mut number = 0;
    let mut take = |step: &mut Step| -> Result<()> {
        let mut batch = batches[number as usize % batches.len()].clone();
        batch.step = number;
        number += 1;
        step.run(&batch, 1e-3)
    };
    take(&mut step)?;
    synchronize(device)?;
    // The second step, which is eager still, has its kernels compiled.
    let nodes = if is_timed {
        graph::timed(device, || take(&mut step))?
    } else {
        Vec::new()
    };
    if explain && !is_timed {
        // Of the two slots each runs eagerly once before its step is captured.
        (0..2).try_for_each(|_| take(&mut step))?;
        synchronize(device)?;
        return explained(&step, device, say);
    }
    // The process's age is known to a hundredth of a second, and is at least what passed in here.
    let first_step_s = process::age_s().map(|age_s| age_s.max(began.elapsed().as_secs_f64()));
    let first_step_mb = process::peak_mb();
    // The time of reductions over the timed steps, and the part that backward did not hide.
    let (mut busy, mut exposed, mut steps) = (Duration::ZERO, Duration::ZERO, 0);
    let times = rounds(main, device, bench, |_| {
        take(&mut step)?;
        let time = step.stages()[0].reducer().last_time();
        (busy, exposed, steps) = (busy + time.busy, exposed + time.exposed, steps + 1);
        Ok(())
    })?;
    if is_timed {
        let rates = timed::Rates::measure(device, format)?;
        let is_captured = step.graphs().is_some();
        return timed::print(&nodes, &rates, times.median_s, is_captured, device, say);
    }
    // Before anything else takes memory.
    let (peak_mb, device_peak_mb) = (process::peak_mb(), process::device_peak_mb(device));
    let optimizer_s = largest(world, optimizer_s(&step, device)?)?;
    let largest_of = |value: Option<f64>| value.map(|value| largest(world, value)).transpose();
    let stage = &step.stages()[0];
    let (reducer, median_s) = (stage.reducer(), times.median_s);
    let moments = stage.optimizer().moments();
    let moments: usize = moments.map(|(_, moment)| moment.bytes()).sum();
    let gradients = reducer.buckets().iter().map(|bucket| bucket.range.len());
    let gradients = gradients.sum::<usize>() * config.reduce_dtype.dtype().bytes();
    // On a GPU the host does not know when a reduction ran.
    let is_known = !device.is_accelerator();
    let steps = f64::from(steps.max(1));
    let per_step_ms = |time: Duration| is_known.then(|| round(time.as_secs_f64() * 1e3 / steps, 4));
    let is_reduced = main.size() > 1 && is_known && !busy.is_zero();
    let hidden = || (1.0 - exposed.as_secs_f64() / busy.as_secs_f64()).max(0.0);
    let fields = json!({
        "batch": batch,
        "ranks": main.size(),
        "threads": threads::count(),
        "dtype": config.dtype,
        "optimizer": config.optimizer,
        "step_ms": round(median_s * 1e3, 4),
        format!("{unit}_per_s"): (units / median_s).round() as u64,
        format!("{unit}_per_s_best"): (units / times.least_s).round() as u64,
        "tflops": round(flop / median_s / 1e12, 4),
        "optimizer_ms": round(optimizer_s * 1e3, 4),
        "optimizer_share": round(optimizer_s / median_s, 4),
        "first_step_s": round_or_null(largest_of(first_step_s)?, 4),
        "first_step_mb": round_or_null(first_step_mb, 1),
        "peak_mb": round_or_null(largest_of(peak_mb)?, 1),
        "device_peak_mb": round_or_null(largest_of(device_peak_mb)?, 1),
        "graph": step.graphs().is_some(),
        "zero": config.zero,
        "same_bits": config.same_bits,
        "moments_mb": round(moments as f64 / 1e6, 6),
        "steps": times.repetitions,
        "transport": reducer.group().transport(),
        "buckets": reducer.buckets().len(),
        "gradient_mb": round(gradients as f64 / 1e6, 6),
        "reduce_dtype": config.reduce_dtype.dtype().to_string(),
        "overlap": reducer.overlaps(),
        "reduce_ms": per_step_ms(busy),
        "exposed_ms": per_step_ms(exposed),
        "hidden_share": is_reduced.then(|| round(hidden(), 3)),
    });
    say(&line(device, &[described, fields]))
}

fn explained(step: &Step, device: Device, say: Say<'_>) -> Result<()> {
    let graph = step.any_graph().ok_or_else(|| {
        Error::Usage(format!(
            "{}: expected a step captured as a CUDA graph, got an eager one on {device}; \
             help: give {DEVICE} cuda, and leave {GRAPH} out",
            SettingName("explain")
        ))
    });
    explain::print(graph?, device, say)
}

/// Seconds of one update, measured separately after the steps, between two events around many of
/// them. It repeats the last step's update, so the model is useless afterwards.
fn optimizer_s(step: &Step, device: Device) -> Result<f64> {
    let stream = Stream::default_of(device)?;
    let (stage, mut takes) = (&step.stages()[0], Vec::new());
    let (params, optimizer) = (&stage.model().params, stage.optimizer());
    for _ in 0..=UPDATE_ROUNDS {
        let start = stream.record_timed()?;
        for _ in 0..UPDATES {
            optimizer.apply(params, &mut OneRank, None, None)?;
        }
        let took = stream.record_timed()?.since(&start)?;
        takes.push(took.as_secs_f64() / UPDATES as f64);
    }
    // The first one is the warm-up.
    takes.remove(0);
    takes.sort_by(f64::total_cmp);
    Ok(takes[takes.len() / 2])
}

fn step(config: &Config, subject: Subject, device: Device, world: &World) -> Result<Step> {
    let options = StepOptions {
        clip_norm: subject.clip_norm,
        ..step_options(config, world)
    };
    let model = Model::with_shares(
        Box::new(subject.layers),
        subject.inputs.row_shape(),
        config.dtype,
        device,
        0,
        &|_| false,
        options.reducer.sharing(world.rank(), world.size()),
    )?;
    let gradients = world.group_on(device, "gradients")?;
    let owned = reducer::owned(&model.params, &gradients, options.reducer);
    let optimizer = Optimizer::of_slices(config.rule(), &model.params, &owned)?;
    Step::new(model, subject.loss, optimizer, gradients, &options)
}

fn batches(
    subject: &Subject,
    device: Device,
    world: &World,
    same_bits: Option<usize>,
) -> Result<Vec<Batch>> {
    let (rank, ranks) = (world.rank(), world.size());
    let count = same_bits.unwrap_or(ranks);
    reducer::check_ranks(count, ranks)?;
    let shards = Shards::of_rank(count, rank, ranks);
    let mine = shards.share(&(0..subject.batch));
    let mut random = Random::new(rank as u64);
    let rows = (mine.end - mine.start) as usize;
    // On a GPU two, like the slots of a loader.
    let count = if device.is_accelerator() {
        2
    } else {
        (ROWS / (rows * subject.unit.1 as usize).max(1)).max(2)
    };
    let micro_rows = match subject.micro_batch {
        0 => rows,
        of_all => rows.min(of_all as usize),
    };
    let make = |_| -> Result<Batch> {
        let x = subject.inputs.make(rows, device, &mut random)?;
        let targets = subject.targets.make(rows, device, &mut random)?;
        let (x, targets) = (x.named("batch"), targets.named("targets"));
        let (all, first, micro) = (subject.batch, mine.start, micro_rows.max(1));
        let batch = Batch::new(0, 0, all, first, x, targets, micro);
        Ok(batch.in_shards(shards).in_slot(SlotId::unique()))
    };
    (0..count).map(make).collect()
}
