//! Inspects a checkpoint. All of its bytes are checked.

use std::path::Path;
use std::{fs, io};

use ddp_kernels::setting::Choice;
use serde_json::json;

use super::model::FileTensors;
use super::sheet::{Inspected, Sheet, some_of, table};
use crate::checkpoint::{self, Best, MODEL_FILE, STATE_FILE, State};
use crate::config::{Config, as_flag};
use crate::data::{LabelName, Normalization, TaskSpec};
use crate::error::Result;
use crate::files;
use crate::shown::shown;
use crate::tasks::BestBy;
use crate::units::plural;

/// Inspects the checkpoint in `folder`.
pub(super) fn found(folder: &Path) -> Result<Inspected> {
    let opened = checkpoint::open(folder)?;
    let (state, config) = (&opened.state, Config::of_checkpoint(&opened)?);
    let tensors = FileTensors::read(&folder.join(MODEL_FILE))?;
    let (outputs, position) = (state.task.outputs(), &state.position);
    let path = folder.display();
    let mut sheet = Sheet::new(format!(
        "checkpoint {path}: intact, every checksum is right"
    ));

    sheet.add("step", progress(state));
    sheet.add("evaluation", evaluations(state));
    sheet.add("task", task(&state.task));
    sheet.add("rows", rows(state, &config));
    let normalized = state.target_normalization.as_ref().map(targets);
    if let Some((done, _)) = &normalized {
        sheet.add("labels", format!("standardized: {done}"));
    }
    let data = shown(&config.data.to_string());
    let (count, batch) = (position.rows, position.batch);
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
    let torch = match &config.lora {
        None => config.model.torch(&state.row_shape, outputs),
        Some(lora) => {
            sheet.add("adapters", shown(&lora.to_string()));
            None
        }
    };
    if let Some(torch) = &torch {
        let undone = normalized.map(|(_, text)| format!("\nin the units of the labels: {text}"));
        sheet.add("torch", torch.clone() + &undone.unwrap_or_default());
    }
    sheet.add("optimizer", optimizer(state, &config));
    let devices: Vec<String> = state.world.devices.iter().map(|text| shown(text)).collect();
    let ranks = plural(state.world.ranks as u64, "rank");
    sheet.add("trained on", format!("{ranks}\n{}", devices.join("\n")));
    let files = sizes(folder)?;
    let row = |(name, bytes): &(String, u64)| vec![name.clone(), format!("{bytes} bytes")];
    sheet.add("files", table(&files.iter().map(row).collect::<Vec<_>>()));

    let mut json = json!(state);
    json["kind"] = "checkpoint".into();
    json["path"] = folder.to_string_lossy().into();
    json["is_whole"] = true.into();
    json["config"] = config.to_json().into();
    let file = |(name, bytes): &(String, u64)| json!({ "name": name, "bytes": bytes });
    json["files"] = files.iter().map(file).collect();
    json["model"] = json!({
        "kind": config.model.name(),
        "inputs": state.row_shape.last(),
        "outputs": outputs,
        "dtype": config.dtype,
        "parameters": elements,
        "tensors": tensors.to_json(),
        "frozen": frozen,
        "torch": torch,
    });
    for (name, value) in config.model.values() {
        json["model"][name] = value;
    }
    Ok(Inspected(sheet, json, None))
}

fn progress(state: &State) -> String {
    let (step, steps, samples) = (state.step, state.schedule.steps, state.samples);
    let text = format!("{step} of {steps}, {samples} rows trained on");
    if step == steps {
        return text;
    }
    let (batch, epoch) = (state.position.in_epoch + 1, state.position.epoch + 1);
    format!("{text}; next batch {batch} of epoch {epoch}")
}

/// The last evaluation, and the best one if it is another.
fn evaluations(state: &State) -> String {
    let Some(last) = &state.last else {
        return "none so far".into();
    };
    let best = state.best.filter(|best| best.step != last.step);
    let best = best.map(|best| format!("\nbest {}", evaluation(&best)));
    evaluation(last) + &best.unwrap_or_default()
}

/// `loss 0.0312, accuracy 99.10%, after step 790`; first what decides which one is the best.
pub(super) fn evaluation(best: &Best) -> String {
    let accuracy = best.accuracy.map(|part| (BestBy::Accuracy, part));
    let accuracy = accuracy.filter(|it| best.by != Some(*it));
    let figures = best.by.into_iter().chain([(BestBy::Loss, best.loss)]);
    let figures = figures.chain(accuracy).map(|(by, it)| by.text(it));
    let figures = Vec::from_iter(figures).join(", ");
    format!("{figures}, after step {}", best.step)
}

pub(super) fn task(task: &TaskSpec) -> String {
    match task.classes() {
        Some(classes) => format!("{task}: {}", some_of(&classes.names())),
        None => task.to_string(),
    }
}

fn rows(state: &State, config: &Config) -> String {
    let mut text = format!("of shape {:?}", state.row_shape);
    let lengths: Vec<String> = state.image.iter().map(usize::to_string).collect();
    match config.model.value("image").as_str() {
        Some(image) if !image.is_empty() => text += &format!(", images {image}"),
        _ if !lengths.is_empty() => text += &format!(", images {}", lengths.join("x")),
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
    let normalized = state.normalization.as_ref();
    text + &match normalized.map(|it| (&it.shift[..], &it.scale[..])) {
        None => "; not normalized".to_string(),
        Some(([shift], [scale])) => format!("; normalized: (x - {shift:?}) * {scale:?}"),
        Some((all, _)) => format!("; normalized: {} features, each separately", all.len()),
    }
}

/// How numeric labels were normalized, and how to undo it.
fn targets(normalization: &Normalization) -> (String, String) {
    let Normalization {
        shift,
        scale,
        range,
    } = normalization;
    let clipped = match range[..] {
        [] => String::new(),
        [[least, greatest]] => format!(", clipped to {least:?} … {greatest:?}"),
        _ => format!(", clipped to the range in {STATE_FILE}"),
    };
    match (&shift[..], &scale[..]) {
        ([shift], [scale]) => (
            format!("(label - {shift:?}) * {scale:?}"),
            format!("model(x) / {scale:?} + {shift:?}{clipped}"),
        ),
        _ => (
            "(label - shift) * scale, each separately".to_string(),
            format!("model(x) / scale + shift, of target_normalization in {STATE_FILE}{clipped}"),
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
        parts => format!("moments in {parts} files, one for each rank (ZeRO)"),
    };
    let (rate, peak) = (state.schedule.learning_rate, config.peak_lr());
    format!("{rule}, next learning rate {rate:?} of {peak:?}, {parts}")
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
