//! Compiled kernels on disk, named by a hash of what they were made from.
//!
//! The folder is `DDP_KERNEL_CACHE`, else `ddp-train/kernels` in the user's cache folder
//! (`XDG_CACHE_HOME`, `~/.cache`); `off` disables the cache. Folder and files are used only if this
//! user or root owns them and no other user may write to them. Only a complete file with the right
//! key is used; any other is made again and replaced. Files appear by a rename, so readers see all
//! of a file or none. Errors here are logged at debug level and change nothing else. The folder may
//! be deleted at any time.
//!
//! A file is a hash of its key and image, then the image: what NVRTC made.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::files;
use crate::heartbeat::{self, Work};

const HEADER_BYTES: usize = blake3::OUT_LEN;
/// No image is larger; a file that claims more is not read.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Hashes what an image is made from.
pub(crate) struct Key(blake3::Hasher);

impl Key {
    pub(crate) fn new() -> Key {
        Key(blake3::Hasher::new())
    }

    /// Each part is preceded by its length, so that parts cannot run into each other.
    pub(crate) fn part(mut self, bytes: &[u8]) -> Key {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    pub(crate) fn finish(self) -> u128 {
        let hash = self.0.finalize();
        u128::from_le_bytes(*hash.as_bytes().first_chunk().expect("32 bytes"))
    }
}

/// Where one image is on disk, if anywhere.
pub(crate) struct CacheEntry {
    path: Option<PathBuf>,
    key: u128,
}

impl CacheEntry {
    /// The file in the folder that the environment names. `label` makes its name readable.
    pub(crate) fn of_process(label: &str, key: u128) -> CacheEntry {
        CacheEntry::new(folder_of_process(), label, key)
    }

    fn new(folder: Option<PathBuf>, label: &str, key: u128) -> CacheEntry {
        CacheEntry {
            path: folder.map(|folder| folder.join(format!("{label}-{key:032x}.kernels"))),
            key,
        }
    }

    /// The image, if the file is complete.
    pub(crate) fn read(&self) -> Option<Vec<u8>> {
        let path = self.path.as_deref()?;
        match read_image(path, self.key) {
            Ok(image) => Some(image),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::debug!(
                    "making again what {} was for, which cannot be used: {error}",
                    path.display()
                );
                None
            }
        }
    }

    /// Writes the image for later processes.
    pub(crate) fn write(&self, image: &[u8]) {
        let Some(path) = self.path.as_deref() else {
            return;
        };
        if let Err(error) = write_image(path, self.key, image) {
            static SAID: std::sync::Once = std::sync::Once::new();
            SAID.call_once(|| {
                let text = format!(
                    "compiled kernels cannot be kept in {}: {error}. Every process compiles them anew; DDP_KERNEL_CACHE \
                     names another folder",
                    path.parent().unwrap_or(path).display()
                );
                // A missing default folder is not worth a warning; a folder that the user named is.
                if std::env::var_os("DDP_KERNEL_CACHE").is_some() {
                    tracing::warn!("{text}");
                } else {
                    tracing::info!("{text}");
                }
            });
        }
    }

    /// Waits until nobody else makes this file, and keeps others waiting until it is dropped. None
    /// where that cannot be had, or one has compiled for two minutes: compiling twice does no harm.
    pub(crate) fn turn(&self) -> Option<CacheTurn> {
        const LONGEST: Duration = Duration::from_secs(120);
        let path = self.path.as_deref()?;
        make_folder(path.parent()?).ok()?;
        let path = path.with_extension("lock");
        // Neither through a link nor emptied: it may be another file's name.
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let options = options.mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&path).ok()?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Some(CacheTurn { path, _file: file }),
                Err(TryLockError::WouldBlock) if start.elapsed() < LONGEST => {
                    heartbeat::beat(Work::Computes);
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(_) => return None,
            }
        }
    }
}

/// The right to make one file. Who waited for it finds the file made.
pub(crate) struct CacheTurn {
    path: PathBuf,
    _file: File,
}

impl Drop for CacheTurn {
    fn drop(&mut self) {
        let _: io::Result<()> = std::fs::remove_file(&self.path);
    }
}

/// The folder of this process; None if there is no cache.
pub(crate) fn folder_of_process() -> Option<PathBuf> {
    folder(|name| std::env::var_os(name))
}

/// The folder that the variables name.
fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    match set("DDP_KERNEL_CACHE") {
        Some(asked) if asked.as_os_str() == "off" => None,
        Some(asked) => Some(asked),
        // The XDG standard says to ignore relative paths.
        None => set("XDG_CACHE_HOME")
            .filter(|folder| folder.is_absolute())
            .or_else(|| set("HOME").map(|home| home.join(".cache")))
            .map(|folder| folder.join("ddp-train/kernels")),
    }
}

fn read_image(path: &Path, key: u128) -> io::Result<Vec<u8>> {
    let damaged = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_string());
    trusted(path.parent().ok_or(io::ErrorKind::InvalidInput)?)?;
    let bytes = files::read_opened(trusted(path)?, FILE_BYTES_MAX)?;
    let mut bytes = bytes.ok_or_else(|| damaged("it is too long"))?;
    match bytes.split_at_checked(HEADER_BYTES) {
        Some((header, image)) if header == header_of(key, image) => {}
        _ => return Err(damaged("it is damaged, or of another kind")),
    }
    bytes.drain(..HEADER_BYTES);
    Ok(bytes)
}

fn header_of(key: u128, image: &[u8]) -> [u8; HEADER_BYTES] {
    *blake3::hash(&[&key.to_le_bytes(), image].concat()).as_bytes()
}

/// Code from this folder is run, so only this user may write to it.
fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    trusted(folder).map(drop)
}

/// Opens a folder or file that only this user or root can have written.
fn trusted(path: &Path) -> io::Result<File> {
    files::open_trusted(path, 0)
}

fn write_image(path: &Path, key: u128, image: &[u8]) -> io::Result<()> {
    make_folder(path.parent().ok_or(io::ErrorKind::InvalidInput)?)?;
    let written = files::replace_file(path, |file| {
        let written = file.set_permissions(Permissions::from_mode(0o644));
        let written = written.and_then(|()| file.write_all(&header_of(key, image)));
        let written = written.and_then(|()| file.write_all(image));
        written.map_err(files::failed("write", path))
    });
    written.map_err(|error| error.source)
}

#[cfg(test)]
mod tests;
