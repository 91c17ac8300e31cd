//! Data: how many rows of what, their classes and ranges, and whether training would take them. Reads all rows once.

use std::path::{Path, PathBuf};

use ddp_comm::World;
use serde_json::{Value, json};

use super::Found;
use super::checkpoint::task;
use super::sheet::{Sheet, some_of, table};
use crate::cli::InspectFlags;
use crate::config::Normalize;
use crate::data::choose;
use crate::data::files::{self, Array, Kind};
use crate::data::{self, Data, DataRequest, DataSpec, Dataset, Targets, Task};
use crate::error::{Error, Result};
use crate::shown::shown;

/// Rows that are looked at together.
const ROWS_AT_A_TIME: u64 = 1024;
/// Classes and features that are listed for people.
const SHOWN: usize = 20;
/// Lines about files.
const LINES_SHOWN: usize = 24;

/// What the rows come to.
#[derive(Debug)]
struct Survey {
    /// Over all features: the least, the largest, the mean.
    least: f32,
    largest: f32,
    mean: f64,
    /// Rows of each class; none of numbers.
    classes: Vec<u64>,
    /// Of numbers as labels: the least and the largest.
    labels: Option<[f32; 2]>,
}

/// What the data are.
pub(super) fn found(flags: &InspectFlags) -> Result<Found> {
    let spec: DataSpec = flags.path.parse().map_err(|error: Error| renamed(error, flags))?;
    let mut sheet = Sheet::new(format!("data {spec}"));
    let mut json = json!({ "kind": "data", "path": flags.path });
    if let DataSpec::Files(spec) = &spec {
        let (text, files) = contents(&choose::files(&spec.path, "PATH")?, flags)?;
        sheet.add("files", text);
        json["files"] = files;
    }
    let request = DataRequest {
        data: spec,
        labels: flags.labels.clone(),
        val_data: None,
        val_labels: None,
        val_split: 0.0,
        seed: 0,
        task: flags.task,
        normalize: Normalize::None,
        cache_dir: flags.cache_dir.clone(),
        trained: None,
    };
    let tried = World::single().map_err(Error::from).and_then(|world| data::prepare(&request, &world));
    let trouble = match tried.and_then(|data| tell(&data, &mut sheet, &mut json)) {
        Ok(()) => {
            sheet.add("training", "would take them");
            None
        }
        // What cannot be read is neither good nor bad data.
        Err(error @ Error::Io { .. }) => return Err(error),
        Err(error) => {
            sheet.add("training", format!("would refuse them: {}", shown(&error.to_string())));
            json["refused"] = json!(error.to_string());
            Some(error)
        }
    };
    json["is_sound"] = json!(trouble.is_none());
    Ok(Found { sheet, json, trouble })
}

/// What is in the files, whatever training would make of it.
fn contents(files: &[PathBuf], flags: &InspectFlags) -> Result<(String, Value)> {
    let mut lines = Vec::new();
    let mut json = Vec::new();
    for path in files {
        let bytes = std::fs::metadata(path).map_err(crate::files::failed("read", path))?.len();
        let (mut arrays, told) = arrays_of(path, flags)?;
        lines.push(vec![path.display().to_string(), format!("{bytes} bytes")]);
        lines.append(&mut arrays);
        json.push(json!({ "path": path.to_string_lossy(), "bytes": bytes, "holds": told }));
    }
    let left_out = lines.len().saturating_sub(LINES_SHOWN);
    lines.truncate(LINES_SHOWN);
    let more =
        if left_out > 0 { format!("\nand {left_out} lines more, all of which --json has") } else { String::new() };
    Ok((table(&lines) + &more, json.into()))
}

/// A line an array, or one for the columns of a table; and the same as JSON.
fn arrays_of(path: &Path, flags: &InspectFlags) -> Result<(Vec<Vec<String>>, Value)> {
    if choose::is_table(path) || matches!(files::kind(path)?, Kind::Csv | Kind::Parquet) {
        let columns = files::table::columns(path)?;
        let line = vec![format!("  {} columns: {}", columns.len(), some_of(&columns))];
        return Ok((vec![line], json!({ "columns": columns })));
    }
    if files::kind(path)? == Kind::Flat {
        files::flat::verify(path)?;
    }
    let contents = files::open(path, flags.cache_dir.as_deref())?;
    let shape = |array: &Array| [&[array.rows() as usize], array.row_shape()].concat();
    let key = |key: &str| if key.is_empty() { "  its array".to_string() } else { format!("  {key}") };
    let line = |array: &Array| vec![key(array.key()), format!("{} {:?}", array.element(), shape(array))];
    let mut lines: Vec<Vec<String>> = contents.arrays.iter().map(line).collect();
    lines.extend(contents.others.iter().map(|(name, why)| vec![key(name), format!("not usable: {why}")]));
    let array = |array: &Array| json!({ "key": array.key(), "element": array.element().name(), "shape": shape(array), "is_usable": true });
    let other = |(key, why): &(String, String)| json!({ "key": key, "is_usable": false, "why": why });
    let arrays: Value = contents.arrays.iter().map(array).chain(contents.others.iter().map(other)).collect();
    Ok((lines, json!({ "arrays": arrays })))
}

/// What is wrong with the words is not wrong with `--data`.
fn renamed(error: Error, flags: &InspectFlags) -> Error {
    match error {
        Error::Usage(text) => Error::Usage(text.replacen(&format!("--data {}", flags.path), &flags.path, 1)),
        other => other,
    }
}

fn tell(data: &Data, sheet: &mut Sheet, json: &mut Value) -> Result<()> {
    let rows = &*data.train;
    let survey = survey(rows)?;
    let held_out = data.held_out.rows();
    let also = if held_out > 0 { format!(", and {held_out} held out") } else { String::new() };
    sheet.add("rows", format!("{} of shape {:?}{also}", rows.rows(), rows.row_shape()));
    if let Some(columns) = &data.columns {
        sheet.add("columns", some_of(columns));
    }
    let Survey { least, largest, mean, .. } = survey;
    sheet.add("features", format!("from {least:?} to {largest:?}, {mean:.6} on average"));
    sheet.add("labels", labels(rows.task(), &survey));
    sheet.add("fingerprint", rows.fingerprint()?);
    json["rows"] = json!(rows.rows());
    json["held_out_rows"] = json!(held_out);
    json["row_shape"] = json!(rows.row_shape());
    json["columns"] = json!(data.columns);
    json["features"] = json!({ "least": least, "largest": largest, "mean": mean });
    json["task"] = json!(rows.task());
    json["fingerprint"] = json!(rows.fingerprint()?);
    match rows.task() {
        Task::Classification { names, .. } => {
            let class = |(name, rows): (&String, &u64)| json!({ "name": name, "rows": rows });
            json["classes"] = names.iter().zip(&survey.classes).map(class).collect();
        }
        Task::Regression { .. } => json["labels"] = json!(survey.labels),
    }
    Ok(())
}

/// What is to be learned, and of which class how many rows are: the most frequent first, where there are many.
fn labels(kind: &Task, survey: &Survey) -> String {
    match kind {
        Task::Classification { names, .. } => {
            let mut classes: Vec<(&String, u64)> = names.iter().zip(survey.classes.iter().copied()).collect();
            let left_out = classes.len().saturating_sub(SHOWN);
            if left_out > 0 {
                classes.sort_by_key(|&(_, rows)| std::cmp::Reverse(rows));
                classes.truncate(SHOWN);
            }
            let rows: Vec<Vec<String>> =
                classes.iter().map(|(name, rows)| vec![name.to_string(), format!("{rows} rows")]).collect();
            let more = if left_out > 0 {
                format!("\nand {left_out} classes more, with no more rows each")
            } else {
                String::new()
            };
            format!("{kind}\n{}{more}", table(&rows))
        }
        Task::Regression { .. } => {
            let range =
                survey.labels.map_or(String::new(), |[least, largest]| format!(", from {least:?} to {largest:?}"));
            format!("{}{range}", task(kind))
        }
    }
}

/// Reads all rows once.
fn survey(rows: &dyn Dataset) -> Result<Survey> {
    let features: usize = rows.row_shape().iter().product();
    let outputs = rows.task().outputs();
    let room = ROWS_AT_A_TIME.min(rows.rows()) as usize;
    let (mut x, mut sum) = (vec![0f32; room * features], 0.0);
    let (mut classes, mut values) = (vec![0i64; room], vec![0f32; room * outputs]);
    let mut survey =
        Survey { least: f32::INFINITY, largest: f32::NEG_INFINITY, mean: f64::NAN, classes: Vec::new(), labels: None };
    let mut range = [f32::INFINITY, f32::NEG_INFINITY];
    if let Task::Classification { classes, .. } = rows.task() {
        survey.classes = vec![0; *classes];
    }
    for first in (0..rows.rows()).step_by(ROWS_AT_A_TIME as usize) {
        let numbers: Vec<u64> = (first..(first + ROWS_AT_A_TIME).min(rows.rows())).collect();
        let x = &mut x[..numbers.len() * features];
        match rows.task() {
            Task::Classification { .. } => {
                let classes = &mut classes[..numbers.len()];
                rows.gather(&numbers, x, Targets::Classes(classes))?;
                for (&class, row) in classes.iter().zip(first..) {
                    let count = usize::try_from(class).ok().and_then(|class| survey.classes.get_mut(class));
                    *count.ok_or_else(|| Error::Data(format!("row {row}: the label {class} is no class")))? += 1;
                }
            }
            Task::Regression { .. } => {
                let values = &mut values[..numbers.len() * outputs];
                rows.gather(&numbers, x, Targets::Values(values))?;
                values.iter().for_each(|&value| range = [range[0].min(value), range[1].max(value)]);
                survey.labels = Some(range);
            }
        }
        // f32 in f64: a mean for people, in one fixed order.
        for &value in &*x {
            survey.least = survey.least.min(value);
            survey.largest = survey.largest.max(value);
            sum += f64::from(value);
        }
    }
    survey.mean = sum / (rows.rows() as f64 * features as f64);
    Ok(survey)
}
