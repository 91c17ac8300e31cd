//! Resuming a run: from which checkpoint, and whether it is still the same run.
//!
//! A run resumes in its own folder, from a checkpoint in it. What changes the results must be as it
//! was, unless `override` is given.

use std::collections::BTreeMap;
use std::path::Path;

use ddp_comm::World;
use ddp_data::{Data, LabelName};
use ddp_kernels::Device;
use ddp_kernels::setting::Choice;
use ddp_nn::Loss;
use ddp_nn::optim::ScheduleShape;
use serde_json::Map;

use super::choices;
use super::plan::Plan;
use crate::checkpoint::{self, Opened, Plateau, State};
use crate::config::{Config, Length, Resume};
use crate::devices::models;
use crate::error::{Error, Result};
use crate::exchange;
use crate::metrics_log::{self, LockedLog};
use crate::setting::{
    CONFIG, DATA, DEVICE, EPOCHS, INIT_FROM, LABELS, OUT, OVERRIDE, RESUME, SAME_BITS, SCHEDULE,
    STEPS, WARMUP_STEPS,
};
use crate::shown::some_of;
use crate::step::Step;

/// Locks the metrics log of a run that is to be resumed, on rank 0, so that no other process
/// changes its folder, and removes unfinished files.
pub(super) fn lock(options: &Config, world: &World) -> Result<Option<LockedLog>> {
    let has_met_again = world.generation() > 1;
    if world.rank() > 0 || options.resume == Resume::Never && !has_met_again {
        return Ok(None);
    }
    let locked = LockedLog::find(&options.out, has_met_again)?;
    checkpoint::clear_up(&options.out)?;
    Ok(locked)
}

/// The checkpoint to resume from, if any: the same on all ranks, all bytes checked.
pub(super) fn find(options: &Config, world: &World) -> Result<Option<Opened>> {
    let out = &options.out;
    match &options.resume {
        // A rank that was lost before the first step may have begun it.
        Resume::Never if world.generation() > 1 && metrics_log::is_of_job(out) => Ok(None),
        Resume::Never if world.rank() == 0 => metrics_log::check_free(out).map(|()| None),
        Resume::Never => Ok(None),
        // All ranks take what rank 0 finds.
        Resume::Auto => checkpoint::open_together(world, || newest(out)),
        Resume::From(path) => checkpoint::open_together(world, || at(path, out).map(Some)),
    }
}

/// The newest intact checkpoint of the run in `out`; None if there are no checkpoints.
fn newest(out: &Path) -> Result<Option<Opened>> {
    let (newest, damaged) = checkpoint::newest(out)?;
    for (folder, why) in &damaged {
        tracing::warn!("skipped the checkpoint {}: {why}", folder.display());
    }
    if newest.is_some() {
        return Ok(newest);
    }
    let has_run = metrics_log::check_free(out).is_err();
    if let Some((_, why)) = damaged.first() {
        return Err(Error::Data(format!(
            "{RESUME} auto: expected an intact checkpoint in {}, got none: {why}; help: repair it, \
             or start over with another {OUT}",
            out.display()
        )));
    }
    let known = metrics_log::checkpoints(out);
    if let Some(last) = known.last() {
        return Err(Error::Data(format!(
            "{RESUME} auto: expected a checkpoint in {}, because {} there knows {} of them, the \
             last of step {last}, got none; help: put the folder checkpoints back, or start over \
             with another {OUT}",
            out.display(),
            metrics_log::EVENTS_FILE,
            known.len()
        )));
    }
    let out = out.display();
    if has_run {
        tracing::warn!("the run in {out} ended before anything was saved: it starts over")
    } else {
        tracing::info!("{out} holds no run to resume: a new one starts")
    }
    Ok(None)
}

/// The checkpoint in the folder `path`, which must belong to the run in `out`.
fn at(path: &Path, out: &Path) -> Result<Opened> {
    let real = |path: &Path| path.canonicalize().ok();
    let parent = real(path).and_then(|path| path.parent().map(Path::to_path_buf));
    let is_of_run = parent.is_some() && parent == real(&out.join("checkpoints"));
    if !is_of_run {
        return Err(Error::Usage(format!(
            "{RESUME} {}: expected never, auto, or the folder of a checkpoint in {}; help: give \
             one of these, or the run of that checkpoint as {OUT}",
            path.display(),
            out.join("checkpoints").display()
        )));
    }
    let opened = checkpoint::open(path)?;
    let named = checkpoint::folder(out, opened.state.step);
    if real(path) != real(&named) {
        return Err(Error::Usage(format!(
            "{RESUME} {}: expected a checkpoint with the name of its step; help: rename it to {}",
            path.display(),
            named.display()
        )));
    }
    Ok(opened)
}

/// Refuses a checkpoint that the run cannot resume from. Returns what `override` allowed, and
/// whether nothing is left to do. All ranks call it together.
pub(super) fn check(
    options: &Config,
    plan: &Plan,
    data: &Data,
    own: (Device, Option<&str>),
    opened: &mut Opened,
    world: &World,
) -> Result<(Vec<String>, bool)> {
    let overridden = changes(options, plan, data, own, opened)?;
    forget_best(options, data, &mut opened.state)?;
    let state = &opened.state;
    let is_over = plan.is_over(state.step) || options.has_stopped_early(&state.progress);
    // It may have been stopped, or its ranks lost, before all of its end was written.
    let has_ended = || Ok(metrics_log::has_ended_well(&options.out));
    let is_finished = is_over && exchange::broadcast(world, 0, has_ended)?;
    Ok((overridden, is_finished))
}

/// What has changed since the checkpoint `opened` and alters the results. Refuses that, unless
/// `override` is given, and a plan with fewer steps than were taken.
fn changes(
    options: &Config,
    plan: &Plan,
    data: &Data,
    (device, own_loss): (Device, Option<&str>),
    opened: &Opened,
) -> Result<Vec<String>> {
    let state = &opened.state;
    if state.step > plan.steps {
        return Err(Error::Usage(format!(
            "{RESUME}: the checkpoint has taken {} steps: expected a run of as many or more, got \
             {}; help: give a larger number of {STEPS} or {EPOCHS}, which count from the start of \
             the run",
            state.step, plan.steps
        )));
    }
    let then = choices::taken_over(&Config::of_checkpoint(opened)?, &Map::new());
    let mut changes = options.changes(&then);
    changes.extend(changed_device(device, state));
    changes.extend(changed_data(data, state)?);
    changes.extend(changed_loss(own_loss, state));
    changes.extend(changed_schedule(options, plan, state));
    if changes.is_empty() {
        changes.extend(changed_formula(options, plan, state)?);
    }
    if changes.is_empty() || options.override_ {
        return Ok(changes);
    }
    Err(Error::Usage(format!(
        "{RESUME} {}: expected the settings that step {} was saved with, got others that change \
         the results: {}; help: give them as they were, as {CONFIG} {} does, start a new run in \
         another {OUT} ({INIT_FROM} takes over the weights), or resume with these by {OVERRIDE}, \
         which cannot change the shape of the model",
        options.resume,
        state.step,
        some_of(&changes, 4),
        options.out.join(metrics_log::CONFIG_FILE).display()
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
    (then != now).then(|| format!("{DEVICE} {now} (was {then})"))
}

/// A loss with its settings, but not on which device its tensors are.
pub(super) fn described(loss: &dyn Loss) -> String {
    let text = format!("{loss:?}").replace(" on cpu", "");
    let mut parts = text.split(" on cuda:");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |text, part| {
        text + part.trim_start_matches(|c: char| c.is_ascii_digit())
    })
}

/// A program's own loss belongs to the run. A checkpoint of version 0.7 says neither that nor
/// versions.
fn changed_loss(now: Option<&str>, state: &State) -> Option<String> {
    if state.versions.is_empty() {
        return None;
    }
    let [then, now] = [state.own_loss.as_deref(), now].map(|it| it.unwrap_or("that of the data"));
    (now != then).then(|| format!("the loss {now} (was {then})"))
}

/// Where each rank trains, and versions by name.
type Machines<'a> = (&'a [String], &'a BTreeMap<String, String>);

/// Says what bits depend on that is not as it was, in a run that promises the same ones.
pub(super) fn warn_of_other_bits(options: &Config, now: Machines<'_>, state: &State) {
    let others = others(now, (&state.world.devices, &state.versions));
    if options.same_bits.is_some() && !others.is_empty() {
        tracing::warn!(
            "{SAME_BITS}: bits are not promised across models of GPU and versions, and these are \
             not those of the checkpoint: {}",
            others.join(", ")
        );
    }
}

/// Models of devices and versions that are not as they were.
fn others((places, versions): Machines<'_>, then: Machines<'_>) -> Vec<String> {
    let mut others = Vec::new();
    let [now, models] = [places, then.0].map(|places| {
        let mut models = models(places);
        // Their names have numbers.
        models.retain(|model, _| !model.contains("Simulated"));
        Vec::from_iter(models.into_keys()).join(" and ")
    });
    if now != models {
        others.push(format!("{now} (was {models})"));
    }
    // All vector instructions give the same bits.
    for (name, now) in versions.iter().filter(|(name, _)| *name != "simd") {
        let then = then.1.get(name).filter(|then| *then != now);
        others.extend(then.map(|then| format!("{name} {now} (was {then})")));
    }
    others
}

fn changed_data(data: &Data, state: &State) -> Result<Vec<String>> {
    let mut changes = Vec::new();
    let (now, then) = (data.train.fingerprint()?, &state.fingerprint);
    if now != *then {
        // Hashes follow, which say nothing to readers.
        let shown = |text: &str| {
            text.split(", labels ")
                .next()
                .unwrap_or_default()
                .to_string()
        };
        let (now, then) = (shown(&now), shown(then));
        let how = if now == then {
            format!("the same {now}, but other values")
        } else {
            format!("{now} (was {then})")
        };
        changes.push(format!("{DATA} with other rows: {how}"));
    }
    let (now, then) = (data.train.task(), &state.task);
    if now != then {
        changes.push(format!(
            "{LABELS} with other classes or numbers: {now} (was {then})"
        ));
    }
    let names = |columns: &Option<Vec<String>>| columns.clone().unwrap_or_default();
    let (now, then) = (names(&data.columns), names(&state.columns));
    if now != then {
        changes.push(format!("{DATA} with {}", other_columns(&now, &then)));
    }
    if data.label != state.label {
        let name = |label: &Option<LabelName>| match label {
            Some(LabelName::Column(name) | LabelName::Array(name)) => format!("{name:?}"),
            None => "without a name".to_string(),
        };
        let (now, then) = (name(&data.label), name(&state.label));
        changes.push(format!("{LABELS} {now} (was {then})"));
    }
    Ok(changes)
}

/// The first difference of the names of features, which are those of columns and of categories.
fn other_columns(now: &[String], then: &[String]) -> String {
    let mut pairs = now.iter().zip(then).enumerate();
    match pairs.find(|(_, (now, then))| now != then) {
        Some((index, (now, then))) => format!("feature {index} called {now:?} (was {then:?})"),
        None => format!("{} named features (were {})", now.len(), then.len()),
    }
}

/// The schedule decided the learning rate of the steps that were taken. It may only change where
/// these would have been the same: so the result is that of a run that never stopped.
fn changed_schedule(options: &Config, plan: &Plan, state: &State) -> Vec<String> {
    let mut changes = Vec::new();
    let shape = options.schedule;
    let (steps, warmup_steps) = (state.schedule.steps, state.schedule.warmup_steps);
    let depends = shape != ScheduleShape::Constant && options.schedule_steps.is_none();
    if plan.steps != steps && depends {
        let setting = match options.length() {
            Length::Steps(_) => STEPS.to_string(),
            Length::Epochs(_) => format!("{EPOCHS}, in steps"),
        };
        let (steps_now, shape) = (plan.steps, shape.name());
        changes.push(format!(
            "{setting} {steps_now} (was {steps}; {SCHEDULE} {shape} depends on it)"
        ));
    }
    if plan.warmup_steps != warmup_steps {
        changes.push(format!(
            "{WARMUP_STEPS} {} (was {warmup_steps})",
            plan.warmup_steps
        ));
    }
    changes
}

/// Versions up to 0.6 had other formulas for schedules that fall. Rates of one formula differ by
/// roundings only, which depend on the machine.
fn changed_formula(options: &Config, plan: &Plan, state: &State) -> Result<Option<String>> {
    let (shape, peak) = (options.schedule, options.peak_lr());
    let next = state.step + 1;
    let now = options.learning_rate(plan)?.learning_rate(state.step);
    let then = state.schedule.learning_rate;
    Ok(((now - then).abs() > 1e-12 * peak).then(|| {
        let (shape, program) = (shape.name(), &state.program);
        format!(
            "{SCHEDULE} {shape}: step {next} has the learning rate {now} (was {then}, in {program})"
        )
    }))
}

/// Loads values and moments of the checkpoint into `step`. With `override`, moments that do not fit
/// start at zero, which `overridden` then says.
pub(super) fn restore(
    options: &Config,
    opened: &Opened,
    step: &mut Step,
    overridden: &mut Vec<String>,
) -> Result<()> {
    if !options.override_ {
        return checkpoint::restore(opened, step);
    }
    if let Err(why) = checkpoint::restore_if_fits(opened, step)? {
        overridden.push(format!(
            "optimizer state reset to zero; the checkpoint's does not fit: {why}"
        ));
        checkpoint::restore_values(opened, step)?;
    }
    Ok(())
}

/// Forgets the best evaluation if the run is evaluated on other rows than before, or by another
/// figure, so that evaluations cannot be compared.
fn forget_best(options: &Config, data: &Data, state: &mut State) -> Result<()> {
    let Some(best) = state.progress.best.or(state.best) else {
        return Ok(());
    };
    let now = match data.held_out.rows() {
        0 => None,
        _ => Some(data.held_out.fingerprint()?),
    };
    let both = now.as_ref().zip(state.held_out.as_ref());
    let what = if both.is_some_and(|(now, then)| now != then) {
        "held-out rows are not those"
    } else if best.by().0 != options.best {
        "figure that decides is not that"
    } else {
        return Ok(());
    };
    tracing::warn!(
        "the {what} of step {}, the best so far: from here on the best is determined anew",
        best.step
    );
    (state.best, state.last, state.progress) = (None, None, Plateau::default());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_all_ranks_and_versions_are_compared() {
        let places = |models: &[&str]| -> Vec<String> {
            let place =
                |(rank, model): (usize, &&str)| format!("cuda:{rank} {model} on a, 8 threads");
            models.iter().enumerate().map(place).collect()
        };
        let versions = |cublaslt: &str, simd: &str| {
            let all = [("cublaslt", cublaslt), ("simd", simd)];
            BTreeMap::from(all.map(|(name, version)| (name.into(), version.into())))
        };
        let (here, none) = (versions("13.1", "avx2"), BTreeMap::new());
        let of = |now: &[&str], then: &[&str], before: &BTreeMap<String, String>| {
            others((&places(now), &here), (&places(then), before))
        };
        let (h100, h200, nvl) = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H200 NVL");
        let same = versions("13.1", "avx512");
        assert!(of(&[h200], &[h200; 3], &same).is_empty());
        // Versions up to 0.7 did not say theirs.
        assert!(of(&[h200], &[h200], &none).is_empty());
        assert!(of(&["Simulated GPU 0"], &["Simulated GPU 1"], &same).is_empty());
        assert_eq!(of(&[h200], &[nvl], &same), [format!("{h200} (was {nvl})")]);
        assert_eq!(of(&[nvl], &[h200], &same), [format!("{nvl} (was {h200})")]);
        let mixed = of(&[h200, h100], &[h200, h200], &same);
        assert_eq!(mixed, [format!("{h100} and {h200} (was {h200})")]);
        let older = of(&[h200], &[h200], &versions("13.0", "avx2"));
        assert_eq!(older, ["cublaslt 13.1 (was 13.0)"]);
    }
}
