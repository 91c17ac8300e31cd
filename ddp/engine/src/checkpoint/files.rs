//! Reading files of checkpoints, and the errors of those that cannot be used.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ddp_kernels::heartbeat::{self, Work};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::shown::some_of;

/// Reads an open file from a position, without its cursor, so that other threads can read it too.
#[derive(Debug)]
pub(crate) struct ReadFrom<'a> {
    file: &'a File,
    at: u64,
}

impl ReadFrom<'_> {
    pub(crate) fn place(file: &File, at: u64) -> ReadFrom<'_> {
        ReadFrom { file, at }
    }
}

impl Read for ReadFrom<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        heartbeat::beat(Work::ReadsCheckpoint);
        self.at += read as u64;
        Ok(read)
    }
}

/// Opens a file of a checkpoint. Refuses what is not a plain file: a pipe would block.
pub(super) fn open_file(folder: &Path, name: &str) -> Result<File> {
    let path = folder.join(name);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => File::open(&path).map_err(unreadable(&path)),
        Ok(_) => Err(damaged(folder, format!("{name} is not a file"))),
        Err(error) if error.kind() == ErrorKind::NotFound && folder.is_dir() => {
            Err(damaged(folder, format!("it lacks {name}")))
        }
        Err(error) => Err(unreadable(&path)(error)),
    }
}

/// The bytes of a file that is at most `bytes_max` long.
pub(super) fn read_small(folder: &Path, name: &str, bytes_max: u64) -> Result<Vec<u8>> {
    read_all(folder, name, &open_file(folder, name)?, bytes_max)
}

/// The bytes of an open file that is at most `bytes_max` long.
pub(super) fn read_all(folder: &Path, name: &str, file: &File, bytes_max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut reader = ReadFrom::place(file, 0).take(bytes_max + 1);
    let read = reader.read_to_end(&mut bytes);
    read.map_err(unreadable(&folder.join(name)))?;
    if bytes.len() as u64 > bytes_max {
        let why = format!("{name} is longer than {bytes_max} bytes");
        return Err(damaged(folder, why));
    }
    Ok(bytes)
}

/// The help if a checkpoint cannot be used.
const HELP: &str = "; help: name another checkpoint of the run";

/// A checkpoint that cannot be used.
pub fn damaged(folder: &Path, why: impl Display) -> Error {
    Error::Data(unusable(folder, why))
}

/// The error of an intact checkpoint whose file `name`, with these bytes, was written by another
/// version of this program.
pub(super) fn of_other_version(folder: &Path, name: &str, why: &str, bytes: &[u8]) -> Error {
    let value: Option<Value> = serde_json::from_slice(bytes).ok();
    let by = value.as_ref().and_then(|it| it.get("program")?.as_str());
    let by = by.map_or(String::new(), |by| format!("; {by} wrote it"));
    // Without a list of all names.
    let why = why.split(", expected one of").next().unwrap_or(why);
    Error::OtherVersion(unusable(folder, format_args!("{name} {why}{by}")))
}

fn unusable(folder: &Path, why: impl Display) -> String {
    format!(
        "cannot use the checkpoint {}: {why}{HELP}",
        folder.display()
    )
}

/// The error of a checkpoint that cannot be used, with another help: using a model and resuming a
/// run need different ones.
pub fn with_help(error: Error, help: &str) -> Error {
    match error {
        Error::Data(text) | Error::OtherVersion(text) => {
            Error::Data(match text.strip_suffix(HELP) {
                Some(text) => format!("{text}; help: {help}"),
                None => text,
            })
        }
        other => other,
    }
}

/// The reason in the text of an error that `damaged` made.
pub(super) fn reason<'a>(folder: &Path, text: &'a str) -> &'a str {
    let start = format!("cannot use the checkpoint {}: ", folder.display());
    let text = text.strip_prefix(&start).unwrap_or(text);
    text.strip_suffix(HELP).unwrap_or(text)
}

/// A file that cannot be read.
pub fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |error| match error.kind() {
        // It is there, but no ordinary file.
        ErrorKind::InvalidInput => Error::Data(format!("cannot read {}: {error}", path.display())),
        _ => Error::io("read", path, "check that it exists and can be read")(error),
    }
}

/// The error of a file of another version.
pub(super) fn other_format(got: impl Into<u64>, known: u32) -> String {
    let got = got.into();
    format!(
        "is of format {got}, and this program reads format {known}: use the version that wrote it"
    )
}

/// What a file lacks, and what it has that `owner` does not; None if neither.
pub(super) fn mismatch<S: AsRef<str>>(missing: &[S], others: &[S], owner: &str) -> Option<String> {
    let lacks = (!missing.is_empty()).then(|| format!("it lacks {}", some_of(missing, 4)));
    let has = || format!("it has {}, which {owner} does not", some_of(others, 4));
    let has = (!others.is_empty()).then(has);
    let text: Vec<String> = lacks.into_iter().chain(has).collect();
    (!text.is_empty()).then(|| text.join("; "))
}
