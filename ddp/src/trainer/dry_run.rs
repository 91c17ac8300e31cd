//! `--dry-run`: everything up to the first step as in a run, a second of steps on a model that is then forgotten, and what follows from that
//! for memory, disk and time. Of the run nothing is written: no folder, no record, no checkpoint.

use std::fmt::Display;
use std::fs::{self, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};

use ddp_comm::World;
use ddp_kernels::mapped::free_bytes;
use ddp_kernels::stream::synchronize;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_kernels::{DType, Device};

use super::setup::{self, Assembled, Run};
use crate::config::{Config, Plan, Resume, is_simulated};
use crate::data::DataSpec;
use crate::error::{Error, Result};
use crate::shown::shown;
use crate::step::Step;
use crate::{metrics, process};

/// How long the steps of the trial may take, and how many they are at least and at most.
const TRIAL: Duration = Duration::from_secs(1);
const STEPS_MIN: u64 = 3;
const STEPS_MAX: u64 = 50;
/// Steps before these: the first of a run warm up, and capture.
const WARM_UP: u64 = 3;

/// Checks everything that can be without training, and says what the run will take. All ranks.
pub fn dry_run(config: &Config, world: &World, say: &mut dyn FnMut(&dyn Display) -> Result<()>) -> Result<()> {
    let mut run = match in_phase(Phase::Setup, || setup::assemble(config, world))? {
        Run::Ready(run) => run,
        Run::Finished(_) => {
            return say(&format!("{}: the run is finished already, and nothing would be done", config.out.display()));
        }
    };
    if config.resume == Resume::Never && world.rank() == 0 {
        metrics::check_free(&config.out)?;
    }
    check_out(&config.out, world)?;
    let taken = run.taken();
    let left = run.plan.steps.saturating_sub(taken);
    let memory = Memory::of(&run.step);
    let checkpoint_bytes = checkpoint_bytes(&run.step, world)?;
    let trial = if left == 0 { None } else { Some(trial(&mut run, world, taken)?) };
    let peaks = peaks(&run, world)?;

    say(&shown(&run.data.description))?;
    say(&length(&run.plan, taken))?;
    for (rank, place) in run.places.iter().enumerate() {
        say(&format!("rank {rank}: {place}"))?;
    }
    say(&format!("memory of a rank: {memory}"))?;
    say(&format!("of them in the trial at most: {peaks}"))?;
    let least = (config.keep + 2).saturating_mul(checkpoint_bytes);
    say(&format!(
        "a checkpoint: {}; kept at a time with --keep {}: up to {}",
        mb(checkpoint_bytes),
        config.keep,
        mb(least)
    ))?;
    match trial {
        Some(_) if is_simulated(run.devices[0]) => say(&"time: simulated GPUs say nothing about it")?,
        Some(trial) => say(&trial.time(&run.plan, left))?,
        None => {}
    }
    // Last, so that all else has been said.
    check_disk(&config.out, least, world)?;
    say(&format!("all checks passed; nothing was trained, and {} (--dry-run)", written(config, run.devices[0])))
}

/// What a run would write anyway, and find again.
fn written(config: &Config, device: Device) -> String {
    let mut kept = Vec::new();
    if [Some(&config.data), config.val_data.as_ref()].iter().flatten().any(|data| matches!(data, DataSpec::Files(_))) {
        let folder = config.cache_dir.as_ref();
        let place =
            folder.map_or_else(|| ".ddp-cache beside them".to_string(), |folder| shown(&folder.to_string_lossy()));
        kept.push(format!("what is known of the data, in {place}"));
    }
    if device.is_accelerator() {
        kept.push("compiled kernels".to_string());
    }
    match kept.is_empty() {
        true => "nothing written".to_string(),
        false => format!("nothing written but {}", kept.join(", and ")),
    }
}

fn length(plan: &Plan, taken: u64) -> String {
    let Plan { sampler, steps, warmup_steps, eval_every, checkpoint_every } = plan;
    let gone = if taken > 0 { format!(", of which {taken} are done") } else { String::new() };
    let every = |what: &str, steps: u64| {
        if steps == 0 { format!("{what} at the end") } else { format!("{what} every {steps}") }
    };
    format!(
        "{steps} steps{gone}, {} an epoch; warm-up {warmup_steps}; {}, {}",
        sampler.steps_per_epoch(),
        every("evaluated", *eval_every),
        every("saved", *checkpoint_every)
    )
}

fn mb(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// What a rank's model takes, known before a step is taken.
struct Memory {
    values: u64,
    copies: u64,
    gradients: u64,
    moments: u64,
}

impl Memory {
    fn of(step: &Step) -> Memory {
        let mut memory = Memory { values: 0, copies: 0, gradients: 0, moments: 0 };
        for stage in step.stages() {
            let params = &stage.model().params;
            memory.values += params.values().bytes() as u64;
            memory.gradients += params.gradients().bytes() as u64;
            if params.dtype() != params.master_dtype() {
                memory.copies += params.read_arena().bytes() as u64;
            }
            memory.moments += stage.optimizer().moments().map(|(_, moment)| moment.bytes() as u64).sum::<u64>();
        }
        memory
    }
}

impl Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Memory { values, copies, gradients, moments } = *self;
        write!(f, "values {}", mb(values))?;
        if copies > 0 {
            write!(f, ", rounded copies {}", mb(copies))?;
        }
        write!(f, ", gradients {}, moments {}", mb(gradients), mb(moments))?;
        write!(
            f,
            ", a copy of what is saved {}; together {}",
            mb(values + moments),
            mb(2 * values + copies + gradients + 2 * moments)
        )
    }
}

/// Bytes of the model and of all ranks' moments, as files hold them: in f32.
fn checkpoint_bytes(step: &Step, world: &World) -> Result<u64> {
    let f32s = |elements: usize| (elements * DType::F32.bytes()) as u64;
    let model: u64 =
        step.stages().iter().map(|stage| f32s(stage.model().params.list().iter().map(|p| p.range.len()).sum())).sum();
    let moments = |stage: &crate::step::Stage| {
        let owned: usize = stage.optimizer().owned_pieces().iter().map(|piece| piece.length).sum();
        f32s(owned * stage.optimizer().moments().count())
    };
    let mine: u64 = step.stages().iter().map(moments).sum();
    let sharded = step.stages().iter().any(|stage| stage.model().params.shares() > 1);
    let all = world.all_gather_bytes(&mine.to_le_bytes())?;
    let all = all.iter().filter_map(|bytes| Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?)));
    // Without ZeRO every rank has all of them, and one file does.
    Ok(model + if sharded { all.sum::<u64>() } else { mine })
}

/// What a few steps and an evaluation took.
struct Trial {
    step: Duration,
    evaluation: Option<Duration>,
    steps: u64,
}

impl Trial {
    fn time(&self, plan: &Plan, left: u64) -> String {
        let evaluations = match self.evaluation {
            None => 0,
            Some(_) if plan.eval_every == 0 => 1,
            Some(_) => left.div_ceil(plan.eval_every),
        };
        let seconds = self.step.as_secs_f64() * left as f64
            + self.evaluation.unwrap_or_default().as_secs_f64() * evaluations as f64;
        format!(
            "time: {:.2} ms a step (median of {}), {evaluations} evaluations: about {} for {left} steps; checkpoints are written beside them",
            self.step.as_secs_f64() * 1e3,
            self.steps,
            told(seconds)
        )
    }
}

/// `40 s`, `12 min`, `3.5 h`
fn told(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.1} s"),
        120.0..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// Takes steps for about a second, all ranks as many.
fn trial(run: &mut Assembled, world: &World, taken: u64) -> Result<Trial> {
    let device = run.devices[0];
    let mut next = taken;
    let mut take = |run: &mut Assembled| -> Result<Duration> {
        let began = Instant::now();
        let batch = in_phase(Phase::Step, || run.loader.load(next))?;
        next = (next + 1).min(run.plan.steps - 1);
        run.step.run(batch, 0.0, false)?;
        synchronize(device)?;
        Ok(began.elapsed())
    };
    let mut last = Duration::ZERO;
    for _ in 0..WARM_UP {
        last = take(run)?;
    }
    let count = (TRIAL.as_secs_f64() / last.as_secs_f64().max(1e-6)) as u64;
    // As rank 0 finds.
    let mut count = count.clamp(STEPS_MIN, STEPS_MAX).to_le_bytes().to_vec();
    world.broadcast_bytes(&mut count, 0)?;
    let count = count
        .try_into()
        .map(u64::from_le_bytes)
        .map_err(|_| Error::Internal("the trial's length is 8 bytes".into()))?;
    let mut times = (0..count).map(|_| take(run)).collect::<Result<Vec<_>>>()?;
    times.sort();
    let evaluation = if run.data.held_out.rows() == 0 {
        None
    } else {
        let began = Instant::now();
        in_phase(Phase::Evaluation, || run.step.evaluate(&mut run.held_out, &run.main))?;
        Some(began.elapsed())
    };
    Ok(Trial { step: times[times.len() / 2], evaluation, steps: count })
}

/// The most memory that any rank has had.
fn peaks(run: &Assembled, world: &World) -> Result<String> {
    let device = run.devices.iter().filter_map(|&device| process::device_peak_mb(device)).reduce(f64::max);
    let mine = [process::peak_mb().unwrap_or(0.0), device.unwrap_or(0.0)];
    let all = world.all_gather_bytes(&mine.map(f64::to_le_bytes).concat())?;
    let most = |place: usize| {
        let of_rank = |bytes: &Vec<u8>| {
            bytes.get(8 * place..8 * place + 8).and_then(|part| Some(f64::from_le_bytes(part.try_into().ok()?)))
        };
        all.iter().filter_map(of_rank).fold(0.0, f64::max)
    };
    let of_gpu = device.map_or(String::new(), |_| format!(", {:.1} MB of a GPU", most(1)));
    Ok(format!("{:.1} MB of the host{of_gpu}", most(0)))
}

/// Whether the run's folder can be made and written to: tried with a file in it, or in what is there of the folders above it. On rank 0,
/// which makes it.
fn check_out(out: &Path, world: &World) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let failed = |source| Error::Io {
        action: "write in",
        path: out.to_path_buf(),
        source,
        way_out: "Check permissions, or give another --out.".into(),
    };
    let out = std::path::absolute(out).map_err(failed)?;
    let there = out.ancestors().find(|folder| folder.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    let file = there.join(format!(".ddp-train-dry-run-{}", std::process::id()));
    // Below a file this is said to be no folder.
    OpenOptions::new().write(true).create_new(true).open(&file).map_err(failed)?;
    fs::remove_file(&file).map_err(failed)
}

/// Whether what is kept has room. Rank 0's disk counts.
fn check_disk(out: &Path, needed: u64, world: &World) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let there = out.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    match free_bytes(there) {
        Ok(free) if free < needed => Err(Error::Io {
            action: "save checkpoints below",
            path: out.to_path_buf(),
            source: std::io::Error::new(
                std::io::ErrorKind::StorageFull,
                format!("{} are free and up to {} are kept at a time", mb(free), mb(needed)),
            ),
            way_out: "Make room, give --out on another disk, or keep fewer (--keep).".into(),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_units_that_people_plan_in() {
        assert_eq!([told(4.04), told(119.0), told(600.0), told(12_600.0)], ["4.0 s", "119.0 s", "10 min", "3.5 h"]);
    }
}
