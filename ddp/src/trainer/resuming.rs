//! Going on with a run: from which checkpoint, whether it is still the same run, and what of the old one is put aside.
//!
//! A run goes on in its own folder, from a checkpoint in it. What alters what is computed has to be what it was, unless `--override` is
//! given; what only says how or where it is computed, and for how long, may change: `FREE` and `check_schedule` say which.

use std::path::{Path, PathBuf};

use ddp_comm::World;
use ddp_kernels::Device;

use crate::checkpoint::{self, Opened, State};
use crate::config::{Config, Length, Plan, Resume, Schedule};
use crate::data::Data;
use crate::error::{Error, Result};
use crate::files;
use crate::metrics::{self, Held};
use crate::step::Step;

/// Flags that may change: they alter nothing but roundings, or what they alter is compared otherwise (data by their rows, the device by its
/// kind, the length and the warm-up by the schedule).
const FREE: [&str; 20] = [
    "data",
    "labels",
    "val-data",
    "val-labels",
    "device",
    "devices-per-rank",
    "data-on-device",
    "graph",
    "zero",
    "bucket-mb",
    "overlap",
    "steps",
    "epochs",
    "warmup-steps",
    "checkpoint-every",
    "keep",
    "eval-every",
    "log-every",
    "resume",
    "init-from",
];

/// Holds the record of a run that is to be gone on with, on the rank that keeps it, so that nobody else changes anything in its folder from here on,
/// and clears up what was left half done there.
pub(super) fn hold(config: &Config, world: &World) -> Result<Option<Held>> {
    if world.rank() > 0 || config.resume == Resume::Never {
        return Ok(None);
    }
    let held = Held::of(&config.out)?;
    checkpoint::clear_up(&config.out)?;
    Ok(held)
}

/// The checkpoint to go on from, if there is one and it is wanted: the same on all ranks, with every byte of it checked.
pub(super) fn find(config: &Config, world: &World) -> Result<Option<Opened>> {
    match &config.resume {
        Resume::Never if world.rank() == 0 => metrics::check_free(&config.out).map(|()| None),
        Resume::Never => Ok(None),
        // What the first rank has found is what all take.
        Resume::Auto => checkpoint::open_together(world, || newest(&config.out, config.override_)),
        Resume::From(path) => checkpoint::open_together(world, || at(path, &config.out).map(Some)),
    }
}

/// The newest whole checkpoint of the run in `out`. Says which it passes over. A run of which none can be used begins anew if that `is_wanted`.
fn newest(out: &Path, is_wanted: bool) -> Result<Option<Opened>> {
    let (newest, damaged) = checkpoint::newest(out)?;
    for (folder, why) in &damaged {
        tracing::warn!("the checkpoint {} is passed over: {why}", folder.display());
    }
    if newest.is_some() {
        return Ok(newest);
    }
    let has_run = metrics::check_free(out).is_err();
    let out = out.display();
    match damaged.first() {
        Some((_, why)) if !is_wanted => Err(Error::Data(format!(
            "--resume auto: expected a whole checkpoint in {out}, got none that can be used: {why}. Mend that; or begin anew: with --override the old run is put aside, with another --out it stays as it is"
        ))),
        Some(_) => {
            tracing::warn!(
                "--resume auto --override: none of the checkpoints in {out} can be used: the run begins anew"
            );
            Ok(None)
        }
        None if has_run => {
            tracing::warn!("--resume auto: {out} holds a run that ended before anything was saved: it begins anew");
            Ok(None)
        }
        None => {
            tracing::info!("--resume auto: {out} holds no run: it begins");
            Ok(None)
        }
    }
}

/// The checkpoint in the folder `path`, which must be one of the run in `out`.
fn at(path: &Path, out: &Path) -> Result<Opened> {
    let real = |path: &Path| path.canonicalize().ok();
    let is_of_run =
        real(path).is_some_and(|path| path.parent().map(Path::to_path_buf) == real(&out.join("checkpoints")));
    if path.exists() && !is_of_run {
        return Err(Error::Usage(format!(
            "--resume {}: expected a checkpoint of the run in --out {}, as {}. Give the --out of its own run; or begin another run with its \
             model: --init-from {}",
            path.display(),
            out.display(),
            checkpoint::folder(out, 120).display(),
            path.join(checkpoint::MODEL_FILE).display()
        )));
    }
    checkpoint::open(path)
}

/// Refuses to go on with a run that is longer than it is to be.
pub(super) fn check_length(state: &State, plan: &Plan) -> Result<()> {
    if state.step > plan.steps {
        return Err(Error::Usage(format!(
            "--resume: expected a run of {} steps or more, for the checkpoint has taken so many, got {}. Give a larger --steps or --epochs; \
             they are those of the whole run",
            state.step, plan.steps
        )));
    }
    Ok(())
}

/// The plan of a run that goes on: where nobody says otherwise, its warm-up is what it was.
pub(super) fn plan(config: &Config, plan: Plan, state: &State) -> Plan {
    let warmup_steps = config.warmup_steps.unwrap_or(state.schedule.warmup_steps).min(plan.steps);
    Plan { warmup_steps, ..plan }
}

/// Refuses to go on with what is not the same run any more, by the names of what has changed. With `--override` it returns these.
pub(super) fn check(config: &Config, plan: &Plan, data: &Data, device: Device, state: &State) -> Result<Vec<String>> {
    let mut changed = changed_flags(&state.config, config);
    changed.extend(changed_device(device, state));
    changed.extend(changed_data(data, state)?);
    changed.extend(changed_schedule(config, plan, state));
    if changed.is_empty() || config.override_ {
        return Ok(changed);
    }
    Err(Error::Usage(format!(
        "--resume {}: expected the flags that step {} was saved with, got others that alter what is computed: {}. Give them as they were, or \
         --override to go on with these",
        config.resume,
        state.step,
        changed.join(", ")
    )))
}

/// Values and moments of the checkpoint into `step`. With `--override` moments of another run are left, which `overridden` then says.
pub(super) fn restore(config: &Config, opened: &Opened, step: &mut Step, overridden: &mut Vec<String>) -> Result<()> {
    if !config.override_ {
        return checkpoint::restore(opened, step);
    }
    if let Err(why) = checkpoint::restore_if_fits(opened, step)? {
        overridden.push(format!(
            "the optimizer begins anew, its moments zero, for those of the checkpoint are of another run: {why}"
        ));
        checkpoint::restore_values(opened, step)?;
    }
    Ok(())
}

/// The flags that have changed and may not.
fn changed_flags(then: &Config, now: &Config) -> Vec<String> {
    let of = |config: &Config| -> Vec<(String, String)> {
        let fields = config.trajectory().into_iter();
        fields.filter(|(name, _)| !FREE.contains(&name.as_str()) && name != "override").collect()
    };
    let (then, now) = (of(then), of(now));
    let find = |fields: &[(String, String)], name: &str| {
        fields.iter().find(|(other, _)| other == name).map(|(_, value)| value.trim_matches('"').to_string())
    };
    let names = now.iter().chain(then.iter().filter(|(name, _)| find(&now, name).is_none())).map(|(name, _)| name);
    let told = |name: &String| match (find(&now, name), find(&then, name)) {
        (Some(now), Some(then)) => (now != then).then(|| format!("--{name} {now} (was {then})")),
        (Some(now), None) => Some(format!("--{name} {now} (was not given)")),
        (None, was) => was.map(|then| format!("--{name} not given (was {then})")),
    };
    names.filter_map(told).collect()
}

/// Another kind of device rounds otherwise.
fn changed_device(device: Device, state: &State) -> Option<String> {
    let now = if device.is_accelerator() { "cuda" } else { "cpu" };
    let then = state.world.devices.first()?.split([':', ' ']).next()?;
    (then != now).then(|| format!("--device {now} (was {then})"))
}

fn changed_data(data: &Data, state: &State) -> Result<Vec<String>> {
    let mut changed = Vec::new();
    let fingerprint = data.train.fingerprint()?;
    if fingerprint != state.fingerprint {
        changed.push(format!("--data with other rows: {fingerprint} (was {})", state.fingerprint));
    }
    if *data.train.task() != state.task {
        changed.push(format!("--labels with other classes or numbers: {} (was {})", data.train.task(), state.task));
    }
    Ok(changed)
}

/// Steps that are taken already went by a schedule; it may only change where they would have gone the same.
fn changed_schedule(config: &Config, plan: &Plan, state: &State) -> Vec<String> {
    let mut changed = Vec::new();
    let (steps, warmup_steps) = (state.schedule.steps, state.schedule.warmup_steps);
    if plan.steps != steps && config.schedule != Schedule::Constant {
        let flag = if matches!(config.length, Length::Steps(_)) { "--steps" } else { "--epochs, in steps" };
        let schedule = config.schedule.shape();
        changed.push(format!("{flag} {} (was {steps}; --schedule {schedule} depends on it)", plan.steps));
    }
    let both_over = plan.warmup_steps.max(warmup_steps) <= state.step && config.schedule == Schedule::Constant;
    if plan.warmup_steps != warmup_steps && !both_over {
        changed.push(format!("--warmup-steps {} (was {warmup_steps})", plan.warmup_steps));
    }
    changed
}

/// Whether the checkpoint bears the name that the run in `out` would save it under.
pub(super) fn is_in_place(opened: &Opened, out: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    real(&opened.folder).is_some_and(|folder| real(&checkpoint::folder(out, opened.state.step)) == Some(folder))
}

/// Whether what a run is evaluated on is not what it was when `state` was saved: losses cannot be compared then.
pub(super) fn is_evaluated_elsewise(held_out: Option<&String>, state: &State) -> bool {
    let is_other = held_out.zip(state.held_out.as_ref()).is_some_and(|(now, then)| now != then);
    if let (true, Some(best)) = (is_other, state.best) {
        tracing::warn!(
            "the held-out rows are not those that step {} was the best on: from here on the best is looked for anew",
            best.step
        );
    }
    is_other
}

/// The first step that a run which goes on from there has no checkpoint of: that one, if the checkpoint bears another name.
pub(super) fn next_saved(opened: &Opened, out: &Path) -> u64 {
    opened.state.step + u64::from(is_in_place(opened, out))
}

/// Puts aside what the run in `out` saved from step `least` on: it was found damaged, or somebody goes back on purpose. Nothing is removed. The newest
/// is the first, so that the newest of those that are left always fits the record.
pub(super) fn put_aside(out: &Path, least: u64) -> Result<()> {
    let folder = out.join("checkpoints");
    if !folder.exists() {
        return Ok(());
    }
    let entries = std::fs::read_dir(&folder).map_err(files::failed("list", &folder))?;
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let number = |name: &str| name.strip_prefix("step-").and_then(|number| number.parse::<u64>().ok());
    names.sort_by_key(|name| std::cmp::Reverse(number(name)));
    for name in names {
        if number(&name).is_some_and(|number| number >= least) {
            let (from, to) = (folder.join(&name), free(&folder, &name));
            std::fs::rename(&from, &to).map_err(files::failed("put aside", &from))?;
            files::sync_folder(&folder)?;
            tracing::warn!("{} is not gone on from, and is put aside as {}", from.display(), to.display());
        }
    }
    Ok(())
}

/// A name for what is put aside.
fn free(folder: &Path, name: &str) -> PathBuf {
    let numbered = |number: u32| match number {
        1 => folder.join(format!("superseded-{name}")),
        _ => folder.join(format!("superseded-{name}-{number}")),
    };
    (1..).map(numbered).find(|path| !path.exists()).expect("some name is free")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::Scratch;

    fn config(flags: &str) -> Config {
        let parsed = crate::cli::parse(["ddp-train"].into_iter().chain(flags.split_whitespace())).unwrap();
        let crate::cli::Command::Train(config) = parsed else { panic!("{flags} is a run") };
        *config
    }

    #[test]
    fn flags_that_alter_what_is_computed_are_named_with_what_they_were() {
        let then = config("--lr 0.001 --class-weights 1,2");
        let changed = |flags: &str| changed_flags(&then, &config(flags)).join("; ");
        assert_eq!(changed("--lr 0.001 --class-weights 1,2"), "");
        assert_eq!(changed("--lr 0.01 --class-weights 1,2"), "--lr 0.01 (was 0.001)");
        assert_eq!(changed("--class-weights 1,2 --micro-batch 4"), "--micro-batch 4 (was not given)");
        assert_eq!(changed("--seed 7"), "--seed 7 (was 0); --class-weights not given (was [1.0,2.0])");
        let optimizer = changed("--class-weights 1,2 --optimizer sgd --lr 0.001 --weight-decay 0.01");
        assert!(optimizer.starts_with("--optimizer sgd (was adamw); --momentum 0.9 (was not given)"), "{optimizer}");
    }

    #[test]
    fn what_only_says_how_or_where_may_change() {
        let then = config("");
        let flags = "--data glyphs,rows=7 --device cuda:0 --data-on-device off --graph off --zero 1 --bucket-mb 1 \
                     --overlap off --steps 3 --warmup-steps 1 --checkpoint-every 3 --keep 9 --eval-every 2 --log-every 3 --resume auto --override \
                     --init-from a.safetensors --out elsewhere --threads 1 --progress never --log-level error --timeout-s 9 --cache-dir c \
                     --tensorboard";
        assert_eq!(changed_flags(&then, &config(flags)), [""; 0]);
        let others = Some("y".to_string());
        let elsewhere =
            Config { labels: others.clone(), val_labels: others, val_data: Some(then.data.clone()), ..then.clone() };
        assert_eq!(changed_flags(&then, &elsewhere), [""; 0]);
        assert_eq!(changed_flags(&then, &config("--epochs 9 --device cuda --share-gpus")), [""; 0]);
        // Every name is one of a flag.
        let all = serde_json::to_value(crate::cli::Flags::default()).unwrap();
        assert!(FREE.iter().all(|name| all.get(name).is_some()));
    }

    #[test]
    fn what_is_past_the_checkpoint_is_put_aside_and_nothing_is_lost() {
        let scratch = Scratch::new();
        let folder = scratch.path().join("checkpoints");
        for _ in 0..2 {
            for name in ["step-00000003", "step-00000006", "step-00000009", "step-x", ".unfinished-1-0"] {
                std::fs::create_dir_all(folder.join(name)).unwrap();
            }
            put_aside(scratch.path(), 4).unwrap();
        }
        let mut names: Vec<String> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let aside = [
            "superseded-step-00000006",
            "superseded-step-00000006-2",
            "superseded-step-00000009",
            "superseded-step-00000009-2",
        ];
        assert_eq!(names[..3], [".unfinished-1-0", "step-00000003", "step-x"]);
        assert_eq!(names[3..], aside);
    }
}
