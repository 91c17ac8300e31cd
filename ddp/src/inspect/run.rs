//! A run's folder: what it was, how far it came and how it ended, and which of its checkpoints are whole.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::checkpoint::{evaluation, sizes, task};
use super::sheet::{Found, Sheet, table};
use crate::checkpoint::{self, Best, Opened};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::files;
use crate::record::EVENTS_FILE;
use crate::shown::shown;

/// What the record of a run says.
#[derive(Debug, Default)]
struct Story {
    start: Option<Value>,
    /// The last event of each kind.
    step: Option<Value>,
    eval: Option<Value>,
    end: Option<Value>,
    best: Option<Best>,
    /// How often it went on from a checkpoint.
    resumed: u64,
    /// Lines that are no events, by number from 1, with the reason.
    bad: Vec<(u64, String)>,
    lines: u64,
}

/// The longest line of a record that is read.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// What is in the folder.
pub(super) fn found(out: &Path) -> Result<Found> {
    let record = out.join(EVENTS_FILE);
    let story = if record.exists() {
        Story::read(&record)?
    } else {
        Story::default()
    };
    let checkpoints = checkpoints(out)?;
    let mut sheet = Sheet::new(format!("run {}", out.display()));
    story.tell(&mut sheet);
    let last = checkpoints
        .iter()
        .rev()
        .find_map(|(_, opened)| opened.as_ref().ok());
    if let Some(last) = last {
        sheet.add("task", task(&last.state.task));
        let config = Config::of_checkpoint(last)?;
        sheet.add("data", shown(&config.data.to_string()));
    }
    let line = |(folder, opened): &(PathBuf, Result<Opened>)| {
        let name = folder
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        vec![name, told(opened)]
    };
    let lines: Vec<Vec<String>> = checkpoints.iter().map(line).collect();
    sheet.add(
        "checkpoints",
        if lines.is_empty() {
            "none".into()
        } else {
            left_table(&lines)
        },
    );
    let trouble = trouble(out, &story, &checkpoints);
    let json = json!({
        "kind": "run",
        "path": out.to_string_lossy(),
        "start": story.start,
        "last_step": story.step,
        "last_eval": story.eval,
        "best": story.best,
        "end": story.end,
        "resumed": story.resumed,
        "checkpoints": checkpoints.iter().map(checkpoint_json).collect::<Value>(),
        "bad_lines": story.bad.iter().map(|(line, why)| json!({ "line": line, "why": why })).collect::<Value>(),
    });
    Ok(Found {
        sheet,
        json,
        trouble,
    })
}

/// Both columns to the left.
fn left_table(lines: &[Vec<String>]) -> String {
    let names: Vec<Vec<String>> = lines.iter().map(|line| vec![line[0].clone()]).collect();
    let names = table(
        &names
            .iter()
            .map(|name| vec![name[0].clone(), ".".into()])
            .collect::<Vec<_>>(),
    );
    let name = |line: &str| line.trim_end_matches('.').to_string();
    names
        .lines()
        .zip(lines)
        .map(|(left, line)| name(left) + &line[1])
        .collect::<Vec<_>>()
        .join("\n")
}

/// The folders that are called like checkpoints, in the order of steps, each opened with all its bytes checked.
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
    // A run in training may have removed some since they were listed.
    Ok(opened
        .filter(|(folder, opened)| opened.is_ok() || !checkpoint::is_gone(folder))
        .collect())
}

fn told(opened: &Result<Opened>) -> String {
    match opened {
        Ok(opened) => {
            let last = opened
                .state
                .last
                .as_ref()
                .filter(|last| last.step == opened.state.step);
            let last = last.map_or(String::new(), |last| format!(", {}", evaluation(last)));
            format!("whole{last}")
        }
        Err(error) => format!("DAMAGED: {error}"),
    }
}

fn checkpoint_json((folder, opened): &(PathBuf, Result<Opened>)) -> Value {
    match opened {
        Ok(opened) => json!({
            "path": folder.to_string_lossy(), "is_whole": true, "step": opened.state.step, "last": opened.state.last,
        }),
        Err(error) => {
            json!({ "path": folder.to_string_lossy(), "is_whole": false, "why": error.to_string() })
        }
    }
}

/// What is wrong: the first of it, and how much more.
fn trouble(out: &Path, story: &Story, checkpoints: &[(PathBuf, Result<Opened>)]) -> Option<Error> {
    let damaged = checkpoints
        .iter()
        .filter_map(|(_, opened)| opened.as_ref().err())
        .map(ToString::to_string);
    let record = out.join(EVENTS_FILE);
    let bad = story
        .bad
        .iter()
        .map(|(line, why)| format!("{}, line {line}: {why}", record.display()));
    let all: Vec<String> = damaged.chain(bad).collect();
    let first = all.first()?;
    let more = match all.len() {
        1 => String::new(),
        count => format!(" (and {} more, named above)", count - 1),
    };
    Some(Error::Data(format!("{first}{more}")))
}

impl Story {
    fn read(path: &Path) -> Result<Story> {
        let failed = || files::failed("read", path);
        let mut lines = BufReader::new(File::open(path).map_err(failed())?);
        let length = fs::metadata(path).map_err(failed())?.len();
        let (mut story, mut line, mut read) = (Story::default(), Vec::new(), 0);
        loop {
            line.clear();
            let count = (&mut lines)
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut line)
                .map_err(failed())?;
            if count == 0 {
                return Ok(story);
            }
            read += count as u64;
            story.lines += 1;
            story.hear(&line, read >= length);
        }
    }

    /// One line. Of a run that was killed the last may be cut short: that is no damage.
    fn hear(&mut self, line: &[u8], is_last: bool) {
        let event: Value = match serde_json::from_slice(line) {
            Ok(event) => event,
            Err(_) if is_last && !line.ends_with(b"\n") => return,
            Err(error) => {
                return self
                    .bad
                    .push((self.lines, format!("it is no event: {error}")));
            }
        };
        match event["event"].as_str() {
            Some("start") => self.start = Some(event),
            Some("step") => self.step = Some(event),
            Some("eval") => {
                let (step, loss) = (event["step"].as_u64(), event["loss"].as_f64());
                if let (Some(step), Some(loss)) = (step, loss)
                    && self.best.is_none_or(|best| loss < best.loss)
                {
                    self.best = Some(Best {
                        step,
                        loss,
                        accuracy: event["accuracy"].as_f64(),
                    });
                }
                self.eval = Some(event);
            }
            Some("resume") => (self.resumed, self.end) = (self.resumed + 1, None),
            Some("end") => self.end = Some(event),
            _ => {}
        }
    }

    fn tell(&self, sheet: &mut Sheet) {
        let Some(start) = &self.start else {
            return sheet.add("record", format!("{EVENTS_FILE} is missing or empty"));
        };
        let text = |value: &Value| {
            shown(
                &value
                    .as_str()
                    .map_or_else(|| value.to_string(), String::from),
            )
        };
        sheet.add("trains on", text(&start["data"]));
        let world = &start["world"];
        sheet.add(
            "ranks",
            format!(
                "{}, {} threads each, ddp-train {}",
                text(&world["ranks"]),
                text(&world["threads"]),
                text(&start["versions"]["ddp-train"])
            ),
        );
        sheet.add("parameters", text(&start["parameters"]));
        if let Some(step) = &self.step {
            let rate = step["samples_per_s"]
                .as_f64()
                .map_or(String::new(), |rate| format!(", {rate:.0} rows/s"));
            let loss = step["loss"].as_f64().unwrap_or(f64::NAN);
            sheet.add(
                "last step",
                format!(
                    "{} of {}, epoch {}: loss {loss:.4}{rate}",
                    text(&step["step"]),
                    text(&start["steps"]),
                    text(&step["epoch"])
                ),
            );
        }
        if let Some(eval) = &self.eval {
            let last = Best {
                step: eval["step"].as_u64().unwrap_or(0),
                loss: eval["loss"].as_f64().unwrap_or(f64::NAN),
                accuracy: eval["accuracy"].as_f64(),
            };
            let best = self.best.filter(|best| best.step != last.step);
            let best = best.map_or(String::new(), |best| {
                format!("\nbest {}", evaluation(&best))
            });
            sheet.add("evaluation", format!("{}{best}", evaluation(&last)));
        }
        if self.resumed > 0 {
            sheet.add(
                "went on",
                format!("{} times from a checkpoint", self.resumed),
            );
        }
        match &self.end {
            Some(end) => {
                let seconds = end["seconds"].as_f64().unwrap_or(f64::NAN);
                sheet.add(
                    "ended",
                    format!(
                        "{} (exit code {}), after {seconds:.1} s",
                        text(&end["reason"]),
                        text(&end["exit_code"])
                    ),
                );
            }
            None => sheet.add(
                "ended",
                "not: it still runs, or was killed. --resume auto goes on with it",
            ),
        }
    }
}
