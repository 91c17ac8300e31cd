//! The page: how a run ended and what it reached, then details.

use super::charts::Charts;
use super::html::{count, duration, escaped, plural, shortened};
use super::read::{Run, TextLine};
use super::results::{Figure, results};
use super::{classes, tables};

/// The most generated texts; the record has all.
const TEXTS_MAX: usize = 5;

/// The whole page.
pub(super) fn of(run: &Run) -> String {
    let charts = Charts::of(run);
    let name = name(run);
    let ending = Ending::of(run);
    let sections = all_sections(run, &charts);
    Page {
        title: format!("{name}: {} · ddp-train", ending.word),
        data: shortened(&run.start.data, 400),
        name,
        ending: ending.html(),
        figures: figures(run),
        is_simulated: run.is_simulated(),
        skipped: run.bad_lines.len(),
        again: "DIR",
    }
    .html(&charts, sections)
}

/// A section of the page: its id, its title and its HTML.
pub(super) type Section = (&'static str, &'static str, String);

/// What is above and below the sections of a page. `ending` and `figures` are HTML.
pub(super) struct Page {
    pub(super) title: String,
    pub(super) name: String,
    pub(super) data: String,
    pub(super) ending: String,
    pub(super) figures: String,
    pub(super) is_simulated: bool,
    /// Lines of the record that could not be read.
    pub(super) skipped: usize,
    /// What `ddp-train report` takes to make it again.
    pub(super) again: &'static str,
}

impl Page {
    pub(super) fn html(&self, charts: &Charts, all: Vec<Section>) -> String {
        let (mut links, mut sections) = (String::new(), String::new());
        for (id, title, html) in all {
            links += &format!("<a href=\"#{id}\">{title}</a>");
            sections += &format!(
                "<section id=\"{id}\" aria-labelledby=\"{id}-title\">\
             <h2 id=\"{id}-title\">{title}</h2>{html}</section>"
            );
        }
        let skipped = match self.skipped as u64 {
            0 => String::new(),
            lines => format!(
                "<p>{} of the record could not be read.</p>",
                plural(lines, "line")
            ),
        };
        let simulated = match self.is_simulated {
            true => {
                "<p class=\"loud\"><strong>On simulated GPUs.</strong> The results are real; times and \
             rates would mean nothing and are left out.</p>"
            }
            false => "",
        };
        format!(
            include_str!("page.html"),
            title = escaped(&self.title),
            style = include_str!("style.css"),
            script = include_str!("script.js"),
            name = escaped(&self.name),
            data = escaped(&self.data),
            ending = self.ending,
            figures = self.figures,
            // Nothing in it can end its element.
            numbers = charts.json().to_string().replace('<', "\\u003c"),
            again = self.again,
            simulated = simulated,
            links = links,
            sections = sections,
            skipped = skipped,
        )
    }
}

/// The name of the run's folder when it began.
fn name(run: &Run) -> String {
    let out = run.start.config.get("out").and_then(|out| out.as_str());
    let last = out
        .unwrap_or("run")
        .trim_end_matches('/')
        .rsplit('/')
        .next();
    let last = last.filter(|last| !matches!(*last, "" | "."));
    shortened(last.unwrap_or("run"), 120)
}

fn all_sections(run: &Run, charts: &Charts) -> Vec<Section> {
    let mut sections = vec![("curves", "Curves", charts.html())];
    if let Some(confusion) = &run.confusion {
        sections.push(("classes", "Classes", classes::confusion(confusion)));
    }
    if let Some(eval) = run.evals.iter().rev().find(|eval| eval.columns.len() > 1) {
        sections.push(("columns", "Columns", tables::columns(eval)));
    }
    match (&run.samples, &run.samples_problem) {
        (Some(samples), _) if !samples.samples.is_empty() => {
            sections.push(("samples", "Samples", classes::samples(samples)));
        }
        (_, Some(problem)) => {
            let text = format!("<p class=\"note\">No samples: {}.</p>", escaped(problem));
            sections.push(("samples", "Samples", text));
        }
        _ => {}
    }
    if !run.texts.is_empty() {
        sections.push(("texts", "Text", texts(run)));
    }
    if let Some(placement) = &run.placement {
        sections.push(("transfers", "Transfers", tables::transfers(placement)));
    }
    sections.extend(tables::memory(run).map(|html| ("memory", "Memory", html)));
    let settings = tables::settings(&run.start.config);
    sections.push(("settings", "Configuration", settings));
    sections.push(("versions", "Versions", tables::versions(run)));
    sections
}

/// The last texts that the model made, the newest first.
fn texts(run: &Run) -> String {
    let text = |line: &TextLine| {
        let (step, prompt) = (count(line.step), escaped(&shortened(&line.prompt, 2000)));
        let text = escaped(&shortened(&line.text, 2000));
        format!("<h3>After step {step}</h3><p class=\"message\"><b>{prompt}</b>{text}</p>")
    };
    let texts: String = run.texts.iter().rev().take(TEXTS_MAX).map(text).collect();
    let note = "The prompt (bold) and what the model wrote after it, at the latest evaluations.";
    format!("<p class=\"note\">{note}</p>{texts}")
}

/// How a run ended.
pub(super) struct Ending {
    class: &'static str,
    sign: &'static str,
    pub(super) word: &'static str,
    message: String,
}

impl Ending {
    pub(super) fn of(run: &Run) -> Ending {
        let Some(end) = &run.end else {
            let last = run.steps.last().map_or(0, |line| line.step);
            return Ending {
                class: "open",
                sign: "…",
                word: "not ended",
                message: format!(
                    "The record ends after step {}: the run is still going, or was killed.",
                    count(last)
                ),
            };
        };
        let (class, sign, word) = match end.exit_code {
            Some(0) | None if end.reason == "done" => ("done", "✓", "done"),
            Some(75) => ("stopped", "‖", "stopped"),
            _ => ("failed", "✕", "failed"),
        };
        let code = end.exit_code.map(|code| format!(" (exit code {code})"));
        let message = match class {
            "done" => String::new(),
            _ => shortened(&end.reason, 2000) + &code.unwrap_or_default(),
        };
        Ending {
            class,
            sign,
            word,
            message,
        }
    }

    fn html(&self) -> String {
        let Ending {
            class, sign, word, ..
        } = self;
        let mut html = format!(
            "<p class=\"ending {class}\"><span aria-hidden=\"true\">{sign}</span> {word}</p>"
        );
        if !self.message.is_empty() {
            html += &format!("<p class=\"message\">{}</p>", escaped(&self.message));
        }
        html
    }
}

/// The results of a run in a few numbers.
fn figures(run: &Run) -> String {
    let (end, last_step) = (run.end.as_ref(), run.steps.last());
    let mut html = String::new();
    let mut add = |name: &str, value: String, note: String| {
        let (value, note) = (escaped(&value), escaped(&note));
        html +=
            &format!("<div><dt>{name}</dt><dd>{value}</dd><dd class=\"about\">{note}</dd></div>");
    };
    for Figure { name, value, note } in results(run) {
        add(name, value, note);
    }
    let seconds = end.and_then(|end| end.seconds);
    if let Some(seconds) = seconds.filter(|_| !run.is_simulated()) {
        let since = run.resumes.last().map(|resume| count(resume.step));
        let since = since.map(|step| format!("since it was resumed after step {step}"));
        add("Time", duration(seconds), since.unwrap_or_default());
    }
    let steps = end.and_then(|end| end.steps);
    let steps = steps.max(last_step.map(|line| line.step)).unwrap_or(0);
    let of_steps = run.start.steps.filter(|all| *all != steps);
    let of_steps = of_steps.map_or(String::new(), |all| format!(" of {}", count(all)));
    let unit = match end.and_then(|end| end.tokens_per_s) {
        None => "samples",
        Some(_) => "windows of tokens",
    };
    let samples = end.and_then(|end| end.samples);
    let samples = samples.map_or(String::new(), |samples| {
        format!("{} {unit}", count(samples))
    });
    add("Steps", format!("{}{of_steps}", count(steps)), samples);
    let hosts = match run.start.world.hosts {
        0 | 1 => String::new(),
        hosts => format!(" on {}", plural(hosts, "host")),
    };
    add("Ranks", count(run.ranks()) + &hosts, kinds_of_devices(run));
    if let Some(parameters) = run.start.parameters {
        add("Parameters", count(parameters), String::new());
    }
    html
}

/// `2 × NVIDIA H200`, `4 × cpu`: devices without their numbers and hosts.
fn kinds_of_devices(run: &Run) -> String {
    let mut kinds: Vec<(String, u64)> = Vec::new();
    for devices in run.devices() {
        let without_host = devices.split(" on ").next().unwrap_or_default();
        for device in without_host.split(" and ") {
            let kind = match device.split_once(' ') {
                Some((number, name)) if number.starts_with("cuda:") => name,
                _ => device,
            };
            let kind = shortened(kind, 60);
            match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, number)) => *number += 1,
                None => kinds.push((kind, 1)),
            }
        }
    }
    let text = |(kind, number): &(String, u64)| format!("{number} × {kind}");
    kinds
        .iter()
        .take(4)
        .map(text)
        .collect::<Vec<_>>()
        .join(", ")
}
