//! Begins a metrics log, or resumes one: lines after the checkpoint are removed, and follow as what
//! was removed (`head.rs`).
//!
//! A killed process may leave half a line, and a power loss a file that ends in zeros. The metrics
//! log ends before the first line that is not an event.
//!
//! A process that resumes a run locks its metrics log before it reads or changes the folder, and
//! keeps the lock until the run ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ddp_kernels::files as disk;
use ddp_kernels::heartbeat::{self, Work};

use super::head::{Head, removed_line};
use super::{
    CONFIG_FILE, EVENTS_FILE, LastSteps, LogLine, MetricsLog, check_free, taken, write_settings,
};
use crate::error::{Error, Result};
use crate::setting::OUT;

/// How long to wait for a run that is ending to release its metrics log.
const ENDING_MAX: Duration = Duration::from_secs(3);
/// How long if its host may be lost: a file system of several hosts releases it after that. NFS
/// servers take 90 s.
const LOST_MAX: Duration = Duration::from_secs(120);

/// The metrics log of a run, locked against other processes.
#[derive(Debug)]
pub(crate) struct LockedLog {
    pub(super) file: File,
    pub(super) path: PathBuf,
}

impl LockedLog {
    /// Locks the metrics log in `out`. None if `out` has no metrics log. It may be that of a rank
    /// `was_lost`, whose host still has the lock.
    pub(crate) fn find(out: &Path, was_lost: bool) -> Result<Option<LockedLog>> {
        if !out.join(EVENTS_FILE).exists() {
            return Ok(None);
        }
        check_plain(out)?;
        let (began, mut is_logged) = (Instant::now(), false);
        let limit = if was_lost { LOST_MAX } else { ENDING_MAX };
        loop {
            match LockedLog::open(out) {
                Err(Error::Usage(_)) if began.elapsed() < limit => {}
                Err(Error::Usage(_)) if was_lost => {
                    let help = "resume the run when the lost host is down";
                    let failed = Error::io("lock", out.join(EVENTS_FILE), help);
                    return Err(failed(io::ErrorKind::TimedOut.into()));
                }
                locked => return locked.map(Some),
            }
            if began.elapsed() > ENDING_MAX && !std::mem::replace(&mut is_logged, true) {
                let (path, limit) = (out.join(EVENTS_FILE), limit.as_secs());
                let path = path.display();
                tracing::warn!("{path}: waiting up to {limit} s until a lost host's lock ends");
            }
            heartbeat::beat(Work::Writes);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// That of this job, which another rank wrote.
    pub(crate) fn of_job(out: &Path) -> Result<LockedLog> {
        let path = out.join(EVENTS_FILE);
        let gone = || {
            let help = "leave the folder of a run as it is until the run ends";
            Error::io("find the metrics log", &path, help)(io::ErrorKind::NotFound.into())
        };
        let locked = LockedLog::find(out, true)?.ok_or_else(gone)?;
        if !is_of_job(out) {
            return Err(Error::Usage(format!(
                "{OUT} {}: another job has resumed this run while this one had lost a rank; help: \
                 resume it once more when that job has ended",
                out.display()
            )));
        }
        Ok(locked)
    }

    /// Locks the metrics log in `out`, creating it if needed. On a file system without locks it
    /// does not exclude other processes.
    fn open(out: &Path) -> Result<LockedLog> {
        let path = out.join(EVENTS_FILE);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(disk::failed("open", &path))?;
        if !disk::is_ours(&file, &path) {
            return Err(Error::Usage(format!(
                "{OUT} {}: a run is writing in it; help: wait until it ends",
                out.display()
            )));
        }
        Ok(LockedLog { file, path })
    }

    /// Locks a new or empty metrics log in `out`. Refuses one that another process has begun.
    pub(crate) fn empty(out: &Path) -> Result<LockedLog> {
        let locked = LockedLog::open(out)?;
        let about = locked.file.metadata();
        let about = about.map_err(disk::failed("look at", &locked.path))?;
        if about.len() > 0 {
            return Err(taken(out));
        }
        Ok(locked)
    }
}

impl MetricsLog {
    /// Makes the run's folder with the settings and an empty metrics log. Refuses a folder that
    /// holds a run, or in which one is starting.
    pub fn create(out: &Path, settings: &str) -> Result<MetricsLog> {
        check_free(out)?;
        disk::make_folder(out)?;
        let path = out.join(EVENTS_FILE);
        let config = out.join(CONFIG_FILE);
        // Without a metrics log next to it, a config.toml is the user's own.
        if !path.exists() && fs::read(&config).is_ok_and(|there| there != settings.as_bytes()) {
            return Err(Error::Usage(format!(
                "{OUT} {}: it holds a {CONFIG_FILE} that no run wrote, which would be overwritten; \
                 help: give another folder",
                out.display()
            )));
        }
        check_plain(out)?;
        // The lock lasts as long as the metrics log is written.
        let LockedLog { file, path } = LockedLog::empty(out)?;
        write_settings(out, settings)?;
        Ok(MetricsLog {
            file,
            path,
            length: 0,
            written: LastSteps::default(),
        })
    }

    /// Opens the metrics log of a run that resumes after step `step`, and cuts the lines after it,
    /// and those of ranks after this `generation`. Also returns whether it has its first line.
    pub(crate) fn resume(
        out: &Path,
        settings: &str,
        locked: LockedLog,
        step: u64,
        generation: Option<u64>,
    ) -> Result<(MetricsLog, bool)> {
        let LockedLog { mut file, path } = locked;
        let mut copied = None;
        disk::replace_file(&path, |copy| {
            // It is locked already, so that no other process locks it first.
            let lines = copy_lines(&mut file, copy, step, generation);
            let lines = lines.map_err(disk::failed("write", &path))?;
            let copy = copy.try_clone().map_err(disk::failed("open", &path))?;
            copied = Some((copy, lines));
            Ok::<_, disk::FileError>(())
        })?;
        let (file, (length, has_start, written)) = copied.expect("the file was written");
        write_settings(out, settings)?;
        let log = MetricsLog {
            file,
            path,
            length,
            written,
        };
        Ok((log, has_start))
    }
}

/// Refuses a metrics log that is a pipe, a device or a folder: reading it might never end.
fn check_plain(out: &Path) -> Result<()> {
    match fs::metadata(out.join(EVENTS_FILE)) {
        Ok(there) if !there.is_file() => Err(Error::Data(format!(
            "{}: expected a plain file, the metrics log of a run, got another kind; help: remove it",
            out.join(EVENTS_FILE).display()
        ))),
        _ => Ok(()),
    }
}

/// The lines of the metrics log in `out`, as far as they are whole.
fn lines(out: &Path) -> impl Iterator<Item = LogLine> {
    let file = File::open(out.join(EVENTS_FILE)).map(BufReader::new);
    let lines = file.into_iter().flat_map(BufRead::lines);
    lines.map_while(|line| serde_json::from_str(&line.ok()?).ok())
}

/// Whether no other job has begun or resumed the run in `out` since this one did.
pub(crate) fn is_of_job(out: &Path) -> bool {
    let openings = lines(out).filter(|line| matches!(&*line.event, "start" | "resume"));
    openings
        .last()
        .is_none_or(|line| line.job == ddp_comm::job_number())
}

/// Whether the metrics log in `out`, if there is one, says that the run ended well.
pub(crate) fn has_ended_well(out: &Path) -> bool {
    let is_good_end = |line: LogLine| line.event == "end" && line.exit_code == Some(0);
    !out.join(EVENTS_FILE).exists() || lines(out).any(is_good_end)
}

/// The steps of the checkpoints that the metrics log in `out` knows.
pub(crate) fn checkpoints(out: &Path) -> Vec<u64> {
    let saved = lines(out).filter(|line| line.event == "checkpoint");
    saved.filter_map(|line| line.step).collect()
}

/// Copies the lines that belong to the run up to step `step` and generation `last`. How it ended
/// before is not one of them. What is left out follows as such. Returns their length, whether the
/// first line is one of them, and the last of each kind.
fn copy_lines(
    from: &mut File,
    to: &mut File,
    step: u64,
    last: Option<u64>,
) -> io::Result<(u64, bool, LastSteps)> {
    from.seek(SeekFrom::Start(0))?;
    let (mut reader, mut writer) = (BufReader::new(from), BufWriter::new(to));
    let (mut text, mut length, mut has_start) = (Vec::new(), 0, false);
    let (mut written, mut before, mut removed) = (LastSteps::default(), Head::default(), vec![]);
    while reader.read_until(b'\n', &mut text)? > 0 {
        heartbeat::beat(Work::Writes);
        let line = text.strip_suffix(b"\n");
        let parsed = line.and_then(|line| serde_json::from_slice::<LogLine>(line).ok());
        let Some((line, parsed)) = line.zip(parsed) else {
            break;
        };
        before.add(line);
        let is_of_end = matches!(
            &*parsed.event,
            "confusion" | "baselines" | "predictions" | "placement" | "end"
        );
        let is_later = parsed.step > Some(step) || last.is_some() && parsed.generation > last;
        if !is_of_end && !is_later {
            writer.write_all(&text)?;
            length += text.len() as u64;
            has_start |= parsed.event == "start";
            written.insert(parsed.event, parsed.step.unwrap_or(0));
        } else {
            removed.push(before.lines);
        }
        text.clear();
    }
    if !removed.is_empty() {
        let mut write = |line: &[u8]| {
            length += line.len() as u64 + 1;
            writer
                .write_all(line)
                .and_then(|()| writer.write_all(b"\n"))
        };
        write(before.cut(removed.len()).as_bytes())?;
        reader.rewind()?;
        let mut removed = removed.into_iter().peekable();
        for number in 1..=before.lines {
            heartbeat::beat(Work::Writes);
            text.clear();
            reader.read_until(b'\n', &mut text)?;
            if removed.next_if_eq(&number).is_some() {
                write(&removed_line(number, &text[..text.len() - 1]))?;
            }
        }
    }
    writer.flush()?;
    Ok((length, has_start, written))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics_log::{LogEvent, find_head, head_of};
    use ddp_kernels::files::testing::Scratch;

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

    fn find(out: &Path) -> LockedLog {
        LockedLog::find(out, false).unwrap().unwrap()
    }

    /// What stays of `text` when a run resumes after step `step`.
    fn kept(text: &[u8], step: u64) -> (Vec<u8>, bool) {
        let scratch = Scratch::new();
        let path = scratch.path().join(EVENTS_FILE);
        fs::write(&path, text).unwrap();
        let locked = find(scratch.path());
        let (_log, has_start) = MetricsLog::resume(scratch.path(), "", locked, step, None).unwrap();
        assert_eq!(scratch.names(), ["config.toml", EVENTS_FILE]);
        let after = fs::read(&path).unwrap();
        let before = head_of(text, None).unwrap();
        // Of whatever was removed the log still has the head, unless the end was damaged.
        if is_sound(text) {
            let found = find_head(&after, Some(&before.text())).unwrap().unwrap();
            assert_eq!(found.lines, before.lines, "from step {step}");
        }
        let is_kept = |line: &&[u8]| !line.starts_with(b"{\"event\":\"cut\"");
        let lines = after.split_inclusive(|byte| *byte == b'\n');
        let stayed: Vec<&[u8]> = lines.take_while(is_kept).collect();
        (stayed.concat(), has_start)
    }

    fn is_sound(text: &[u8]) -> bool {
        let lines = text.split_inclusive(|byte| *byte == b'\n');
        let mut whole = lines.filter(|line| line.ends_with(b"\n"));
        whole.all(|line| serde_json::from_slice::<LogLine>(line).is_ok()) && !text.is_empty()
    }

    #[test]
    fn resuming_cuts_the_log_at_the_checkpoint() {
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
    }

    #[test]
    fn lines_before_a_crash_are_kept() {
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
        let (mut log, _) =
            MetricsLog::resume(scratch.path(), "", find(scratch.path()), 1, None).unwrap();
        // As when the disk is full after some bytes.
        log.file.write_all(b"half a li").unwrap();
        log.cut_back();
        log.write(&LogEvent::Checkpoint {
            step: 1,
            folder: "a",
            manifest_blake3: None,
        })
        .unwrap();
        let text = fs::read_to_string(scratch.path().join(EVENTS_FILE)).unwrap();
        assert_eq!(
            text.lines().last(),
            Some(r#"{"event":"checkpoint","step":1,"folder":"a"}"#)
        );
        // Two that stayed, those that say what was removed, and the new one.
        assert_eq!(text.lines().count(), 2 + 1 + 7 + 1);
    }

    #[test]
    fn what_a_step_has_at_most_once_is_not_written_again_also_by_another_rank() {
        let scratch = Scratch::new();
        let path = scratch.path().join(EVENTS_FILE);
        fs::write(&path, LINES).unwrap();
        let (mut log, _) =
            MetricsLog::resume(scratch.path(), "", find(scratch.path()), 4, None).unwrap();
        let before = fs::read_to_string(&path).unwrap();
        let checkpoint = |step| LogEvent::Checkpoint {
            step,
            folder: "a",
            manifest_blake3: None,
        };
        assert!(log.has("step", 4) && log.has("eval", 4) && !log.has("step", 5));
        let step = |step| format!(r#"{{"event":"step","step":{step},"of":"another rank"}}"#);
        log.write_once(step(4)).unwrap();
        log.write(&checkpoint(3)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), before);
        log.write_once(step(5)).unwrap();
        for _ in 0..2 {
            log.write(&checkpoint(5)).unwrap();
        }
        let after = fs::read_to_string(&path).unwrap();
        let added = after.strip_prefix(&before).unwrap();
        assert_eq!(added.lines().count(), 2, "{added}");
    }

    #[test]
    fn a_log_that_another_job_has_resumed_or_removed_is_not_taken_over() {
        let scratch = Scratch::new();
        let path = scratch.path().join(EVENTS_FILE);
        let gone = LockedLog::of_job(scratch.path()).unwrap_err();
        assert_eq!(gone.exit_code(), 74, "{gone}");
        // This process is of no job that continues without lost ranks.
        fs::write(&path, LINES).unwrap();
        LockedLog::of_job(scratch.path()).unwrap();
        let resumed = r#"{"event":"resume","step":6,"job":"another"}"#;
        fs::write(&path, format!("{LINES}{resumed}\n")).unwrap();
        let error = LockedLog::of_job(scratch.path()).unwrap_err();
        let text = error.to_string();
        let expected = "another job has resumed this run";
        assert!(error.exit_code() == 2 && text.contains(expected), "{text}");
    }

    #[test]
    fn a_log_that_is_being_written_is_left_alone() {
        let scratch = Scratch::new();
        fs::write(scratch.path().join(EVENTS_FILE), LINES).unwrap();
        let first = MetricsLog::resume(scratch.path(), "", find(scratch.path()), 6, None).unwrap();
        // The thread that writes checkpoints has such a handle.
        let (handle, _) = first.0.handle().unwrap();
        drop(first);
        let refused = |error: Error| {
            assert!(
                error.exit_code() == 2 && error.to_string().contains("a run is writing in it"),
                "{error}"
            );
        };
        refused(LockedLog::empty(scratch.path()).unwrap_err());
        let began = Instant::now();
        refused(LockedLog::find(scratch.path(), false).unwrap_err());
        assert!(began.elapsed() >= ENDING_MAX, "the run may be ending");
        drop(handle);
        let held = find(scratch.path());
        drop(MetricsLog::resume(scratch.path(), "", held, 1, None).unwrap());
        // That of a lost host is released later.
        let first = MetricsLog::resume(scratch.path(), "", find(scratch.path()), 1, None).unwrap();
        let ends = std::thread::spawn(move || {
            // Sleep: a run that is ending has released it by then.
            std::thread::sleep(ENDING_MAX + Duration::from_millis(500));
            drop(first);
        });
        let held = LockedLog::find(scratch.path(), true).unwrap().unwrap();
        ends.join().unwrap();
        drop(held);
        // Not locked any more, but it is not a new run's.
        let error = LockedLog::empty(scratch.path()).unwrap_err();
        assert!(error.to_string().contains("holds a run already"), "{error}");
    }
}
