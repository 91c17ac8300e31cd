//! The record of a run: OUT/config.toml, and OUT/metrics.jsonl with one event a line. Progress,
//! reports and `inspect` derive from it.
//!
//! Rank 0 writes it. A line is written whole or not at all: a full disk leaves the lines before it
//! as they were. Non-finite numbers are `null`. Only the first line, the last one and those of a
//! resume have times of the wall clock. When a run is resumed, lines after the checkpoint are cut
//! (`record/cut.rs`).

mod cut;

pub(crate) use self::cut::{Held, Kept};

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ddp_data::disk;
use ddp_kernels::transfer::Ledger;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::audit::Audit;
use crate::error::{Error, Result};
use crate::evidence::Confusion;

/// The file of events.
pub const EVENTS_FILE: &str = "metrics.jsonl";
/// The report that is made from it.
pub const REPORT_FILE: &str = "report.html";
/// The file of settings.
pub const CONFIG_FILE: &str = "config.toml";

/// What is known before the first step.
#[derive(Clone, Debug)]
pub struct Start<'a> {
    /// All settings, by name.
    pub config: &'a Map<String, Value>,
    /// Names and versions: of this program, and of libraries it found.
    pub versions: &'a [(&'a str, String)],
    /// What trains, one text a rank.
    pub devices: &'a [String],
    /// How many ranks.
    pub ranks: usize,
    /// On how many hosts.
    pub hosts: usize,
    /// Threads of this rank.
    pub threads: usize,
    /// How ranks reach each other.
    pub transport: &'a str,
    /// Whether gradients are reduced while backward runs.
    pub overlap: bool,
    /// In how many buckets.
    pub buckets: usize,
    /// What the data are.
    pub data: &'a str,
    /// Their fingerprint.
    pub fingerprint: &'a str,
    /// Elements of all parameters.
    pub parameters: usize,
    /// Steps that the run is to have.
    pub steps: u64,
    /// Steps of an epoch.
    pub steps_per_epoch: u64,
}

/// One step, or what became of it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepEvent {
    /// Its number, from 1.
    pub step: u64,
    /// The epoch it is in, from 1.
    pub epoch: u64,
    /// The mean over the whole global batch.
    pub loss: f64,
    /// The learning rate it used.
    pub lr: f64,
    /// The norm of all gradients before clipping.
    pub grad_norm: Option<f64>,
    /// Rows a second over all ranks, since the event before; NaN, and so null, on a simulated GPU.
    pub samples_per_s: f64,
    /// Milliseconds a step, since the event before; null as well.
    pub step_ms: f64,
    /// Of these, how long rank 0 waited for its rows.
    pub data_ms: f64,
    /// Of these, how long rank 0 waited for reductions; none where the host does not wait.
    pub reduce_ms: Option<f64>,
    /// Of these, how long checkpoints held training up.
    pub save_ms: f64,
}

/// One evaluation on held-out rows.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct EvalEvent {
    /// After this step.
    pub step: u64,
    /// The mean over all held-out rows.
    pub loss: f64,
    /// The part of them that is classified rightly; none for regression.
    pub accuracy: Option<f64>,
}

/// A checkpoint that is whole and durable.
#[derive(Clone, Debug, Serialize)]
pub struct CheckpointEvent<'a> {
    /// After this step.
    pub step: u64,
    /// Its folder, below the run's.
    pub folder: &'a str,
}

/// That a run goes on.
#[derive(Clone, Debug, Serialize)]
pub struct ResumeEvent<'a> {
    /// After this step.
    pub step: u64,
    /// The checkpoint's folder, below the run's.
    pub from: &'a str,
    /// With so many ranks.
    pub ranks: usize,
    /// What trains now, one text a rank.
    pub devices: &'a [String],
    /// What has changed that alters what is computed, each as `--lr 0.01 (was 0.001)`.
    pub overridden: &'a [String],
}

/// What a run came to.
#[derive(Clone, Debug, Serialize)]
pub struct End<'a> {
    /// Why it ended: `done`, or the error.
    pub reason: &'a str,
    /// The code that the process ends with.
    pub exit_code: u8,
    /// Steps taken.
    pub steps: u64,
    /// Rows trained on, over all ranks.
    pub samples: u64,
    /// Seconds since the first step of this process, evaluations included.
    pub seconds: f64,
    /// Rows a second over that time; null on a simulated GPU.
    pub samples_per_s: f64,
    /// The last loss that was read.
    pub loss: Option<f64>,
    /// The last evaluation's.
    pub eval_loss: Option<f64>,
    /// The last evaluation's.
    pub accuracy: Option<f64>,
    /// The most memory that rank 0 has had.
    pub peak_mb: Option<f64>,
    /// The most memory of its GPU that it has had; none on the CPU.
    pub device_peak_mb: Option<f64>,
}

/// The record that is being written.
#[derive(Debug)]
pub struct Record {
    file: File,
    path: PathBuf,
    /// Of the whole lines so far.
    length: u64,
    line: Vec<u8>,
}

impl Record {
    /// Makes the run's folder with the settings and an empty record. Refuses a folder that holds a
    /// run, or in which one is starting.
    pub fn create(out: &Path, settings: &str) -> Result<Record> {
        check_free(out)?;
        disk::make_folder(out)?;
        let path = out.join(EVENTS_FILE);
        let beside = out.join(CONFIG_FILE);
        // Beside a record, even an empty one, it is a run's; else somebody's own.
        if !path.exists() && fs::read(&beside).is_ok_and(|there| there != settings.as_bytes()) {
            return Err(Error::Usage(format!(
                "`out` {}: it holds a {CONFIG_FILE} that no run wrote, which would be overwritten; help: give another folder",
                out.display()
            )));
        }
        if fs::metadata(&path).is_ok_and(|there| !there.is_file()) {
            let text = format!(
                "`out` {}: {EVENTS_FILE} in it is not a plain file; help: give another folder",
                out.display()
            );
            return Err(Error::Usage(text));
        }
        let opened = OpenOptions::new().append(true).create(true).open(&path);
        let file = opened.map_err(disk::failed("make", &path))?;
        let is_empty = file
            .metadata()
            .map_err(disk::failed("look at", &path))?
            .len()
            == 0;
        // Held as long as the record is written. File systems that know no locks do without.
        if !is_empty || matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(taken(out));
        }
        write_settings(out, settings)?;
        Ok(Record {
            file,
            path,
            length: 0,
            line: Vec::with_capacity(1024),
        })
    }

    /// Writes `{"event":"start",…}`.
    pub fn start(&mut self, start: &Start<'_>) -> Result<()> {
        let versions: serde_json::Map<String, Value> = start
            .versions
            .iter()
            .map(|(name, version)| (name.to_string(), json!(version)))
            .collect();
        self.write(&json!({
            "event": "start",
            "time_unix_s": unix_s(),
            "config": start.config,
            "versions": versions,
            "devices": start.devices,
            "world": {
                "ranks": start.ranks,
                "hosts": start.hosts,
                "threads": start.threads,
                "transport": start.transport,
                "overlap": start.overlap,
                "buckets": start.buckets,
            },
            "data": start.data,
            "fingerprint": start.fingerprint,
            "parameters": start.parameters,
            "steps": start.steps,
            "steps_per_epoch": start.steps_per_epoch,
        }))
    }

    /// Writes `{"event":"step",…}`.
    pub fn step(&mut self, event: &StepEvent) -> Result<()> {
        self.write(&Tagged {
            event: "step",
            fields: event,
        })
    }

    /// Writes `{"event":"eval",…}`.
    pub fn eval(&mut self, event: &EvalEvent) -> Result<()> {
        self.write(&Tagged {
            event: "eval",
            fields: event,
        })
    }

    /// Writes `{"event":"confusion",…}`: after the last evaluation of a run that classifies.
    pub(crate) fn confusion(&mut self, confusion: &Confusion) -> Result<()> {
        self.write(&Tagged {
            event: "confusion",
            fields: confusion,
        })
    }

    /// Writes `{"event":"checkpoint",…}`.
    pub fn checkpoint(&mut self, event: &CheckpointEvent<'_>) -> Result<()> {
        self.write(&Tagged {
            event: "checkpoint",
            fields: event,
        })
    }

    /// Writes `{"event":"resume",…}`.
    pub fn resume(&mut self, event: &ResumeEvent<'_>) -> Result<()> {
        #[derive(Serialize)]
        struct Timed<'a> {
            time_unix_s: f64,
            #[serde(flatten)]
            fields: &'a ResumeEvent<'a>,
        }
        self.write(&Tagged {
            event: "resume",
            fields: &Timed {
                time_unix_s: unix_s(),
                fields: event,
            },
        })
    }

    /// Writes `{"event":"placement",…}`: before the end, of a run that went well.
    pub fn placement(&mut self, audit: &Audit) -> Result<()> {
        self.write(&Tagged {
            event: "placement",
            fields: audit,
        })
    }

    /// Writes `{"event":"end",…}` with the ledger of transfers, and makes the record durable.
    pub fn end(&mut self, end: &End<'_>, transfers: &Ledger) -> Result<()> {
        #[derive(Serialize)]
        struct Whole<'a> {
            event: &'static str,
            time_unix_s: f64,
            #[serde(flatten)]
            end: &'a End<'a>,
            transfers: Value,
        }
        self.write(&Whole {
            event: "end",
            time_unix_s: unix_s(),
            end,
            transfers: transfers.to_json(),
        })?;
        let synced = self.file.sync_all();
        Ok(synced.map_err(disk::failed("make durable", &self.path))?)
    }

    /// Another handle of the file, and its path, to make the record durable. It holds the lock too.
    pub fn handle(&self) -> Result<(File, &Path)> {
        Ok((
            self.file
                .try_clone()
                .map_err(disk::failed("open", &self.path))?,
            &self.path,
        ))
    }

    fn write(&mut self, event: &impl Serialize) -> Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, event)
            .expect("events have texts for names and numbers for values");
        self.line.push(b'\n');
        if let Err(error) = self.file.write_all(&self.line) {
            self.cut_back();
            return Err(disk::failed("write", &self.path)(error).into());
        }
        self.length += self.line.len() as u64;
        Ok(())
    }

    /// Removes half a line, which would make the record unreadable. An error here adds nothing to
    /// the first one.
    fn cut_back(&mut self) {
        _ = self.file.set_len(self.length);
        _ = self.file.seek(SeekFrom::Start(self.length));
    }
}

/// Writes the settings' file beside the record.
fn write_settings(out: &Path, settings: &str) -> Result<()> {
    let path = out.join(CONFIG_FILE);
    Ok(disk::replace_file(&path, |file| {
        let written = file.write_all(settings.as_bytes());
        written.map_err(disk::failed("write", &path))
    })?)
}

#[derive(Serialize)]
struct Tagged<'a, T> {
    event: &'static str,
    #[serde(flatten)]
    fields: &'a T,
}

/// Refuses a folder that holds a run, and names one that does not. An empty record is of a run that
/// failed before it began, and does not count.
pub fn check_free(out: &Path) -> Result<()> {
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
        "`out` {}: it holds a run already, and no run is overwritten; help: give another folder, \
         as in `out` {}, or `resume` auto to continue that run",
        out.display(),
        free.display()
    ))
}

fn unix_s() -> f64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64());
    (since * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests;
