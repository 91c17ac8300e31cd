//! Resuming a record: lines after the checkpoint are cut, the others stay.
//!
//! A killed process may leave half a line, and a machine that lost power a file that ends in zeros.
//! The record ends before the first line that is no event.
//!
//! A process that resumes a run locks its record before it reads or changes the folder, and until
//! the run ends.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ddp_data::disk;
use serde::Deserialize;

use super::{EVENTS_FILE, Record, write_settings};
use crate::error::{Error, Result};

/// What of a line decides.
#[derive(Deserialize)]
struct Line {
    event: String,
    step: Option<u64>,
    loss: Option<f64>,
}

/// What of a record stays.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Kept {
    /// Whether it has its first line, and its last.
    pub(crate) has_start: bool,
    pub(crate) has_end: bool,
    /// The last step that has a line, and its loss.
    pub(crate) last_step: Option<u64>,
    pub(crate) last_loss: Option<f64>,
    /// The last checkpoint that has one, and the step that the run last went on from.
    pub(crate) saved: Option<u64>,
    resumed: Option<u64>,
    /// Bytes of the lines that stay, and of all there is.
    bytes: u64,
    all_bytes: u64,
}

impl Kept {
    fn add(&mut self, line: &Line, bytes: usize) {
        self.bytes += bytes as u64;
        match &*line.event {
            "start" => self.has_start = true,
            "end" => self.has_end = true,
            "step" => (self.last_step, self.last_loss) = (line.step, line.loss),
            "checkpoint" => self.saved = line.step,
            "resume" => self.resumed = line.step,
            _ => {}
        }
    }

    /// Whether lines are missing of a run that logged every `log_every` steps up to `step`, because
    /// they were not on the disk when the machine lost power.
    pub(crate) fn has_gap(&self, step: u64, log_every: u64) -> bool {
        let expected = step - step % log_every.max(1);
        // Those before went by another rule, if that has changed.
        expected > self.resumed.unwrap_or(0) && self.last_step.is_none_or(|last| last < expected)
    }
}

/// How long a run that is ending may hold its record.
const ENDING_MAX: Duration = Duration::from_secs(3);

/// The record of a run, held: nobody else writes it.
#[derive(Debug)]
pub(crate) struct Held {
    file: File,
    path: PathBuf,
}

impl Held {
    /// That of the run in `out`; none if there is none.
    pub(crate) fn of(out: &Path) -> Result<Option<Held>> {
        let path = out.join(EVENTS_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let began = Instant::now();
        loop {
            match Held::new(out) {
                Err(Error::Usage(_)) if began.elapsed() < ENDING_MAX => {
                    std::thread::sleep(Duration::from_millis(50))
                }
                held => return held.map(Some),
            }
        }
    }

    /// That in `out`, empty if there was none.
    fn new(out: &Path) -> Result<Held> {
        let path = out.join(EVENTS_FILE);
        Ok(Held {
            file: open_locked(out, &path)?,
            path,
        })
    }

    /// What is in it, but half a line at its end.
    pub(crate) fn all(&mut self) -> Result<Kept> {
        self.keep(&|_| true, &mut |_| Ok(()))
    }

    fn keep(&mut self, stays: &dyn Fn(&Line) -> bool, take: Take<'_>) -> Result<Kept> {
        Ok(keep(&mut self.file, stays, take).map_err(disk::failed("read", &self.path))?)
    }

    /// Puts a copy of it aside, if there are steps in it.
    fn put_aside(&mut self) -> Result<()> {
        if self.all()?.last_step.is_none() {
            return Ok(());
        }
        let aside = superseded(&self.path);
        disk::replace_file(&aside, |copy| {
            self.file
                .seek(SeekFrom::Start(0))
                .map_err(disk::failed("read", &self.path))?;
            std::io::copy(&mut self.file, copy)
                .map(drop)
                .map_err(disk::failed("write", &aside))
        })?;
        tracing::warn!("the record so far is put aside as {}", aside.display());
        Ok(())
    }

    /// Goes on behind the lines that stay, the others cut.
    fn cut(mut self, stays: &dyn Fn(&Line) -> bool) -> Result<(Record, Kept)> {
        let kept = self.keep(stays, &mut |_| Ok(()))?;
        let Held { mut file, path } = self;
        if kept.bytes != kept.all_bytes {
            let mut cut = None;
            disk::replace_file(&path, |aside| {
                // Locked before it bears the name, so that nobody comes between.
                _ = aside.try_lock();
                keep(&mut file, stays, &mut |line| aside.write_all(line))
                    .map_err(disk::failed("write", &path))?;
                cut = Some(aside.try_clone().map_err(disk::failed("open", &path))?);
                Ok(())
            })?;
            file = cut.expect("it was written");
        }
        file.seek(SeekFrom::Start(kept.bytes))
            .map_err(disk::failed("write", &path))?;
        Ok((
            Record {
                file,
                path,
                length: kept.bytes,
                line: Vec::with_capacity(1024),
            },
            kept,
        ))
    }
}

/// A name for what is put aside.
fn superseded(path: &Path) -> PathBuf {
    let numbered = |number: u32| match number {
        1 => path.with_file_name(format!("superseded-{EVENTS_FILE}")),
        _ => path.with_file_name(format!("superseded-{number}-{EVENTS_FILE}")),
    };
    (1..)
        .map(numbered)
        .find(|path| !path.exists())
        .expect("some name is free")
}

impl Record {
    /// Opens the record of a run that resumes after step `step`, and returns what stays of it.
    /// Without a step the old record is put aside. Refuses a record that another process writes.
    pub(crate) fn go_on(
        out: &Path,
        settings: &str,
        held: Option<Held>,
        step: Option<u64>,
    ) -> Result<(Record, Kept)> {
        disk::make_folder(out)?;
        let mut held = held.map_or_else(|| Held::new(out), Ok)?;
        if step.is_none() {
            held.put_aside()?;
        }
        let gone_on = held.cut(&|line| step.is_some_and(|step| stays(line, step)))?;
        write_settings(out, settings)?;
        Ok(gone_on)
    }

    /// Opens the record of a run that finished with step `step` but whose record has no end. None
    /// if the record is complete.
    pub(crate) fn of_finished(mut held: Held, step: u64) -> Result<Option<(Record, Kept)>> {
        let all = held.all()?;
        if all.has_end || !all.has_start {
            return Ok(None);
        }
        held.cut(&|line| line.step.is_none_or(|of_line| of_line <= step))
            .map(Some)
    }
}

/// The record, held as long as it is open. File systems that know no locks do without.
fn open_locked(out: &Path, path: &Path) -> Result<File> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    let file = opened.map_err(disk::failed("open", path))?;
    let is_written = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    // Another may have put a new one in its place in between.
    let is_same = fs::metadata(path)
        .is_ok_and(|there| file.metadata().is_ok_and(|here| here.ino() == there.ino()));
    if is_written || !is_same {
        let text = format!(
            "`out` {}: a run is writing in it; help: wait until it ends",
            out.display()
        );
        return Err(Error::Usage(text));
    }
    Ok(file)
}

/// Has a line that stays.
type Take<'a> = &'a mut dyn FnMut(&[u8]) -> std::io::Result<()>;

/// Hands the lines that stay to `take`, one by one.
fn keep(file: &mut File, stays: &dyn Fn(&Line) -> bool, take: Take<'_>) -> std::io::Result<Kept> {
    let mut kept = Kept {
        all_bytes: file.metadata()?.len(),
        ..Kept::default()
    };
    file.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        let Some(event) = line
            .strip_suffix(b"\n")
            .and_then(|line| serde_json::from_slice::<Line>(line).ok())
        else {
            break;
        };
        if stays(&event) {
            kept.add(&event, line.len());
            take(&line)?;
        }
        line.clear();
    }
    Ok(kept)
}

/// Whether a line belongs to the run up to step `step`. How it ended before is no part of it.
fn stays(line: &Line, step: u64) -> bool {
    !matches!(line.event.as_str(), "confusion" | "placement" | "end")
        && line.step.is_none_or(|of_line| of_line <= step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ddp_data::disk::testing::Scratch;

    const LINES: &str = r#"{"event":"start","time_unix_s":1}
{"event":"step","step":1}
{"event":"step","step":4}
{"event":"checkpoint","step":3}
{"event":"eval","step":4}
{"event":"checkpoint","step":6}
{"event":"confusion","step":6}
{"event":"placement"}
{"event":"end","steps":6}
"#;

    /// What stays of `text` when a run goes on from step `step`.
    fn kept(text: &[u8], step: impl Into<Option<u64>>) -> (Vec<u8>, bool) {
        let scratch = Scratch::new();
        let path = scratch.path().join(EVENTS_FILE);
        fs::write(&path, text).unwrap();
        let step = step.into();
        let (_record, kept) =
            Record::go_on(scratch.path(), "", Held::of(scratch.path()).unwrap(), step).unwrap();
        let aside = if step.is_none() {
            &["superseded-metrics.jsonl"][..]
        } else {
            &[]
        };
        assert_eq!(
            scratch.names(),
            [&["config.toml", EVENTS_FILE], aside].concat()
        );
        assert!(
            aside
                .iter()
                .all(|aside| fs::read(scratch.path().join(aside)).unwrap() == text)
        );
        (fs::read(&path).unwrap(), kept.has_start)
    }

    #[test]
    fn what_came_after_the_checkpoint_goes_and_the_rest_stays_as_it_was() {
        let lines: Vec<&str> = LINES.split_inclusive('\n').collect();
        for (step, expected) in [
            (6, &[0, 1, 2, 3, 4, 5][..]),
            (4, &[0, 1, 2, 3, 4]),
            (3, &[0, 1, 3]),
            (1, &[0, 1]),
            (0, &[0]),
        ] {
            let expected: String = expected.iter().map(|&index: &usize| lines[index]).collect();
            assert_eq!(
                kept(LINES.as_bytes(), step),
                (expected.into_bytes(), true),
                "from step {step}"
            );
        }
        assert_eq!(
            kept(LINES.as_bytes(), None),
            (vec![], false),
            "of a run that was never saved"
        );
    }

    #[test]
    fn whatever_a_crash_leaves_at_the_end_the_lines_before_it_stay() {
        let whole = LINES
            .lines()
            .take(2)
            .map(|line| format!("{line}\n"))
            .collect::<String>();
        let tails = [
            "",
            "{",
            "{\"event\":\"step\",\"st",
            "{\"event\":\"step\",\"step\":2}",
            "\0\0\0\0",
            "\0\n{\"event\":\"step\",\"step\":2}\n",
        ];
        for tail in tails {
            let text = [whole.as_bytes(), tail.as_bytes()].concat();
            assert_eq!(
                kept(&text, 9),
                (whole.clone().into_bytes(), true),
                "{tail:?}"
            );
        }
        assert_eq!(kept(b"", 9), (vec![], false));
    }

    #[test]
    fn what_is_written_next_follows_what_stayed_also_after_a_write_that_failed() {
        let scratch = Scratch::new();
        fs::write(scratch.path().join(EVENTS_FILE), LINES).unwrap();
        let (mut record, _) = Record::go_on(scratch.path(), "", None, Some(1)).unwrap();
        // As when the disk is full behind some bytes.
        record.file.write_all(b"half a li").unwrap();
        record.cut_back();
        record
            .write(&serde_json::json!({"event": "resume", "step": 1}))
            .unwrap();
        let text = fs::read_to_string(scratch.path().join(EVENTS_FILE)).unwrap();
        assert_eq!(text.lines().last(), Some(r#"{"event":"resume","step":1}"#));
        assert_eq!(text.lines().count(), 3);
    }

    #[test]
    fn a_record_that_is_being_written_is_left_alone() {
        let scratch = Scratch::new();
        fs::write(scratch.path().join(EVENTS_FILE), LINES).unwrap();
        let first = Record::go_on(scratch.path(), "", None, Some(6)).unwrap();
        // A handle of it, as what writes checkpoints has one.
        let (handle, _) = first.0.handle().unwrap();
        drop(first);
        let refused = |error: Error| {
            assert!(
                error.exit_code() == 2 && error.to_string().contains("a run is writing in it"),
                "{error}"
            );
        };
        refused(Record::go_on(scratch.path(), "", None, Some(1)).unwrap_err());
        refused(Held::of(scratch.path()).unwrap_err());
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop(handle);
        });
        let held = Held::of(scratch.path()).unwrap();
        ends.join().unwrap();
        Record::go_on(scratch.path(), "", held, Some(1)).unwrap();
    }

    #[test]
    fn a_record_that_ends_before_the_checkpoint_has_a_gap() {
        let kept = |last_step, resumed| Kept {
            last_step,
            resumed,
            ..Kept::default()
        };
        for (step, log_every, last_step, resumed, expected) in [
            (20, 10, Some(20), None, false),
            (29, 10, Some(20), None, false),
            (30, 10, Some(20), None, true),
            (9, 10, None, None, false),
            (10, 10, None, None, true),
            // From step 25 on every seventh.
            (27, 7, Some(20), Some(25), false),
            (28, 7, Some(20), Some(25), true),
        ] {
            let has_gap = kept(last_step, resumed).has_gap(step, log_every);
            assert_eq!(
                has_gap, expected,
                "{step} {log_every} {last_step:?} {resumed:?}"
            );
        }
    }

    #[test]
    fn of_a_run_that_was_over_nothing_but_half_a_line_is_cut() {
        let scratch = Scratch::new();
        let path = scratch.path().join(EVENTS_FILE);
        let lines: Vec<&str> = LINES.split_inclusive('\n').collect();
        let whole = lines[..8].concat();
        fs::write(&path, format!("{whole}{{\"event\":\"en")).unwrap();
        let (_, kept) = Record::of_finished(Held::of(scratch.path()).unwrap().unwrap(), 6)
            .unwrap()
            .unwrap();
        assert_eq!((kept.saved, kept.last_step), (Some(6), Some(4)));
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
        fs::write(&path, LINES).unwrap();
        assert!(
            Record::of_finished(Held::of(scratch.path()).unwrap().unwrap(), 6)
                .unwrap()
                .is_none()
        );
    }
}
