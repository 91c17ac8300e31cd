//! Inspects a run's folder: how far the run came, how it ended, and which checkpoints are intact.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::checkpoint::{evaluation, sizes, task};
use super::sheet::{Inspected, Sheet, some_of};
use crate::checkpoint::{self, Opened};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::metrics::Run;
use crate::record::EVENTS_FILE;
use crate::shown::{shown, significant};
use crate::units::{duration, plural};

/// Inspects the run in `out`.
pub(super) fn found(out: &Path) -> Result<Inspected> {
    let record = out.join(EVENTS_FILE);
    let run = match record.exists() {
        true => Run::read_log(&record, |_| true)?,
        false => Run::default(),
    };
    let checkpoints = checkpoints(out)?;
    let mut sheet = Sheet::new(format!("run {}", out.display()));
    let last = checkpoints
        .iter()
        .rev()
        .find_map(|(_, opened)| opened.as_ref().ok());
    // A resumed run may have more steps than it started with.
    let steps = last.map_or(run.start.steps, |last| Some(last.state.schedule.steps));
    describe(&run, steps, &mut sheet);
    if let Some(last) = last {
        sheet.add("task", task(&last.state.task));
        let config = Config::of_checkpoint(last)?;
        sheet.add("data", shown(&config.data.to_string()));
        if !config.freeze.is_empty() {
            sheet.add("frozen", some_of(&config.freeze));
        }
    }
    let line = |(folder, opened): &(PathBuf, Result<Opened>)| {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        shown(&format!("{name}  {}", condition(opened)))
    };
    let lines: Vec<String> = checkpoints.iter().map(line).collect();
    let lines = match lines.is_empty() {
        true => "none".to_string(),
        false => lines.join("\n"),
    };
    sheet.add("checkpoints", lines);
    let problem = problem(out, &run, &checkpoints);
    let bad_line = |(line, why): &(u64, String)| json!({ "line": line, "why": why });
    let json = json!({
        "kind": "run",
        "path": out.to_string_lossy(),
        "start": run.last.get("start"),
        "last_step": run.last.get("step"),
        "last_eval": run.last.get("eval"),
        "best": run.best(),
        "end": run.last.get("end"),
        "resumed": run.resumes.len(),
        "checkpoints": checkpoints.iter().map(checkpoint_json).collect::<Value>(),
        "bad_lines": run.bad_lines.iter().map(bad_line).collect::<Value>(),
    });
    Ok(Inspected {
        sheet,
        json,
        problem,
    })
}

/// The checkpoints in the order of steps, each opened with all its bytes checked.
fn checkpoints(out: &Path) -> Result<Vec<(PathBuf, Result<Opened>)>> {
    let folder = out.join("checkpoints");
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let names = sizes(&folder)?.into_iter().map(|(name, _)| name);
    let folders = names
        .filter(|name| name.starts_with("step-"))
        .map(|name| folder.join(name));
    let opened = folders.map(|folder| (folder.clone(), checkpoint::open(&folder)));
    // A run in progress may have removed some since they were listed.
    Ok(opened
        .filter(|(folder, opened)| opened.is_ok() || !checkpoint::is_gone(folder))
        .collect())
}

fn condition(opened: &Result<Opened>) -> String {
    match opened {
        Ok(opened) => {
            let last = opened
                .state
                .last
                .as_ref()
                .filter(|last| last.step == opened.state.step);
            let last = last.map_or(String::new(), |last| format!(", {}", evaluation(last)));
            format!("intact{last}")
        }
        Err(error) => format!("DAMAGED: {error}"),
    }
}

fn checkpoint_json((folder, opened): &(PathBuf, Result<Opened>)) -> Value {
    match opened {
        Ok(opened) => json!({
            "path": folder.to_string_lossy(),
            "is_whole": true,
            "step": opened.state.step,
            "last": opened.state.last,
        }),
        Err(error) => {
            json!({ "path": folder.to_string_lossy(), "is_whole": false, "why": error.to_string() })
        }
    }
}

/// The first problem, and the number of others.
fn problem(out: &Path, run: &Run, checkpoints: &[(PathBuf, Result<Opened>)]) -> Option<Error> {
    let damaged = checkpoints
        .iter()
        .filter_map(|(_, opened)| opened.as_ref().err())
        .map(ToString::to_string);
    let record = out.join(EVENTS_FILE);
    let bad = run
        .bad_lines
        .iter()
        .map(|(line, why)| format!("{}, line {line}: {why}", record.display()));
    let all: Vec<String> = damaged.chain(bad).collect();
    let first = all.first()?;
    let more = match all.len() {
        1 => String::new(),
        count => format!(" (and {} more, shown above)", count - 1),
    };
    Some(Error::Data(format!("{first}{more}")))
}

/// Adds what the metrics log says of a run of `steps` steps.
fn describe(run: &Run, steps: Option<u64>, sheet: &mut Sheet) {
    if !run.last.contains_key("start") {
        return sheet.add("metrics log", format!("{EVENTS_FILE} is missing or empty"));
    }
    let (start, world) = (&run.start, &run.start.world);
    sheet.add("trains on", shown(&start.data));
    let text = |name: &str| start.versions.get(name)?.as_str();
    // Versions up to 0.6 wrote only their number.
    let older = || format!("ddp-train {}", text("ddp-train").unwrap_or_default());
    let program = shown(&text("program").map_or_else(older, String::from));
    let (ranks, threads) = (world.ranks, plural(world.threads, "thread"));
    sheet.add("ranks", format!("{ranks}, {threads} each, {program}"));
    sheet.add("bits", shown(&world.why_bits_may_differ()));
    sheet.add("parameters", start.parameters.unwrap_or(0).to_string());
    if let Some(last) = run.last.get("step") {
        let rates = [("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")];
        let rate = rates
            .iter()
            .find_map(|(name, unit)| Some((last[name].as_f64()?, unit)));
        let rate = rate.map_or(String::new(), |(rate, unit)| format!(", {rate:.0} {unit}"));
        let (number, steps) = (run.last_step(), steps.unwrap_or(0));
        let loss = significant(last["loss"].as_f64().unwrap_or(f64::NAN), 4);
        let epoch = shown(&last["epoch"].to_string());
        sheet.add(
            "last logged",
            format!("step {number} of {steps}, epoch {epoch}: loss {loss}{rate}"),
        );
    }
    if let Some((step, text)) = run.eval_texts().next_back() {
        let best = run.best().filter(|best| best.step != step);
        let best = best.map_or(String::new(), |best| {
            format!("\nbest {}", evaluation(&best))
        });
        sheet.add("evaluation", format!("{text}, after step {step}{best}"));
    }
    if !run.resumes.is_empty() {
        let times = plural(run.resumes.len() as u64, "time");
        sheet.add("resumed", format!("{times} from a checkpoint"));
    }
    let ended = match run.ending() {
        Some((reason, code)) => {
            let after = duration(run.of_end("seconds").unwrap_or(f64::NAN));
            format!("{} (exit code {code}), after {after}", shown(reason))
        }
        None => "no: it is still running, or was killed; ddp-train resume continues it".to_string(),
    };
    sheet.add("ended", ended);
}
