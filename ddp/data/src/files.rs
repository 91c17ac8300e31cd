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
pub(crate) mod gzip;
mod idx;
pub(crate) mod io;
mod kind;
mod llm_c;
mod npy;
mod npz;
pub(crate) mod parquet;
mod safetensors;
mod shown;
pub mod table;
pub mod tokens;
mod written;

use std::path::Path;

pub use self::array::{Array, Element};
pub(crate) use self::cell::{is_missing, number};
pub use self::contents::{Contents, OddCells};
use self::io::refuse;
pub use self::kind::{FileKind, kind};
pub(crate) use self::shown::{listed, listed_up_to, shown_number};
pub(crate) use self::written::Written;
use crate::error::Result;

/// The arrays of the file at `path`, of any format with arrays. Converted copies go to `cache_dir`,
/// if given.
pub fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let name = path.display().to_string();
    match kind(path)? {
        FileKind::Npy => npy::open(path, &name, cache_dir),
        FileKind::Npz => npz::open(path, cache_dir),
        FileKind::Idx => idx::open(path, &name),
        FileKind::Safetensors => safetensors::open(path),
        FileKind::Flat => {
            cache::checked(path, cache_dir, || flat::verify(path))?;
            flat::open(path, &name)
        }
        FileKind::Gzip => open_gzip(path, cache_dir),
        FileKind::Text => Err(refuse(
            path,
            "expected a file of arrays, got a text; help: rename a table of text to .csv",
        )),
        kind @ (FileKind::Csv | FileKind::Parquet | FileKind::LlmC) => {
            let what = format!("expected a file of arrays, got {}", kind.name());
            Err(refuse(path, what))
        }
    }
}

/// Whether a file is a table, by its name or by its first bytes.
pub fn is_table(path: &Path) -> bool {
    let is_named = kind::of_name(path) == Some(FileKind::Csv)
        || kind::of_name(path) == Some(FileKind::Parquet);
    is_named || kind(path).is_ok_and(|kind| matches!(kind, FileKind::Csv | FileKind::Parquet))
}

/// The array of a compressed file: unpacked once, then read like any other.
fn open_gzip(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let unpacked = gzip::unpacked(path, cache_dir)?;
    let name = path.display().to_string();
    match kind(&unpacked)? {
        FileKind::Npy => npy::open(&unpacked, &name, cache_dir),
        FileKind::Idx => idx::open(&unpacked, &name),
        other => {
            let what = "expected .npy, IDX or .csv in a .gz file";
            Err(refuse(path, format!("{what}, got {}", other.name())))
        }
    }
}

#[cfg(test)]
mod tests;
