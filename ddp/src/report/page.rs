//! The page: what a run was and came to, in the order in which people ask.

use super::charts::{Charts, best_text};
use super::read::Run;
use super::text::{count, duration, escaped, figure, percent, plural, shortened};
use super::{classes, picture, sha256, tables};

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// The whole page.
pub(super) fn of(run: &Run) -> String {
    let charts = Charts::of(run);
    let name = name(run);
    let ending = Ending::of(run);
    let sections = sections(run, &charts);
    let links: String = sections.iter().map(|(id, title, _)| format!("<a href=\"#{id}\">{title}</a>")).collect();
    let section = |(id, title, html): &(&str, &str, String)| {
        format!(
            "<section id=\"{id}\" aria-labelledby=\"{id}-title\"><h2 id=\"{id}-title\">{title}</h2>{html}</section>"
        )
    };
    let passed_over = match run.lines_passed_over {
        0 => String::new(),
        lines => format!(
            "<p>{} of the record could not be read, and {} passed over.</p>",
            plural(lines, "line"),
            if lines == 1 { "was" } else { "were" }
        ),
    };
    let loud = if run.is_simulated() {
        "<p class=\"loud\"><strong>On simulated GPUs.</strong> What was computed is right; times and rates would say nothing, and there are none.</p>"
    } else {
        ""
    };
    filled(
        TEMPLATE,
        &[
            ("title", &escaped(&format!("{name}: {} · ddp-train", ending.word))),
            ("hash", &picture::base64(&sha256::of(SCRIPT.as_bytes()))),
            ("style", STYLE),
            ("script", SCRIPT),
            ("name", &escaped(&name)),
            ("data", &escaped(&shortened(&run.start.data, 400))),
            ("ending", &ending.html()),
            ("loud", loud),
            ("figures", &figures(run)),
            ("links", &links),
            ("sections", &sections.iter().map(section).collect::<String>()),
            ("passed-over", &passed_over),
            ("numbers", &charts.json()),
        ],
    )
}

/// A template with its places filled. What is filled in is not looked at again.
fn filled(template: &str, values: &[(&str, &str)]) -> String {
    let mut page = String::with_capacity(template.len() + values.iter().map(|(_, value)| value.len()).sum::<usize>());
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").expect("a place in the template ends");
        let value = values.iter().find(|(known, _)| *known == name);
        page.push_str(before);
        page.push_str(value.expect("each place in the template has a value").1);
        rest = after;
    }
    page.push_str(rest);
    page
}

/// What the folder was called when the run began.
fn name(run: &Run) -> String {
    let out = run.start.config.get("out").and_then(|out| out.as_str()).unwrap_or("run");
    let last = out.trim_end_matches('/').rsplit('/').next().unwrap_or(out);
    shortened(if last.is_empty() || last == "." { "run" } else { last }, 120)
}

fn sections<'a>(run: &Run, charts: &Charts) -> Vec<(&'a str, &'a str, String)> {
    let mut sections = vec![("curves", "Curves", charts.html())];
    if let Some(placement) = &run.placement {
        sections.push(("transfers", "Transfers", tables::transfers(placement)));
    }
    sections.extend(tables::memory(run).map(|html| ("memory", "Memory", html)));
    if !run.start.config.is_empty() {
        sections.push(("settings", "Configuration", tables::settings(&run.start.config)));
    }
    sections.push(("versions", "Versions", tables::versions(run)));
    sections.extend(run.confusion.as_ref().map(|confusion| ("classes", "Classes", classes::confusion(confusion))));
    let problem = run
        .samples_problem
        .as_ref()
        .map(|problem| format!("<p class=\"note\">There are none to show: {}.</p>", escaped(problem)));
    let samples = run.samples.as_ref().filter(|samples| !samples.samples.is_empty()).map(classes::samples);
    sections.extend(samples.or(problem).map(|html| ("samples", "Samples", html)));
    sections
}

/// How a run ended.
struct Ending {
    class: &'static str,
    sign: &'static str,
    word: &'static str,
    message: String,
}

impl Ending {
    fn of(run: &Run) -> Ending {
        let last = run.steps.last().map_or(0, |line| line.step);
        match &run.end {
            None => {
                let message =
                    format!("The record ends after step {}: the run still goes on, or was killed.", count(last));
                Ending { class: "open", sign: "…", word: "not ended", message }
            }
            Some(end) if end.exit_code.unwrap_or(0) == 0 && end.reason == "done" => {
                Ending { class: "done", sign: "✓", word: "done", message: String::new() }
            }
            Some(end) => {
                let (class, sign, word) = match end.exit_code {
                    Some(75) => ("stopped", "‖", "stopped"),
                    _ => ("failed", "✕", "failed"),
                };
                let code = end.exit_code.map_or(String::new(), |code| format!(" (exit code {code})"));
                Ending { class, sign, word, message: shortened(&end.reason, 2000) + &code }
            }
        }
    }

    fn html(&self) -> String {
        let Ending { class, sign, word, message } = self;
        let message =
            if message.is_empty() { String::new() } else { format!("<p class=\"message\">{}</p>", escaped(message)) };
        format!("<p class=\"ending {class}\"><span aria-hidden=\"true\">{sign}</span> {word}</p>{message}")
    }
}

/// What a run came to, in a few numbers.
fn figures(run: &Run) -> String {
    let end = run.end.as_ref();
    let last_step = run.steps.last();
    let loss = end.and_then(|end| end.loss).or_else(|| last_step.and_then(|line| line.loss));
    let eval = run.evals.last();
    let eval_loss = end.and_then(|end| end.eval_loss).or_else(|| eval.and_then(|line| line.loss));
    let accuracy = end.and_then(|end| end.accuracy).or_else(|| eval.and_then(|line| line.accuracy));
    let steps = end.and_then(|end| end.steps).max(last_step.map(|line| line.step)).unwrap_or(0);
    let of_steps =
        run.start.steps.filter(|all| *all != steps).map_or(String::new(), |all| format!(" of {}", count(all)));
    let mut html = String::new();
    let mut add = |name: &str, value: String, note: &str| {
        let note = if note.is_empty() { String::new() } else { format!("<dd class=\"about\">{}</dd>", escaped(note)) };
        html += &format!("<div><dt>{name}</dt><dd>{}</dd>{note}</div>", escaped(&value));
    };
    if accuracy.is_some() {
        let rows = run.confusion.as_ref().map(|confusion| confusion.rows.iter().sum::<u64>());
        let note = rows.map_or("on held-out rows".to_string(), |rows| format!("on {} held-out rows", count(rows)));
        add("Accuracy", percent(accuracy), &note);
    }
    if eval_loss.is_some() {
        add("Held-out loss", figure(eval_loss), &best_text(run).unwrap_or_default());
    }
    add("Final loss", figure(loss), "in training");
    if let Some(rate) = end.and_then(|end| end.samples_per_s).filter(|rate| rate.is_finite()) {
        add("Samples a second", figure(Some(rate)), "over all ranks, evaluations included");
    }
    if let Some(seconds) = end.and_then(|end| end.seconds).filter(|_| !run.is_simulated()) {
        let since = run.resumes.last().map(|resume| format!("since it went on, after step {}", count(resume.step)));
        add("Time", duration(Some(seconds)), &since.unwrap_or_default());
    }
    add(
        "Steps",
        format!("{}{of_steps}", count(steps)),
        &end.and_then(|end| end.samples).map_or(String::new(), |samples| format!("{} samples", count(samples))),
    );
    let hosts = if run.start.world.hosts > 1 {
        format!(" on {}", plural(run.start.world.hosts, "host"))
    } else {
        String::new()
    };
    add("Ranks", format!("{}{hosts}", count(run.ranks())), &kinds_of_devices(run));
    if let Some(parameters) = run.start.parameters {
        add("Parameters", count(parameters), "");
    }
    html
}

/// `2 × NVIDIA H200`, `4 × cpu`: devices without their numbers and hosts.
fn kinds_of_devices(run: &Run) -> String {
    let mut kinds: Vec<(String, u64)> = Vec::new();
    for device in run.devices().iter().flat_map(|devices| devices.split(" on ").next().unwrap_or("").split(" and ")) {
        let kind = match device.split_once(' ') {
            Some((place, name)) if place.starts_with("cuda:") => name,
            _ => device,
        };
        let kind = shortened(kind, 60);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, number)) => *number += 1,
            None => kinds.push((kind, 1)),
        }
    }
    kinds.iter().take(4).map(|(kind, number)| format!("{number} × {kind}")).collect::<Vec<_>>().join(", ")
}
