//! Resuming a run: from which checkpoint, whether it is still the same run, and what is put aside.
//!
//! A run resumes in its own folder, from a checkpoint in it. What changes the results must be as it
//! was, unless `override` is given.

use std::path::{Path, PathBuf};

use ddp_comm::World;
use ddp_data::{Data, disk};
use ddp_kernels::Device;
use ddp_nn::optim::Shape;

use super::options::{Length, Plan, Resume, RunOptions};
use crate::checkpoint::{self, Opened, State};
use crate::error::{Error, Result};
use crate::record::{self, Held};
use crate::step::Step;

/// Locks the record of a run that is to be resumed, on rank 0, so that no other process changes its
/// folder, and removes files that were left half written.
pub(super) fn hold(options: &RunOptions, world: &World) -> Result<Option<Held>> {
    if world.rank() > 0 || options.resume == Resume::Never {
        return Ok(None);
    }
    let held = Held::of(&options.out)?;
    checkpoint::clear_up(&options.out)?;
    Ok(held)
}

/// The checkpoint to resume from, if any: the same on all ranks, all bytes checked.
pub(super) fn find(options: &RunOptions, world: &World) -> Result<Option<Opened>> {
    let out = &options.out;
    match &options.resume {
        Resume::Never if world.rank() == 0 => record::check_free(out).map(|()| None),
        Resume::Never => Ok(None),
        // All ranks take what rank 0 finds.
        Resume::Auto => checkpoint::open_together(world, || newest(out, options.override_)),
        Resume::From(path) => checkpoint::open_together(world, || at(path, out).map(Some)),
    }
}

/// The newest intact checkpoint of the run in `out`. Where all are damaged, the run starts over if
/// `may_start_over`.
fn newest(out: &Path, may_start_over: bool) -> Result<Option<Opened>> {
    let (newest, damaged) = checkpoint::newest(out)?;
    for (folder, why) in &damaged {
        tracing::warn!("skipped the checkpoint {}: {why}", folder.display());
    }
    if newest.is_some() {
        return Ok(newest);
    }
    let has_run = record::check_free(out).is_err();
    let out = out.display();
    match damaged.first() {
        Some((_, why)) if !may_start_over => {
            return Err(Error::Data(format!(
                "`resume` auto: expected an intact checkpoint in {out}, got none: {why}; help: \
                 repair it, or start over: with `override` the old run is put aside, with another \
                 `out` it stays as it is"
            )));
        }
        Some(_) => tracing::warn!("no checkpoint in {out} can be used: the run starts over"),
        None if has_run => {
            tracing::warn!("the run in {out} ended before anything was saved: it starts over");
        }
        None => tracing::info!("{out} holds no run to resume: a new one starts"),
    }
    Ok(None)
}

/// The checkpoint in the folder `path`, which must belong to the run in `out`.
fn at(path: &Path, out: &Path) -> Result<Opened> {
    let real = |path: &Path| path.canonicalize().ok();
    let parent = real(path).and_then(|path| path.parent().map(Path::to_path_buf));
    let is_of_run = parent.is_some() && parent == real(&out.join("checkpoints"));
    if path.exists() && !is_of_run {
        return Err(Error::Usage(format!(
            "`resume` {}: expected a checkpoint of the run in `out` {}, as {}; help: give its own \
             run as `out`, or start a run from its model: `init-from` {}",
            path.display(),
            out.display(),
            checkpoint::folder(out, 120).display(),
            path.join(checkpoint::MODEL_FILE).display()
        )));
    }
    checkpoint::open(path)
}

/// The plan of a resumed run: its warm-up is what it was, unless another one is given. Refuses a
/// plan with fewer steps than were taken.
pub(super) fn plan(options: &RunOptions, plan: Plan, state: &State) -> Result<Plan> {
    if state.step > plan.steps {
        return Err(Error::Usage(format!(
            "`resume`: the checkpoint has taken {} steps: expected a run of as many or more, got \
             {}; help: give a larger number of `steps` or `epochs`, which count from the start of \
             the run",
            state.step, plan.steps
        )));
    }
    let warmup_steps = options.learning_rate.warmup_steps;
    let warmup_steps = warmup_steps.unwrap_or(state.schedule.warmup_steps);
    Ok(Plan {
        warmup_steps: warmup_steps.min(plan.steps),
        ..plan
    })
}

/// What else than settings has changed and alters the results.
pub(super) fn changes(
    options: &RunOptions,
    plan: &Plan,
    data: &Data,
    device: Device,
    state: &State,
) -> Result<Vec<String>> {
    let mut changes = Vec::new();
    changes.extend(changed_device(device, state));
    changes.extend(changed_data(data, state)?);
    changes.extend(changed_schedule(options, plan, state));
    Ok(changes)
}

/// Refuses to resume with changes, unless that is asked for.
pub(super) fn check(options: &RunOptions, state: &State, changes: &[String]) -> Result<()> {
    if changes.is_empty() || options.override_ {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "`resume` {}: expected the settings that step {} was saved with, got others that change \
         the results: {}; help: give them as they were, or `override` to resume with these",
        options.resume,
        state.step,
        changes.join(", ")
    )))
}

/// Devices of another kind round differently.
fn changed_device(device: Device, state: &State) -> Option<String> {
    let now = if device.is_accelerator() {
        "cuda"
    } else {
        "cpu"
    };
    let then = state.world.devices.first()?.split([':', ' ']).next()?;
    (then != now).then(|| format!("`device` {now} (was {then})"))
}

fn changed_data(data: &Data, state: &State) -> Result<Vec<String>> {
    let mut changes = Vec::new();
    let (now, then) = (data.train.fingerprint()?, &state.fingerprint);
    if now != *then {
        changes.push(format!("`data` with other rows: {now} (was {then})"));
    }
    let (now, then) = (data.train.task(), &state.task);
    if now != then {
        changes.push(format!(
            "`labels` with other classes or numbers: {now} (was {then})"
        ));
    }
    Ok(changes)
}

/// The schedule decided the learning rate of the steps that were taken. It may only change where
/// these would have been the same.
fn changed_schedule(options: &RunOptions, plan: &Plan, state: &State) -> Vec<String> {
    let mut changes = Vec::new();
    let shape = options.learning_rate.shape;
    let (steps, warmup_steps) = (state.schedule.steps, state.schedule.warmup_steps);
    if plan.steps != steps && shape != Shape::Constant {
        let setting = match options.length {
            Length::Steps(_) => "`steps`",
            Length::Epochs(_) => "`epochs`, in steps",
        };
        changes.push(format!(
            "{setting} {} (was {steps}; `schedule` {shape} depends on it)",
            plan.steps
        ));
    }
    let warmups_are_over = plan.warmup_steps.max(warmup_steps) <= state.step;
    let is_same = shape == Shape::Constant && warmups_are_over;
    if plan.warmup_steps != warmup_steps && !is_same {
        changes.push(format!(
            "`warmup-steps` {} (was {warmup_steps})",
            plan.warmup_steps
        ));
    }
    changes
}

/// Loads values and moments of the checkpoint into `step`. With `override`, moments that do not fit
/// start at zero, which `overridden` then says.
pub(super) fn restore(
    options: &RunOptions,
    opened: &Opened,
    step: &mut Step,
    overridden: &mut Vec<String>,
) -> Result<()> {
    if !options.override_ {
        return checkpoint::restore(opened, step);
    }
    if let Err(why) = checkpoint::restore_if_fits(opened, step)? {
        overridden.push(format!(
            "the optimizer starts anew, its moments zero: those of the checkpoint do not fit: {why}"
        ));
        checkpoint::restore_values(opened, step)?;
    }
    Ok(())
}

/// Whether the checkpoint has the name that the run in `out` would give it.
pub(super) fn is_in_place(opened: &Opened, out: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    let here = real(&opened.folder);
    here.is_some() && here == real(&checkpoint::folder(out, opened.state.step))
}

/// Whether the run is evaluated on other rows than before, so that losses cannot be compared.
pub(super) fn has_other_held_out_rows(held_out: Option<&String>, state: &State) -> bool {
    let both = held_out.zip(state.held_out.as_ref());
    let differ = both.is_some_and(|(now, then)| now != then);
    if let (true, Some(best)) = (differ, state.best) {
        tracing::warn!(
            "the held-out rows are not those of step {}, the best so far: from here on the best \
             is determined anew",
            best.step
        );
    }
    differ
}

/// The first step from which on checkpoints are in the way of the resumed run. It is the
/// checkpoint's own step if that has another name.
pub(super) fn first_to_put_aside(opened: &Opened, out: &Path) -> u64 {
    opened.state.step + u64::from(is_in_place(opened, out))
}

/// Renames the checkpoints in `out` from step `least` on. Nothing is removed. The newest goes
/// first: the newest that is left is then never older than the record.
pub(super) fn put_aside(out: &Path, least: u64) -> Result<()> {
    let folder = out.join("checkpoints");
    if !folder.exists() {
        return Ok(());
    }
    let entries = std::fs::read_dir(&folder).map_err(disk::failed("list", &folder))?;
    let names = entries.flatten();
    let numbered = names.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let number: u64 = name.strip_prefix("step-")?.parse().ok()?;
        (number >= least).then_some((number, name))
    });
    let mut numbered: Vec<(u64, String)> = numbered.collect();
    numbered.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    for (_, name) in numbered {
        let (from, to) = (folder.join(&name), free_name(&folder, &name));
        std::fs::rename(&from, &to).map_err(disk::failed("put aside", &from))?;
        disk::sync_folder(&folder)?;
        tracing::warn!("put {} aside as {}", from.display(), to.display());
    }
    Ok(())
}

/// A free name for a checkpoint that is put aside.
fn free_name(folder: &Path, name: &str) -> PathBuf {
    let numbered = |number: u32| match number {
        1 => folder.join(format!("superseded-{name}")),
        _ => folder.join(format!("superseded-{name}-{number}")),
    };
    let mut names = (1..).map(numbered);
    names
        .find(|path| !path.exists())
        .expect("some name is free")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ddp_data::disk::testing::Scratch;

    #[test]
    fn what_is_past_the_checkpoint_is_put_aside_and_nothing_is_lost() {
        let scratch = Scratch::new();
        let folder = scratch.path().join("checkpoints");
        for _ in 0..2 {
            for name in [
                "step-00000003",
                "step-00000006",
                "step-00000009",
                "step-x",
                ".unfinished-1-0",
            ] {
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
