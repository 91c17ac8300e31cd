//! The metrics of a run as CSV: a row for each logged step and each evaluation, in the order of the
//! log. Missing and non-finite numbers are empty cells.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value};

use crate::tasks;

/// Writes the metrics of the metrics log at `log` to `out`.
pub(super) fn write(log: &Path, out: &mut dyn Write) -> io::Result<()> {
    let mut columns: Vec<String> = vec!["event".into(), "step".into()];
    for line in metrics(log)? {
        for (name, _) in line? {
            // Digests are for `compare`.
            if !columns.contains(&name) && name != "digests" {
                columns.push(name);
            }
        }
    }
    let mut out = BufWriter::new(out);
    let names: Vec<String> = columns.iter().map(|name| tasks::cell(name)).collect();
    writeln!(out, "{}", names.join(","))?;
    for line in metrics(log)? {
        let line = line?;
        let cells: Vec<String> = columns.iter().map(|name| cell(line.get(name))).collect();
        writeln!(out, "{}", cells.join(","))?;
    }
    out.flush()
}

/// Every step and every evaluation. Other lines are skipped.
fn metrics(log: &Path) -> io::Result<impl Iterator<Item = io::Result<Map<String, Value>>>> {
    let is_metric = |line: &Map<String, Value>| {
        let event = line.get("event").and_then(Value::as_str);
        matches!(event, Some("step" | "eval"))
    };
    let metric = move |line: Vec<u8>| serde_json::from_slice(&line).ok().filter(is_metric);
    let lines = BufReader::new(File::open(log)?).split(b'\n');
    Ok(lines.filter_map(move |line| line.map(metric).transpose()))
}

fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => tasks::cell(text),
        Some(Value::Number(number)) => number.to_string(),
        Some(other) => tasks::cell(&other.to_string()),
    }
}
