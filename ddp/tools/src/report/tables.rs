//! The tables of the page: transfers, settings, versions.

use serde_json::Value;

use super::html::{breakable, count, escaped, figure, note, plural, shortened, table};
use crate::audit::Audit;
use crate::config::{Config, as_flag, find};
use crate::metrics::Run;
use crate::tasks::ColumnErrors;

/// The most ranks that are listed; the metrics log has all.
const RANKS_MAX: usize = 64;
/// The most characters of a setting or a name.
const CHARS_MAX: usize = 300;

/// What each rank moved between devices, as the run printed it at its end.
pub(super) fn transfers(audit: &Audit) -> String {
    let cells = |row: Vec<String>| row.iter().map(|text| breakable(text)).collect();
    let mut rows = audit.table().into_iter();
    let headings = rows.next().unwrap_or_default();
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let rows = rows.map(cells);
    let table = Some(table("What each rank moved", &headings, 2, rows));
    let table = table.filter(|_| !headings.is_empty()).unwrap_or_default();
    let line = |text: &String| format!("<li>{}</li>", escaped(text));
    let notes: String = audit.notes().iter().map(line).collect();
    format!("{}{table}<ul>{notes}</ul>", note(&escaped(&audit.title())))
}

/// The errors of each column of numbers.
pub(super) fn columns(run: &Run) -> String {
    let (Some(step), 2..) = (run.evals.steps.last(), run.column_errors.len()) else {
        return String::new();
    };
    let row = |column: &ColumnErrors| {
        let mut cells = vec![cell(&column.name)];
        cells.extend([column.rmse, column.mae, column.r2].map(figure));
        cells
    };
    let headings = ["column", "RMSE", "mean absolute error", "R²"];
    let about = "on held-out rows, in the units of the labels";
    let note = note(&format!("After step {}, {about}.", count(*step)));
    note + &table("Columns", &headings, 1, run.column_errors.iter().map(row))
}

/// Settings: those that differ from the defaults, then the rest, folded away.
pub(super) fn settings(run: &Run) -> String {
    let (defaults, config) = (Config::default().to_json(), run.config());
    let is_default = |name: &String, value: &Value| match &run.start.changed {
        Some(changed) => !changed.contains(name) && run.start.config.get(name) == Some(value),
        // A log of version 0.8.
        None => defaults.get(name) == Some(value),
    };
    let all = config.iter();
    let (defaulted, changed): (Vec<_>, Vec<_>) =
        all.partition(|(name, value)| is_default(name, value));
    let rows = |settings: Vec<(&String, &Value)>| {
        let row = |(name, value): (&String, &Value)| {
            let default = match defaults.get(name) {
                Some(default) => written(default),
                None => default_of(name),
            };
            vec![cell(name), written(value), default]
        };
        let headings = ["setting", "value", "default"];
        table("Settings", &headings, 3, settings.into_iter().map(row))
    };
    let summary = plural(defaulted.len() as u64, "setting");
    let (changed, rest) = (rows(changed), rows(defaulted));
    format!("{changed}<details><summary>{summary} at the default</summary>{rest}</details>")
}

/// The default of a setting of a model family, or of one whose default follows from others.
fn default_of(name: &str) -> String {
    let Some(setting) = find(name) else {
        return "not a setting of this version".to_string();
    };
    if !setting.default.is_null() {
        return written(&setting.default);
    }
    let help = setting.help.split_once("[default: ");
    let default = help.and_then(|(_, text)| text.strip_suffix(']'));
    cell(default.unwrap_or("none"))
}

pub(super) fn written(value: &Value) -> String {
    format!("<code>{}</code>", cell(&as_flag(value)))
}

fn cell(text: &str) -> String {
    breakable(&shortened(text, CHARS_MAX))
}

/// Data, ranks, devices, programs.
pub(super) fn versions(run: &Run) -> String {
    let (start, world) = (&run.start, &run.start.world);
    let (hosts, threads) = (plural(world.hosts, "host"), plural(world.threads, "thread"));
    let ranks = format!("{}, {hosts}, {threads} each", plural(run.ranks(), "rank"));
    let mut rows = vec![
        ("data".to_string(), start.data.clone()),
        ("fingerprint".to_string(), start.fingerprint.clone()),
        ("ranks".to_string(), ranks),
    ];
    if run.ranks() > 1 {
        let when = if world.overlap {
            "during backward"
        } else {
            "after backward"
        };
        let buckets = plural(world.buckets, "bucket");
        let text = format!("{buckets} over {}, reduced {when}", world.transport);
        rows.push(("gradients".to_string(), text));
        rows.push(("bits".to_string(), world.why_bits_may_differ()));
    }
    let devices = run.devices().iter().enumerate();
    for (rank, device) in devices.take(RANKS_MAX) {
        rows.push((format!("rank {rank}"), device.clone()));
    }
    if run.devices().len() > RANKS_MAX {
        let more = count((run.devices().len() - RANKS_MAX) as u64);
        rows.push((format!("{more} more ranks"), "see metrics.jsonl".into()));
    }
    rows.extend(start.versions.clone());
    let rows = rows.iter().filter(|(_, value)| !value.is_empty());
    let rows = rows.map(|(name, value)| vec![cell(name), cell(value)]);
    table("Versions", &[], 2, rows)
}
