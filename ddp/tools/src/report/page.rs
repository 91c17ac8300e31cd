//! The page: how a run ended and its results, then details.

use serde::Deserialize;
use serde_json::Value;

use super::charts;
use super::html::{count, escaped, note, plural, shortened};
use super::results::{Figure, figures};
use super::{classes, svg, tables};
use crate::metrics::Run;
use crate::metrics_log::{RunOutcome, SampleEvent};

/// The most generated texts; the metrics log has all.
const TEXTS_MAX: usize = 5;
/// The most predictions.
const ROWS_MAX: usize = 1000;

/// The page of a run.
pub(super) fn of(run: &Run) -> String {
    let (name, charts) = (name(run), charts::of_run(run));
    let [class, sign, word, message] = &ending(run);
    let mut ending =
        format!("<p class=\"ending {class}\"><span aria-hidden=\"true\">{sign}</span> {word}</p>");
    for text in [message.clone(), run.best_is_earlier().unwrap_or_default()] {
        if !text.is_empty() {
            ending += &format!("<p class=\"message\">{}</p>", escaped(&text));
        }
    }
    Page {
        title: format!("{name}: {word} · ddp-train"),
        data: shortened(&run.start.data, 400),
        name,
        ending,
        figures: tiles(run),
        is_simulated: run.is_simulated(),
        skipped: run.bad_lines.len(),
        again: "DIR".into(),
        numbers: charts::json(&charts, &charts::marks(run), false),
        sections: sections(run, &charts),
    }
    .html()
}

/// A section of the page: its id, its title and its HTML; empty if it is left out.
pub(super) type Section = (&'static str, &'static str, String);

/// What a page is made of. `ending` and `figures` are HTML.
pub(super) struct Page {
    pub(super) title: String,
    pub(super) name: String,
    pub(super) data: String,
    pub(super) ending: String,
    pub(super) figures: String,
    pub(super) is_simulated: bool,
    /// Lines of the metrics log that could not be read.
    pub(super) skipped: usize,
    /// What `ddp-train report` takes to make it again.
    pub(super) again: String,
    /// What `script.js` draws.
    pub(super) numbers: Value,
    pub(super) sections: Vec<Section>,
}

impl Page {
    pub(super) fn html(&self) -> String {
        let (mut links, mut sections) = (String::new(), String::new());
        for (id, title, html) in self.sections.iter().filter(|section| !section.2.is_empty()) {
            links += &format!("<a href=\"#{id}\">{title}</a>");
            sections += &format!(
                "<section id=\"{id}\" aria-labelledby=\"{id}-title\">\
                 <h2 id=\"{id}-title\">{title}</h2>{html}</section>"
            );
        }
        let skipped = match self.skipped as u64 {
            0 => String::new(),
            lines => {
                let lines = plural(lines, "line");
                format!("<p>{lines} of the metrics log could not be read.</p>")
            }
        };
        let simulated = if self.is_simulated {
            "<p class=\"loud\"><strong>On simulated GPUs.</strong> The results are real; times \
                 and rates would mean nothing and are left out.</p>"
        } else {
            ""
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
            numbers = self.numbers.to_string().replace('<', "\\u003c"),
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
    let out = run.start.config.get("out").and_then(Value::as_str);
    let mut parts = out.unwrap_or_default().trim_end_matches('/').rsplit('/');
    let last = parts.next().filter(|last| !matches!(*last, "" | "."));
    shortened(last.unwrap_or("run"), 120)
}

fn sections(run: &Run, charts: &[charts::Chart]) -> Vec<Section> {
    let about_curves = if run.is_simulated() {
        note("Times on simulated GPUs mean nothing and are not recorded.")
    } else if run.steps.has("step_ms") && !run.steps.has("reduce_ms") {
        note("On GPUs the host does not wait for reductions: the step's time contains them.")
    } else {
        String::new()
    };
    let curves = about_curves + &charts::html(charts);
    let classes = run.confusion.as_ref().map(classes::confusion);
    let transfers = run.placement.as_ref().map(tables::transfers);
    let settings = tables::settings(run);
    vec![
        ("curves", "Curves", curves),
        ("classes", "Classes", classes.unwrap_or_default()),
        ("columns", "Columns", tables::columns(run)),
        ("answers", "Predictions", answers(run)),
        ("texts", "Text", texts(run)),
        ("transfers", "Transfers", transfers.unwrap_or_default()),
        ("settings", "Configuration", settings),
        ("versions", "Versions", tables::versions(run)),
    ]
}

/// Predicted numbers against those in the data.
fn answers(run: &Run) -> String {
    let rows = run
        .last
        .get("predictions")
        .map(|event| Vec::deserialize(&event["rows"]));
    let mut rows: Vec<[f64; 2]> = rows.and_then(Result::ok).unwrap_or_default();
    rows.retain(|row| row.iter().all(|value| value.is_finite()));
    rows.truncate(ROWS_MAX);
    if rows.is_empty() {
        return String::new();
    }
    let about = format!(
        "{} held-out rows at the last evaluation; on the line predictions are right.",
        rows.len()
    );
    note(&about) + &svg::answers(&rows)
}

/// The last texts that the model made, the newest first.
fn texts(run: &Run) -> String {
    let text = |line: &SampleEvent| {
        let part = |text: &str| escaped(&shortened(text, 2000));
        let texts = line.texts().map(|one| {
            let expected = one.expected.as_deref().map(part);
            let expected = expected.map(|text| format!("<br><i>In the data:</i> {text}"));
            let (prompt, text) = (part(&one.prompt), part(&one.text));
            let expected = expected.unwrap_or_default();
            format!("<p class=\"message\"><b>{prompt}</b>{text}{expected}</p>")
        });
        format!(
            "<h3>After step {}</h3>{}",
            count(line.step),
            texts.collect::<String>()
        )
    };
    let texts: String = run.texts.iter().rev().take(TEXTS_MAX).map(text).collect();
    let about = "The prompt (bold) and what the model wrote after it, at the latest evaluations.";
    if texts.is_empty() {
        texts
    } else {
        note(about) + &texts
    }
}

/// How a run ended: a class of the style sheet, a sign, a word, and why it did not succeed.
pub(super) fn ending(run: &Run) -> [String; 4] {
    let Some((outcome, reason, code)) = run.ending() else {
        let log = format!("The metrics log ends after step {}", count(run.last_step()));
        let message = format!("{log}: the run is still running, or was killed.");
        return ["open", "…", "not ended", &message].map(String::from);
    };
    let (reason, with_code) = (shortened(reason, 2000), format!(" (exit code {code})"));
    let (class, sign, message) = match outcome {
        RunOutcome::Done => ("done", "✓", String::new()),
        RunOutcome::Early => ("done", "✓", reason),
        RunOutcome::Stopped => ("stopped", "‖", reason + &with_code),
        RunOutcome::Failed => ("failed", "✕", reason + &with_code),
    };
    [class, sign, class, &message].map(String::from)
}

/// The run in a few numbers.
fn tiles(run: &Run) -> String {
    let html = |Figure { name, value, note }: &Figure| {
        let (value, note) = (escaped(value), escaped(note));
        format!("<div><dt>{name}</dt><dd>{value}</dd><dd class=\"about\">{note}</dd></div>")
    };
    figures(run).iter().map(html).collect()
}
