//! Model and rows, made ready on all ranks: the same checkpoint, and data such as it was trained on.

use std::sync::Arc;

use ddp_comm::{Field, World};
use ddp_kernels::{Device, threads};

use super::choose::choose;
use super::dealt::Dealt;
use super::forward::Forward;
use crate::checkpoint::{self, Chosen, MODEL_FILE, Opened, State};
use crate::config::{self, Config, Normalize, Precision, TaskKind, UseConfig};
use crate::data::{self, DataRequest, DataSpec, Dataset, InOrder, Source, Task, Trained};
use crate::error::{Error, Result};
use crate::trainer::model::models;

/// A model and the rows it is used on, on one rank.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) opened: Opened,
    /// Why this checkpoint, for people.
    pub(super) why: String,
    pub(super) forward: Forward,
    pub(super) dealt: Arc<Dealt>,
    pub(super) batches: InOrder,
}

/// Makes both ready. All ranks call it together.
pub(super) fn ready(config: &UseConfig, world: &World, needs_labels: bool) -> Result<Ready> {
    let using = &config.using;
    threads::set_count(using.threads.unwrap_or_else(|| world.default_threads()))?;
    let device = config::find_devices(using.device, 1, using.share_gpus, world)?[0];
    let Chosen { opened, why } = choose_together(config, world)?;
    let rows = rows(config, world, &opened.state, needs_labels)?;
    let forward = Forward::new(model(&opened, device, world)?)?;
    checkpoint::wait_for_all(world)?;
    agree(config, world, &opened, &*rows)?;
    let batch = using.batch_size.min(usize::try_from(rows.rows()).unwrap_or(usize::MAX));
    let dealt = Arc::new(Dealt::new(rows, world.rank(), world.size(), batch));
    let batches = InOrder::from_source(Source::new(dealt.clone(), [device; 2]), 0, 1, dealt.batch())?;
    Ok(Ready { opened, why, forward, dealt, batches })
}

/// The checkpoint that rank 0 chooses: a run that goes on may have another newest one a moment later.
fn choose_together(config: &UseConfig, world: &World) -> Result<Chosen> {
    let mut why = "as rank 0 chose".to_string();
    let opened = checkpoint::open_together(world, || {
        let chosen = choose(&config.using.checkpoint)?;
        why = chosen.why;
        Ok(Some(chosen.opened))
    })?;
    let opened = opened.ok_or_else(|| Error::Internal("no checkpoint was chosen".into()))?;
    Ok(Chosen { opened, why })
}

/// The rows, as the model needs them.
fn rows(config: &UseConfig, world: &World, state: &State, needs_labels: bool) -> Result<Arc<dyn Dataset>> {
    let task = match &state.task {
        Task::Classification { .. } => TaskKind::Classification,
        Task::Regression { .. } => TaskKind::Regression,
    };
    let trained = Trained {
        task: state.task.clone(),
        row_shape: state.row_shape.clone(),
        normalization: state.normalization.clone(),
        columns: state.columns.clone(),
        label: state.label.clone(),
        needs_labels,
    };
    let request = DataRequest {
        data: config.using.data.clone(),
        labels: config.labels.clone(),
        val_data: None,
        val_labels: None,
        val_split: 0.0,
        seed: state.config.seed,
        task: Some(task),
        normalize: Normalize::None,
        cache_dir: config.using.cache_dir.clone(),
        trained: Some(trained),
    };
    let data = data::prepare(&request, world)?;
    // Of files all rows are here: none were asked to be held out.
    let rows = if data.held_out.rows() > 0 { data.held_out } else { data.train };
    check_rows(&config.using.data, &*rows, state)?;
    Ok(rows)
}

/// Refuses rows that the model was not made for.
fn check_rows(spec: &DataSpec, rows: &dyn Dataset, state: &State) -> Result<()> {
    let refuse = |what: &str, got: String, expected: String| {
        let way_out = "Give data like those it was trained on, or another --checkpoint";
        Err(Error::Data(format!("--data {spec}: expected {what} {expected}, as the model has, got {got}. {way_out}")))
    };
    if rows.rows() == 0 {
        return Err(Error::Data(format!("--data {spec}: expected rows, got none. Give data that have some")));
    }
    if rows.row_shape() != state.row_shape {
        return refuse("rows of shape", format!("{:?}", rows.row_shape()), format!("{:?}", state.row_shape));
    }
    match (rows.task(), &state.task) {
        (Task::Classification { classes: got, names }, Task::Classification { classes, names: known }) => {
            if got == classes && names == known {
                return Ok(());
            }
            let shown = |names: &[String]| match names.len() {
                0..=8 => names.join(", "),
                count => format!("{} … ({count} of them)", names[..7].join(", ")),
            };
            refuse("the classes", shown(names), shown(known))
        }
        (got, expected) if got != expected => refuse("labels for", got.to_string(), expected.to_string()),
        _ => Ok(()),
    }
}

/// The model of a checkpoint, on this rank's device. Nothing of it is trained, so it has neither gradients nor moments.
fn model(opened: &Opened, device: Device, world: &World) -> Result<crate::models::Model> {
    let state = &opened.state;
    check_size(opened)?;
    let mut config = state.config.clone();
    if !device.is_accelerator() && config.dtype != Precision::F32 {
        if world.rank() == 0 {
            tracing::info!(
                "the model was trained in {:?} and is used in f32 here, since this is on the CPU",
                config.dtype
            );
        }
        config.dtype = Precision::F32;
    }
    let everything = |_: &str| true;
    let mut models = models(&config, &state.row_shape, &state.task, &[device], &everything, 1)?;
    let model = models.pop().expect("a model for one device");
    checkpoint::load_opened(opened, &[&model.params])?;
    Ok(model)
}

/// Whether the file can hold a model of the size that the configuration claims: before memory is taken for it.
fn check_size(opened: &Opened) -> Result<()> {
    let Opened { state, files, .. } = opened;
    let bytes = files.iter().find(|entry| entry.name == MODEL_FILE).map_or(0, |entry| entry.bytes);
    match claimed_elements(&state.config, &state.row_shape, &state.task) {
        Some(elements) if elements.checked_mul(4).is_some_and(|claimed| claimed <= bytes) => Ok(()),
        claimed => Err(Error::Data(format!(
            "{}: expected a model of {} parameters, as {} says, got a file of {bytes} bytes. The checkpoint is damaged: take another",
            opened.model_file().display(),
            claimed.map_or("more than can be counted".to_string(), |claimed| claimed.to_string()),
            crate::checkpoint::STATE_FILE,
        ))),
    }
}

/// How many parameters a perceptron of this configuration has; none if they cannot be counted.
fn claimed_elements(config: &Config, row_shape: &[usize], task: &Task) -> Option<u64> {
    let mut inputs = row_shape.last().copied()? as u64;
    let mut elements = 0u64;
    for width in config.hidden.iter().copied().chain([task.outputs()]) {
        let width = width as u64;
        elements = elements.checked_add(inputs.checked_add(1)?.checked_mul(width)?)?;
        inputs = width;
    }
    Some(elements)
}

/// Ends all ranks, with an error that names what differs, unless they use the same model on the same rows.
fn agree(config: &UseConfig, world: &World, opened: &Opened, rows: &dyn Dataset) -> Result<()> {
    let flags = "Start every rank with the same flags.";
    let program = "Start every rank with the same build of ddp-train.";
    let same_model = "Give every rank the same checkpoint: compare the folders on the hosts.";
    let same_data = "Give every rank the same data: compare the files on the hosts.";
    let asked = format!(
        "batch-size = {}\nlabels = {:?}\njson = {}\npredictions = {:?}\n",
        config.using.batch_size, config.labels, config.json, config.predictions
    );
    let state = serde_json::to_string(&opened.state).map_err(|error| Error::Internal(error.to_string()))?;
    Ok(world.handshake(&[
        Field::must_match("the program's version", env!("CARGO_PKG_VERSION"), program),
        Field::must_match("what is asked for", asked, flags),
        Field::must_match("the checkpoint", state, same_model),
        Field::must_match("the data", rows.fingerprint()?, same_data),
    ])?)
}
