//! Inspects a run's folder: how far the run came, how it ended, and which checkpoints are intact.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use ddp_kernels::files::open_ordinary;
use ddp_kernels::setting::SettingName;

use serde_json::{Value, json};

use super::checkpoint::{evaluation, sizes, task};
use super::sheet::{Inspected, Sheet, some_of};
use crate::checkpoint::{self, Opened};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::metrics::Run;
use crate::metrics_log::{EVENTS_FILE, Head, head_of};
use crate::report::charts;
use crate::shown::{shown, significant};
use crate::units::{duration, plural};

/// The most resumes and lost ranks to show: the latest ones.
const CHANGES_MAX: usize = 12;

/// Inspects the run in `out`.
pub(super) fn found(out: &Path, lines: Option<u64>) -> Result<Inspected> {
    let log = out.join(EVENTS_FILE);
    let run = if log.exists() {
        Run::read_log(out, |_| true)?
    } else {
        Run::default()
    };
    let head = head(&log, lines)?;
    let checkpoints = checkpoints(out)?;
    let mut sheet = Sheet::new(format!("run {}", out.display()));
    if let Some(head) = &head {
        sheet.add(
            "head",
            format!("{} (of {})", head.text(), plural(head.lines, "line")),
        );
    }
    let mut newest = checkpoints.iter().rev();
    let last = newest.find_map(|(_, opened)| opened.as_ref().ok());
    // A resumed run may have more steps than it started with.
    let steps = last.map_or(run.start.steps, |last| Some(last.state.schedule.steps));
    describe(&run, steps, &mut sheet);
    if let Some(last) = last {
        sheet.add("task", task(&last.state.task));
        let config = Config::of_checkpoint(last)?;
        sheet.add("data", shown(&config.data.to_string()));
        if let Some(lora) = &config.lora {
            sheet.add("adapters", shown(&lora.to_string()));
        }
        if let Some(frozen) = config.freeze.as_ref().filter(|names| !names.is_empty()) {
            sheet.add("frozen", some_of(frozen));
        }
    }
    let (lines, listed) = listed(&checkpoints);
    sheet.add("checkpoints", lines);
    let bad_line = |(line, why): &(u64, String)| json!({ "line": line, "why": why });
    let json = json!({
        "kind": "run",
        "path": out.to_string_lossy(),
        "head": head.as_ref().map(Head::text),
        "lines": head.as_ref().map(|head| head.lines),
        "start": run.last.get("start"),
        "last_step": run.last.get("step"),
        "last_eval": run.last.get("eval"),
        "best": run.best(),
        "end": run.last.get("end"),
        "resumed": run.resumes.len(),
        "checkpoints": listed,
        "bad_lines": run.bad_lines.iter().map(bad_line).collect::<Value>(),
    });
    let problem = problem(&log, &run, &checkpoints);
    Ok(Inspected(sheet, json, problem))
}

/// The head of these lines of the log, if there is one.
fn head(log: &Path, lines: Option<u64>) -> Result<Option<Head>> {
    if !log.exists() {
        return Ok(None);
    }
    let file = open_ordinary(log).map_err(checkpoint::unreadable(log))?;
    let head = head_of(BufReader::new(file), lines).map_err(checkpoint::unreadable(log))?;
    match lines.filter(|lines| head.lines < *lines) {
        Some(lines) => Err(Error::Usage(format!(
            "inspect {} {lines}: expected at most {}, the lines of {}; help: give fewer",
            SettingName("lines"),
            head.lines,
            log.display()
        ))),
        None => Ok(Some(head)),
    }
}

/// A checkpoint's folder, and the checkpoint with all its bytes checked.
type Checked = (PathBuf, Result<Opened>);

/// The checkpoints in the order of steps.
fn checkpoints(out: &Path) -> Result<Vec<Checked>> {
    let folder = out.join("checkpoints");
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let names = sizes(&folder)?.into_iter().map(|(name, _)| name);
    let names = names.filter(|name| name.starts_with("step-"));
    let opened = names.map(|name| folder.join(name));
    let opened = opened.map(|folder| (folder.clone(), checkpoint::open(&folder)));
    // A run in progress may have removed some since they were listed.
    let is_there = |(folder, opened): &Checked| opened.is_ok() || !checkpoint::is_gone(folder);
    Ok(opened.filter(is_there).collect())
}

/// The checkpoints and their condition, as lines and as JSON.
fn listed(checkpoints: &[Checked]) -> (String, Value) {
    let (mut lines, mut json) = (Vec::new(), Vec::new());
    for (folder, opened) in checkpoints {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let path = folder.to_string_lossy();
        match opened {
            Ok(Opened { state, .. }) => {
                let (step, last) = (state.step, &state.last);
                json.push(json!({ "path": path, "is_whole": true, "step": step, "last": last }));
                let last = last.as_ref().filter(|last| last.step == step);
                let last = last.map(|last| format!(", {}", evaluation(last)));
                lines.push(format!("{name}  intact{}", last.unwrap_or_default()));
            }
            Err(error) => {
                let why = error.to_string();
                json.push(json!({ "path": path, "is_whole": false, "why": why }));
                lines.push(format!("{name}  DAMAGED: {why}"));
            }
        }
    }
    let lines: Vec<String> = lines.iter().map(|line| shown(line)).collect();
    if lines.is_empty() {
        ("none".into(), json.into())
    } else {
        (lines.join("\n"), json.into())
    }
}

/// The first problem, and the number of others.
fn problem(log: &Path, run: &Run, checkpoints: &[Checked]) -> Option<Error> {
    let damaged = checkpoints
        .iter()
        .filter_map(|(_, opened)| opened.as_ref().err());
    let bad = |(line, why): &(u64, String)| format!("{}, line {line}: {why}", log.display());
    let bad = run.bad_lines.iter().map(bad);
    let all: Vec<String> = damaged.map(ToString::to_string).chain(bad).collect();
    let more = match all.len() {
        0 | 1 => String::new(),
        all => format!(" (and {} more, shown above)", all - 1),
    };
    Some(Error::Data(format!("{}{more}", all.first()?)))
}

/// Adds what the metrics log says of a run of `steps` steps.
fn describe(run: &Run, steps: Option<u64>, sheet: &mut Sheet) {
    if !run.last.contains_key("start") {
        return sheet.add("metrics log", format!("{EVENTS_FILE} is missing or empty"));
    }
    let (start, world) = (&run.start, &run.start.world);
    sheet.add("trains on", shown(&start.data));
    let program = shown(start.versions.get("program").map_or("", String::as_str));
    let (ranks, threads) = (world.ranks, plural(world.threads, "thread"));
    sheet.add("ranks", format!("{ranks}, {threads} each, {program}"));
    let marks = charts::marks(run);
    if !marks.is_empty() {
        let last = marks[marks.len().saturating_sub(CHANGES_MAX)..].iter();
        let last: Vec<_> = last.map(|(_, text)| shown(text)).collect();
        sheet.add("since then", last.join("\n"));
    }
    sheet.add("bits", shown(&world.why_bits_may_differ()));
    sheet.add("parameters", start.parameters.unwrap_or(0).to_string());
    if let Some(last) = run.last.get("step") {
        let rates = [("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")];
        let rate = |(name, unit)| Some(format!(", {:.0} {unit}", last[name].as_f64()?));
        let rate = rates.into_iter().find_map(rate).unwrap_or_default();
        let (number, steps) = (run.last_step(), steps.unwrap_or(0));
        let loss = significant(last["loss"].as_f64().unwrap_or(f64::NAN), 4);
        let epoch = shown(&last["epoch"].to_string());
        let text = format!("step {number} of {steps}, epoch {epoch}: loss {loss}{rate}");
        sheet.add("last logged", text);
    }
    if let Some(text) = start.out_of_fold.as_ref().and_then(|folds| folds.beside()) {
        sheet.add("out of fold", shown(&text));
    }
    if let Some((step, text)) = run.eval_texts().next_back() {
        let best = run.best().filter(|best| best.step != step);
        let best = best.map(|best| format!("\nbest {}", evaluation(&best)));
        let text = format!("{text}, after step {step}{}", best.unwrap_or_default());
        sheet.add("evaluation", text);
    }
    let ended = match run.ending() {
        Some((_, reason, code)) => {
            let after = duration(run.of_end("seconds").unwrap_or(f64::NAN));
            format!("{} (exit code {code}), after {after}", shown(reason))
        }
        None => "no: it is still running, or was killed; ddp-train resume continues it".to_string(),
    };
    sheet.add("ended", ended);
}
