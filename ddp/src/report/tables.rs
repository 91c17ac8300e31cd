//! What of a run is told in tables: what moved, memory, settings, versions.

use std::collections::BTreeSet;

use ddp_kernels::transfer::{Kind, readable_bytes};
use serde_json::{Map, Value};

use super::read::{AmountLine, DifferenceLine, Placement, RankLine, Run};
use super::text::{count, escaped, figure, megabytes, plural, shortened};
use crate::cli::Flags;
use crate::config::Config;

/// The most ranks, differences and hints that are shown each; the record has all.
const RANKS_MAX: usize = 64;
const DIFFERENCES_MAX: usize = 20;
const HINTS_MAX: usize = 10;
/// The most characters of a setting or a name.
const CHARS_MAX: usize = 300;
/// Settings that follow from the data and the machine where they are not given.
const SETTLED: [&str; 6] = ["warmup-steps", "eval-every", "checkpoint-every", "threads", "graph", "data-on-device"];
/// The kinds of transfers in the order in which people see them; others behind them.
const KINDS: [Kind; 6] = [Kind::Upload, Kind::Download, Kind::Peer, Kind::Staged, Kind::Collective, Kind::ScalarRead];

/// A table that scrolls inside itself where there is no room for it.
pub(super) fn scrolling(label: &str, table: &str) -> String {
    format!("<div class=\"scroll\" role=\"region\" aria-label=\"{}\" tabindex=\"0\">{table}</div>", escaped(label))
}

/// The cells of a row of headings: texts first, then numbers.
fn headings<T: AsRef<str>>(texts: &[T], numbers: &[T]) -> String {
    let text = |name: &T| format!("<th scope=\"col\">{}</th>", escaped(name.as_ref()));
    let number = |name: &T| format!("<th scope=\"col\" class=\"n\">{}</th>", escaped(name.as_ref()));
    format!(
        "<thead><tr>{}{}</tr></thead>",
        texts.iter().map(text).collect::<String>(),
        numbers.iter().map(number).collect::<String>()
    )
}

/// What each rank moved in a step.
pub(super) fn transfers(placement: &Placement) -> String {
    let in_steps: Vec<&str> = in_order(placement.ranks.iter().flat_map(|rank| rank.per_step.keys()));
    let on = if placement.simulated { " on simulated GPUs" } else { "" };
    let mut html = format!("<p class=\"note\">Per rank and step, mean of {}{on}.</p>", plural(placement.steps, "step"));
    if in_steps.is_empty() {
        html += "<p class=\"good\">Nothing crossed between devices in a step.</p>";
    } else {
        let cell = |rank: &RankLine, kind: &str| match rank.per_step.get(kind) {
            None => "<td class=\"n\">–</td>".to_string(),
            Some(amount) => format!(
                "<td class=\"n\">{} <small>{} ×</small></td>",
                readable(amount.bytes),
                figure(Some(amount.count))
            ),
        };
        let row = |rank: &RankLine| {
            let cells: String = in_steps.iter().map(|kind| cell(rank, kind)).collect();
            let devices = escaped(&shortened(&rank.devices.join(" and "), CHARS_MAX));
            format!(
                "<tr><th scope=\"row\">{}</th><td>{devices}</td><td class=\"n\">{}</td>{cells}</tr>",
                rank.rank,
                count(rank.rows)
            )
        };
        let rows: String = placement.ranks.iter().take(RANKS_MAX).map(row).collect();
        let numbers: Vec<&str> = ["rows trained on"].into_iter().chain(in_steps.iter().copied()).collect();
        let table = format!("<table>{}<tbody>{rows}</tbody></table>", headings(&["rank", "on"], &numbers));
        html += &scrolling("What each rank moved in a step", &table);
        html += &left_out(placement.ranks.len(), RANKS_MAX, "rank");
    }
    html += &differences(placement);
    html += &outside_steps(&placement.ranks);
    let hint = |hint: &super::read::HintLine| {
        let ranks = ranks_text(&hint.ranks);
        format!(
            "<li>{} <small>{ranks}, {} times</small></li>",
            escaped(&shortened(&hint.text, 2 * CHARS_MAX)),
            count(hint.count)
        )
    };
    if !placement.hints.is_empty() {
        let hints: String = placement.hints.iter().take(HINTS_MAX).map(hint).collect();
        html += &format!(
            "<h3>What costs time for nothing</h3><ul>{hints}</ul>{}",
            left_out(placement.hints.len(), HINTS_MAX, "hint")
        );
    }
    html
}

fn left_out(all: usize, most: usize, noun: &str) -> String {
    match all.saturating_sub(most) {
        0 => String::new(),
        left => format!("<p class=\"note\">And {} more, in the record.</p>", plural(left as u64, noun)),
    }
}

/// These kinds of transfers, each once.
fn in_order<'a>(kinds: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    let found: BTreeSet<&str> = kinds.map(String::as_str).collect();
    let mut found: Vec<&str> = found.into_iter().collect();
    let place = |name: &str| KINDS.iter().position(|kind| kind.to_string() == name).unwrap_or(KINDS.len());
    found.sort_by_key(|name| place(name));
    found
}

fn differences(placement: &Placement) -> String {
    if placement.ranks.len() < 2 {
        return String::new();
    }
    if placement.differences.is_empty() {
        return "<p class=\"good\">No differences between ranks in a step.</p>".to_string();
    }
    let told = |difference: &DifferenceLine| {
        let mut alike: Vec<(String, Vec<u64>)> = Vec::new();
        for (rank, amount) in difference.amounts.iter().enumerate() {
            let text = match amount {
                None => "not told".to_string(),
                Some(amount) if amount.count == 0.0 => "none".to_string(),
                Some(amount) => {
                    format!("{} in {} over the run", readable(amount.bytes), plural(amount.count as u64, "transfer"))
                }
            };
            match alike.iter_mut().find(|(known, _)| *known == text) {
                Some((_, ranks)) => ranks.push(rank as u64),
                None => alike.push((text, vec![rank as u64])),
            }
        }
        let amounts: Vec<String> =
            alike.iter().take(8).map(|(text, ranks)| format!("{}: {text}", ranks_text(ranks))).collect();
        let (kind, at) =
            (escaped(&shortened(&difference.kind, CHARS_MAX)), escaped(&shortened(&difference.at, CHARS_MAX)));
        format!("<tr><td>{kind}</td><td><code>{at}</code></td><td>{}</td></tr>", amounts.join("<br>"))
    };
    let rows: String = placement.differences.iter().take(DIFFERENCES_MAX).map(told).collect();
    let table = format!("<table>{}<tbody>{rows}</tbody></table>", headings(&["moves", "at", "how much"], &[]));
    format!(
        "<h3 class=\"bad\">Differences between ranks</h3>{}{}",
        scrolling("Differences between ranks", &table),
        left_out(placement.differences.len(), DIFFERENCES_MAX, "difference")
    )
}

/// What all ranks moved in other phases.
fn outside_steps(ranks: &[RankLine]) -> String {
    let phases: BTreeSet<&String> =
        ranks.iter().flat_map(|rank| rank.phases.keys()).filter(|phase| *phase != "step").collect();
    let row = |phase: &&String| {
        let of_phase = || ranks.iter().filter_map(|rank| rank.phases.get(*phase));
        let part = |kind: &str| {
            let amounts = of_phase().filter_map(|kinds| kinds.get(kind));
            let sum = amounts.fold(AmountLine::default(), |sum, amount| AmountLine {
                count: sum.count + amount.count,
                bytes: sum.bytes + amount.bytes,
            });
            format!("{} {}", readable(sum.bytes), escaped(kind))
        };
        let parts: Vec<String> = in_order(of_phase().flat_map(|kinds| kinds.keys())).into_iter().map(part).collect();
        format!("<li>{}: {}</li>", escaped(phase), parts.join(", "))
    };
    let rows: String = phases.iter().map(row).collect();
    if rows.is_empty() { rows } else { format!("<h3>Outside steps, over the run and all ranks</h3><ul>{rows}</ul>") }
}

/// `ranks 0, 1, 2 and 5 more`
fn ranks_text(ranks: &[u64]) -> String {
    let shown: Vec<String> = ranks.iter().take(8).map(u64::to_string).collect();
    let more = ranks.len().saturating_sub(shown.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, shown.join(", "))
}

fn readable(bytes: f64) -> String {
    readable_bytes(bytes.max(0.0).round() as u64)
}

/// The most memory that was had.
pub(super) fn memory(run: &Run) -> Option<String> {
    let end = run.end.as_ref()?;
    let row = |name: &str, value: Option<f64>| {
        let value = value.filter(|value| value.is_finite())?;
        Some(format!("<tr><th scope=\"row\">{name}</th><td class=\"n\">{}</td></tr>", megabytes(value)))
    };
    let rows =
        [row("host memory of rank 0, at most", end.peak_mb), row("GPU memory of rank 0, at most", end.device_peak_mb)];
    let rows: String = rows.into_iter().flatten().collect();
    (!rows.is_empty()).then(|| format!("<table class=\"narrow\"><tbody>{rows}</tbody></table>"))
}

/// Settings: those that differ from the defaults first, the rest folded away.
pub(super) fn settings(config: &Map<String, Value>) -> String {
    let defaults = Config::resolve(Flags::default()).map(|config| config.to_json()).unwrap_or_default();
    let (mut changed, mut settled, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for (name, value) in config {
        let default = defaults.get(name);
        let group = match default {
            Some(default) if default == value => &mut others,
            // `auto`, or nothing at all: what became of it.
            Some(Value::String(auto)) if auto == "auto" && SETTLED.contains(&name.as_str()) => &mut settled,
            None if SETTLED.contains(&name.as_str()) => &mut settled,
            _ => &mut changed,
        };
        let default = default.map_or_else(|| "–".to_string(), written);
        group.push(format!(
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{default}</td></tr>",
            escaped(&shortened(name, CHARS_MAX)),
            written(value)
        ));
    }
    let table = |rows: &[String]| {
        format!("<table>{}<tbody>{}</tbody></table>", headings(&["setting", "value", "default"], &[]), rows.concat())
    };
    let mut html = match changed.len() {
        0 => "<p class=\"note\">All settings are the defaults.</p>".to_string(),
        _ => scrolling("Settings that differ from the defaults", &table(&changed)),
    };
    for (rows, what) in [(settled, "settled by the data and the machine"), (others, "at their defaults")] {
        if !rows.is_empty() {
            let summary = format!("{} {what}", plural(rows.len() as u64, "setting"));
            html += &format!("<details><summary>{summary}</summary>{}</details>", scrolling(&summary, &table(&rows)));
        }
    }
    html
}

/// A value as one writes it behind a flag.
fn written(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(|value| value.to_string()).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    };
    format!("<code>{}</code>", escaped(&shortened(&text, CHARS_MAX)))
}

/// What trained: data, ranks, devices, programs.
pub(super) fn versions(run: &Run) -> String {
    let start = &run.start;
    let mut rows =
        vec![("data".to_string(), start.data.clone()), ("fingerprint".to_string(), start.fingerprint.clone())];
    let world = &start.world;
    let parts =
        [plural(run.ranks(), "rank"), plural(world.hosts, "host"), format!("{} each", plural(world.threads, "thread"))];
    rows.push(("ranks".to_string(), parts.join(", ")));
    let overlap = if world.overlap { "reduced while backward runs" } else { "reduced after backward" };
    if run.ranks() > 1 {
        rows.push((
            "gradients".to_string(),
            format!("{} in {}, {overlap}", plural(world.buckets, "bucket"), world.transport),
        ));
        for (rank, device) in run.devices().iter().enumerate().take(RANKS_MAX) {
            rows.push((format!("rank {rank}"), device.clone()));
        }
    } else if let Some(device) = run.devices().first() {
        rows.push(("device".to_string(), device.clone()));
    }
    for (name, version) in &start.versions {
        rows.push((name.clone(), version.as_str().map_or_else(|| version.to_string(), str::to_string)));
    }
    let row = |(name, value): &(String, String)| {
        format!(
            "<tr><th scope=\"row\">{}</th><td>{}</td></tr>",
            escaped(&shortened(name, CHARS_MAX)),
            escaped(&shortened(value, CHARS_MAX))
        )
    };
    let rows: String = rows.iter().filter(|(_, value)| !value.is_empty()).map(row).collect();
    scrolling("Versions", &format!("<table><tbody>{rows}</tbody></table>"))
        + &left_out(run.devices().len(), RANKS_MAX, "rank")
}
