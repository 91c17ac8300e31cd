//! The metrics log of a run: OUT/config.toml, and OUT/metrics.jsonl with one event a line.
//! Progress, reports and `inspect` derive from it.
//!
//! Rank 0 writes it. A line is written whole or not at all: a full disk does not damage earlier
//! lines. Non-finite numbers are `null`. Only the first line, the last one, those of a resume
//! and of lost ranks have wall-clock times. When a run is resumed, lines after the checkpoint are
//! removed (`metrics_log/cut.rs`); the log says what they were, so that a published hash of its
//! lines, its head, can still be checked (`metrics_log/head.rs`).

mod cut;
mod events;
mod head;

pub(crate) use self::cut::{LockedLog, checkpoints, has_ended_well, is_of_job};
pub(crate) use self::events::DONE;
pub use self::events::{
    Contents, EndEvent, EvalEvent, LogEvent, OutOfFold, RanksEvent, ResumeEvent, RunOutcome,
    SampleEvent, SampleText, StartEvent, StartWorld, StepEvent,
};
pub use self::head::{FoundHead, Head, HeadError, find_head, head_of};

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ddp_kernels::files as disk;
use serde::Deserialize;

use crate::checkpoint;
use crate::error::{Error, Result};
use crate::setting::{OUT, RESUME};

/// The file of events.
pub const EVENTS_FILE: &str = "metrics.jsonl";
/// The report that is made from it.
pub const REPORT_FILE: &str = "report.html";
/// The file of settings.
pub const CONFIG_FILE: &str = "config.toml";

/// The metrics log that is being written.
#[derive(Debug)]
pub struct MetricsLog {
    file: File,
    path: PathBuf,
    /// The length of the complete lines.
    length: u64,
    written: LastSteps,
}

/// By the names of events: the step of the last line. There is no line for step 0.
pub(crate) type LastSteps = BTreeMap<String, u64>;

/// The events that a step has at most once.
const ONCE: [&str; 7] = [
    "step",
    "eval",
    "sample",
    "checkpoint",
    "confusion",
    "baselines",
    "predictions",
];

/// The fields that tell lines apart.
#[derive(Deserialize)]
struct LogLine {
    event: String,
    step: Option<u64>,
    generation: Option<u64>,
    job: Option<String>,
    exit_code: Option<u8>,
}

impl MetricsLog {
    /// Another handle of the file, and its path, to make the metrics log durable. It holds the lock
    /// too.
    pub fn handle(&self) -> Result<(File, PathBuf)> {
        let file = self.file.try_clone();
        let file = file.map_err(disk::failed("open", &self.path))?;
        Ok((file, self.path.clone()))
    }

    /// Refuses a metrics log that was removed, replaced or cut while it is written.
    pub(crate) fn check_present(&self) -> Result<()> {
        let there = fs::metadata(&self.path).and_then(|there| Ok((there, self.file.metadata()?)));
        let gone = match there {
            Ok((there, here)) if there.ino() == here.ino() && here.len() >= self.length => {
                return Ok(());
            }
            Ok((there, here)) if there.ino() == here.ino() => {
                io::Error::other("it was cut while this run was writing it")
            }
            Ok(_) => io::Error::other("it was replaced while this run was writing it"),
            Err(error) => error,
        };
        let help = "leave the folder of a run as it is until the run ends";
        Err(Error::io("find the metrics log", &self.path, help)(gone))
    }

    /// Writes the last line, and makes the metrics log durable.
    pub fn end(&mut self, end: EndEvent<'_>) -> Result<()> {
        self.check_present()?;
        self.write(&LogEvent::End(end))?;
        let synced = self.file.sync_all();
        Ok(synced.map_err(disk::failed("make durable", &self.path))?)
    }

    /// Whether there is a line of this kind for step `step`: after the loss of a rank, others
    /// repeat what belongs to a step.
    pub(crate) fn has(&self, kind: &str, step: u64) -> bool {
        step > 0 && self.written.get(kind).is_some_and(|last| *last >= step)
    }

    /// Writes a line, unless it is there.
    pub fn write(&mut self, event: &LogEvent<'_>) -> Result<()> {
        self.write_once(event.to_line())
    }

    /// Writes the line of an event, which another rank may have made, unless it is there.
    pub(crate) fn write_once(&mut self, line: String) -> Result<()> {
        let parsed = serde_json::from_str(&line);
        let LogLine { event, step, .. } = parsed.expect("the line of an event");
        let step = step.filter(|_| ONCE.contains(&&*event));
        if step.is_some_and(|step| self.has(&event, step)) {
            return Ok(());
        }
        self.write_line(line)?;
        self.written.extend(step.map(|step| (event, step)));
        Ok(())
    }

    /// Writes that the checkpoint of step `step` is durable.
    pub(crate) fn write_checkpoint(&mut self, step: u64, folder: &Path) -> Result<()> {
        let out = self.path.parent().unwrap_or(Path::new(""));
        let manifest_blake3 = checkpoint::manifest_blake3(folder);
        let folder = folder.strip_prefix(out).unwrap_or(folder);
        let folder = &folder.to_string_lossy();
        self.write(&LogEvent::Checkpoint {
            step,
            folder,
            manifest_blake3,
        })
    }

    fn write_line(&mut self, mut line: String) -> Result<()> {
        let length = self.file.metadata();
        // Writing after its end would fill what was cut with zeros.
        if length.map_err(disk::failed("look at", &self.path))?.len() < self.length {
            return self.check_present();
        }
        line.push('\n');
        if let Err(error) = self.file.write_all(line.as_bytes()) {
            self.cut_back();
            return Err(disk::failed("write", &self.path)(error).into());
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Removes an incomplete line. An error here is ignored: the first one is reported.
    fn cut_back(&mut self) {
        _ = self.file.set_len(self.length);
        _ = self.file.seek(SeekFrom::Start(self.length));
    }
}

/// Writes the settings' file next to the metrics log.
fn write_settings(out: &Path, settings: &str) -> Result<()> {
    Ok(disk::replace_with(
        &out.join(CONFIG_FILE),
        settings.as_bytes(),
    )?)
}

/// Refuses a folder that holds a run, and names a free one. An empty metrics log does not count:
/// its run failed before it began.
pub(crate) fn check_free(out: &Path) -> Result<()> {
    let begun = fs::metadata(out.join(EVENTS_FILE)).is_ok_and(|events| events.len() > 0);
    if begun || out.join("checkpoints").exists() {
        Err(taken(out))
    } else {
        Ok(())
    }
}

fn taken(out: &Path) -> Error {
    let mut numbers = 2u64..;
    let named = |number: u64| {
        PathBuf::from(format!(
            "{}-{number}",
            out.display().to_string().trim_end_matches('/')
        ))
    };
    let free = numbers.find_map(|number| Some(named(number)).filter(|folder| !folder.exists()));
    let free = free.unwrap_or_else(|| out.to_path_buf());
    Error::Usage(format!(
        "{OUT} {}: it holds a run already, and no run is overwritten; help: give another folder, \
         as in {OUT} {}, or {RESUME} auto to continue that run",
        out.display(),
        free.display()
    ))
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> f64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64());
    (since * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests;
