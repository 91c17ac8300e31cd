//! `ddp-train bench mlp`: training steps of a perceptron with ReLU, cross-entropy and AdamW.

use std::ops::Range;

use ddp_comm::{Group, World};
use ddp_kernels::ops::Activation;
use ddp_kernels::stream::synchronize;
use ddp_kernels::{DType, Device, Random, Tensor, threads};
use serde_json::{Value, json};

use super::{Rounds, agree, find_device, largest, pin, rounds};
use crate::config::{self, MlpBenchConfig};
use crate::data::{Batch, SlotId, sampler};
use crate::error::Result;
use crate::models::{Mlp, Model};
use crate::nn::CrossEntropy;
use crate::optim::{Optimizer, Rule};
use crate::process;
use crate::reducer::plan::BucketSizes;
use crate::reducer::{self, ReduceTime, ReducerOptions};
use crate::step::{Step, StepOptions};

/// Each rank steps through about as many rows as this, so that a batch is not in cache from the step before.
const ROWS: usize = 4096;

/// The reductions' share that backward hid, over the timed steps.
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

    /// What was hidden of what there was; null where nothing is reduced.
    fn hidden_share(&self) -> Value {
        if self.busy_s == 0.0 { Value::Null } else { json!(round((1.0 - self.exposed_s / self.busy_s).max(0.0), 3)) }
    }

    fn per_step_ms(&self, seconds: f64) -> f64 {
        round(seconds * 1e3 / self.steps.max(1) as f64, 4)
    }
}

/// Measures, on all ranks; the line is the same on all but for what is a rank's own.
pub fn on_ranks(bench: &MlpBenchConfig, world: &World) -> Result<Value> {
    pin(bench.threads, world)?;
    agree(world, &format!("{bench:?}"))?;
    let device = find_device(bench.device, world)?;
    config::check_graph(bench.graph, device)?;
    let (main, gradients) = (&world.group("main")?, world.group("gradients")?);
    let mine = sampler::share(&(0..bench.batch), world.rank(), world.size());
    let batches = batches(bench, device, &mine, world.rank())?;
    let reducer = ReducerOptions {
        sizes: BucketSizes::of_bytes((bench.bucket_mb * 1e6) as usize),
        dtype: bench.reduce_dtype.dtype(),
        overlap: reducer::overlaps(bench.overlap, world),
    };
    let mut step = step(bench, device, gradients, reducer)?;
    let mut number = 0;
    let mut take = |step: &mut Step| -> Result<()> {
        let mut batch = batches[number as usize % batches.len()].clone();
        batch.step = number;
        number += 1;
        step.run(&batch, 1e-3, false)
    };
    take(&mut step)?;
    synchronize(device)?;
    let first_step_s = process::age_s();
    let first_step_mb = process::peak_mb();

    let mut reduced = Reduced::default();
    let times = rounds(main, device, bench.seconds, bench.rounds, |_| {
        take(&mut step)?;
        reduced.add(step.reducer().last_time());
        Ok(())
    })?;
    line(bench, device, main, &step, &times, &reduced, [first_step_s, first_step_mb])
}

fn step(bench: &MlpBenchConfig, device: Device, gradients: Group, reducer: ReducerOptions) -> Result<Step> {
    let (&outputs, rest) = bench.layers.split_last().expect("checked: at least two widths");
    let layers = Mlp { hidden: rest[1..].to_vec(), outputs, activation: Activation::Relu, dropout: 0.0 }.layers();
    let model = Model::new(Box::new(layers), &rest[..1], DType::F32, device, 0, &|_| false)?;
    let optimizer = Optimizer::new(Rule::adamw(), &model.params)?;
    let options = StepOptions { reducer, clip_norm: 0.0, seed: 0, graph: bench.graph };
    Step::new(model, Box::new(CrossEntropy::default()), optimizer, gradients, &options)
}

fn batches(bench: &MlpBenchConfig, device: Device, mine: &Range<u64>, rank: usize) -> Result<Vec<Batch>> {
    let mut random = Random::new(rank as u64);
    let rows = (mine.end - mine.start) as usize;
    let (inputs, classes) = (bench.layers[0], *bench.layers.last().expect("checked: at least two widths"));
    // On a GPU two, as a loader has slots: what a graph holds stays where it is, and so does a batch in the GPU's cache.
    let count = if device.is_accelerator() { 2 } else { (ROWS / rows.max(1)).max(2) };
    let make = |_| -> Result<Batch> {
        let x = Tensor::randn(&[rows, inputs], DType::F32, device, &mut random)?.named("batch");
        let targets = Tensor::randint(classes as u32, &[rows], DType::I64, device, &mut random)?;
        let batch = Batch::new(0, 0, bench.batch, mine.start, x, targets.named("targets"), rows.max(1));
        Ok(batch.in_slot(SlotId::new()))
    };
    (0..count).map(make).collect()
}

fn line(
    bench: &MlpBenchConfig,
    device: Device,
    main: &Group,
    step: &Step,
    times: &Rounds,
    reduced: &Reduced,
    [first_step_s, first_step_mb]: [Option<f64>; 2],
) -> Result<Value> {
    let median_s = times.median_s();
    // Forward once, backward twice, but for the input's gradient, which nobody needs.
    let pairs = bench.layers.windows(2).enumerate();
    let products: usize = pairs.map(|(index, pair)| pair[0] * pair[1] * if index == 0 { 2 } else { 3 }).sum();
    let flop = 2.0 * bench.batch as f64 * products as f64;
    let optional = |value: Option<f64>, digits: i32| value.map_or(Value::Null, |value| json!(round(value, digits)));
    let peak_mb = process::peak_mb().map(|mb| largest(main, mb)).transpose()?;
    let first_step_s = first_step_s.map(|s| largest(main, s)).transpose()?;
    let layers: Vec<String> = bench.layers.iter().map(usize::to_string).collect();
    Ok(json!({
        "system": "ddp-train",
        "version": env!("CARGO_PKG_VERSION"),
        "layers": layers.join(","),
        "batch": bench.batch,
        "ranks": main.size(),
        "threads": threads::count(),
        "dtype": DType::F32.to_string(),
        "device": config::described(device),
        "step_ms": round(median_s * 1e3, 4),
        "samples_per_s": (bench.batch as f64 / median_s).round() as u64,
        "samples_per_s_best": (bench.batch as f64 / times.least_s()).round() as u64,
        "tflops": round(flop / median_s / 1e12, 4),
        "first_step_s": optional(first_step_s, 3),
        "first_step_mb": optional(first_step_mb, 1),
        "peak_mb": optional(peak_mb, 1),
        "device_peak_mb": optional(process::device_peak_mb(device), 1),
        "graph": step.graphs().is_some(),
        "steps": times.repetitions,
        "transport": main.transport(),
        "buckets": step.reducer().buckets().len(),
        "overlap": step.reducer().overlaps(),
        "reduce_ms": reduced.per_step_ms(reduced.busy_s),
        "exposed_ms": reduced.per_step_ms(reduced.exposed_s),
        "hidden_share": if main.size() == 1 { Value::Null } else { reduced.hidden_share() },
    }))
}

fn round(value: f64, digits: i32) -> f64 {
    let unit = 10f64.powi(digits);
    (value * unit).round() / unit
}
