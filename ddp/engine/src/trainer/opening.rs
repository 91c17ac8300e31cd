//! The folder of a run before its first step: settings, the first line of the record or the line
//! that it resumes, and what every checkpoint says.

use std::path::Path;

use ddp_comm::World;
use ddp_kernels::threads;

use super::options::{Resume, RunOptions};
use super::places::versions;
use super::program::{Program, Settings};
use super::resume;
use super::setup::Assembled;
use crate::checkpoint::{Opened, Position, ScheduleState, State, WorldState};
use crate::error::Result;
use crate::record::{self, EVENTS_FILE, Held, Kept, Record, ResumeEvent, Start};

/// What every checkpoint of this run says, besides how far it is.
pub(super) fn state(
    options: &RunOptions,
    settings: &Settings,
    run: &Assembled,
    ranks: usize,
) -> Result<State> {
    let (data, plan) = (&run.data, &run.plan);
    let held_out = match data.held_out.rows() {
        0 => None,
        _ => Some(data.held_out.fingerprint()?),
    };
    Ok(State {
        // The saver fills it in.
        format: 0,
        program: format!("ddp-train {}", env!("CARGO_PKG_VERSION")),
        step: 0,
        samples: 0,
        config: settings.values.clone(),
        position: Position {
            seed: options.seed,
            epoch: 0,
            in_epoch: 0,
            rows: plan.sampler.rows(),
            batch: options.batch_size,
            drop_last: options.drop_last,
        },
        schedule: ScheduleState {
            steps: plan.steps,
            warmup_steps: plan.warmup_steps,
            learning_rate: 0.0,
        },
        optimizer_since: 0,
        world: WorldState {
            ranks,
            optimizer_parts: if options.reduction.zero { ranks } else { 1 },
            devices: run.places.clone(),
        },
        task: data.train.task().clone(),
        row_shape: data.train.row_shape().to_vec(),
        normalization: data.normalization.clone(),
        columns: data.columns.clone(),
        label: data.label.clone(),
        fingerprint: data.train.fingerprint()?,
        held_out,
        best: None,
        last: None,
    })
}

/// Opens the record of a new or resumed run, on rank 0.
pub(super) fn open_record(
    options: &RunOptions,
    program: &mut dyn Program,
    settings: &Settings,
    run: &Assembled,
    world: &World,
    held: Option<Held>,
) -> Result<Record> {
    let (out, file) = (&options.out, &settings.file);
    let starts_over = options.resume == Resume::Auto && record::check_free(out).is_err();
    // Newer checkpoints are put aside before the record is cut, so that the record always reaches
    // as far as the newest checkpoint.
    let (mut record, kept) = match &run.resumed {
        Some(opened) => {
            resume::put_aside(out, resume::first_to_put_aside(opened, out))?;
            Record::go_on(out, file, held, Some(opened.state.step))?
        }
        None if starts_over => {
            resume::put_aside(out, 0)?;
            Record::go_on(out, file, held, None)?
        }
        None => {
            drop(held);
            (Record::create(out, file)?, Kept::default())
        }
    };
    if run.devices[0].is_accelerator() {
        log_places(&run.places);
    }
    if !kept.has_start {
        write_start(&mut record, settings, run, world)?;
    }
    program.begin(out, run.taken(), run.plan.steps)?;
    if let Some(opened) = &run.resumed {
        warn_of_gap(out, kept, opened);
        write_resume(&mut record, options, program, run, opened)?;
    }
    Ok(record)
}

/// Warns of lines that are missing between the record's end and the checkpoint.
pub(super) fn warn_of_gap(out: &Path, kept: Kept, opened: &Opened) {
    let State { step, config, .. } = &opened.state;
    let log_every = config.get("log-every").and_then(|value| value.as_u64());
    if kept.has_gap(*step, log_every.unwrap_or(1)) {
        tracing::warn!(
            "{} ends at step {}, and the checkpoint is of step {step}: lines are missing",
            out.join(EVENTS_FILE).display(),
            kept.last_step.unwrap_or(0),
        );
    }
}

fn write_resume(
    record: &mut Record,
    options: &RunOptions,
    program: &dyn Program,
    run: &Assembled,
    opened: &Opened,
) -> Result<()> {
    let (step, folder) = (opened.state.step, &opened.folder);
    let from = folder.strip_prefix(&options.out).unwrap_or(folder);
    let overridden: Vec<String> = run
        .overridden
        .iter()
        .map(|text| program.named(text))
        .collect();
    tracing::info!("resuming after step {step}, from {}", folder.display());
    if !overridden.is_empty() {
        tracing::warn!(
            "what is computed changes from here on: {}",
            overridden.join(", ")
        );
    }
    record.resume(&ResumeEvent {
        step,
        from: &from.to_string_lossy(),
        ranks: run.places.len(),
        devices: &run.places,
        overridden: &overridden,
    })
}

/// The first line of the record.
fn write_start(
    record: &mut Record,
    settings: &Settings,
    run: &Assembled,
    world: &World,
) -> Result<()> {
    let (step, data, plan) = (&run.step, &run.data, &run.plan);
    let stages = step.stages();
    let reducer = stages[0].reducer();
    record.start(&Start {
        config: &settings.values,
        versions: &versions(run.devices[0]),
        devices: &run.places,
        ranks: world.size(),
        hosts: world.hosts(),
        threads: threads::count(),
        transport: reducer.group().transport(),
        overlap: reducer.overlaps(),
        buckets: stages
            .iter()
            .map(|stage| stage.reducer().buckets().len())
            .sum(),
        data: &data.description,
        fingerprint: &data.train.fingerprint()?,
        parameters: stages
            .iter()
            .map(|stage| stage.model().params.count())
            .sum(),
        steps: plan.steps,
        steps_per_epoch: plan.sampler.steps_per_epoch(),
    })
}

fn log_places(places: &[String]) {
    match places {
        [place] => tracing::info!("training on {place}"),
        _ => {
            for (rank, place) in places.iter().enumerate() {
                tracing::info!("rank {rank} trains on {place}");
            }
        }
    }
}
