//! `--dry-run`: checks a run without training, and says what it would take in memory, disk space
//! and time. No folder, metrics log or checkpoint is written.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use ddp_comm::World;
use ddp_kernels::mapped::free_bytes;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::output::Say;
use crate::shown::shown;
use crate::train::TrainProgram;
use crate::trainer::{self, ModelBytes, Plan, Rehearsal, Trial};
use crate::units::{duration, megabytes};

/// Checks everything that can be checked without training. All ranks call it together.
pub fn dry_run(config: &Config, world: &World, say: Say<'_>) -> Result<()> {
    let Some(run) = trainer::rehearse(config, &TrainProgram::new(config), world)? else {
        let out = config.out.display();
        let text = "the run is finished already, and nothing would be done";
        return say(&format!("{out}: {text}"));
    };
    if world.rank() == 0 {
        check_out(&config.out)?;
    }
    say(&shown(&run.data))?;
    say(&length(&run.plan, run.taken))?;
    for (rank, place) in run.places.iter().enumerate() {
        say(&format!("rank {rank}: {place}"))?;
    }
    say(&format!("the model of a rank: {}", model(&run.model_bytes)))?;
    match run.host_peak_mb {
        Some(host) => say(&format!("memory of a rank: {}", peaks(host, &run)))?,
        None => {
            let tied = match config.devices_per_rank {
                1 => "",
                _ => ", copies of tied weights",
            };
            say(&format!(
                "the model was not made, since it is large: activations, batches{tied} and the \
                 program come on top"
            ))?
        }
    }
    if let Some(bytes) = run.between_ranks_bytes.filter(|bytes| *bytes > 0) {
        let sent = mb(bytes);
        say(&format!(
            "a rank sends at most {sent} to the others in a step"
        ))?;
    }
    let (keep, one) = (config.keep, run.checkpoint_bytes);
    let needed = (keep + 2).saturating_mul(one);
    let [one, all] = [one, needed].map(mb);
    let text = format!("a checkpoint: {one}; kept at a time with --keep {keep}: up to {all}");
    say(&text)?;
    if let Some(trial) = &run.trial {
        say(&time(trial, &run.plan, run.plan.steps - run.taken))?;
    }
    // Last, after everything else was printed.
    if world.rank() == 0 {
        check_disk(&config.out, needed)?;
    }
    let written = "nothing written but caches of tables and kernels (--dry-run)";
    say(&format!(
        "all checks passed; nothing was trained, and {written}"
    ))
}

fn length(plan: &Plan, taken: u64) -> String {
    let done = match taken {
        0 => String::new(),
        _ => format!(", of which {taken} are done"),
    };
    let every = |what: &str, steps: u64| match steps {
        0 => format!("{what} at the end"),
        _ => format!("{what} every {steps}"),
    };
    let (steps, epoch, warmup) = (
        plan.steps,
        plan.sampler.steps_per_epoch(),
        plan.warmup_steps,
    );
    let evaluated = every("evaluated", plan.eval_every);
    let saved = every("saved", plan.checkpoint_every);
    format!("{steps} steps{done}, {epoch} an epoch; warm-up {warmup}; {evaluated}, {saved}")
}

fn mb(bytes: u64) -> String {
    megabytes(bytes as f64 / 1e6)
}

fn model(bytes: &ModelBytes) -> String {
    let total = mb(bytes.total());
    let ModelBytes {
        values,
        copies,
        tied,
        gradients,
        moments,
        kept_moments,
        partial_sums,
    } = *bytes;
    let also = |what: &str, bytes: u64| match bytes {
        0 => String::new(),
        _ => format!(", {what} {}", mb(bytes)),
    };
    let (rounded, tied) = (also("rounded copies", copies), also("tied copies", tied));
    let partial = also("partial sums of gradients", partial_sums);
    let kept = also("kept for another rank", kept_moments);
    let [values, gradients, moments, saved] = [values, gradients, moments, bytes.saved()].map(mb);
    format!(
        "parameters {values}{rounded}{tied}, gradients {gradients}{partial}, moments {moments}{kept}, \
         the copy being saved {saved}; together {total}"
    )
}

fn peaks(host_mb: f64, run: &Rehearsal) -> String {
    let gpu = |peak_mb: f64| format!(", {} of GPU memory", megabytes(peak_mb));
    let gpu = run.device_peak_mb.map_or(String::new(), gpu);
    let host = megabytes(host_mb);
    format!("about {host} of host memory at the peak{gpu}, as measured in a few steps")
}

fn time(trial: &Trial, plan: &Plan, left: u64) -> String {
    let evaluations = match trial.evaluation {
        None => 0,
        Some(_) if plan.eval_every == 0 => 1,
        Some(_) => left.div_ceil(plan.eval_every),
    };
    let evaluation_s = trial.evaluation.unwrap_or_default().as_secs_f64();
    let step_s = trial.step.as_secs_f64();
    let seconds = step_s * left as f64 + evaluation_s * evaluations as f64;
    let ([step, all], median_of) = ([step_s, seconds].map(duration), trial.steps);
    format!(
        "time: {step} a step (median of {median_of}), {evaluations} evaluations: about {all} for \
         {left} steps; checkpoints are written in the background"
    )
}

/// Whether the run's folder can be made and written: tries with a file in it, or in the nearest
/// folder above it that exists.
fn check_out(out: &Path) -> Result<()> {
    let failed = || Error::io("write in", out, "check permissions, or give another --out");
    let out = std::path::absolute(out).map_err(failed())?;
    let mut above = out.ancestors();
    let there = above.find(|folder| folder.symlink_metadata().is_ok());
    let there = there.unwrap_or(Path::new("/"));
    let file = there.join(format!(".ddp-train-dry-run-{}", std::process::id()));
    let opened = OpenOptions::new().write(true).create_new(true).open(&file);
    opened.map_err(failed())?;
    fs::remove_file(&file).map_err(failed())
}

/// Whether the disk has room for the checkpoints that are kept.
fn check_disk(out: &Path, needed: u64) -> Result<()> {
    let there = out.ancestors().find(|folder| folder.is_dir());
    let Ok(free) = free_bytes(there.unwrap_or(Path::new("."))) else {
        return Ok(());
    };
    if free >= needed {
        return Ok(());
    }
    let [free, needed] = [free, needed].map(mb);
    let text = format!("{free} are free and up to {needed} are kept at a time");
    let full = io::Error::new(io::ErrorKind::StorageFull, text);
    let help = "make room, give --out on another disk, or keep fewer (--keep)";
    Err(Error::io("save checkpoints below", out, help)(full))
}
