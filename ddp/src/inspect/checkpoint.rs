//! Inspects a checkpoint. All of its bytes are checked.

use std::path::Path;
use std::{fs, io};

use ddp_kernels::choice::Choice;
use serde_json::{Value, json};

use super::model::Tensors;
use super::sheet::{Inspected, Sheet, some_of, table};
use crate::checkpoint::{self, Best, MODEL_FILE, STATE_FILE, State};
use crate::config::{Config, as_flag};
use crate::data::{LabelName, Normalization, TaskSpec};
use crate::error::Result;
use crate::files;
use crate::shown::{shown, significant};
use crate::units::plural;

/// Inspects the checkpoint in `folder`.
pub(super) fn found(folder: &Path) -> Result<Inspected> {
    let opened = checkpoint::open(folder)?;
    let state = &opened.state;
    let config = Config::of_checkpoint(&opened)?;
    let tensors = Tensors::read(&folder.join(MODEL_FILE))?;
    let files = sizes(folder)?;
    let sheet = sheet(folder, state, &config, &tensors, &files)?;
    let file = |(name, bytes): &(String, u64)| json!({ "name": name, "bytes": bytes });
    let mut json = json!(state);
    for (name, value) in [
        ("kind", "checkpoint".into()),
        ("path", folder.to_string_lossy().into()),
        ("is_whole", true.into()),
        ("model", model_json(state, &config, &tensors)),
        ("config", config.to_json().into()),
        ("files", files.iter().map(file).collect()),
    ] {
        json[name] = value;
    }
    Inspected::intact(sheet, json)
}

fn sheet(
    folder: &Path,
    state: &State,
    config: &Config,
    tensors: &Tensors,
    files: &[(String, u64)],
) -> Result<Sheet> {
    let folder = folder.display();
    let mut sheet = Sheet::new(format!(
        "checkpoint {folder}: intact, every checksum is right"
    ));
    let (step, steps, samples) = (state.step, state.schedule.steps, state.samples);
    let position = &state.position;
    let (batch, epoch) = (position.in_epoch + 1, position.epoch + 1);
    let next = match step < steps {
        true => format!("; next batch {batch} of epoch {epoch}"),
        false => String::new(),
    };
    let step = format!("{step} of {steps}, {samples} rows trained on{next}");
    sheet.add("step", step);
    let best = state
        .best
        .filter(|best| state.last.is_none_or(|last| best.step != last.step));
    let best = best.map(|best| format!("\nbest {}", evaluation(&best)));
    let last = state.last.as_ref().map(evaluation);
    let last = last.unwrap_or_else(|| "none so far".into());
    sheet.add("evaluation", last + &best.unwrap_or_default());
    sheet.add("task", task(&state.task));
    sheet.add("rows", rows(state, config));
    let normalized = state.target_normalization.as_ref().map(targets);
    if let Some((done, _)) = &normalized {
        sheet.add("labels", format!("standardized: {done}"));
    }
    let (data, count, batch) = (
        shown(&config.data.to_string()),
        position.rows,
        position.batch,
    );
    sheet.add("data", format!("{data}: {count} rows, batches of {batch}"));
    let (elements, dtype, names) = (tensors.elements(), config.dtype, tensors.table());
    let model = format!("{elements} parameters in {dtype:?}\n{names}");
    sheet.add("model", model);
    let (frozen, count) = tensors.those(|name| config.is_frozen(name));
    if count > 0 {
        let names = some_of(&frozen);
        let text = format!("{names}: {count} parameters were not trained");
        sheet.add("frozen", text);
    }
    if let Some(torch) = torch(state, config) {
        let undone = normalized.map(|(_, text)| format!("\nin the units of the labels: {text}"));
        sheet.add("torch", torch + &undone.unwrap_or_default());
    }
    sheet.add("optimizer", optimizer(state, config));
    let devices: Vec<String> = state.world.devices.iter().map(|text| shown(text)).collect();
    let ranks = plural(state.world.ranks as u64, "rank");
    sheet.add("trained on", format!("{ranks}\n{}", devices.join("\n")));
    let row = |(name, bytes): &(String, u64)| vec![name.clone(), format!("{bytes} bytes")];
    sheet.add("files", table(&files.iter().map(row).collect::<Vec<_>>()));
    Ok(sheet)
}

/// `loss 0.0312, accuracy 99.10%, after step 790`
pub(super) fn evaluation(best: &Best) -> String {
    let (loss, step) = (significant(best.loss, 4), best.step);
    let accuracy = best
        .accuracy
        .map(|part| format!(", accuracy {:.2}%", 100.0 * part));
    format!(
        "loss {loss}{}, after step {step}",
        accuracy.unwrap_or_default()
    )
}

pub(super) fn task(task: &TaskSpec) -> String {
    match task.classes() {
        Some(classes) => format!("{task}: {}", some_of(&classes.names())),
        None => task.to_string(),
    }
}

/// `28x28`
fn lengths(shape: &[usize]) -> String {
    let lengths: Vec<String> = shape.iter().map(usize::to_string).collect();
    lengths.join("x")
}

fn rows(state: &State, config: &Config) -> String {
    let mut text = format!("of shape {:?}", state.row_shape);
    match config.model.value("image").as_str() {
        Some(image) if !image.is_empty() => text += &format!(", images {image}"),
        _ if !state.image.is_empty() => text += &format!(", images {}", lengths(&state.image)),
        _ => {}
    }
    if let Some(columns) = &state.columns {
        text += &format!(", the columns {}", some_of(columns));
    }
    if let Some(LabelName::Column(name) | LabelName::Array(name)) = &state.label {
        text += &format!(", labels {name}");
    }
    let plans = state.plan.columns.iter().flatten();
    let categorical = plans.filter(|plan| plan.values.is_some());
    let categorical: Vec<_> = categorical.map(|plan| plan.name.clone()).collect();
    if !categorical.is_empty() {
        text += &format!("; categorical: {}", some_of(&categorical));
    }
    if state.plan.fill.is_some() {
        text += "; missing numbers are filled in";
    }
    match &state.normalization {
        None => text + "; not normalized",
        Some(Normalization { shift, scale }) => match (&shift[..], &scale[..]) {
            ([shift], [scale]) => text + &format!("; normalized: (x - {shift:?}) * {scale:?}"),
            _ => text + &format!("; normalized: {} features, each separately", shift.len()),
        },
    }
}

/// How numeric labels were normalized, and how to undo it.
fn targets(Normalization { shift, scale }: &Normalization) -> (String, String) {
    match (&shift[..], &scale[..]) {
        ([shift], [scale]) => (
            format!("(label - {shift:?}) * {scale:?}"),
            format!("model(x) / {scale:?} + {shift:?}"),
        ),
        _ => (
            "(label - shift) * scale, each separately".to_string(),
            format!("model(x) / scale + shift, of target_normalization in {STATE_FILE}"),
        ),
    }
}

fn optimizer(state: &State, config: &Config) -> String {
    let values = config.to_json();
    let constants = config.optimizer.declared().defaults.iter();
    let constants = constants.filter(|(name, _)| !["lr", "weight-decay"].contains(name));
    let constant = |(name, _): &(&str, f64)| format!("{name} {}", as_flag(&values[*name]));
    let constants: Vec<_> = constants.map(constant).collect();
    let rule = format!("{} ({})", config.optimizer.name(), constants.join(", "));
    let parts = match state.world.optimizer_parts {
        1 => "moments in 1 file".to_string(),
        parts => format!("moments in {parts} files, one for each rank (ZeRO-1)"),
    };
    let (rate, peak) = (state.schedule.learning_rate, config.peak_lr());
    format!("{rule}, next learning rate {rate:?} of {peak:?}, {parts}")
}

/// The model in PyTorch.
fn torch(state: &State, config: &Config) -> Option<String> {
    config.model.torch(&state.row_shape, state.task.outputs())
}

fn model_json(state: &State, config: &Config, tensors: &Tensors) -> Value {
    let mut model = json!({
        "kind": config.model.name(),
        "inputs": state.row_shape.last(),
        "outputs": state.task.outputs(),
        "dtype": config.dtype,
        "parameters": tensors.elements(),
        "tensors": tensors.to_json(),
        "frozen": tensors.those(|name| config.is_frozen(name)).0,
        "torch": torch(state, config),
    });
    let settings = json!(config.model);
    for (name, value) in settings.as_object().into_iter().flatten() {
        if name != "model" {
            model[name] = value.clone();
        }
    }
    model
}

/// The files of a folder by name, with their sizes in bytes. Those that a running job removes
/// meanwhile are left out.
pub(super) fn sizes(folder: &Path) -> Result<Vec<(String, u64)>> {
    let failed = || files::failed("list", folder);
    let size = |entry: io::Result<fs::DirEntry>| {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        match entry.metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            metadata => Ok(Some((name, metadata?.len()))),
        }
    };
    let entries = fs::read_dir(folder).map_err(failed())?;
    let sizes = entries.map(size).filter_map(io::Result::transpose);
    let mut sizes: Vec<_> = sizes.collect::<io::Result<_>>().map_err(failed())?;
    sizes.sort();
    Ok(sizes)
}
