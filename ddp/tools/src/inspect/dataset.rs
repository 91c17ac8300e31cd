//! Inspects data: rows, classes and ranges, and whether training would accept them. Reads all rows
//! once.

use std::path::{Path, PathBuf};

use ddp_data::setting::DATA;
use ddp_kernels::setting::SettingName;
use serde_json::{Value, json};

use super::sheet::{Inspected, Sheet, some_of, table};
use crate::config::Config;
use crate::data::files;
use crate::data::resolve;
use crate::data::{self, Alone, Data, DataRequest, DataSpec, Dataset, TokenSummary};
use crate::error::{Error, Result};
use crate::shown::{shown, significant};
use crate::tables::READER;
use crate::tasks::{self, Survey};

/// Rows that are read at a time.
const ROWS_AT_A_TIME: u64 = 1024;
/// The most lines about files.
const LINES_SHOWN: usize = 24;

/// Inspects the data that `flags` name.
pub(super) fn found(path: &str, settings: &Config) -> Result<Inspected> {
    let spec: DataSpec = path.parse().map_err(|error| renamed(error, path))?;
    let config = Config {
        data: spec.clone(),
        ..settings.clone()
    };
    let request = config.data_request();
    match data::summarize_tokens(&request).map_err(|error| renamed(error, path))? {
        Some(summary) => tokens(&summary, path),
        None => rows(spec, &request, path),
    }
}

/// Inspects rows of features.
fn rows(spec: DataSpec, request: &DataRequest, path: &str) -> Result<Inspected> {
    let mut sheet = Sheet::new(format!("data {spec}"));
    let mut json = json!({ "kind": "data", "path": path });
    if let DataSpec::Files(spec) = &spec {
        let files = resolve::files(&spec.path, DATA).map_err(|error| renamed(error, path))?;
        let (text, files) = contents(&files, request.cache_dir.as_deref())?;
        sheet.add("files", text);
        json["files"] = files;
    }
    let prepared =
        data::prepare(request, Some(READER), &Alone).map_err(|error| renamed(error, path));
    let problem = match prepared.and_then(|data| describe(&data, &mut sheet, &mut json)) {
        Ok(()) => None,
        // Unreadable files are not bad data.
        Err(error @ Error::Io(_)) => return Err(error),
        Err(error) => Some(error),
    };
    if let Some(error) = &problem {
        json["refused"] = json!(error.escaped(&error.to_string()));
    }
    // The error itself is the last line.
    let usable = problem.as_ref().map_or("usable", |_| "not usable");
    sheet.add("training", usable);
    json["is_sound"] = json!(problem.is_none());
    Ok(Inspected(sheet, json, problem))
}

/// The sheet of tokens, all of which were read and checked.
fn tokens(summary: &TokenSummary, path: &str) -> Result<Inspected> {
    let (content, files) = (format!("{:016x}", summary.content), &summary.files);
    let (windows, dropped) = (summary.windows, summary.dropped);
    let mut sheet = Sheet::new(format!("tokens {path}"));
    let line = |(name, tokens): &(String, u64)| vec![name.clone(), format!("{tokens} tokens")];
    sheet.add("files", first_lines(files.iter().map(line).collect()));
    let text = format!("{}: {}", summary.tokens(), summary.coding);
    sheet.add("tokens", text);
    let guess = match summary.is_vocabulary_guessed {
        true => ", so the vocabulary is taken as one more",
        false => "",
    };
    let (vocabulary, largest) = (summary.vocabulary, summary.largest);
    let text = format!("{vocabulary}; the largest token is {largest}{guess}");
    sheet.add("vocabulary", text);
    let text = match summary.context {
        Some(context) => format!(
            "{windows} with a context of {context}; {dropped} tokens at the end of files are in none"
        ),
        None => "not counted; give a context to count them, as in tokens:FILE,context=64".into(),
    };
    sheet.add("windows", text);
    sheet.add("content", &*content);
    let file = |(name, tokens): &(String, u64)| json!({ "path": name, "tokens": tokens });
    let json = json!({
        "kind": "tokens",
        "path": path,
        "files": files.iter().map(file).collect::<Value>(),
        "tokens": summary.tokens(),
        "coding": summary.coding,
        "vocabulary": summary.vocabulary,
        "is_vocabulary_guessed": summary.is_vocabulary_guessed,
        "largest": summary.largest,
        "context": summary.context,
        "windows": summary.context.map(|_| windows),
        "dropped": summary.context.map(|_| dropped),
        "content": content,
        "is_sound": true,
    });
    Ok(Inspected(sheet, json, None))
}

/// The contents of the files, whether or not training would accept them.
fn contents(files: &[PathBuf], cache: Option<&Path>) -> Result<(String, Value)> {
    let mut lines = Vec::new();
    let mut json = Vec::new();
    for path in files {
        let about = std::fs::metadata(path);
        let bytes = about.map_err(crate::files::failed("read", path))?.len();
        let (mut arrays, holds) = arrays_of(path, cache)?;
        lines.push(vec![path.display().to_string(), format!("{bytes} bytes")]);
        lines.append(&mut arrays);
        json.push(json!({ "path": path.to_string_lossy(), "bytes": bytes, "holds": holds }));
    }
    Ok((first_lines(lines), json.into()))
}

/// The first lines as a table, and how many more there are.
fn first_lines(mut lines: Vec<Vec<String>>) -> String {
    let more = lines.len().saturating_sub(LINES_SHOWN);
    lines.truncate(LINES_SHOWN);
    match more {
        0 => table(&lines),
        more => {
            table(&lines) + &format!("\nand {more} more lines, which {} has", SettingName("json"))
        }
    }
}

/// A line for each array, or one for the columns of a table; and the same as JSON.
fn arrays_of(path: &Path, cache: Option<&Path>) -> Result<(Vec<Vec<String>>, Value)> {
    if files::is_table(path) {
        let columns = READER.columns(path)?;
        let (count, names) = (columns.len(), some_of(&columns));
        let line = vec![format!("  {count} columns: {names}")];
        return Ok((vec![line], json!({ "columns": columns })));
    }
    let contents = files::open(path, cache)?;
    let (mut lines, mut json) = (Vec::new(), Vec::new());
    let mut add = |key: &str, text: String, value: Value| {
        let key = if key.is_empty() { "its array" } else { key };
        lines.push(vec![format!("  {key}"), text]);
        json.push(value);
    };
    for array in &contents.arrays {
        let shape = [&[array.rows() as usize], array.row_shape()].concat();
        let (key, element) = (&array.key, array.element);
        let value = json!({ "key": key, "element": element, "shape": shape, "is_usable": true });
        add(key, format!("{element} {shape:?}"), value);
    }
    for (key, why) in &contents.others {
        let value = json!({ "key": key, "is_usable": false, "why": why });
        add(key, format!("not usable: {why}"), value);
    }
    Ok((lines, json!({ "arrays": json })))
}

/// An error about these data without the setting `data`, since `inspect` takes them as an argument.
fn renamed(error: data::Error, path: &str) -> Error {
    let rename = |text: String| text.replace(&format!("{DATA} {path}"), path);
    match error.into() {
        Error::Usage(text) => Error::Usage(rename(text)),
        Error::Data(text) => Error::Data(rename(text)),
        Error::Io(mut error) => {
            error.help = error.help.replace(&format!("it was given as {DATA}: "), "");
            Error::Io(error)
        }
        other => other,
    }
}

fn describe(data: &Data, sheet: &mut Sheet, json: &mut Value) -> Result<()> {
    let rows = &*data.train;
    let ([least, largest, mean], labels) = survey(rows)?;
    let (count, held_out, shape) = (rows.rows(), data.held_out.rows(), rows.row_shape());
    let (least, largest, fingerprint) = (least as f32, largest as f32, rows.fingerprint()?);
    let also = Some(format!(", and {held_out} held out")).filter(|_| held_out > 0);
    let text = format!("{count} of shape {shape:?}{}", also.unwrap_or_default());
    sheet.add("rows", text);
    if let Some(columns) = &data.columns {
        sheet.add("columns", some_of(columns));
    }
    sheet.add("taken as", shown(&data.description));
    let average = significant(mean, 6);
    let text = format!("from {least:?} to {largest:?}, {average} on average");
    sheet.add("features", text);
    sheet.add("labels", labels.text());
    sheet.add("fingerprint", &*fingerprint);
    json["rows"] = json!(count);
    json["held_out_rows"] = json!(held_out);
    json["row_shape"] = json!(shape);
    json["columns"] = json!(data.columns);
    json["features"] = json!({ "least": least, "largest": largest, "mean": mean });
    json["taken_as"] = json!(data.description);
    json["task"] = json!(rows.task());
    json["fingerprint"] = json!(fingerprint);
    let (name, value) = labels.json();
    json[name] = value;
    Ok(())
}

/// Reads all rows once. The least and the largest feature, and their mean; and the labels.
fn survey(rows: &dyn Dataset) -> Result<([f64; 3], Box<dyn Survey>)> {
    let labels = tasks::of(rows.task()).survey();
    let mut labels = labels.ok_or_else(|| Error::Internal("rows without labels".into()))?;
    let (mut least, mut largest, mut sum) = (f64::INFINITY, f64::NEG_INFINITY, 0.0);
    for first in (0..rows.rows()).step_by(ROWS_AT_A_TIME as usize) {
        let numbers: Vec<u64> = (first..(first + ROWS_AT_A_TIME).min(rows.rows())).collect();
        let [x, targets] = data::read_rows(rows, &numbers)?;
        labels.count(first, &targets)?;
        for value in x.to_vec::<f32>()?.into_iter().map(f64::from) {
            (least, largest, sum) = (least.min(value), largest.max(value), sum + value);
        }
    }
    let mean = sum / (rows.rows() as f64 * rows.spec().inputs.elements() as f64);
    Ok(([least, largest, mean], labels))
}
