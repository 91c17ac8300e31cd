//! The metrics of a run as CSV: a row for each logged step and each evaluation, in the order of the
//! log. Missing and non-finite numbers are empty cells.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use serde_json::{Map, Value};

use crate::tasks;

/// Writes the metrics of the metrics log at `log` to `out`.
pub(super) fn write(log: &Path, out: &mut dyn Write) -> io::Result<()> {
    let mut columns: Vec<String> = vec!["event".into(), "step".into()];
    for_each_metric(log, |line| {
        // Digests are for `compare`.
        let new = line
            .keys()
            .filter(|name| !columns.contains(name) && *name != "digests");
        let new: Vec<String> = new.cloned().collect();
        columns.extend(new);
        Ok(())
    })?;
    let names: Vec<String> = columns.iter().map(|name| tasks::cell(name)).collect();
    writeln!(out, "{}", names.join(","))?;
    for_each_metric(log, |line| {
        let cells: Vec<String> = columns.iter().map(|name| cell(line.get(name))).collect();
        writeln!(out, "{}", cells.join(","))
    })
}

/// Calls `each` with every step and every evaluation. Other lines are skipped.
fn for_each_metric(
    log: &Path,
    mut each: impl FnMut(&Map<String, Value>) -> io::Result<()>,
) -> io::Result<()> {
    for line in BufReader::new(File::open(log)?).split(b'\n') {
        if let Ok(Value::Object(line)) = serde_json::from_slice(&line?)
            && matches!(
                line.get("event").and_then(Value::as_str),
                Some("step" | "eval")
            )
        {
            each(&line)?;
        }
    }
    Ok(())
}

fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => tasks::cell(text),
        Some(Value::Number(number)) => number.to_string(),
        Some(other) => tasks::cell(&other.to_string()),
    }
}
