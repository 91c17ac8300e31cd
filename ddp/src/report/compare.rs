//! The page of several runs: their curves over one another, their results, and the settings in
//! which they differ.

use std::collections::BTreeSet;

use super::charts::Charts;
use super::html::{count, duration, escaped, plural, shortened, table};
use super::page::{Ending, Page};
use super::read::Run;
use super::results::{self, Figure};
use crate::config::as_flag;

/// The most runs of a page: it has so many colors.
pub(super) const RUNS_MAX: usize = 8;

/// The page of these runs, which have different names.
pub(super) fn of(runs: &[(String, Run)]) -> String {
    let charts = Charts::of_runs(runs);
    let sections = vec![
        ("curves", "Curves", charts.html()),
        ("results", "Results", results(runs)),
        ("settings", "Configuration", settings(runs)),
    ];
    let names: Vec<&str> = runs.iter().map(|(name, _)| name.as_str()).collect();
    let skipped = runs.iter().map(|(_, run)| run.bad_lines.len()).sum();
    Page {
        title: format!("{} · ddp-train", names.join(", ")),
        name: plural(runs.len() as u64, "run"),
        data: names.join(", "),
        ending: String::new(),
        figures: String::new(),
        is_simulated: runs.iter().any(|(_, run)| run.is_simulated()),
        skipped,
        again: "DIR DIR --out FILE",
    }
    .html(&charts, sections)
}

/// How each run ended and what it reached.
fn results(runs: &[(String, Run)]) -> String {
    let all: Vec<Vec<Figure>> = runs.iter().map(|(_, run)| results::results(run)).collect();
    let mut names: Vec<&str> = Vec::new();
    for figure in all.iter().flatten() {
        if !names.contains(&figure.name) {
            names.push(figure.name);
        }
    }
    let row = |((name, run), figures): (&(String, Run), &Vec<Figure>)| {
        let value = |name: &&str| {
            let figure = figures.iter().find(|figure| figure.name == *name);
            figure.map_or("–".to_string(), |figure| escaped(&figure.value))
        };
        let end = run.end.as_ref();
        let steps = run.steps.last().map_or("–".into(), |line| count(line.step));
        let mut cells = vec![
            escaped(&shortened(name, 120)),
            Ending::of(run).word.to_string(),
            steps,
        ];
        cells.extend(names.iter().map(value));
        let seconds = end.and_then(|end| end.seconds);
        cells.extend([seconds.map_or("–".into(), duration), count(run.ranks())]);
        cells
    };
    let headings = [&["run", "ended", "steps"][..], &names, &["time", "ranks"]].concat();
    table("Results", &headings, 2, runs.iter().zip(&all).map(row))
}

/// The settings that are not the same in all runs.
fn settings(runs: &[(String, Run)]) -> String {
    let all = || runs.iter().map(|(_, run)| &run.start.config);
    let names: BTreeSet<&String> = all().flat_map(|config| config.keys()).collect();
    let differs = |name: &&String| {
        let mut values = all().map(|config| config.get(*name));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    let text = |value: Option<&serde_json::Value>| match value {
        None => "–".to_string(),
        Some(value) => format!("<code>{}</code>", escaped(&shortened(&as_flag(value), 120))),
    };
    let row = |name: &String| {
        let values = all().map(|config| text(config.get(name)));
        std::iter::once(escaped(&shortened(name, 120)))
            .chain(values)
            .collect()
    };
    let differing: Vec<Vec<String>> = names.into_iter().filter(differs).map(row).collect();
    if differing.is_empty() {
        return "<p class=\"note\">All settings are the same.</p>".to_string();
    }
    let titles: Vec<String> = runs
        .iter()
        .map(|(name, _)| escaped(&shortened(name, 60)))
        .collect();
    let headings: Vec<&str> = std::iter::once("setting")
        .chain(titles.iter().map(String::as_str))
        .collect();
    table(
        "Settings that differ",
        &headings,
        headings.len(),
        differing.into_iter(),
    )
}
