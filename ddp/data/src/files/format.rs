//! What a format of data files is: its name, how its files are recognised, and how they are read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use super::cell::TableReader;
use super::contents::Contents;
use super::io::{map, refuse};
use super::token_file::TokenFile;
use crate::error::{Error, Result};

/// A format of data files. A new one is a file with such a static, and a line in `formats.rs`.
#[derive(Debug)]
pub struct Format {
    /// What it is called in messages: "an .npy file".
    pub name: &'static str,
    /// How names of its files end.
    pub(crate) endings: &'static [&'static str],
    /// Whether the first and last bytes of a file say that it is of this format.
    pub(crate) begins: fn(&Ends<'_>) -> bool,
    /// Why a file is refused that ends as names of this format do, and does not begin so; `None` if
    /// its name is enough.
    pub(crate) must_begin: Option<&'static str>,
    pub(crate) holds: Holds,
}

/// What files of a format hold, and how that is read.
#[derive(Debug)]
pub(crate) enum Holds {
    /// Arrays of numbers: read by ranges of rows from a mapped file, or from a converted copy.
    Arrays(fn(&DataFile<'_>) -> Result<Contents>),
    /// A table, whose cells are read row after row, once: then it is an array in a converted copy.
    Table(fn(&Path) -> Result<Box<dyn TableReader>>),
    /// Tokens, and nothing else.
    Tokens(fn(&DataFile<'_>) -> Result<TokenFile>),
    /// A file of another format, which is unpacked.
    Packed(fn(&DataFile<'_>) -> Result<PathBuf>),
}

/// The first bytes of a file, the last eight, and how many there are.
#[derive(Debug)]
pub(crate) struct Ends<'a> {
    pub(crate) start: &'a [u8],
    pub(crate) end: [u8; 8],
    pub(crate) bytes: u64,
}

/// A file that is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataFile<'a> {
    pub(crate) path: &'a Path,
    /// What messages call it; of an unpacked file the packed one.
    pub(crate) name: &'a str,
    /// Where converted copies are kept, if not in the usual place.
    pub(crate) cache_dir: Option<&'a Path>,
}

impl DataFile<'_> {
    pub(crate) fn map(&self) -> Result<Arc<Mapped>> {
        map(self.path)
    }

    /// The error of a file whose content is not what it should be.
    pub(crate) fn bad(&self, why: String) -> Error {
        refuse(Path::new(self.name), why)
    }
}

impl Format {
    /// Whether it is this one.
    pub(crate) fn is(&self, other: &'static Format) -> bool {
        std::ptr::eq(self, other)
    }

    /// Whether its files are tables.
    pub(crate) fn is_table(&self) -> bool {
        matches!(self.holds, Holds::Table(_))
    }
}
