//! Event files for TensorBoard: `OUT/tensorboard/events.out.tfevents.…`. A resumed run adds one.
//!
//! A file is a sequence of records: length, checksum of the length, an `Event`, its checksum.
//! Checksums are CRC-32C, masked as TensorFlow does. An `Event` is a protocol buffer; only five of
//! its fields are needed, so they are written by hand.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::Result;
use crate::files;
use crate::metrics_log::{EvalEvent, StepEvent};

/// The folder of these files in a run's folder.
pub const FOLDER: &str = "tensorboard";

/// The start of files' names; ten digits follow, the second in which the file was made.
const PREFIX: &str = "events.out.tfevents.";
const SECOND_MAX: u64 = 9_999_999_998;

/// The text of the first event of a file.
const VERSION: &str = "brain.Event:2";

/// Fields of `Event`.
const WALL_TIME: u64 = 1;
const STEP: u64 = 2;
const FILE_VERSION: u64 = 3;
const SUMMARY: u64 = 5;
const SESSION_LOG: u64 = 7;
/// `Summary.value`, and the tag and number of a value.
const VALUE: u64 = 1;
const TAG: u64 = 1;
const SIMPLE_VALUE: u64 = 2;
/// `SessionLog.status`, and its value that discards what was written for this and later steps.
const STATUS: u64 = 1;
const START: u64 = 1;

/// A file of events that is being written.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// A new file for the run in `out`. Its next step is `next_step`, more than 1 if it is resumed:
    /// points of earlier files from that step on are then no longer shown.
    pub fn create(out: &Path, next_step: u64) -> Result<EventFile> {
        let folder = out.join(FOLDER);
        files::make_folder(&folder)?;
        let now = wall_time_s();
        // TensorBoard reads files in the order of their names. This one must come last, even within
        // the same second or on a host with a slow clock.
        let newest = newest_second(&folder).map_or(0, |newest| newest + 1);
        let (second, process) = (newest.max(now as u64), std::process::id());
        let path = folder.join(format!("{PREFIX}{second:010}.ddp-train.{process}"));
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(files::failed("make", &path))?;
        let mut events = EventFile { file, path };
        events.write(now, &bytes(FILE_VERSION, VERSION.as_bytes()))?;
        if next_step > 1 {
            let log = bytes(SESSION_LOG, &number(STATUS, START));
            events.write(now, &[number(STEP, next_step), log].concat())?;
        }
        Ok(events)
    }

    /// The curves of a step.
    pub fn step(&mut self, event: &StepEvent) -> Result<()> {
        let points = [
            ("train/loss", event.loss),
            ("train/accuracy", event.accuracy.unwrap_or(f64::NAN)),
            ("train/lr", event.lr),
            ("train/grad_norm", event.grad_norm.unwrap_or(f64::NAN)),
            ("speed/samples_per_s", event.samples_per_s),
            ("speed/tokens_per_s", event.tokens_per_s.unwrap_or(f64::NAN)),
            ("speed/tflops", event.tflops.unwrap_or(f64::NAN)),
            ("speed/step_ms", event.step_ms),
            ("speed/data_ms", event.data_ms),
        ];
        self.scalars(event.step, &points)
    }

    /// The curves of an evaluation.
    pub fn evaluation(&mut self, event: &EvalEvent) -> Result<()> {
        let accuracy = event.accuracy.unwrap_or(f64::NAN);
        let points = [("eval/loss", event.loss), ("eval/accuracy", accuracy)];
        self.scalars(event.step, &points)
    }

    /// Adds a point to each of these curves. Non-finite numbers are left out.
    pub fn scalars(&mut self, step: u64, points: &[(&str, f64)]) -> Result<()> {
        let points = points.iter().filter(|(_, value)| value.is_finite());
        let values = points.flat_map(|(tag, value)| {
            let value = (*value as f32).to_le_bytes();
            let value = [&varint(SIMPLE_VALUE << 3 | 5)[..], &value].concat();
            bytes(VALUE, &[bytes(TAG, tag.as_bytes()), value].concat())
        });
        let summary: Vec<u8> = values.collect();
        if summary.is_empty() {
            return Ok(());
        }
        let fields = [number(STEP, step), bytes(SUMMARY, &summary)].concat();
        self.write(wall_time_s(), &fields)
    }

    /// Writes an event: its time, then these fields.
    fn write(&mut self, wall_time_s: f64, fields: &[u8]) -> Result<()> {
        let time = varint(WALL_TIME << 3 | 1);
        let event = [&time, &wall_time_s.to_le_bytes()[..], fields].concat();
        let length = (event.len() as u64).to_le_bytes();
        let [of_length, of_event] =
            [&length[..], &event].map(|it| masked(crc32c(it)).to_le_bytes());
        let record = [&length[..], &of_length, &event, &of_event].concat();
        let written = self.file.write_all(&record);
        Ok(written.map_err(files::failed("write", &self.path))?)
    }
}

/// The latest second in the names of the files in `folder`.
fn newest_second(folder: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let seconds = entries.filter_map(|entry| {
        let name = entry.file_name();
        let mut parts = name.to_str()?.strip_prefix(PREFIX)?.split('.');
        parts.next()?.parse::<u64>().ok()
    });
    seconds.filter(|second| *second <= SECOND_MAX).max()
}

fn wall_time_s() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

/// Seven bits a byte, the lowest first; all but the last have the eighth set. A field begins with
/// its number times 8 and its wire type: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A field with a whole number.
fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

/// A field with a text or a message.
fn bytes(field: u64, content: &[u8]) -> Vec<u8> {
    let length = varint(content.len() as u64);
    [&varint(field << 3 | 2), &length, content].concat()
}

/// CRC-32 with Castagnoli's polynomial, bit by bit: events are short.
fn crc32c(bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
    let byte = |crc, &byte: &u8| (0..8).fold(crc ^ u32::from(byte), bit);
    !bytes.iter().fold(!0, byte)
}

/// Masks a checksum as TensorFlow does.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::Scratch;

    /// The events of a file, each checked against its checksums.
    fn events(bytes: &[u8]) -> Vec<&[u8]> {
        let (mut events, mut rest) = (Vec::new(), bytes);
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let sum = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            let event = &rest[12..12 + length];
            assert_eq!(
                (sum(8), sum(12 + length)),
                (masked(crc32c(&rest[..8])), masked(crc32c(event)))
            );
            events.push(event);
            rest = &rest[16 + length..];
        }
        events
    }

    fn only_file(out: &Path) -> Vec<u8> {
        let mut files = std::fs::read_dir(out.join(FOLDER)).unwrap();
        let file = files.next().unwrap().unwrap().path();
        assert!(
            files.next().is_none()
                && file
                    .file_name()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .contains("tfevents")
        );
        std::fs::read(file).unwrap()
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        // The check value of the CRC catalogue, and RFC 3720's of 32 zeros.
        assert_eq!(
            (crc32c(b"123456789"), crc32c(&[0; 32])),
            (0xe306_9283, 0x8a91_36aa)
        );
    }

    #[test]
    fn points_are_events_with_step_tag_and_number() {
        let scratch = Scratch::new();
        let mut file = EventFile::create(scratch.path(), 1).unwrap();
        file.scalars(300, &[("loss", 0.5), ("none", f64::NAN)])
            .unwrap();
        file.scalars(301, &[("none", f64::NAN)]).unwrap();
        let bytes = only_file(scratch.path());
        let events = events(&bytes);
        assert_eq!(events.len(), 2);
        assert!(events[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        // step 300; summary of 13 bytes; value of 11 bytes; tag of 4; number 0.5.
        assert_eq!(
            &events[1][9..],
            b"\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x00\x3f"
        );
    }

    #[test]
    fn a_resumed_run_takes_back_what_was_written_past_its_step() {
        let scratch = Scratch::new();
        EventFile::create(scratch.path(), 41).unwrap();
        let bytes = only_file(scratch.path());
        // step 41; session log with status start.
        assert_eq!(&events(&bytes)[1][9..], b"\x10\x29\x3a\x02\x08\x01");
    }

    #[test]
    fn a_new_file_sorts_last_even_if_the_clock_went_back() {
        let scratch = Scratch::new();
        let folder = scratch.path().join(FOLDER);
        let names = || {
            let names = std::fs::read_dir(&folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        // Within one second, and of other names.
        EventFile::create(scratch.path(), 1).unwrap();
        std::fs::write(folder.join("events.out.tfevents.99999999999.other"), "").unwrap();
        std::fs::write(folder.join("notes"), "").unwrap();
        EventFile::create(scratch.path(), 2).unwrap();
        // A clock an hour ahead wrote this one.
        let ahead = format!("{PREFIX}{:010}.ddp-train.1", wall_time_s() as u64 + 3600);
        std::fs::write(folder.join(&ahead), "").unwrap();
        let before = names();
        EventFile::create(scratch.path(), 3).unwrap();
        let after = names();
        let new = after.iter().find(|name| !before.contains(name)).unwrap();
        assert!(*new > ahead && after.len() == before.len() + 1, "{after:?}");
    }
}
