//! The folder of a run before its first step: settings, the first line of the record or the line
//! that it resumes, and what every checkpoint says.

use std::collections::BTreeMap;
use std::io::Write;

use ddp_comm::World;
use ddp_data::text::TOKENIZER_FILE;
use ddp_kernels::files as disk;
use ddp_kernels::threads;
use ddp_nn::params::Parameter;
use serde_json::{Map, Value};

use super::program::Program;
use super::setup::Assembled;
use super::{places, resume};
use crate::checkpoint::{self, Opened, Position, ScheduleState, State, WorldState};
use crate::config::{Config, GraphChoice, Resident, Resume};
use crate::digest;
use crate::error::Result;
use crate::record::{self, Event, LockedRecord, Record, ResumeEvent, Start, StartWorld};
use crate::shown::shown;
use crate::tasks;

/// The settings of a run, as given and as chosen.
pub(super) struct Settings {
    /// With the run's choices in place of defaults, for the record and checkpoints.
    pub(super) values: Map<String, Value>,
    /// The content of the settings' file.
    pub(super) file: String,
    /// Of the program and of libraries, by name.
    versions: BTreeMap<String, String>,
}

impl Settings {
    pub(super) fn of(options: &Config, run: &Assembled, world: &World) -> Settings {
        // How a run was started is no property of the run.
        let given = Config {
            resume: Resume::Never,
            override_: false,
            ..options.settled()
        };
        let (captured, kept) = (run.kept.step.graphs().is_some(), run.kept_bytes.is_some());
        let chosen = Config {
            graph: [GraphChoice::Off, GraphChoice::On][usize::from(captured)],
            data_on_device: [Resident::Off, Resident::On][usize::from(kept)],
            warmup_steps: Some(run.plan.warmup_steps),
            eval_every: Some(run.plan.eval_every),
            checkpoint_every: Some(run.plan.checkpoint_every),
            threads: Some(threads::count()),
            ..given.clone()
        };
        let mut versions = places::versions(run.devices[0]);
        versions.insert("program".into(), places::program(world));
        Settings {
            values: chosen.to_json(),
            // Another run may have other ranks, devices or steps: it makes its own choices.
            file: given.to_toml(),
            versions,
        }
    }
}

/// What every checkpoint of this run says, besides how far it is.
pub(super) fn state(
    options: &Config,
    settings: &Settings,
    run: &Assembled,
    world: &World,
) -> Result<State> {
    let (data, plan, ranks) = (&run.data, &run.plan, world.size());
    let held_out = match data.held_out.rows() {
        0 => None,
        _ => Some(data.held_out.fingerprint()?),
    };
    let saved = run.resumed.as_ref().map(|opened| &opened.state);
    let loss =
        tasks::of(data.train.task()).settled(&options.loss_options(), data, options.data.name())?;
    // Another number of ranks has matmuls of other shapes, unless each has whole shards.
    let saved = saved.filter(|it| options.same_bits.is_some() || it.world.ranks == ranks);
    Ok(State {
        // The saver fills it in.
        format: 0,
        program: places::program(world),
        versions: settings.versions.clone(),
        step: 0,
        samples: 0,
        config: settings.values.clone(),
        position: Position {
            seed: options.seed,
            epoch: 0,
            in_epoch: 0,
            rows: plan.sampler.rows(),
            batch: options.batch_rows(),
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
            optimizer_parts: if options.zero == 1 { ranks } else { 1 },
            devices: run.places.clone(),
        },
        task: data.train.task().clone(),
        row_shape: data.train.row_shape().to_vec(),
        image: data.train.spec().image.clone(),
        normalization: data.normalization.clone(),
        target_normalization: data.target_normalization.clone(),
        plan: data.plan.clone(),
        columns: data.columns.clone(),
        label: data.label.clone(),
        class_weights: loss.class_weights.numbers(),
        fingerprint: data.train.fingerprint()?,
        held_out,
        products: saved.and_then(|state| state.products.clone()),
        best: None,
        last: None,
    })
}

/// Opens the record of a run that continues with this rank as rank 0: another one wrote it. Lines
/// after the steps taken are cut.
pub(super) fn take_over(
    options: &Config,
    program: &mut dyn Program,
    settings: &Settings,
    run: &Assembled,
    world: &World,
) -> Result<Record> {
    let (out, taken) = (&options.out, run.taken());
    checkpoint::put_aside_after(out, taken)?;
    let (mut record, has_start) = match LockedRecord::find(out)? {
        Some(locked) => Record::resume(out, &settings.file, locked, taken)?,
        None => (Record::create(out, &settings.file)?, false),
    };
    if !has_start {
        write_start(&mut record, settings, run, world)?;
    }
    program.begin(out, taken, run.plan.steps)?;
    Ok(record)
}

/// Opens the record of a new or resumed run, on rank 0.
pub(super) fn open_record(
    options: &Config,
    program: &mut dyn Program,
    settings: &Settings,
    run: &Assembled,
    world: &World,
    locked: Option<LockedRecord>,
) -> Result<Record> {
    let (out, file) = (&options.out, &settings.file);
    let (mut record, has_start) = match &run.resumed {
        Some(opened) => {
            // A record that another process began meanwhile is refused.
            let locked = locked.map_or_else(|| LockedRecord::empty(out), Ok)?;
            // Newer checkpoints are put aside before the record is cut, so that the record always
            // reaches as far as the newest checkpoint.
            let step = opened.state.step;
            checkpoint::put_aside_after(out, step)?;
            Record::resume(out, file, locked, step)?
        }
        None if options.resume == Resume::Auto && record::check_free(out).is_err() => {
            // Nothing was saved: the run starts over, and its record so far is put aside, unless
            // another process has begun it since this one looked.
            if locked.is_some() {
                checkpoint::put_aside(&out.join(record::EVENTS_FILE))?;
            }
            drop(locked);
            Record::resume(out, file, LockedRecord::empty(out)?, 0)?
        }
        None => {
            drop(locked);
            (Record::create(out, file)?, false)
        }
    };
    if let Some(tokenizer) = &run.data.tokenizer {
        let path = out.join(TOKENIZER_FILE);
        disk::replace_file(&path, |file| {
            let written = file.write_all(&tokenizer.file);
            written.map_err(disk::failed("write", &path))
        })?;
    }
    tracing::info!("{}", shown(&run.data.description));
    log_places(&run.places);
    log_plan(options, run);
    if !has_start {
        write_start(&mut record, settings, run, world)?;
    }
    program.begin(out, run.taken(), run.plan.steps)?;
    if let Some(opened) = &run.resumed {
        write_resume(&mut record, options, settings, run, opened)?;
    }
    Ok(record)
}

fn write_resume(
    record: &mut Record,
    options: &Config,
    settings: &Settings,
    run: &Assembled,
    opened: &Opened,
) -> Result<()> {
    let (step, folder) = (opened.state.step, &opened.folder);
    let from = folder.strip_prefix(&options.out).unwrap_or(folder);
    let overridden = &run.overridden;
    tracing::info!("resuming after step {step}, from {}", folder.display());
    if !overridden.is_empty() {
        tracing::warn!(
            "what is computed changes from here on: {}",
            overridden.join(", ")
        );
    }
    let versions = &settings.versions;
    resume::warn_of_other_bits(options, (&run.places, versions), &opened.state);
    record.write(&Event::Resume(ResumeEvent {
        time_unix_s: record::unix_s(),
        step,
        from: &from.to_string_lossy(),
        ranks: run.places.len(),
        devices: &run.places,
        versions,
        overridden,
    }))
}

/// The first line of the record.
fn write_start(
    record: &mut Record,
    settings: &Settings,
    run: &Assembled,
    world: &World,
) -> Result<()> {
    let (step, data, plan) = (&run.kept.step, &run.data, &run.plan);
    let stages = step.stages();
    // Reducers of all stages communicate in the same way.
    let reducer = stages[0].reducer();
    let buckets = stages.iter().map(|stage| stage.reducer().buckets().len());
    let parameters = stages.iter().map(|stage| stage.model().params.count());
    let transport = reducer.group().transport();
    let bits_may_differ = match transport {
        "nccl" => ddp_comm::settings_of_free_order(),
        _ => Vec::new(),
    };
    record.write(&Event::Start(Start {
        time_unix_s: record::unix_s(),
        config: &settings.values,
        versions: &settings.versions,
        devices: &run.places,
        world: StartWorld {
            ranks: world.size(),
            hosts: world.hosts(),
            threads: threads::count(),
            transport,
            overlap: reducer.overlaps(),
            buckets: buckets.sum(),
            bits_may_differ,
        },
        data: &data.description,
        fingerprint: &data.train.fingerprint()?,
        parameters: parameters.sum(),
        steps: plan.steps,
        steps_per_epoch: plan.sampler.steps_per_epoch(),
        initial_weights: digest::of_weights(stages.iter().map(|stage| &stage.model().params))?,
    }))
}

fn log_places(places: &[String]) {
    match places {
        [place] => tracing::info!("training on {place}"),
        [first, rest @ ..] if rest.iter().all(|place| place == first) => {
            tracing::info!("{} ranks train, each on {first}", places.len());
        }
        _ => {
            for (rank, place) in places.iter().enumerate() {
                tracing::info!("rank {rank} trains on {place}");
            }
        }
    }
}

/// The size of the model, how long it is trained, and where results go.
fn log_plan(options: &Config, run: &Assembled) {
    let stages = run.kept.step.stages().iter();
    let parameters: usize = stages.map(|stage| stage.model().params.count()).sum();
    let (steps, out) = (run.plan.steps, options.out.display().to_string());
    tracing::info!(
        "a model with {parameters} parameters, for {steps} steps of {} rows; results in {}",
        options.batch_rows(),
        shown(&out)
    );
    if let Some([name, other]) = options.rule().hidden_and_rest() {
        let stages = run.kept.step.stages().iter();
        let trained = stages.flat_map(|stage| stage.model().params.list());
        let trained = trained.filter(|parameter| parameter.is_trained());
        let (hidden, others): (Vec<_>, Vec<_>) = trained.partition(|p| !p.matrices.is_empty());
        let matrices: usize = hidden.iter().map(|p| p.matrices.len()).sum();
        let values = |of: &[&Parameter]| -> usize { of.iter().map(|p| p.range.len()).sum() };
        tracing::info!(
            "{name} updates {matrices} matrices with {} parameters, {other} the other {}",
            values(&hidden),
            values(&others)
        );
    }
}
