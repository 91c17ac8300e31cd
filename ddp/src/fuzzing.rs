//! What fuzz targets call (`ddp/fuzz`): bytes as the content of a file of some name, read as data would be. Not for anybody else.
//!
//! Whatever the bytes are, the end is numbers or bad data, exit code 65; never more numbers than the bytes can be.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::data::files::{Array, claimed_bytes, gzip, table};
use crate::error::{Error, Result};

/// Reads a table of this name (`a.csv`), first without a label, then with its last column as the label. Gives how many numbers that were.
pub fn table(name: &str, bytes: &[u8]) -> Result<usize> {
    in_folder(name, bytes, |path, folder| {
        let names = table::columns(path)?;
        let mut count = 0;
        for label in [None, names.last()] {
            let request =
                table::TableRequest { label: label.map(String::as_str), features: None, cache_dir: Some(folder) };
            let contents = table::open(path, &request)?;
            for array in &contents.arrays {
                count += finite_numbers(array)?;
            }
        }
        Ok(count)
    })
}

/// Unpacks an array that gzip has packed. Gives its size.
pub fn unpacked(bytes: &[u8]) -> Result<u64> {
    in_folder("array.gz", bytes, |path, folder| {
        let made = gzip::unpacked(path, Some(folder), claimed_bytes)?;
        let start = fs::read(&made).map_err(|error| Error::Internal(error.to_string()))?;
        match claimed_bytes(&start) {
            Ok(Some(bytes)) if bytes == start.len() as u64 => Ok(bytes),
            other => Err(Error::Internal(format!("{} bytes were unpacked of a claim of {other:?}", start.len()))),
        }
    })
}

/// Reads all numbers of an array; any that is not finite is a mistake of the conversion.
fn finite_numbers(array: &Array) -> Result<usize> {
    let mut row = vec![0.0; array.row_shape().iter().product()];
    for number in 0..array.rows() {
        array.read_f64(number, &mut row)?;
        if row.iter().any(|value| !value.is_finite()) {
            return Err(Error::Internal(format!("row {number} of {} is {row:?}", array.name())));
        }
    }
    Ok(row.len() * array.rows() as usize)
}

/// Gives `read` a file of these bytes and a folder for what it makes; both are gone when it is done.
fn in_folder<T>(name: &str, bytes: &[u8], read: impl FnOnce(&Path, &Path) -> Result<T>) -> Result<T> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // In memory: making a file durable costs nothing there.
    let folder = PathBuf::from(format!("/dev/shm/ddp-fuzz-{}-{number}", std::process::id()));
    let failed = |error: std::io::Error| Error::Internal(error.to_string());
    fs::create_dir(&folder).map_err(failed)?;
    let path = folder.join(name);
    let read = fs::write(&path, bytes).map_err(failed).and_then(|()| read(&path, &folder.join("cache")));
    fs::remove_dir_all(&folder).map_err(failed)?;
    read
}
