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
pub use self::format::{Coding, Contents, Format, OddCells, TokenFile};
use self::format::{DataFile, Holds};
pub(crate) use self::formats::{endings, named};
pub use self::formats::{format, is_table};
pub use crate::element::Element;
use crate::error::Result;

/// The arrays of the file at `path`, of any format with arrays. Converted copies go to `cache_dir`,
/// if given.
pub fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let name = path.display().to_string();
    let file = DataFile {
        path,
        name: &name,
        cache_dir,
    };
    let format = format(path)?;
    match format.holds {
        Holds::Arrays(open) => open(&file),
        Holds::Packed(unpack) => {
            let path = &unpack(&file)?;
            let inner = formats::format(path)?;
            match inner.holds {
                Holds::Arrays(open) if !inner.is(&flat::FLAT) => open(&DataFile { path, ..file }),
                _ => Err(file.bad(format!(
                    "expected .npy, IDX or .csv in a .gz file, got {}",
                    inner.name
                ))),
            }
        }
        _ => {
            let help = match format.is(&text::TEXT) {
                true => "; help: rename a table of text to .csv",
                false => "",
            };
            Err(file.bad(format!(
                "expected a file of arrays, got {}{help}",
                format.name
            )))
        }
    }
}

#[cfg(test)]
mod tests;
