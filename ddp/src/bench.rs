//! `ddp-train bench`: how fast a training step or a reduction is here, as one JSON line.
//!
//! The step is the trainer's own (`step.rs`), on random rows that lie in memory: what is measured is the machine and this
//! program, not the data.

pub mod allreduce;
pub mod mlp;

use std::time::{Duration, Instant};

use ddp_comm::handshake::Field;
use ddp_comm::{Group, World};
use ddp_kernels::stream::{Stream, synchronize};
use ddp_kernels::{Device, Tensor, threads};

use crate::config::{self, DeviceChoice};
use crate::error::{Error, Result};

/// Repetitions before anything is timed.
const WARM_UP: u64 = 20;

/// Times of one repetition, from several rounds.
#[derive(Clone, Debug)]
pub struct Rounds {
    /// Seconds of one repetition: one number a round, in order of size.
    sorted_s: Vec<f64>,
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
}

/// Where to measure. Refuses a GPU that is none.
fn find_device(choice: DeviceChoice, world: &World) -> Result<Device> {
    let device = config::find_device(choice, world.rank(), world.size())?;
    if config::is_simulated(device) {
        let name = config::described(device);
        let text = format!(
            "--device {choice}: expected a device to measure, got {name}: figures of simulated GPUs mean nothing"
        );
        return Err(Error::Usage(format!("{text}. Give --device cpu, or measure on a real GPU")));
    }
    Ok(device)
}

/// Runs `body`, whose work is `device`'s, on all ranks for about `seconds` in all, in `rounds` rounds. All ranks repeat it as often
/// as rank 0 decides. Each round ends when the device has done its work.
fn rounds(
    group: &Group,
    device: Device,
    seconds: f64,
    rounds: usize,
    mut body: impl FnMut(u64) -> Result<()>,
) -> Result<Rounds> {
    let stream = Stream::default_of(Device::Cpu)?;
    let mut repetition = 0;
    let mut run = |count: u64| -> Result<Duration> {
        synchronize(device)?;
        group.barrier(&stream)?;
        let started = Instant::now();
        for _ in 0..count {
            body(repetition)?;
            repetition += 1;
        }
        synchronize(device)?;
        group.barrier(&stream)?;
        Ok(started.elapsed())
    };
    run(WARM_UP)?;
    let trial = run(WARM_UP / 2)?.as_secs_f64() / (WARM_UP / 2) as f64;
    let wanted = (seconds / rounds as f64 / trial.max(1e-9)).clamp(5.0, 1e9);
    let count = Tensor::from_slice(&[wanted as i64], &[1], Device::Cpu)?.named("repetitions");
    group.broadcast(&count, 0, &stream)?;
    let count = count.to_vec::<i64>()?[0] as u64;

    let mut sorted_s = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        sorted_s.push(run(count)?.as_secs_f64() / count as f64);
    }
    sorted_s.sort_by(f64::total_cmp);
    Ok(Rounds { sorted_s, repetitions: count * rounds as u64 })
}

/// The largest of the ranks' numbers.
fn largest(group: &Group, value: f64) -> Result<f64> {
    let tensor = Tensor::from_slice(&[value], &[1], Device::Cpu)?.named("a measurement");
    group.all_reduce(&tensor, ddp_comm::Reduce::Max, &Stream::default_of(Device::Cpu)?)?;
    Ok(tensor.to_vec::<f64>()?[0])
}

/// Uses so many threads (this rank's share of the cores by default), each on a core of its own.
fn pin(count: Option<usize>, world: &World) -> Result<()> {
    let count = count.unwrap_or_else(|| world.default_threads());
    Ok(threads::set_count_pinned_from(world.core_offset(), count)?)
}

/// All ranks measure the same with the same program.
fn agree(world: &World, config: &str) -> Result<()> {
    let way_out = "Start every rank with the same program and the same flags.";
    Ok(world.handshake(&[
        Field::must_match("the program's version", env!("CARGO_PKG_VERSION"), way_out),
        Field::must_match("the flags of the bench", config, way_out),
    ])?)
}
