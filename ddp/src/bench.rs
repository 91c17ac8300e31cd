//! `ddp-train bench`: how fast a training step, a product or a collective is here, as lines of JSON.
//!
//! What is measured is what training does: the trainer's own step (`step.rs`), the product as its layers call it, collectives of
//! the groups that its reducer uses. Rows are random and lie in memory: what is measured is the machine and this program, not the
//! data. A GPU is timed from the host: many calls are in flight, and a round ends when the device has done them.

pub mod addmm;
pub mod allreduce;
pub mod mlp;

use std::fmt::Display;
use std::time::Instant;

use ddp_comm::handshake::Field;
use ddp_comm::{Group, World};
use ddp_kernels::ops::F32Math;
use ddp_kernels::stream::{Stream, synchronize};
use ddp_kernels::{DType, Device, Tensor, threads};
use serde_json::{Value, json};

use crate::config::{self, BenchConfig, Precision};
use crate::error::{Error, Result};

/// Repetitions at first, which compile, take memory and capture.
const COLD: u64 = 4;
/// And at most so many more before anything counts.
const WARM_UP: f64 = 20.0;

/// Takes a line of the results. On ranks other than 0 it may do nothing.
pub type Say<'a> = &'a mut dyn FnMut(&dyn Display) -> Result<()>;

/// Times of one repetition, from several rounds.
#[derive(Clone, Debug)]
pub struct Rounds {
    /// Seconds of one repetition, up to when all ranks had done it: one number a round, in order of size.
    sorted_s: Vec<f64>,
    /// The same, up to when this rank had done it.
    own_sorted_s: Vec<f64>,
    /// Repetitions in all rounds together.
    pub repetitions: u64,
}

impl Rounds {
    /// Seconds of one repetition, in the median round.
    pub fn median_s(&self) -> f64 {
        self.sorted_s[self.sorted_s.len() / 2]
    }

    /// Seconds of one repetition, in the fastest round.
    pub fn least_s(&self) -> f64 {
        self.sorted_s[0]
    }

    /// Seconds that this rank took for one repetition, without waiting for the others, in the median round.
    pub fn own_median_s(&self) -> f64 {
        self.own_sorted_s[self.own_sorted_s.len() / 2]
    }
}

/// What this rank has to measure with: threads on cores of their own, and the device. All ranks come here with the same flags
/// (`config` is all of them as text), or it ends. Refuses a GPU that is none.
fn start(bench: &BenchConfig, config: &str, world: &World) -> Result<Device> {
    let count = bench.threads.unwrap_or_else(|| world.default_threads());
    threads::set_count_pinned_from(world.core_offset(), count)?;
    let way_out = "Start every rank with the same program and the same flags.";
    world.handshake(&[
        Field::must_match("the program's version", env!("CARGO_PKG_VERSION"), way_out),
        Field::must_match("the flags of the bench", config, way_out),
    ])?;
    let device = config::find_devices(bench.device, 1, bench.share_gpus, world)?[0];
    if config::is_simulated(device) && !tries_simulated() {
        return Err(no_figures(bench, device, "figures of simulated GPUs mean nothing"));
    }
    Ok(device)
}

/// For tests: all is done on simulated GPUs too, up to where times would be taken.
fn tries_simulated() -> bool {
    std::env::var_os("DDP_TEST_BENCH").is_some_and(|value| value == "simulated")
}

fn no_figures(bench: &BenchConfig, device: Device, why: &str) -> Error {
    let (choice, name) = (bench.device, config::described(device));
    let text = format!("--device {choice}: expected a device to measure, got {name}: {why}");
    Error::Usage(format!("{text}. Give --device cpu, or measure on a real GPU"))
}

/// A group that moves tensors of `device`.
fn group_on(device: Device, name: &'static str, world: &World) -> Result<Group> {
    Ok(if device.is_accelerator() { world.gpu_group(name, device)? } else { world.group(name)? })
}

/// In which dtype tensors are for a `--dtype`, and how f32 is multiplied. What the device does not have is refused.
fn precision(wanted: Precision, device: Device) -> Result<(DType, F32Math)> {
    if wanted != Precision::F32 && !device.is_accelerator() {
        let name = name_of(wanted);
        let text = format!("--dtype {name}: expected --device cuda: {name} is for GPUs alone");
        return Err(Error::Usage(format!("{text}. Leave --dtype out, or measure on a GPU")));
    }
    Ok(match wanted {
        Precision::F32 => (DType::F32, F32Math::Strict),
        Precision::Tf32 => (DType::F32, F32Math::Tf32),
        Precision::Bf16 => (DType::BF16, F32Math::Strict),
    })
}

/// Runs `body`, whose work is `device`'s, on all ranks for about `seconds` in all, in `rounds` rounds. All ranks repeat it as often
/// as rank 0 decides. Each round ends when all devices have done their work. `group` is one of host memory.
fn rounds(
    group: &Group,
    device: Device,
    bench: &BenchConfig,
    mut body: impl FnMut(u64) -> Result<()>,
) -> Result<Rounds> {
    let stream = Stream::default_of(Device::Cpu)?;
    let mut repetition = 0;
    let mut run = |count: u64| -> Result<[f64; 2]> {
        synchronize(device)?;
        group.barrier(&stream)?;
        let started = Instant::now();
        for _ in 0..count {
            body(repetition)?;
            repetition += 1;
        }
        synchronize(device)?;
        let own = started.elapsed();
        group.barrier(&stream)?;
        Ok([started.elapsed(), own].map(|took| took.as_secs_f64() / count as f64))
    };
    // So many repetitions as take this long, as rank 0 has it.
    let so_many = |seconds: f64, of_one_s: f64, most: f64| -> Result<u64> {
        let count = [(seconds / of_one_s.max(1e-9)).clamp(1.0, most) as i64];
        let count = Tensor::from_slice(&count, &[1], Device::Cpu)?.named("repetitions");
        group.broadcast(&count, 0, &stream)?;
        Ok(count.to_vec::<i64>()?[0] as u64)
    };
    let first_s = run(COLD)?[0];
    if config::is_simulated(device) {
        let why = "all was done once, and its figures mean nothing, as those of simulated GPUs";
        return Err(no_figures(bench, device, why));
    }
    let warm_s = run(so_many(bench.seconds / 4.0, first_s, WARM_UP)?)?[0];
    let count = so_many(bench.seconds / bench.rounds as f64, warm_s, 1e9)?;

    let mut times = [Vec::with_capacity(bench.rounds), Vec::with_capacity(bench.rounds)];
    for _ in 0..bench.rounds {
        for (times, took) in times.iter_mut().zip(run(count)?) {
            times.push(took);
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let [sorted_s, own_sorted_s] = times;
    Ok(Rounds { sorted_s, own_sorted_s, repetitions: count * bench.rounds as u64 })
}

/// The ranks' numbers, in the order of ranks. `group` is one of host memory.
fn of_all_ranks(group: &Group, value: f64) -> Result<Vec<f64>> {
    let mut all = vec![0.0; group.size()];
    all[group.rank()] = value;
    let tensor = Tensor::from_slice(&all, &[group.size()], Device::Cpu)?.named("a measurement");
    group.all_gather(&tensor, &Stream::default_of(Device::Cpu)?)?;
    Ok(tensor.to_vec::<f64>()?)
}

/// The largest of the ranks' numbers.
fn largest(group: &Group, value: f64) -> Result<f64> {
    Ok(of_all_ranks(group, value)?.into_iter().fold(f64::NEG_INFINITY, f64::max))
}

/// To so many digits behind the point.
fn round(value: f64, digits: i32) -> f64 {
    let unit = 10f64.powi(digits);
    (value * unit).round() / unit
}

/// The same of what may be unknown: null.
fn round_or_null(value: Option<f64>, digits: i32) -> Value {
    value.map_or(Value::Null, |value| json!(round(value, digits)))
}

/// As `--dtype` has it.
fn name_of(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "f32",
        Precision::Tf32 => "tf32",
        Precision::Bf16 => "bf16",
    }
}
