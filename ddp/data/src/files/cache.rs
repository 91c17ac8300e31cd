//! Converted copies of files that cannot be mapped, kept so that each file is converted once.
//!
//! The folder is the one asked for, else `.ddp-cache` beside the file, else, where that cannot be
//! written, `ddp-train/data` in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`). It may be
//! deleted at any time.
//!
//! ```text
//! train.csv-KEY/data.bin     the copy; KEY is xxh3-128 of the source's content and of the request
//!               entry.json   the copy's checksum, and its identity on the disk at that time
//! .seen-KEY                  the source's checksum, and its identity at that time
//! .unfinished-PID-N          an entry being made; renamed once it is on the disk
//! ```
//!
//! A checksum is trusted while inode, size and times of the file are unchanged, and recomputed
//! otherwise. Times less than two seconds old prove nothing, since file systems' clocks tick
//! slowly. Two processes may convert the same file at the same time: the second one uses the entry
//! of the first.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::mapped::Identity;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use super::io::{read_up_to, reading, refuse, writing};
use crate::error::{Error, Result};
use ddp_kernels::files::{first_free, replace_file, sync_folder};

/// Part of every key: entries of older versions are not found.
const VERSION: &[u8] = b"ddp cache 3";
/// The note in an entry.
const ENTRY: &str = "entry.json";
/// Smaller files are compared with their own checksums each time.
const NOTED_BYTES_MIN: u64 = 64 << 20;
/// A file changed more recently than this may change again without its times showing it.
const SETTLED: Duration = Duration::from_secs(2);
/// An unfinished entry that was not written to for this long was left by a process that was killed.
const ABANDONED: Duration = Duration::from_secs(6 * 3600);

/// The name of the copy in its entry.
const COPY: &str = "data.bin";

/// A copy that is wanted.
struct WantedCopy<'a> {
    /// The file it is made from.
    source: &'a Path,
    /// Everything besides the source's content on which the copy depends.
    request: &'a str,
}

/// The copy that `make` makes of `source`, or the one made earlier. `make` gets the path to write,
/// in a new folder.
pub fn converted(
    source: &Path,
    cache_dir: Option<&Path>,
    request: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let wanted = WantedCopy { source, request };
    find_or_make(&usual_folders(source, cache_dir), &wanted, make)
}

fn usual_folders(source: &Path, cache_dir: Option<&Path>) -> Vec<PathBuf> {
    folders(source, cache_dir, |name| std::env::var_os(name))
}

/// Compares the file at `path` with its own checksums by `check`, once: a larger file that passed
/// is noted, and not read again until it changes.
pub(super) fn checked(
    path: &Path,
    cache_dir: Option<&Path>,
    check: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let identity = identity_of(path).map_err(reading(path))?;
    if identity.bytes < NOTED_BYTES_MIN {
        return check();
    }
    let wanted = WantedCopy {
        source: path,
        request: "its own checksums",
    };
    let (folders, seen) = (usual_folders(path, cache_dir), wanted.seen_name());
    if Note::find(&folders, &seen, &identity).is_some() {
        return Ok(());
    }
    check()?;
    let can_be_written = |folder: &&PathBuf| fs::create_dir_all(folder).is_ok();
    if let Some(folder) = folders.iter().find(can_be_written) {
        Note::of_checksum(String::new(), &identity).keep(&folder.join(&seen));
    }
    Ok(())
}

/// The copy, found in one of the folders or made in the first one that can be written.
fn find_or_make(
    folders: &[PathBuf],
    wanted: &WantedCopy<'_>,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let source = wanted.source;
    let before = identity_of(source).map_err(reading(source))?;
    let seen = wanted.seen_name();
    let note = match Note::find(folders, &seen, &before) {
        Some(note) => note,
        None => Note::of(source).map_err(reading(source))?,
    };
    let key = wanted.hash(note.xxh3.as_bytes());
    for folder in folders {
        if let Some(found) = wanted.find(folder, &key) {
            note.keep(&folder.join(seen));
            return Ok(found);
        }
    }
    let (folder, aside) = new_folder(folders)?;
    remove_abandoned(folder);
    let made = wanted.make(folder, &aside, &key, &before, make);
    // After a success it has been renamed.
    let _ = fs::remove_dir_all(&aside);
    let made = made?;
    note.keep(&folder.join(seen));
    Ok(made)
}

impl WantedCopy<'_> {
    /// The name of the note about the file at this path.
    fn seen_name(&self) -> String {
        let path = fs::canonicalize(self.source).unwrap_or_else(|_| self.source.to_path_buf());
        format!(".seen-{}", self.hash(path.as_os_str().as_encoded_bytes()))
    }

    fn hash(&self, about: &[u8]) -> String {
        let mut hash = XxHash3_128::new();
        for part in [VERSION, about, self.request.as_bytes()] {
            // The length first, so that parts cannot run into each other.
            hash.write(&(part.len() as u64).to_le_bytes());
            hash.write(part);
        }
        format!("{:032x}", hash.finish_128())
    }

    fn entry(&self, folder: &Path, key: &str) -> PathBuf {
        let name = self.source.file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        // File names have at most 255 bytes.
        let name = &name[..name.floor_char_boundary(120)];
        folder.join(format!("{name}-{key}"))
    }

    /// The copy in the entry of this key, if there is one. A damaged entry is removed.
    fn find(&self, folder: &Path, key: &str) -> Option<PathBuf> {
        let entry = self.entry(folder, key);
        let path = entry.join(COPY);
        match check_entry(&entry, &path) {
            Ok(()) => Some(path),
            Err(error) if error.kind() == ErrorKind::NotFound && !entry.exists() => None,
            Err(error) => {
                let (path, source) = (path.display(), self.source.display());
                tracing::warn!("{path}: {error}; converting {source} again");
                let _ = fs::remove_dir_all(&entry);
                None
            }
        }
    }

    /// Makes the entry in the folder `aside` and renames it.
    fn make(
        &self,
        folder: &Path,
        aside: &Path,
        key: &str,
        before: &Identity,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let (path, entry) = (aside.join(COPY), self.entry(folder, key));
        make(&path)?;
        if identity_of(self.source).map_err(reading(self.source))? != *before {
            return Err(refuse(
                self.source,
                "it changed while it was read; help: start again once nothing writes to it",
            ));
        }
        let note = Note::of(&path).map_err(writing(&path))?;
        note.write(&aside.join(ENTRY))?;
        sync_folder(aside)?;
        match fs::rename(aside, &entry) {
            // Another process has made it since.
            Err(_) if self.find(folder, key).is_some() => {}
            renamed => renamed.map_err(writing(&entry))?,
        }
        sync_folder(folder)?;
        Ok(entry.join(COPY))
    }
}

/// An error unless the copy at `path` is what was made.
fn check_entry(entry: &Path, path: &Path) -> io::Result<()> {
    let damaged = |why: &str| io::Error::new(ErrorKind::InvalidData, why.to_string());
    let identity = identity_of(path)?;
    let note = entry.join(ENTRY);
    let said = Note::read(&note).ok_or_else(|| damaged("its entry.json is missing or damaged"))?;
    if said.describes(&identity) {
        return Ok(());
    }
    let now = Note::of(path)?;
    if now.xxh3 != said.xxh3 {
        return Err(damaged("its checksum is wrong"));
    }
    now.keep(&note);
    Ok(())
}

/// The folders to look in, best first.
fn folders(
    source: &Path,
    cache_dir: Option<&Path>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<PathBuf> {
    if let Some(asked) = cache_dir {
        return vec![asked.to_path_buf()];
    }
    let beside = source.parent().unwrap_or(Path::new("")).join(".ddp-cache");
    let absolute = |name: &str| {
        let path = variable(name).map(PathBuf::from);
        path.filter(|folder| folder.is_absolute())
    };
    let user = absolute("XDG_CACHE_HOME");
    let user = user.or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    let user = user.map(|user| user.join("ddp-train/data"));
    std::iter::once(beside).chain(user).collect()
}

/// A new folder for an entry, in the first of `folders` that can be written.
fn new_folder(folders: &[PathBuf]) -> Result<(&Path, PathBuf)> {
    let mut first_error = None;
    for folder in folders {
        let new = || first_free(folder, |path| fs::create_dir(path));
        match fs::create_dir_all(folder).and_then(|()| new()) {
            Ok(((), aside)) => return Ok((folder, aside)),
            Err(error) => {
                tracing::info!("{} cannot be used as a cache: {error}", folder.display());
                first_error.get_or_insert_with(|| writing(folder)(error));
            }
        }
    }
    Err(first_error.unwrap_or_else(|| Error::Internal("a cache without folders".into())))
}

/// Removes unfinished entries that killed processes left.
fn remove_abandoned(folder: &Path) {
    let is_old = |path: &Path| -> Option<bool> {
        Some(fs::metadata(path).ok()?.modified().ok()?.elapsed().ok()? > ABANDONED)
    };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let files = fs::read_dir(&path).into_iter().flatten().flatten();
        let mut all = files.map(|file| file.path()).chain([path.clone()]);
        let is_unfinished = name.as_encoded_bytes().starts_with(b".unfinished-");
        if is_unfinished && all.all(|path| is_old(&path) == Some(true)) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

fn identity_of(path: &Path) -> io::Result<Identity> {
    let metadata = fs::metadata(path)?;
    if metadata.is_file() {
        Ok(Identity::of(&metadata))
    } else {
        Err(io::Error::new(
            ErrorKind::InvalidInput,
            "it is not an ordinary file",
        ))
    }
}

/// The checksum of a file, trusted while the file's identity is the same.
#[derive(Serialize, Deserialize)]
struct Note {
    /// xxh3-128 of the content, in hexadecimal.
    xxh3: String,
    /// Missing where the file had changed too recently.
    identity: Option<String>,
}

impl Note {
    /// Reads the file.
    fn of(path: &Path) -> io::Result<Note> {
        let identity = identity_of(path)?;
        let xxh3 = format!("{:032x}", hash_of(path)?);
        Ok(Note::of_checksum(xxh3, &identity))
    }

    fn of_checksum(xxh3: String, identity: &Identity) -> Note {
        let changed_s = u64::try_from(identity.changed_ns / 1_000_000_000).unwrap_or(u64::MAX);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let settled_s = changed_s.saturating_add(SETTLED.as_secs());
        let is_settled = now.unwrap_or_default().as_secs() > settled_s;
        Note {
            xxh3,
            identity: is_settled.then(|| format!("{identity:?}")),
        }
    }

    fn describes(&self, identity: &Identity) -> bool {
        self.identity.as_ref() == Some(&format!("{identity:?}"))
    }

    /// The note of this name in one of the folders that describes a file.
    fn find(folders: &[PathBuf], name: &str, identity: &Identity) -> Option<Note> {
        let folders = folders.iter();
        let mut notes = folders.filter_map(|folder| Note::read(&folder.join(name)));
        notes.find(|note| note.describes(identity))
    }

    /// The note at `path`, if it is complete.
    fn read(path: &Path) -> Option<Note> {
        serde_json::from_slice(&read_up_to(path, 1 << 16).ok()??).ok()
    }

    fn write(&self, path: &Path) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|error| Error::Internal(error.to_string()))?;
        replace_file(path, |file| file.write_all(&json).map_err(writing(path)))
    }

    /// Writes the note if it is worth it. Without it the file is read again the next time.
    fn keep(&self, path: &Path) {
        let is_new = || Note::read(path).is_none_or(|note| note.identity != self.identity);
        if self.identity.is_some() && is_new() {
            let _ = self.write(path);
        }
    }
}

/// xxh3-128 of a file's content.
fn hash_of(path: &Path) -> io::Result<u128> {
    let mut file = File::open(path)?;
    let (mut hash, mut buffer) = (XxHash3_128::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hash.finish_128()),
            Ok(count) => {
                hash.write(&buffer[..count]);
                heartbeat::beat(Work::ReadsData);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
