//! Reading an open file from a place on, without its cursor: whoever else reads it, in whatever thread, is not disturbed.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// A file from a place on.
#[derive(Debug)]
pub(super) struct ReadFrom<'a> {
    file: &'a File,
    at: u64,
}

impl ReadFrom<'_> {
    pub(super) fn start(file: &File) -> ReadFrom<'_> {
        ReadFrom::place(file, 0)
    }

    pub(super) fn place(file: &File, at: u64) -> ReadFrom<'_> {
        ReadFrom { file, at }
    }
}

impl Read for ReadFrom<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}
