//! What a run says of itself before its first step: its settings, every one of them settled, the first line of its record or the line that it
//! goes on, and what every checkpoint of it says.

use std::path::Path;

use ddp_comm::World;
use ddp_kernels::device::discover;
use ddp_kernels::{Device, simd, threads};

use super::{Desk, resuming};
use crate::checkpoint::{Opened, Position, ScheduleState, State, WorldState};
use crate::config::{self, Config, GraphChoice, Plan, Resident, Resume};
use crate::data::Data;
use crate::error::Result;
use crate::metrics::{self, EVENTS_FILE, Held, Kept, Record, ResumeEvent, Start};
use crate::progress::Progress;
use crate::step::Step;

/// Every setting as it is, those that follow from the data and the machine too. How the run was begun is none.
pub(super) fn settled(config: &Config, plan: &Plan, step: &Step, is_kept: bool) -> Config {
    let is_captured = step.graphs().is_some();
    Config {
        graph: if is_captured { GraphChoice::On } else { GraphChoice::Off },
        data_on_device: if is_kept { Resident::On } else { Resident::Off },
        warmup_steps: Some(plan.warmup_steps),
        eval_every: Some(plan.eval_every),
        checkpoint_every: Some(plan.checkpoint_every),
        threads: Some(threads::count()),
        resume: Resume::Never,
        override_: false,
        ..config.clone()
    }
}

/// What every checkpoint of this run says besides how far it is.
pub(super) fn state(settled: &Config, world: &World, data: &Data, plan: &Plan, devices: &[String]) -> Result<State> {
    let sampler = &plan.sampler;
    Ok(State {
        // What is saved fills it in.
        format: 0,
        program: format!("ddp-train {}", env!("CARGO_PKG_VERSION")),
        step: 0,
        samples: 0,
        config: settled.clone(),
        position: Position {
            seed: settled.seed,
            epoch: 0,
            in_epoch: 0,
            rows: sampler.rows(),
            batch: settled.batch_size,
            drop_last: settled.drop_last,
        },
        schedule: ScheduleState { steps: plan.steps, warmup_steps: plan.warmup_steps, learning_rate: 0.0 },
        optimizer_since: 0,
        world: WorldState {
            ranks: world.size(),
            optimizer_parts: if settled.zero == 1 { world.size() } else { 1 },
            devices: devices.to_vec(),
        },
        task: data.train.task().clone(),
        row_shape: data.train.row_shape().to_vec(),
        normalization: data.normalization.clone(),
        columns: data.columns.clone(),
        label: data.label.clone(),
        fingerprint: data.train.fingerprint()?,
        held_out: if data.held_out.rows() > 0 { Some(data.held_out.fingerprint()?) } else { None },
        best: None,
        last: None,
    })
}

/// How a run begins.
#[derive(Clone, Copy, Debug)]
pub(super) enum Beginning<'a> {
    /// In a folder without a run.
    New,
    /// In that of a run that ended before anything was saved, in its place.
    Again,
    /// As a run that goes on from there, with what has been overridden.
    From(&'a Opened, &'a [String]),
}

impl<'a> Beginning<'a> {
    /// Of the run that `config` asks for, on the rank that keeps the record.
    pub(super) fn of(config: &Config, resumed: Option<&'a Opened>, overridden: &'a [String]) -> Beginning<'a> {
        match resumed {
            Some(opened) => Beginning::From(opened, overridden),
            None if config.resume == Resume::Auto && metrics::check_free(&config.out).is_err() => Beginning::Again,
            None => Beginning::New,
        }
    }
}

/// The folder of this run and the first line of its record; of one that goes on the record up to there.
pub(super) fn open_desk(
    config: &Config,
    world: &World,
    data: &Data,
    plan: &Plan,
    step: &Step,
    devices: &[String],
    (beginning, held): (Beginning<'_>, Option<Held>),
) -> Result<Desk> {
    // What is not gone on from goes before the record is cut: whatever is the newest, the record reaches as far.
    let (mut record, kept) = match beginning {
        Beginning::New => {
            // One without a line is none.
            drop(held);
            (Record::create(config)?, Kept::default())
        }
        Beginning::Again => {
            resuming::put_aside(&config.out, 0)?;
            Record::go_on(config, held, None)?
        }
        Beginning::From(opened, _) => {
            resuming::put_aside(&config.out, resuming::next_saved(opened, &config.out))?;
            Record::go_on(config, held, Some(opened.state.step))?
        }
    };
    if device_of(step).is_accelerator() {
        tell_places(world, devices);
    }
    if !kept.has_start {
        start(&mut record, config, world, data, plan, step, devices)?;
    }
    if config.tensorboard {
        let taken = if let Beginning::From(opened, _) = beginning { opened.state.step } else { 0 };
        record.draw_curves(&config.out, taken + 1)?;
    }
    let progress = Progress::new(config.progress, plan.steps, true);
    if let Beginning::From(opened, overridden) = beginning {
        warn_of_gap(&config.out, kept, &opened.state);
        go_on(&mut record, config, world, devices, opened, overridden)?;
        progress.step(opened.state.step);
    }
    Ok(Desk { record, progress })
}

/// Warns of lines that are missing between those that were kept and the checkpoint.
pub(super) fn warn_of_gap(out: &Path, kept: Kept, state: &State) {
    if kept.has_gap(state.step, state.config.log_every) {
        let (record, last, step) = (out.join(EVENTS_FILE), kept.last_step.unwrap_or(0), state.step);
        tracing::warn!(
            "{} ends at step {last}, and the checkpoint is of step {step}: what was between is lost from it",
            record.display()
        );
    }
}

/// Says that the run goes on, from where, and with what else than before.
fn go_on(
    record: &mut Record,
    config: &Config,
    world: &World,
    devices: &[String],
    opened: &Opened,
    overridden: &[String],
) -> Result<()> {
    let (step, ranks) = (opened.state.step, world.size());
    let from = opened.folder.strip_prefix(&config.out).unwrap_or(&opened.folder).to_string_lossy();
    tracing::info!("the run goes on behind step {step}, from {}", opened.folder.display());
    if !overridden.is_empty() {
        tracing::warn!("--override: what is computed from here on has changed: {}", overridden.join(", "));
    }
    record.resume(&ResumeEvent { step, from: &from, ranks, devices, overridden })
}

fn device_of(step: &Step) -> Device {
    step.model().params.device()
}

/// The first line of the record: what is known before the first step.
fn start(
    record: &mut Record,
    config: &Config,
    world: &World,
    data: &Data,
    plan: &Plan,
    step: &Step,
    devices: &[String],
) -> Result<()> {
    record.start(&Start {
        config,
        versions: &versions(device_of(step)),
        devices,
        ranks: world.size(),
        hosts: world.hosts(),
        threads: threads::count(),
        transport: step.reducer().group().transport(),
        overlap: step.reducer().overlaps(),
        buckets: step.stages().iter().map(|stage| stage.reducer().buckets().len()).sum(),
        data: &data.description,
        fingerprint: &data.train.fingerprint()?,
        parameters: step.stages().iter().map(|stage| stage.model().params.count()).sum(),
        steps: plan.steps,
        steps_per_epoch: plan.sampler.steps_per_epoch(),
    })
}

/// Names and versions of what computes: this program's, and on a GPU those of CUDA's parts, as far as they tell.
pub(super) fn versions(device: Device) -> Vec<(&'static str, String)> {
    let mut versions = vec![
        ("ddp-train", env!("CARGO_PKG_VERSION").to_string()),
        ("simd", format!("{:?}", simd::level()).to_lowercase()),
    ];
    if device.is_accelerator() {
        let found = discover();
        let driver = found.driver_version.map(|(major, minor)| format!("{major}.{minor}"));
        let parts = [
            ("cuda-driver", driver),
            ("nvrtc", found.nvrtc.version.clone()),
            ("cublaslt", found.cublaslt.version.clone()),
            ("nccl", found.nccl.version.clone()),
        ];
        versions.extend(parts.into_iter().filter_map(|(name, version)| Some((name, version?))));
    }
    versions
}

/// Where each rank trains: `cpu on node7, 8 threads`, `cuda:0 NVIDIA H200 on node7, 8 threads`.
pub(super) fn places(world: &World, devices: &[Device]) -> Result<Vec<String>> {
    let devices: Vec<String> = devices.iter().map(|&device| config::described(device)).collect();
    let mine = format!("{} on {}, {} threads", devices.join(" and "), world.host(), threads::count());
    let all = world.all_gather_bytes(mine.as_bytes())?;
    Ok(all.into_iter().map(|text| String::from_utf8_lossy(&text).into_owned()).collect())
}

/// Says where the ranks train, a line each.
fn tell_places(world: &World, places: &[String]) {
    for (rank, place) in places.iter().enumerate() {
        match world.size() {
            1 => tracing::info!("training on {place}"),
            _ => tracing::info!("rank {rank} trains on {place}"),
        }
    }
}
