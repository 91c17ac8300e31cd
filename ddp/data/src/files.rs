//! Arrays and tables in users' files: `.npy`, `.npz`, IDX, `.safetensors`, our own flat `.bin`
//! (`flat.rs`), CSV and Parquet.
//!
//! Files are untrusted. `open` reads only headers and compares their claims with the size of the
//! file before it allocates anything; what is wrong is one error that names the file. Pickled
//! objects are never read. What cannot be mapped as it is (compressed, in Fortran order, a table)
//! is converted once into the cache.

pub mod array;
pub mod cache;
mod cell;
mod contents;
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
mod safetensors;
mod shown;
pub mod table;
pub(crate) mod text;
mod token_file;
pub mod tokens;
mod written;

use std::path::Path;

pub use self::array::Array;
pub(crate) use self::cell::{is_missing, number};
pub use self::contents::{Contents, OddCells};
pub use self::format::Format;
use self::format::{DataFile, Holds};
pub(crate) use self::formats::{endings, named};
pub use self::formats::{format, is_table};
pub(crate) use self::shown::{listed, listed_up_to, shown_number, some_of};
pub use self::token_file::{Coding, TokenFile};
pub(crate) use self::written::Written;
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
                Holds::Arrays(open) => open(&DataFile { path, ..file }),
                _ => Err(file.bad(format!(
                    "expected .npy, IDX or .csv in a .gz file, got {}",
                    inner.name
                ))),
            }
        }
        Holds::Tokens(_) if format.is(&text::TEXT) => Err(file.bad(
            "expected a file of arrays, got a text; help: rename a table of text to .csv".into(),
        )),
        _ => Err(file.bad(format!("expected a file of arrays, got {}", format.name))),
    }
}

#[cfg(test)]
mod tests;
