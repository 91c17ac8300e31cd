//! What all benchmarks share: flags, the start, and timing in rounds.

use std::time::Instant;

use ddp_comm::{Field, Group, World};
use ddp_kernels::stream::{Stream, synchronize};
use ddp_kernels::{Device, Tensor, threads};
use serde_json::{Value, json};

use crate::config::Config;
use crate::devices::{described, find_devices, is_simulated};
use crate::error::{Error, Result};
use crate::exchange::gather_numbers;
use crate::setting::DEVICE;

/// Repetitions of the first run, which compiles, allocates and captures.
const COLD: u64 = 4;
/// The most repetitions of the second run, before anything is timed.
const WARM_UP_MAX: f64 = 20.0;

/// What all benchmarks share.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The settings of a run that a benchmark takes.
    pub config: Config,
    /// Seconds to measure, for each shape or size.
    pub seconds: f64,
    /// Rounds; the median is reported.
    pub rounds: usize,
    /// The text of all flags, which must be the same on all ranks.
    pub flags: String,
}

/// Times of one repetition, from several rounds.
#[derive(Debug)]
pub(super) struct Rounds {
    /// Seconds in the median round, until all ranks were done.
    pub(super) median_s: f64,
    /// Seconds in the fastest round.
    pub(super) least_s: f64,
    /// As `median_s`, without the wait for other ranks.
    pub(super) own_median_s: f64,
    /// Repetitions in all rounds together.
    pub(super) repetitions: u64,
}

/// As `begin`, to measure: simulated GPUs are refused.
pub(super) fn start(bench: &BenchOptions, world: &World) -> Result<Device> {
    let device = begin(bench, world)?;
    if is_simulated(device) && !tries_simulated() {
        let why = "figures of simulated GPUs mean nothing";
        return Err(no_figures(bench, device, why));
    }
    Ok(device)
}

/// Pins this rank's threads and finds its device.
pub(super) fn begin(bench: &BenchOptions, world: &World) -> Result<Device> {
    let config = &bench.config;
    let count = config.threads.unwrap_or_else(|| world.default_threads());
    threads::set_count_pinned_from(world.core_offset(), count)?;
    let help = "start every rank with the same program and the same flags";
    world.handshake(&[
        Field::must_match("the program's version", env!("CARGO_PKG_VERSION"), help),
        Field::must_match("the flags of the bench", &*bench.flags, help),
    ])?;
    Ok(find_devices(config.device, 1, config.share_gpus, world)?[0])
}

/// For tests: simulated GPUs do everything up to the first timing.
fn tries_simulated() -> bool {
    std::env::var_os("DDP_TEST_BENCH").is_some_and(|value| value == "simulated")
}

fn no_figures(bench: &BenchOptions, device: Device, why: &str) -> Error {
    let (choice, got) = (bench.config.device, described(device));
    Error::Usage(format!(
        "{DEVICE} {choice}: expected a real device, got {got}: {why}; help: give {DEVICE} cpu, or \
         measure on a real GPU"
    ))
}

/// Repeats `body`, which is given the number of the repetition, for about `seconds` in `rounds`
/// rounds. Rank 0 decides how often. A round ends when all devices are done. `group` is one of host
/// memory.
pub(super) fn rounds(
    group: &Group,
    device: Device,
    bench: &BenchOptions,
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
    // How many repetitions fill `seconds`, as rank 0 measured one.
    let count_in = |seconds: f64, one_s: f64, most: f64| -> Result<u64> {
        let count = [(seconds / one_s.max(1e-9)).clamp(1.0, most) as i64];
        let count = Tensor::from_slice(&count, &[1], Device::Cpu)?.named("repetitions");
        group.broadcast(&count, 0, &stream)?;
        Ok(count.to_vec::<i64>()?[0] as u64)
    };
    let [first_s, _] = run(COLD)?;
    if is_simulated(device) {
        let why = "all was done once, but figures of simulated GPUs mean nothing";
        return Err(no_figures(bench, device, why));
    }
    let [warm_s, _] = run(count_in(bench.seconds / 4.0, first_s, WARM_UP_MAX)?)?;
    let count = count_in(bench.seconds / bench.rounds as f64, warm_s, 1e9)?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..bench.rounds {
        let round = times.iter_mut().zip(run(count)?);
        round.for_each(|(times, took_s)| times.push(took_s));
    }
    times.iter_mut().for_each(|of| of.sort_by(f64::total_cmp));
    let [all, own] = times;
    Ok(Rounds {
        median_s: all[bench.rounds / 2],
        least_s: all[0],
        own_median_s: own[bench.rounds / 2],
        repetitions: count * bench.rounds as u64,
    })
}

/// The largest of the ranks' numbers.
pub(super) fn largest(world: &World, value: f64) -> Result<f64> {
    let all = gather_numbers(world, &[value])?.concat();
    Ok(all.into_iter().fold(f64::NEG_INFINITY, f64::max))
}

/// A line of the results: the program, the device and these fields.
pub(super) fn line(device: Device, fields: &[Value]) -> Value {
    let mut line = json!({
        "system": "ddp-train",
        "version": env!("CARGO_PKG_VERSION"),
        "device": described(device),
    });
    for (name, value) in fields.iter().filter_map(Value::as_object).flatten() {
        line[name] = value.clone();
    }
    line
}

/// Rounds to `digits` after the point.
pub(super) fn round(value: f64, digits: i32) -> f64 {
    let unit = 10f64.powi(digits);
    (value * unit).round() / unit
}

/// As `round`; null if the value is unknown.
pub(super) fn round_or_null(value: Option<f64>, digits: i32) -> Value {
    value.map_or(Value::Null, |value| json!(round(value, digits)))
}
