//! `--dry-run`: checks a run without training, and prints the memory, disk space and time that it
//! would take. No folder, metrics log or checkpoint is written.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use ddp_comm::World;
use ddp_kernels::mapped::free_bytes;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::shown::shown;
use crate::train::TrainProgram;
use crate::trainer::{self, DryRun, ModelBytes, Plan, StepBytes, TimedTrial};
use crate::units::{duration, megabytes};
use ddp_tools::output::Say;

/// Checks everything that can be checked without training. All ranks call it together.
pub(crate) fn dry_run(config: &Config, world: &World, say: Say<'_>) -> Result<()> {
    let Some(run) = trainer::dry_run(config, &TrainProgram::new(config), world)? else {
        let out = config.out.display();
        let text = "the run is finished already, and nothing would be done";
        return say(&format!("{out}: {text}"));
    };
    if world.rank() == 0 {
        check_out(&config.out)?;
    }
    let needed = (config.keep + 2).saturating_mul(run.checkpoint_bytes);
    let lines = lines(config, &run, needed);
    lines.iter().try_for_each(|line| say(line))?;
    // Last, after everything else was printed.
    if world.rank() == 0 {
        check_disk(&config.out, needed)?;
    }
    let written = "nothing written but caches of tables and kernels (--dry-run)";
    say(&format!(
        "all checks passed; nothing was trained, and {written}"
    ))
}

fn lines(config: &Config, run: &DryRun, needed: u64) -> Vec<String> {
    let mut lines = vec![shown(&run.data), length(run)];
    let places = run.places.iter().enumerate();
    lines.extend(places.map(|(rank, place)| format!("rank {rank}: {place}")));
    lines.push(format!("the model of a rank: {}", model(&run.model_bytes)));
    let on_gpus = run.devices[0].is_accelerator();
    lines.push(planned(&run.model_bytes, &run.step_bytes, on_gpus));
    let gpu = |peak_mb: f64| format!(", {} of GPU memory", megabytes(peak_mb));
    let gpu = run.device_peak_mb.map(gpu).unwrap_or_default();
    lines.push(match run.host_peak_mb.map(megabytes) {
        Some(host) => format!(
            "memory of a rank: about {host} of host memory at the peak{gpu}, as measured in a few \
             steps; activations took {}",
            mb(run.activation_bytes.unwrap_or(0))
        ),
        None => "the model was not made, since it is large: the program itself comes on top".into(),
    });
    let sent = run.between_ranks_bytes.filter(|bytes| *bytes > 0).map(mb);
    let sent = sent.map(|sent| format!("a rank sends at most {sent} to the others in a step"));
    lines.extend(sent);
    let ([one, all], keep) = ([run.checkpoint_bytes, needed].map(mb), config.keep);
    let text = format!("a checkpoint: {one}; kept at a time with --keep {keep}: up to {all}");
    lines.push(text);
    let left = run.plan.steps - run.taken;
    lines.extend(run.trial.as_ref().map(|trial| time(trial, &run.plan, left)));
    lines
}

fn length(run: &DryRun) -> String {
    let (plan, taken) = (&run.plan, run.taken);
    let done = (taken > 0).then(|| format!(", of which {taken} are done"));
    let every = |what: &str, steps: u64| match steps {
        0 => format!("{what} at the end"),
        _ => format!("{what} every {steps}"),
    };
    let (steps, warmup) = (plan.steps, plan.warmup_steps);
    let epoch = plan.sampler.steps_per_epoch();
    let evaluated = match run.held_out_rows {
        0 => "not evaluated (no rows are held out)".into(),
        _ => every("evaluated", plan.eval_every),
    };
    let best = if run.held_out_rows > 0 {
        ", and the best by evaluation"
    } else {
        ""
    };
    let saved = every("saved", plan.checkpoint_every) + best;
    let done = done.unwrap_or_default();
    format!("{steps} steps{done}, {epoch} an epoch; warm-up {warmup}; {evaluated}, {saved}")
}

fn mb(bytes: u64) -> String {
    megabytes(bytes as f64 / 1e6)
}

fn model(bytes: &ModelBytes) -> String {
    let parts = [
        ("parameters", bytes.values, true),
        ("rounded copies", bytes.copies, false),
        ("frozen weights", bytes.base, false),
        ("tied copies", bytes.tied, false),
        ("gradients", bytes.gradients, true),
        ("partial sums of gradients", bytes.partial_sums, false),
        ("moments", bytes.moments, true),
        ("kept for another rank", bytes.kept_for_others, false),
        ("the copy being saved", bytes.saved(), true),
    ];
    let shown = |(what, bytes, always): (&str, u64, bool)| {
        (always || bytes > 0).then(|| format!("{what} {}", mb(bytes)))
    };
    let parts: Vec<String> = parts.into_iter().filter_map(shown).collect();
    format!("{}; together {}", parts.join(", "), mb(bytes.total()))
}

/// What a rank needs on its devices, by kind, as computed without a model.
fn planned(model: &ModelBytes, step: &StepBytes, on_gpus: bool) -> String {
    let place = if on_gpus { "GPU" } else { "host" };
    let sums = model.partial_sums + model.kept_for_others;
    let saved = if on_gpus { 0 } else { model.saved() };
    // Without rounded copies layers read the masters.
    let read = model.copies + model.base + model.tied;
    let [weights, masters] = match model.copies {
        0 => [read + model.values, 0],
        _ => [read, model.values],
    };
    let parts = [
        ("weights", weights),
        ("f32 masters", masters),
        ("gradients", model.gradients),
        ("sums and copies for others", sums),
        ("moments", model.moments),
        ("activations", step.activations),
        ("batches", step.batches),
        ("workspace", step.workspace),
        ("CUDA's context about", step.context),
        ("NCCL about", step.nccl),
        ("masters gathered to save about", step.gathered),
        ("whole pieces of 32 MiB about", step.rest_of_piece),
        ("the copy being saved", saved),
    ];
    let shown = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let shown: Vec<_> = shown
        .map(|(what, bytes)| format!("{what} {}", mb(*bytes)))
        .collect();
    let total = mb(model.on_device() + step.total() + saved);
    format!(
        "planned {place} memory of a rank: {}; together {total}",
        shown.join(", ")
    )
}

fn time(trial: &TimedTrial, plan: &Plan, left: u64) -> String {
    let evaluations = match (trial.evaluation, plan.eval_every) {
        (None, _) => 0,
        (Some(_), 0) => 1,
        (Some(_), every) => left.div_ceil(every),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The plan runs no step; the trial after it takes two, and evaluates.
    #[test]
    fn activations_on_the_cpu_are_planned_to_the_byte() {
        let folder = std::env::temp_dir().join(format!("ddp-planned-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (text, out) = (folder.join("text.txt"), folder.join("out"));
        let words = (0..9000u32).map(|at| format!("{} ", at * at % 97));
        fs::write(&text, words.collect::<String>()).unwrap();
        let gpt = format!(
            "--data {} --model gpt,layers=2,heads=2,width=32,context=32",
            text.display()
        );
        let glyphs = "--data glyphs,rows=512,held-out=70 --batch-size 100";
        let cases = [
            format!("{gpt} --batch-size 8 --micro-batch 3"),
            format!("{gpt} --dtype bf16"),
            format!("{gpt} --recompute block --dropout 0.1 --val-split 0"),
            format!("{glyphs} --model vit,layers=2 --micro-batch 30 --same-bits 4"),
            format!("{glyphs} --model vit,layers=2 --micro-batch 8 --same-bits 16"),
            format!("{glyphs} --model vit,layers=2 --dtype bf16 --recompute block"),
            format!("{glyphs} --hidden 300,200 --activation gelu --micro-batch 30"),
            "--data synthetic:regression --hidden 100 --freeze 0.*".into(),
        ];
        for case in cases {
            let line = format!("ddp-train {case} --device cpu --steps 3");
            let words = line.split(' ').map(String::from);
            let words = words.chain(["--out".into(), out.display().to_string()]);
            let (crate::cli::Command::Train(config), _) = crate::cli::parse(words).unwrap() else {
                panic!("{case} is a run")
            };
            let world = World::single().unwrap();
            let run = trainer::dry_run(&config, &TrainProgram::new(&config), &world);
            let run = run.unwrap().unwrap();
            let said = length(&run);
            // No part of the text is held out.
            assert_eq!(
                said.contains("not evaluated"),
                case.starts_with(&gpt),
                "{said}"
            );
            let taken = run.activation_bytes.unwrap();
            assert_eq!(run.step_bytes.activations, taken, "{case}");
            assert!(taken > 0, "{case}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
