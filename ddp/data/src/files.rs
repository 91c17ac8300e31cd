//! Arrays and tables in users' files: `.npy`, `.npz`, IDX, `.safetensors`, our own flat `.bin`
//! (`flat.rs`), CSV and Parquet.
//!
//! Files are untrusted. `open` reads only headers and compares their claims with the size of the
//! file before it allocates anything; what is wrong is one error that names the file. Pickled
//! objects are never read. What cannot be mapped as it is (compressed, in Fortran order, a table)
//! is converted once into the cache.

pub mod array;
pub mod cache;
mod contents;
mod conversion;
mod csv;
pub mod flat;
pub mod gzip;
mod idx;
mod io;
mod kind;
mod npy;
mod npz;
mod parquet;
mod safetensors;
mod shown;
pub mod table;

use std::path::Path;

pub use self::array::{Array, Element};
pub use self::contents::Contents;
use self::io::refuse;
pub use self::kind::{Kind, kind};
use crate::error::Result;

/// The arrays of the file at `path`, of any format with arrays. Converted copies go to `cache_dir`,
/// if given.
pub fn open(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let name = path.display().to_string();
    match kind(path)? {
        Kind::Npy => npy::open(path, &name, cache_dir),
        Kind::Npz => npz::open(path, cache_dir),
        Kind::Idx => idx::open(path, &name),
        Kind::Safetensors => safetensors::open(path),
        Kind::Flat => flat::open(path, &name),
        Kind::Gzip => open_gzip(path, cache_dir),
        kind @ (Kind::Csv | Kind::Parquet) => {
            let what = format!("expected a file of arrays, got {}", kind.name());
            Err(refuse(path, what))
        }
    }
}

/// The array of a compressed file: unpacked once, then read like any other.
fn open_gzip(path: &Path, cache_dir: Option<&Path>) -> Result<Contents> {
    let unpacked = gzip::unpacked(path, cache_dir, claimed_bytes)?;
    let name = path.display().to_string();
    match kind(&unpacked)? {
        Kind::Npy => npy::open(&unpacked, &name, cache_dir),
        Kind::Idx => idx::open(&unpacked, &name),
        other => {
            let what = "expected .npy, IDX or .csv in a .gz file";
            Err(refuse(path, format!("{what}, got {}", other.name())))
        }
    }
}

/// The size of an `.npy` or IDX file that begins with these bytes; `None` if more of them are
/// needed.
pub fn claimed_bytes(start: &[u8]) -> Result<Option<u64>, String> {
    const NPY: &[u8] = b"\x93NUMPY";
    match start.first() {
        None => Ok(None),
        Some(0) => match idx::Header::parse(start)? {
            None => Ok(None),
            Some(header) => match header.bytes() {
                None => Err("its header claims more than 2^64 bytes".into()),
                bytes => Ok(bytes),
            },
        },
        Some(_) if NPY.starts_with(start) => Ok(None),
        Some(_) => match npy::header(start) {
            Ok(header) => Ok(Some(npy::bytes(&header))),
            Err(_) if start.starts_with(NPY) && npy::ends_early(start) => Ok(None),
            Err(why) => Err(why),
        },
    }
}

#[cfg(test)]
mod tests;
