//! Inspects data: rows, classes and ranges, and whether training would accept them. Reads all rows
//! once.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::sheet::{Inspected, Sheet, some_of, table};
use crate::cli::InspectFlags;
use crate::data::files::{self, Array};
use crate::data::resolve;
use crate::data::{self, Alone, Data, DataRequest, DataSpec, Dataset, TableSettings, TokenSummary};
use crate::error::{Error, Result, ShownError};
use crate::shown::{shown, significant};
use crate::tasks::{self, Survey, SurveyText};

/// Rows that are read at a time.
const ROWS_AT_A_TIME: u64 = 1024;
/// The most lines about files.
const LINES_SHOWN: usize = 24;

/// The range and mean of all features.
#[derive(Debug)]
struct Features {
    least: f32,
    largest: f32,
    mean: f64,
}

/// Inspects the data that `flags` name.
pub(super) fn found(flags: &InspectFlags) -> Result<Inspected> {
    let spec: DataSpec = flags.path.parse().map_err(|error| renamed(error, flags))?;
    let request = request(spec.clone(), flags);
    match data::summarize_tokens(&request).map_err(|error| renamed(error, flags))? {
        Some(summary) => Ok(tokens(&summary, flags)),
        None => rows(spec, &request, flags),
    }
}

fn request(spec: DataSpec, flags: &InspectFlags) -> DataRequest {
    DataRequest {
        labels: flags.settings.labels.clone(),
        task: flags.settings.task,
        table: TableSettings {
            drop: flags.settings.drop.clone(),
            categorical: flags.settings.categorical.clone(),
            missing: flags.settings.missing,
        },
        cache_dir: flags.settings.cache_dir.clone(),
        ..DataRequest::new(spec)
    }
}

/// Inspects rows of features.
fn rows(spec: DataSpec, request: &DataRequest, flags: &InspectFlags) -> Result<Inspected> {
    let mut sheet = Sheet::new(format!("data {spec}"));
    let mut json = json!({ "kind": "data", "path": flags.path });
    if let DataSpec::Files(spec) = &spec {
        let files = resolve::files(&spec.path, "data").map_err(|error| renamed(error, flags))?;
        let (text, files) = contents(&files, flags)?;
        sheet.add("files", text);
        json["files"] = files;
    }
    let prepared = data::prepare(request, &Alone).map_err(|error| renamed(error, flags));
    let problem = match prepared.and_then(|data| describe(&data, &mut sheet, &mut json)) {
        Ok(()) => {
            sheet.add("training", "usable");
            None
        }
        // Unreadable files are not bad data.
        Err(error @ Error::Io { .. }) => return Err(error),
        Err(error) => {
            let error = ShownError(error);
            // The error itself is the last line.
            sheet.add("training", "not usable");
            json["refused"] = json!(error.to_string());
            Some(error.0)
        }
    };
    json["is_sound"] = json!(problem.is_none());
    Ok(Inspected {
        sheet,
        json,
        problem,
    })
}

/// The sheet of tokens, all of which were read and checked.
fn tokens(summary: &TokenSummary, flags: &InspectFlags) -> Inspected {
    let TokenSummary {
        coding,
        files,
        largest,
        vocabulary,
        is_vocabulary_guessed,
        content,
        context,
        windows,
        dropped,
    } = summary;
    let mut sheet = Sheet::new(format!("tokens {}", flags.path));
    let line = |(name, tokens): &(String, u64)| vec![name.clone(), format!("{tokens} tokens")];
    let lines: Vec<_> = files.iter().take(LINES_SHOWN).map(line).collect();
    let more = match files.len().saturating_sub(LINES_SHOWN) {
        0 => String::new(),
        more => format!("\nand {more} more files"),
    };
    sheet.add("files", table(&lines) + &more);
    sheet.add("tokens", format!("{}: {coding}", summary.tokens()));
    let guess = match is_vocabulary_guessed {
        true => ", so the vocabulary is taken as one more",
        false => "",
    };
    sheet.add(
        "vocabulary",
        format!("{vocabulary}; the largest token is {largest}{guess}"),
    );
    sheet.add(
        "windows",
        match context {
            Some(context) => format!(
                "{windows} with a context of {context}; {dropped} tokens at the end of files are in none"
            ),
            None => "not counted; give a context to count them, as in tokens:FILE,context=64".into(),
        },
    );
    sheet.add("content", format!("{content:016x}"));
    let file = |(name, tokens): &(String, u64)| json!({ "path": name, "tokens": tokens });
    let json = json!({
        "kind": "tokens",
        "path": flags.path,
        "files": files.iter().map(file).collect::<Value>(),
        "tokens": summary.tokens(),
        "coding": coding,
        "vocabulary": vocabulary,
        "is_vocabulary_guessed": is_vocabulary_guessed,
        "largest": largest,
        "context": context,
        "windows": context.map(|_| windows),
        "dropped": context.map(|_| dropped),
        "content": format!("{content:016x}"),
        "is_sound": true,
    });
    Inspected {
        sheet,
        json,
        problem: None,
    }
}

/// The contents of the files, whether or not training would accept them.
fn contents(files: &[PathBuf], flags: &InspectFlags) -> Result<(String, Value)> {
    let mut lines = Vec::new();
    let mut json = Vec::new();
    for path in files {
        let bytes = std::fs::metadata(path)
            .map_err(crate::files::failed("read", path))?
            .len();
        let (mut arrays, holds) = arrays_of(path, flags)?;
        lines.push(vec![path.display().to_string(), format!("{bytes} bytes")]);
        lines.append(&mut arrays);
        json.push(json!({ "path": path.to_string_lossy(), "bytes": bytes, "holds": holds }));
    }
    let left_out = lines.len().saturating_sub(LINES_SHOWN);
    lines.truncate(LINES_SHOWN);
    let more = if left_out > 0 {
        format!("\nand {left_out} more lines, which --json has")
    } else {
        String::new()
    };
    Ok((table(&lines) + &more, json.into()))
}

/// A line for each array, or one for the columns of a table; and the same as JSON.
fn arrays_of(path: &Path, flags: &InspectFlags) -> Result<(Vec<Vec<String>>, Value)> {
    if files::is_table(path) {
        let columns = files::table::columns(path)?;
        let line = vec![format!(
            "  {} columns: {}",
            columns.len(),
            some_of(&columns)
        )];
        return Ok((vec![line], json!({ "columns": columns })));
    }
    let contents = files::open(path, flags.settings.cache_dir.as_deref())?;
    let shape = |array: &Array| [&[array.rows() as usize], array.row_shape()].concat();
    let key = |key: &str| {
        if key.is_empty() {
            "  its array".to_string()
        } else {
            format!("  {key}")
        }
    };
    let line = |array: &Array| {
        vec![
            key(array.key()),
            format!("{} {:?}", array.element(), shape(array)),
        ]
    };
    let mut lines: Vec<Vec<String>> = contents.arrays.iter().map(line).collect();
    lines.extend(
        contents
            .others
            .iter()
            .map(|(name, why)| vec![key(name), format!("not usable: {why}")]),
    );
    let array = |array: &Array| {
        let (key, element) = (array.key(), array.element().name());
        json!({ "key": key, "element": element, "shape": shape(array), "is_usable": true })
    };
    let other =
        |(key, why): &(String, String)| json!({ "key": key, "is_usable": false, "why": why });
    let arrays: Value = contents
        .arrays
        .iter()
        .map(array)
        .chain(contents.others.iter().map(other))
        .collect();
    Ok((lines, json!({ "arrays": arrays })))
}

/// An error about these data without the setting `data`, since `inspect` takes them as an argument.
fn renamed(error: data::Error, flags: &InspectFlags) -> Error {
    let rename = |text: String| text.replace(&format!("`data` {}", flags.path), &flags.path);
    match error.into() {
        Error::Usage(text) => Error::Usage(rename(text)),
        Error::Data(text) => Error::Data(rename(text)),
        Error::Io {
            action,
            path,
            source,
            help,
        } => Error::Io {
            action,
            path,
            source,
            help: help.replace("it was given as `data`: ", ""),
        },
        other => other,
    }
}

fn describe(data: &Data, sheet: &mut Sheet, json: &mut Value) -> Result<()> {
    let rows = &*data.train;
    let (features, labels) = survey(rows)?;
    let held_out = data.held_out.rows();
    let also = if held_out > 0 {
        format!(", and {held_out} held out")
    } else {
        String::new()
    };
    sheet.add(
        "rows",
        format!("{} of shape {:?}{also}", rows.rows(), rows.row_shape()),
    );
    if let Some(columns) = &data.columns {
        sheet.add("columns", some_of(columns));
    }
    sheet.add("taken as", shown(&data.description));
    let Features {
        least,
        largest,
        mean,
    } = features;
    sheet.add(
        "features",
        format!(
            "from {least:?} to {largest:?}, {} on average",
            significant(mean, 6)
        ),
    );
    sheet.add("labels", labels_text(&labels.text()));
    sheet.add("fingerprint", rows.fingerprint()?);
    json["rows"] = json!(rows.rows());
    json["held_out_rows"] = json!(held_out);
    json["row_shape"] = json!(rows.row_shape());
    json["columns"] = json!(data.columns);
    json["features"] = json!({ "least": least, "largest": largest, "mean": mean });
    json["taken_as"] = json!(data.description);
    json["task"] = json!(rows.task());
    json["fingerprint"] = json!(rows.fingerprint()?);
    let (name, value) = labels.json();
    json[name] = value;
    Ok(())
}

/// The task and the targets.
fn labels_text(found: &SurveyText) -> String {
    let parts = [found.head.clone(), table(&found.table), found.rest.clone()];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join("\n")
}

/// Reads all rows once.
fn survey(rows: &dyn Dataset) -> Result<(Features, Box<dyn Survey>)> {
    let labels = tasks::of(rows.task()).survey();
    let mut labels = labels.ok_or_else(|| Error::Internal("rows without labels".into()))?;
    let (mut least, mut largest, mut sum) = (f32::INFINITY, f32::NEG_INFINITY, 0.0);
    for first in (0..rows.rows()).step_by(ROWS_AT_A_TIME as usize) {
        let numbers: Vec<u64> = (first..(first + ROWS_AT_A_TIME).min(rows.rows())).collect();
        let [x, targets] = data::read_rows(rows, &numbers)?;
        labels.count(first, &targets)?;
        for value in x.to_vec::<f32>()? {
            least = least.min(value);
            largest = largest.max(value);
            sum += f64::from(value);
        }
    }
    let mean = sum / (rows.rows() as f64 * rows.spec().inputs.elements() as f64);
    let features = Features {
        least,
        largest,
        mean,
    };
    Ok((features, labels))
}
