//! Training steps of any model, timed: what `bench mlp` and `bench gpt` share.

use std::ops::Range;
use std::time::Instant;

use clap::Args;
use ddp_comm::{Group, World};
use ddp_kernels::stream::{Stream, synchronize};
use ddp_kernels::{Device, Random, Tensor, threads};
use serde_json::{Map, Value, json};

use super::explain;
use super::measure::{
    BenchFlags, Rounds, Say, begin, group_on, largest, precision, round, round_or_null, rounds,
    start,
};
use crate::config::{FloatType, GraphChoice, OptimizerKind, Overlap, Precision};
use crate::data::{Batch, SlotId, sampler};
use crate::devices::described;
use crate::error::{Error, Result};
use crate::flags::{choice, number, whole};
use crate::models::Model;
use crate::nn::{Loss, Mse, Sequential};
use crate::optim::Optimizer;
use crate::optim::muon::Alone;
use crate::process;
use crate::reducer::plan::BucketSizes;
use crate::reducer::{self, ReduceTime, ReducerOptions};
use crate::step::{Step, StepOptions};

/// The flags of all benchmarks of training steps.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct StepFlags {
    /// Precision of the model's computation; parameters, gradients and moments stay f32
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = choice::<Precision>())]
    pub dtype: Precision,
    /// Optimizer
    #[arg(long, value_name = "NAME", default_value = "adamw", value_parser = choice::<OptimizerKind>())]
    pub optimizer: OptimizerKind,
    /// Size of a bucket of gradients, in MB [default: 25 on GPUs, 4 on the CPU]
    #[arg(long, value_name = "MB", value_parser = number(0.001..=65_536.0), allow_negative_numbers = true)]
    pub bucket_mb: Option<f64>,
    /// Type of gradients in transit
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = choice::<FloatType>())]
    pub reduce_dtype: FloatType,
    /// ZeRO stage: 0 keeps all state on every rank, 1 divides the optimizer's moments among the
    /// ranks
    #[arg(long, value_name = "LEVEL", default_value = "0", value_parser = whole(0..=1u64), allow_negative_numbers = true)]
    pub zero: u64,
    /// Reduce gradients while the backward pass still runs
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = choice::<Overlap>())]
    pub overlap: Overlap,
    /// Capture a step as a CUDA graph and replay it
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = choice::<GraphChoice>())]
    pub graph: GraphChoice,
    /// List the nodes of a captured step and what each moves, instead of timing steps
    #[arg(long)]
    pub explain: bool,
    /// The flags of all benchmarks.
    #[command(flatten)]
    pub common: BenchFlags,
}

/// Each rank steps through about this many rows, so that a batch is not in cache from the step
/// before.
const ROWS: usize = 4096;
/// Updates between two events, and how often that is timed.
const UPDATES: usize = 20;
const UPDATE_ROUNDS: usize = 5;

/// The time of reductions over the timed steps, and the part that backward did not hide.
#[derive(Clone, Copy, Debug, Default)]
struct Reduced {
    busy_s: f64,
    exposed_s: f64,
    steps: u64,
}

impl Reduced {
    fn add(&mut self, time: ReduceTime) {
        self.busy_s += time.busy.as_secs_f64();
        self.exposed_s += time.exposed.as_secs_f64();
        self.steps += 1;
    }

    /// The fraction of the reductions' time that backward hid; null without reductions.
    fn hidden_share(&self) -> Value {
        if self.busy_s == 0.0 {
            Value::Null
        } else {
            json!(round((1.0 - self.exposed_s / self.busy_s).max(0.0), 3))
        }
    }

    fn per_step_ms(&self, seconds: f64) -> f64 {
        round(seconds * 1e3 / self.steps.max(1) as f64, 4)
    }
}

/// A model that is trained on random rows.
pub(super) struct Subject {
    pub(super) layers: Sequential,
    pub(super) loss: Box<dyn Loss>,
    /// The shape of one row of the inputs.
    pub(super) row_shape: Vec<usize>,
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

/// Makes inputs and targets of so many rows.
pub(super) type MakeRows<'a> = &'a mut dyn FnMut(usize, Device, &mut Random) -> Result<[Tensor; 2]>;

/// Measures on all ranks. Some figures of the line are this rank's own. `key` tells whether ranks
/// measure the same.
pub(super) fn measure(
    flags: &StepFlags,
    key: &str,
    world: &World,
    say: Say<'_>,
    mut subject: Subject,
    rows: MakeRows<'_>,
) -> Result<()> {
    let begin = if flags.explain { begin } else { start };
    let device = begin(&flags.common, key, world)?;
    crate::step::check_graph(flags.graph, device)?;
    precision(flags.dtype, device)?;
    let began = Instant::now();
    let (main, gradients) = (&world.group("main")?, group_on(device, "gradients", world)?);
    let mine = sampler::share(&(0..subject.batch), world.rank(), world.size());
    let batches = batches(&subject, device, &mine, world.rank(), rows)?;
    let reducer = ReducerOptions {
        sizes: flags
            .bucket_mb
            .map(|mb| BucketSizes::of_bytes((mb * 1e6) as usize)),
        dtype: flags.reduce_dtype.dtype(),
        overlap: reducer::overlaps(flags.overlap, world),
        zero: flags.zero == 1,
    };
    let mut step = step(flags, &mut subject, device, gradients, reducer)?;
    let mut number = 0;
    let mut take = |step: &mut Step| -> Result<()> {
        let mut batch = batches[number as usize % batches.len()].clone();
        batch.step = number;
        number += 1;
        step.run(&batch, 1e-3)
    };
    take(&mut step)?;
    synchronize(device)?;
    if flags.explain {
        // Of the two slots each runs eagerly once before its step is captured.
        (0..2).try_for_each(|_| take(&mut step))?;
        synchronize(device)?;
        return explained(&step, device, say);
    }
    // The process's age is known to a hundredth of a second, and is at least what passed in here.
    let first_step_s = process::age_s().map(|age_s| age_s.max(began.elapsed().as_secs_f64()));
    let first_step_mb = process::peak_mb();

    let mut reduced = Reduced::default();
    let times = rounds(main, device, &flags.common, |_| {
        take(&mut step)?;
        reduced.add(step.stages()[0].reducer().last_time());
        Ok(())
    })?;
    // Before anything else takes memory.
    let (peak_mb, device_peak_mb) = (process::peak_mb(), process::device_peak_mb(device));
    let measured = Measured {
        times,
        reduced,
        first_step_s,
        first_step_mb,
        peak_mb,
        device_peak_mb,
        optimizer_s: optimizer_s(&step, device)?,
    };
    say(&line(flags, &subject, device, main, &step, measured)?)
}

fn explained(step: &Step, device: Device, say: Say<'_>) -> Result<()> {
    let Some(graph) = step.any_graph() else {
        return Err(Error::Usage(format!(
            "--explain: expected a step captured as a CUDA graph, got an eager one on {device}; \
             help: give --device cuda, and leave --graph out"
        )));
    };
    explain::print(graph, device, say)
}

/// This rank's measurements.
struct Measured {
    times: Rounds,
    reduced: Reduced,
    first_step_s: Option<f64>,
    first_step_mb: Option<f64>,
    /// The peak memory of the host and of the device.
    peak_mb: Option<f64>,
    device_peak_mb: Option<f64>,
    optimizer_s: f64,
}

/// Seconds of one update, measured separately after the steps, between two events around many of
/// them. It repeats the last step's update, so the model is useless afterwards.
fn optimizer_s(step: &Step, device: Device) -> Result<f64> {
    let stream = Stream::default_of(device)?;
    let mut takes = Vec::with_capacity(UPDATE_ROUNDS);
    for _ in 0..=UPDATE_ROUNDS {
        let start = stream.record_timed()?;
        for _ in 0..UPDATES {
            step.stages()[0].optimizer().apply(
                &step.stages()[0].model().params,
                &mut Alone,
                None,
                None,
            )?;
        }
        let took = stream.record_timed()?.since(&start)?;
        takes.push(took.as_secs_f64() / UPDATES as f64);
    }
    // The first one is the warm-up.
    takes.remove(0);
    takes.sort_by(f64::total_cmp);
    Ok(takes[takes.len() / 2])
}

fn step(
    flags: &StepFlags,
    subject: &mut Subject,
    device: Device,
    gradients: Group,
    reducer: ReducerOptions,
) -> Result<Step> {
    let shares = reducer.shares(gradients.size());
    let model = Model::with_shares(
        Box::new(std::mem::take(&mut subject.layers)),
        &subject.row_shape,
        flags.dtype,
        device,
        0,
        &|_| false,
        shares,
    )?;
    let optimizer = Optimizer::of_slices(
        flags.optimizer.rule(&|_| None),
        &model.params,
        &reducer::owned(&model.params, &gradients, reducer),
    )?;
    let options = StepOptions {
        reducer,
        clip_norm: subject.clip_norm,
        seed: 0,
        graph: flags.graph,
    };
    let loss = std::mem::replace(&mut subject.loss, Box::new(Mse));
    Step::new(model, loss, optimizer, gradients, &options)
}

fn batches(
    subject: &Subject,
    device: Device,
    mine: &Range<u64>,
    rank: usize,
    make_rows: MakeRows<'_>,
) -> Result<Vec<Batch>> {
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
        let [x, targets] = make_rows(rows, device, &mut random)?;
        let batch = Batch::new(
            0,
            0,
            subject.batch,
            mine.start,
            x.named("batch"),
            targets.named("targets"),
            micro_rows.max(1),
        );
        Ok(batch.in_slot(SlotId::unique()))
    };
    (0..count).map(make).collect()
}

fn line(
    flags: &StepFlags,
    subject: &Subject,
    device: Device,
    main: &Group,
    step: &Step,
    measured: Measured,
) -> Result<Value> {
    let Measured { times, reduced, .. } = &measured;
    let median_s = times.median_s();
    let largest_of = |value: Option<f64>| value.map(|value| largest(main, value)).transpose();
    let optimizer_s = largest(main, measured.optimizer_s)?;
    let (unit, units_per_row) = subject.unit;
    let units = (subject.batch * units_per_row) as f64;
    let buckets = step.stages()[0].reducer().buckets();
    let moments: usize = step.stages()[0]
        .optimizer()
        .moments()
        .map(|(_, moment)| moment.bytes())
        .sum();
    let gradients: usize = buckets.iter().map(|bucket| bucket.range.len()).sum();
    // On a GPU the host does not know when a reduction ran.
    let is_known = !device.is_accelerator();
    let per_step_ms = |seconds: f64| is_known.then(|| reduced.per_step_ms(seconds));
    let mut line = Map::from_iter([
        ("system".to_string(), json!("ddp-train")),
        ("version".to_string(), json!(env!("CARGO_PKG_VERSION"))),
    ]);
    line.extend(subject.described.as_object().cloned().unwrap_or_default());
    let common = json!({
        "batch": subject.batch,
        "ranks": main.size(),
        "threads": threads::count(),
        "dtype": flags.dtype,
        "optimizer": flags.optimizer,
        "device": described(device),
        "step_ms": round(median_s * 1e3, 4),
        format!("{unit}_per_s"): (units / median_s).round() as u64,
        format!("{unit}_per_s_best"): (units / times.least_s()).round() as u64,
        "tflops": round(subject.flop / median_s / 1e12, 4),
        "optimizer_ms": round(optimizer_s * 1e3, 4),
        "optimizer_share": round(optimizer_s / median_s, 4),
        "first_step_s": round_or_null(largest_of(measured.first_step_s)?, 4),
        "first_step_mb": round_or_null(measured.first_step_mb, 1),
        "peak_mb": round_or_null(largest_of(measured.peak_mb)?, 1),
        "device_peak_mb": round_or_null(largest_of(measured.device_peak_mb)?, 1),
        "graph": step.graphs().is_some(),
        "zero": flags.zero,
        "moments_mb": round(moments as f64 / 1e6, 6),
        "steps": times.repetitions,
        "transport": step.stages()[0].reducer().group().transport(),
        "buckets": buckets.len(),
        "gradient_mb": round((gradients * flags.reduce_dtype.dtype().bytes()) as f64 / 1e6, 6),
        "reduce_dtype": flags.reduce_dtype.dtype().to_string(),
        "overlap": step.stages()[0].reducer().overlaps(),
        "reduce_ms": per_step_ms(reduced.busy_s),
        "exposed_ms": per_step_ms(reduced.exposed_s),
        "hidden_share": if main.size() == 1 || !is_known { Value::Null } else { reduced.hidden_share() },
    });
    line.extend(common.as_object().cloned().unwrap_or_default());
    Ok(line.into())
}
