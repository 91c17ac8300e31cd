//! Arrays and tables in users' files: `.npy`, `.npz`, IDX, `.safetensors`, our own flat `.bin`
//! (`flat.rs`), CSV and Parquet.
//!
//! Files are untrusted. `open` reads only headers and compares their claims with the size of the
//! file before it allocates anything; what is wrong is one error that names the file. Pickled
//! objects are never read. What cannot be mapped as it is (compressed, a table) is converted once
//! into the cache.

pub mod array;
pub mod cache;
mod cell;
mod csv;
pub mod flat;
mod format;
mod formats;
pub(crate) mod gzip;
mod idx;
pub(crate) mod io;
mod llm_c;
mod nanogpt;
mod npy;
mod npz;
pub(crate) mod parquet;
pub mod safetensors;
pub mod table;
pub(crate) mod text;
pub mod tokens;

use std::path::Path;

pub use self::array::Array;
pub(crate) use self::cell::{
    PLAIN_HELP, is_missing, is_written_otherwise, listed, listed_up_to, number, shown_number,
    some_of,
};
pub(crate) use self::format::DataFile;
use self::format::Holds;
pub use self::format::{Coding, Contents, Format, OddCells, TokenFile};
pub(crate) use self::formats::{endings, named};
pub use self::formats::{format, is_table};
pub use crate::element::Element;
use crate::error::Result;

/// The arrays of the file at `path`, of any format with arrays. Converted copies go to `cache_dir`,
/// if given.
pub fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    read(&DataFile::new(path, &path.display().to_string(), cache_dir))
}

/// The arrays of a file, or those that a table becomes.
pub(crate) fn read(file: &DataFile<'_>) -> Result<Contents> {
    let format = format(file.path)?;
    let (expected, got) = match format.holds {
        Holds::Arrays(arrays) if !format.is_table() || file.table.is_some() => return arrays(file),
        Holds::Packed(unpack) => {
            let path = &unpack(file)?;
            let inner = formats::format(path)?;
            match inner.holds {
                Holds::Arrays(arrays) if !inner.is(&flat::FLAT) && !inner.is_table() => {
                    return arrays(&DataFile { path, ..*file });
                }
                _ => (".npy, IDX or .csv in a .gz file", inner),
            }
        }
        _ => ("a file of arrays", format),
    };
    let help = match got.is(&text::TEXT) {
        true => "; help: rename a table of text to .csv",
        false => "",
    };
    Err(file.bad(format!("expected {expected}, got {}{help}", got.name)))
}

#[cfg(test)]
mod tests;
