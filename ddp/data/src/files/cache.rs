//! Converted copies of files that cannot be mapped, kept so that each file is converted once.
//!
//! The folder is the one asked for, else `.ddp-cache` beside the file; where that cannot be used,
//! `ddp-train/copies` in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`). It may be deleted
//! at any time.
//!
//! ```text
//! train.csv-KEY/data.bin     the copy; KEY is xxh3-128 of the source's content and of the request
//!               entry.json   the copy's checksum, and its identity on the disk at that time
//! .seen-KEY                  the source's checksum, and its identity at that time
//! .unfinished-PID-N          an entry being made, locked; renamed once it is on the disk
//! ```
//!
//! Folders, entries and notes count only if no user but this one, the source's owner and root can
//! have written them. They are made only where no user but this one and root could put something
//! else in their place. What is made is written by this user alone, and read by all if all may read
//! the source, else by this user alone.
//!
//! A checksum is trusted while inode, size and times of the file are unchanged, and recomputed
//! otherwise. Times less than two seconds old prove nothing, since file systems' clocks tick
//! slowly. Two processes may convert the same file at the same time: the second one uses the entry
//! of the first.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::mapped::Identity;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use super::io::{reading, refuse, writing};
use crate::error::{Error, Result};
use ddp_kernels::files::{
    check_keeps, first_free, is_ours, open_ordinary, open_trusted, read_opened, replace_file,
    sync_folder,
};

/// Part of every key: entries of older versions are not found.
const VERSION: &[u8] = b"ddp cache 4";
/// The note in an entry.
const ENTRY: &str = "entry.json";
/// Smaller files are compared with their own checksums each time.
const NOTED_BYTES_MIN: u64 = 64 << 20;
/// A file changed more recently than this may change again without its times showing it.
const SETTLED: Duration = Duration::from_secs(2);
/// An unfinished entry that was not written to for this long was left by a process that was killed,
/// also where there are no locks.
const ABANDONED: Duration = Duration::from_secs(6 * 3600);

/// The name of the copy in its entry.
const COPY: &str = "data.bin";
/// The folder beside a file.
const BESIDE: &str = ".ddp-cache";

/// Who may have made what is found, and who may read what is made: as of the source.
#[derive(Clone, Copy)]
struct Access {
    owner: u32,
    /// Whether all users may read the source.
    is_public: bool,
}

impl Access {
    fn of(source: &Path) -> io::Result<Access> {
        let about = fs::metadata(source)?;
        Ok(Access {
            owner: about.uid(),
            // A file without a name is in the memory of processes, and no other user may read it.
            is_public: about.nlink() > 0 && about.mode() & 0o004 != 0,
        })
    }

    /// An error unless `folder` is there and may be trusted.
    fn check(self, folder: &Path) -> io::Result<()> {
        let is_folder = open_trusted(folder, self.owner)?.metadata()?.is_dir();
        let refused = || ErrorKind::NotADirectory.into();
        is_folder.then_some(()).ok_or_else(refused)
    }

    /// Makes the folder if it is not there. An error if a user other than this one and root could
    /// put something else in its place, also above it, or write to it.
    fn make_folder(self, folder: &Path, source: &Path) -> io::Result<()> {
        let private = |recursive| {
            let mut builder = DirBuilder::new();
            builder.recursive(recursive).mode(0o700);
            builder
        };
        let above = folder.parent().filter(|it| !it.as_os_str().is_empty());
        let above = above.unwrap_or(Path::new("."));
        private(true).create(above)?;
        let whole = fs::canonicalize(above)?;
        whole.ancestors().try_for_each(check_keeps)?;
        match private(false).create(folder) {
            Ok(()) if folder.parent() == source.parent() => self.give(&File::open(folder)?)?,
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        open_trusted(folder, 0).map(drop)?;
        self.check(folder)
    }

    /// Lets all users read what is open if they may read the source, and else this user alone.
    fn give(self, made: &File) -> io::Result<()> {
        let about = made.metadata()?;
        let mode = match (self.is_public, about.is_dir()) {
            (true, true) => 0o755,
            (true, false) => 0o644,
            (false, true) => 0o700,
            (false, false) => 0o600,
        };
        match made.set_permissions(Permissions::from_mode(mode)) {
            // Some file systems have one mode for all files.
            Err(error) if about.mode() & 0o066 & !mode != 0 => Err(error),
            _ => Ok(()),
        }
    }
}

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
    let access = Access::of(path).map_err(reading(path))?;
    let (folders, seen) = (usual_folders(path, cache_dir), wanted.seen_name());
    if Note::find(&folders, &seen, &identity, access).is_some() {
        return Ok(());
    }
    check()?;
    let can_be_used = |folder: &&PathBuf| access.make_folder(folder, path).is_ok();
    if let Some(folder) = folders.iter().find(can_be_used) {
        Note::of_checksum(String::new(), &identity).keep(&folder.join(&seen), access);
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
    let access = Access::of(source).map_err(reading(source))?;
    let seen = wanted.seen_name();
    let note = match Note::find(folders, &seen, &before, access) {
        Some(note) => note,
        None => Note::of(source).map_err(reading(source))?,
    };
    let key = wanted.hash(note.xxh3.as_bytes());
    let (mut usable, mut refused) = (Vec::new(), None);
    for folder in folders {
        match access
            .check(folder)
            .and_then(|()| wanted.find(folder, &key, access))
        {
            Ok(Some(found)) => {
                note.keep(&folder.join(seen), access);
                return Ok(found);
            }
            Ok(None) => usable.push(&**folder),
            Err(error) if error.kind() == ErrorKind::NotFound => usable.push(&**folder),
            Err(error) => pass_over(folder, error, &mut refused),
        }
    }
    let new = |folder: &Path| {
        access.make_folder(folder, source)?;
        // Locked until it is whole: what a killed process leaves is not.
        let private = |path: &Path| {
            DirBuilder::new().mode(0o700).create(path)?;
            let made = File::open(path)?;
            let is_kept = is_ours(&made, path).then_some(made);
            is_kept.ok_or_else(|| ErrorKind::AlreadyExists.into())
        };
        first_free(folder, private)
    };
    let found = usable.into_iter().find_map(|folder| match new(folder) {
        Ok((lock, aside)) => Some((folder, aside, lock)),
        Err(error) => {
            pass_over(folder, error, &mut refused);
            None
        }
    });
    let Some((folder, aside, lock)) = found else {
        let none = || Error::Internal("a cache without folders".into());
        return Err(refused.unwrap_or_else(none));
    };
    remove_abandoned(folder);
    let made = wanted.make(folder, &aside, &key, (&before, access, &lock), make);
    // After a success it has been renamed.
    let _ = fs::remove_dir_all(&aside);
    let made = made?;
    note.keep(&folder.join(seen), access);
    Ok(made)
}

/// Says why a folder is not used, and keeps the first error.
fn pass_over(folder: &Path, error: io::Error, first: &mut Option<Error>) {
    let text = format!("{} cannot be used as a cache: {error}", folder.display());
    // Data in a folder that may only be read are usual.
    if folder.ends_with(BESIDE) && error.raw_os_error().is_some() {
        tracing::info!("{text}");
    } else {
        tracing::warn!("{text}");
    }
    first.get_or_insert_with(|| writing(folder)(error));
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

    /// The copy in the entry of this key, if there is one. An entry that is damaged, or that others
    /// may have written, is removed; an error if it stays.
    fn find(&self, folder: &Path, key: &str, access: Access) -> io::Result<Option<PathBuf>> {
        let entry = self.entry(folder, key);
        let path = entry.join(COPY);
        match check_entry(&entry, &path, access) {
            Ok(()) => Ok(Some(path)),
            Err(_) if fs::symlink_metadata(&entry).is_err() => Ok(None),
            Err(error) => {
                let (path, source) = (path.display(), self.source.display());
                tracing::warn!("{path}: {error}; converting {source} again");
                fs::remove_dir_all(&entry).map(|()| None)
            }
        }
    }

    /// Makes the entry in the folder `aside` and renames it.
    fn make(
        &self,
        folder: &Path,
        aside: &Path,
        key: &str,
        (before, access, lock): (&Identity, Access, &File),
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let (path, entry) = (aside.join(COPY), self.entry(folder, key));
        make(&path)?;
        let copy = File::open(&path).and_then(|copy| access.give(&copy));
        copy.map_err(writing(&path))?;
        if identity_of(self.source).map_err(reading(self.source))? != *before {
            return Err(refuse(
                self.source,
                "it changed while it was read; help: start again once nothing writes to it",
            ));
        }
        let note = Note::of(&path).map_err(writing(&path))?;
        note.write(&aside.join(ENTRY), access)?;
        access.give(lock).map_err(writing(aside))?;
        sync_folder(aside)?;
        match fs::rename(aside, &entry) {
            // Another process has made it since.
            Err(_) if matches!(self.find(folder, key, access), Ok(Some(_))) => {}
            renamed => renamed.map_err(writing(&entry))?,
        }
        sync_folder(folder)?;
        Ok(entry.join(COPY))
    }
}

/// An error unless the copy at `path` is what was made, by someone who is trusted.
fn check_entry(entry: &Path, path: &Path, access: Access) -> io::Result<()> {
    let damaged = |why: &str| io::Error::new(ErrorKind::InvalidData, why.to_string());
    access.check(entry)?;
    let file = open_trusted(path, access.owner)?;
    let identity = Identity::of(&file.metadata()?);
    let note = entry.join(ENTRY);
    let said = Note::read(&note, access);
    let said = said.ok_or_else(|| damaged("its entry.json is missing or damaged"))?;
    if said.describes(&identity) {
        return Ok(());
    }
    let now = Note::of_opened(file)?;
    if now.xxh3 != said.xxh3 {
        return Err(damaged("its checksum is wrong"));
    }
    now.keep(&note, access);
    Ok(())
}

/// The folders to look in, best first.
fn folders(
    source: &Path,
    cache_dir: Option<&Path>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<PathBuf> {
    let beside = || source.parent().unwrap_or(Path::new("")).join(BESIDE);
    let first = cache_dir.map_or_else(beside, Path::to_path_buf);
    let absolute = |name: &str| {
        let path = variable(name).map(PathBuf::from);
        path.filter(|folder| folder.is_absolute())
    };
    let user = absolute("XDG_CACHE_HOME");
    let user = user.or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    let user = user.map(|user| user.join("ddp-train/copies"));
    std::iter::once(first).chain(user).collect()
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
        let number = name.to_str().and_then(|it| it.strip_prefix(".unfinished-"));
        let Some((process, _)) = number.and_then(|it| it.split_once('-')) else {
            continue;
        };
        // Older versions do not lock what they make.
        let is_left = !Path::new("/proc").join(process).exists()
            && File::open(&path).is_ok_and(|it| it.try_lock().is_ok() && is_ours(&it, &path));
        if is_left || all.all(|path| is_old(&path) == Some(true)) {
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
        Note::of_opened(open_ordinary(path)?)
    }

    fn of_opened(file: File) -> io::Result<Note> {
        let identity = Identity::of(&file.metadata()?);
        let xxh3 = format!("{:032x}", hash_of(file)?);
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
    fn find(folders: &[PathBuf], name: &str, identity: &Identity, access: Access) -> Option<Note> {
        let folders = folders.iter();
        let trusted = folders.filter(|folder| access.check(folder).is_ok());
        let mut notes = trusted.filter_map(|folder| Note::read(&folder.join(name), access));
        notes.find(|note| note.describes(identity))
    }

    /// The note at `path`, if it is complete and may be trusted.
    fn read(path: &Path, access: Access) -> Option<Note> {
        let file = open_trusted(path, access.owner).ok()?;
        serde_json::from_slice(&read_opened(file, 1 << 16).ok()??).ok()
    }

    fn write(&self, path: &Path, access: Access) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|error| Error::Internal(error.to_string()))?;
        replace_file(path, |file| {
            let written = file.write_all(&json).and_then(|()| access.give(file));
            written.map_err(writing(path))
        })
    }

    /// Writes the note if it is worth it. Without it the file is read again the next time.
    fn keep(&self, path: &Path, access: Access) {
        let is_new = || Note::read(path, access).is_none_or(|note| note.identity != self.identity);
        if self.identity.is_some() && is_new() {
            let _ = self.write(path, access);
        }
    }
}

/// xxh3-128 of a file's content.
fn hash_of(mut file: File) -> io::Result<u128> {
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
