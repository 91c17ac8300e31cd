//! Reading files of checkpoints.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ddp_kernels::heartbeat::{self, Work};

use super::errors::{damaged, unreadable};
use crate::error::Result;

/// Reads an open file from a position, without its cursor, so that other threads can read it too.
#[derive(Debug)]
pub(crate) struct ReadFrom<'a> {
    file: &'a File,
    at: u64,
}

impl ReadFrom<'_> {
    pub(crate) fn start(file: &File) -> ReadFrom<'_> {
        ReadFrom::place(file, 0)
    }

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
    let mut reader = ReadFrom::start(file).take(bytes_max + 1);
    let read = reader.read_to_end(&mut bytes);
    read.map_err(unreadable(&folder.join(name)))?;
    if bytes.len() as u64 > bytes_max {
        let why = format!("{name} is longer than {bytes_max} bytes");
        return Err(damaged(folder, why));
    }
    Ok(bytes)
}
