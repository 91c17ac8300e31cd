//! The page of several runs: their curves in the same charts, their results, and the settings in
//! which they differ.

use std::collections::BTreeSet;

use super::charts;
use super::html::{breakable, count, duration, escaped, note, plural, shortened, table};
use super::page::{Page, ending};
use super::results::{Figures, results};
use super::tables::written;
use crate::metrics::Run;
use crate::setting::OUT;

/// The most runs of a page: it has that many colors.
pub(super) const RUNS_MAX: usize = 8;

/// The page of these runs, which have different names.
pub(super) fn of(runs: &[(String, Run)]) -> String {
    let charts = charts::of_runs(runs);
    let names: Vec<&str> = runs.iter().map(|(name, _)| name.as_str()).collect();
    Page {
        title: format!("{} · ddp-train", names.join(", ")),
        name: plural(runs.len() as u64, "run"),
        data: names.join(", "),
        ending: String::new(),
        figures: String::new(),
        is_simulated: runs.iter().any(|(_, run)| run.is_simulated()),
        skipped: runs.iter().map(|(_, run)| run.bad_lines.len()).sum(),
        again: format!("DIR DIR {OUT} FILE"),
        numbers: charts::json(&charts, &[], true),
        sections: vec![
            ("curves", "Curves", charts::html(&charts)),
            ("results", "Results", reached(runs)),
            ("settings", "Configuration", settings(runs)),
        ],
    }
    .html()
}

/// How each run ended and what it reached.
fn reached(runs: &[(String, Run)]) -> String {
    let all: Vec<Figures> = runs.iter().map(|(_, run)| results(run)).collect();
    let mut names: Vec<&str> = Vec::new();
    for figure in all.iter().flat_map(|figures| &figures.0) {
        if !names.contains(&figure.name) {
            names.push(figure.name);
        }
    }
    let row = |((name, run), Figures(figures)): (&(String, Run), &Figures)| {
        let value = |name: &&str| {
            let figure = figures.iter().find(|figure| figure.name == *name);
            figure.map_or("–".to_string(), |figure| escaped(&figure.value))
        };
        let [_, _, word, _] = ending(run);
        let steps = count(run.last_step());
        let mut cells = vec![breakable(&shortened(name, 120)), word, steps];
        cells.extend(names.iter().map(value));
        let seconds = run.of_end("seconds");
        cells.extend([seconds.map_or("–".into(), duration), count(run.ranks())]);
        cells
    };
    let headings = [&["run", "ended", "steps"][..], &names, &["time", "ranks"]].concat();
    table("Results", &headings, 2, runs.iter().zip(&all).map(row))
}

/// The settings that are not the same in all runs.
fn settings(runs: &[(String, Run)]) -> String {
    let all = || runs.iter().map(|(_, run)| run.config());
    let names: BTreeSet<&String> = all().flat_map(|config| config.keys()).collect();
    let differs = |name: &&String| {
        let mut values = all().map(|config| config.get(*name));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    let row = |name: &String| {
        let values = all().map(|config| config.get(name).map_or("–".into(), written));
        let name = breakable(&shortened(name, 120));
        std::iter::once(name).chain(values).collect()
    };
    let mut differing = names.into_iter().filter(differs).map(row).peekable();
    if differing.peek().is_none() {
        return note("All settings are the same.");
    }
    let titles: Vec<String> = runs.iter().map(|(name, _)| shortened(name, 60)).collect();
    let mut headings = vec!["setting"];
    headings.extend(titles.iter().map(String::as_str));
    table("Settings that differ", &headings, headings.len(), differing)
}
