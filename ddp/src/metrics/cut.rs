//! Going on with a record: what lies past the checkpoint that a run goes on from is cut, and the rest stays as it is.
//!
//! A process that was killed may leave half a line, and a machine that lost its power a file that ends in zeros: the record ends with the
//! last line before the first that is no event.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Deserialize;

use super::{EVENTS_FILE, Record, write_settings};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::files;

/// What of a line decides.
#[derive(Deserialize)]
struct Line {
    event: String,
    step: Option<u64>,
}

/// What of a record stays.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    /// Whether it has its first line.
    pub(super) has_start: bool,
    /// Bytes of the lines that stay, and of all there is.
    pub(super) bytes: u64,
    pub(super) all_bytes: u64,
}

impl Record {
    /// Goes on with the record of a run that was saved after step `step`, with these settings; of one that never was nothing stays. Says whether
    /// it has its first line: a record that was lost begins anew. Refuses one that somebody writes at this moment.
    pub fn go_on(config: &Config, step: Option<u64>) -> Result<(Record, bool)> {
        let out = &config.out;
        files::make_folder(out)?;
        let path = out.join(EVENTS_FILE);
        let mut file = open_locked(out, &path)?;
        let kept = keep(&mut file, step, &mut |_| Ok(())).map_err(files::failed("read", &path))?;
        if kept.bytes != kept.all_bytes {
            let mut cut = None;
            files::replace_file(&path, |aside| {
                // Locked before it bears the name, so that nobody comes between.
                _ = aside.try_lock();
                keep(&mut file, step, &mut |line| aside.write_all(line)).map_err(files::failed("write", &path))?;
                cut = Some(aside.try_clone().map_err(files::failed("open", &path))?);
                Ok(())
            })?;
            file = cut.expect("it was written");
        }
        write_settings(config)?;
        file.seek(SeekFrom::Start(kept.bytes)).map_err(files::failed("write", &path))?;
        let record = Record { file, path, length: kept.bytes, line: Vec::with_capacity(1024), curves: None };
        Ok((record, kept.has_start))
    }
}

/// The record, held as long as it is open. File systems that know no locks do without.
fn open_locked(out: &Path, path: &Path) -> Result<File> {
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = opened.map_err(files::failed("open", path))?;
    let is_written = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    // Another may have put a new one in its place in between.
    let is_same = fs::metadata(path).is_ok_and(|there| file.metadata().is_ok_and(|here| here.ino() == there.ino()));
    if is_written || !is_same {
        let text = format!("--out {}: a run goes on in it at this moment. Wait until that ends", out.display());
        return Err(Error::Usage(text));
    }
    Ok(file)
}

/// Hands the lines that stay to `take`, one by one.
fn keep(
    file: &mut File,
    step: Option<u64>,
    take: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
) -> std::io::Result<Kept> {
    let mut kept = Kept { all_bytes: file.metadata()?.len(), ..Kept::default() };
    file.seek(SeekFrom::Start(0))?;
    let Some(step) = step else { return Ok(kept) };
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        let Some(event) = line.strip_suffix(b"\n").and_then(|line| serde_json::from_slice::<Line>(line).ok()) else {
            break;
        };
        if stays(&event, step) {
            kept.has_start |= event.event == "start";
            kept.bytes += line.len() as u64;
            take(&line)?;
        }
        line.clear();
    }
    Ok(kept)
}

/// Whether a line belongs to the run up to step `step`. How it ended before is no part of it.
fn stays(line: &Line, step: u64) -> bool {
    !matches!(line.event.as_str(), "confusion" | "placement" | "end") && line.step.is_none_or(|of_line| of_line <= step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::Scratch;

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
        let config = Config { out: scratch.path().into(), ..Config::default() };
        let (_record, has_start) = Record::go_on(&config, step.into()).unwrap();
        assert_eq!(scratch.names(), ["config.toml", EVENTS_FILE]);
        (fs::read(&path).unwrap(), has_start)
    }

    #[test]
    fn what_came_after_the_checkpoint_goes_and_the_rest_stays_as_it_was() {
        let lines: Vec<&str> = LINES.split_inclusive('\n').collect();
        for (step, expected) in
            [(6, &[0, 1, 2, 3, 4, 5][..]), (4, &[0, 1, 2, 3, 4]), (3, &[0, 1, 3]), (1, &[0, 1]), (0, &[0])]
        {
            let expected: String = expected.iter().map(|&index: &usize| lines[index]).collect();
            assert_eq!(kept(LINES.as_bytes(), step), (expected.into_bytes(), true), "from step {step}");
        }
        assert_eq!(kept(LINES.as_bytes(), None), (vec![], false), "of a run that was never saved");
    }

    #[test]
    fn whatever_a_crash_leaves_at_the_end_the_lines_before_it_stay() {
        let whole = LINES.lines().take(2).map(|line| format!("{line}\n")).collect::<String>();
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
            assert_eq!(kept(&text, 9), (whole.clone().into_bytes(), true), "{tail:?}");
        }
        assert_eq!(kept(b"", 9), (vec![], false));
    }

    #[test]
    fn what_is_written_next_follows_what_stayed_also_after_a_write_that_failed() {
        let scratch = Scratch::new();
        fs::write(scratch.path().join(EVENTS_FILE), LINES).unwrap();
        let config = Config { out: scratch.path().into(), ..Config::default() };
        let (mut record, _) = Record::go_on(&config, Some(1)).unwrap();
        // As when the disk is full behind some bytes.
        record.file.write_all(b"half a li").unwrap();
        record.cut_back();
        record.write(&serde_json::json!({"event": "resume", "step": 1})).unwrap();
        let text = fs::read_to_string(scratch.path().join(EVENTS_FILE)).unwrap();
        assert_eq!(text.lines().last(), Some(r#"{"event":"resume","step":1}"#));
        assert_eq!(text.lines().count(), 3);
    }

    #[test]
    fn a_record_that_is_being_written_is_left_alone() {
        let scratch = Scratch::new();
        fs::write(scratch.path().join(EVENTS_FILE), LINES).unwrap();
        let config = Config { out: scratch.path().into(), ..Config::default() };
        let first = Record::go_on(&config, Some(6)).unwrap();
        let error = Record::go_on(&config, Some(1)).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("goes on in it at this moment"), "{error}");
        drop(first);
        Record::go_on(&config, Some(1)).unwrap();
    }
}
