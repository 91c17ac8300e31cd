//! What was made of files that cannot be mapped, kept so that it is made once.
//!
//! The folder is what `--cache-dir` says, else `.ddp-cache` beside the file, else, where that cannot be written,
//! `ddp-train/data` in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`). It may be deleted at any time.
//!
//! ```text
//! train.csv-KEY/features.bin    what was made; KEY is xxh3-128 of the source's content and of the request
//!               entry.json      its size and checksum, and how it lay on the disk when that was last checked
//! .seen-KEY                     a source by its path: its KEY as long as size, times and inode are these
//! .lock-KEY                     held by whoever makes an entry, and a byte longer every second as long as its process lives; others wait
//! .unfinished-KEY-HOLDER-…      an entry in the making, renamed when all of it is on the disk; HOLDER is the kernel whose lock its maker
//!                               has, or "unlocked" where the file system has none or the one who has it seems to have stopped
//! ```
//!
//! An entry is believed if it lies as it lay when its checksum was right, and is checked anew where it does not. Times within two
//! seconds of a check prove nothing, since a file system's clock ticks slowly: then contents are read again. Entries are never replaced, only
//! added, so that whoever has one mapped keeps it when its source changes.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ddp_kernels::mapped::free_bytes;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::refuse;
use crate::error::{Error, Result};
use crate::files::sync_folder;

/// Goes into every key: what an older version made is not looked at.
const VERSION: &[u8] = b"ddp cache 1";
pub(super) const ENTRY: &str = "entry.json";
const WAY_OUT: &str = "Check the folder's permissions and the space left on its disk, or give another with --cache-dir";
/// A time as close as this to the present may be that of two different contents.
const SETTLED: Duration = Duration::from_secs(2);
/// So often whoever makes an entry shows that it lives.
const PULSE: Duration = Duration::from_secs(1);
/// For so long the maker of an entry may show no life before a waiting process makes it too.
const STALLED: Duration = Duration::from_secs(60);
/// What nobody has written to for so long is left over, whoever made it.
const LEFT: Duration = Duration::from_secs(6 * 3600);
/// In the place of a kernel's name: made without a lock.
const UNLOCKED: &str = "unlocked";

/// What is wanted of a file.
pub(super) struct Wanted<'a> {
    /// What it is made from.
    pub(super) source: &'a Path,
    /// What the file that is made is called.
    pub(super) name: &'a str,
    /// All that decides what is made besides the source's content.
    pub(super) request: &'a str,
}

/// What `make` makes of the file at `source`: made now, or found where it was made before. `make` is given the path to write and has its
/// folder to itself; `request` is all that decides what it makes besides the source's content.
pub(crate) fn converted(
    source: &Path,
    cache_dir: Option<&Path>,
    request: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    find_or_make(&usual_folders(source, cache_dir), &Wanted { source, name: "data.bin", request }, make)
}

/// A folder for what is known of the file at `source`: the cache's, made, and writable.
pub(crate) fn folder(source: &Path, cache_dir: Option<&Path>) -> Result<PathBuf> {
    writable(&usual_folders(source, cache_dir)).cloned()
}

pub(super) fn usual_folders(source: &Path, cache_dir: Option<&Path>) -> Vec<PathBuf> {
    folders(source, cache_dir, |name| std::env::var_os(name))
}

/// The file that is wanted, from one of the folders or made in the first that can be written.
pub(super) fn find_or_make(
    folders: &[PathBuf],
    wanted: &Wanted<'_>,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let before = Marks::of_source(wanted.source)?;
    let seen = wanted.seen_name();
    let mut known = folders.iter().filter_map(|folder| Seen::read(&folder.join(&seen)));
    let key = match known.find(|seen| seen.marks == before) {
        Some(seen) => seen.key,
        None => wanted.key(&hash_of(wanted.source).map_err(reading(wanted.source))?),
    };
    if let Some(found) = folders.iter().find_map(|folder| wanted.find(folder, &key)) {
        if let Some(folder) = folders.iter().find(|folder| found.starts_with(folder)) {
            remember(folder, &seen, &before, &key);
        }
        return Ok(found);
    }
    let folder = writable(folders)?;
    let lock = Lock::wait(folder, &key, wanted.source, STALLED);
    if let Some(found) = wanted.find(folder, &key) {
        return Ok(found);
    }
    let holder = if lock.is_some() { kernel() } else { UNLOCKED.into() };
    remove_left_over(folder, &key, lock.as_ref());
    let made = wanted.make(folder, &key, &holder, &before, make)?;
    remember(folder, &seen, &before, &key);
    Ok(made)
}

impl Wanted<'_> {
    /// What an entry is called after its source's content and the request.
    fn key(&self, content: &[u8; 16]) -> String {
        self.hash(content)
    }

    /// Where it is written down which key the file at this path has.
    fn seen_name(&self) -> String {
        let path = fs::canonicalize(self.source).unwrap_or_else(|_| self.source.to_path_buf());
        format!(".seen-{}", self.hash(path.as_os_str().as_encoded_bytes()))
    }

    fn hash(&self, about: &[u8]) -> String {
        let mut hash = Xxh3::new();
        for part in [VERSION, about, self.name.as_bytes(), self.request.as_bytes()] {
            // Each with its length before it, so that parts cannot run into each other.
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        format!("{:032x}", hash.digest128())
    }

    fn entry(&self, folder: &Path, key: &str) -> PathBuf {
        let name = self.source.file_name().unwrap_or_default().to_string_lossy();
        // Names of files have at most 255 bytes, and this one gets longer.
        let end = name.char_indices().map(|(at, _)| at).take_while(|&at| at <= 120).last().unwrap_or(0);
        let name = if name.len() <= 120 { &*name } else { &name[..end] };
        folder.join(format!("{name}-{key}"))
    }

    /// The file in the entry of this key, if a whole one is there. A damaged one is removed.
    fn find(&self, folder: &Path, key: &str) -> Option<PathBuf> {
        let entry = self.entry(folder, key);
        let path = entry.join(self.name);
        match Entry::check(&entry, &path) {
            Ok(()) => Some(path),
            Err(error) if error.kind() == ErrorKind::NotFound && !entry.exists() => None,
            Err(error) => {
                tracing::warn!("{} is made again from {}: {error}", path.display(), self.source.display());
                remove(&entry, folder);
                None
            }
        }
    }

    /// Makes the entry aside, makes it durable and renames it.
    fn make(
        &self,
        folder: &Path,
        key: &str,
        holder: &str,
        before: &Marks,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let aside = new_folder(folder, &unfinished(key, holder)).map_err(writing(folder))?;
        let entry = self.entry(folder, key);
        let attempt = (|| {
            let path = aside.join(self.name);
            make(&path)?;
            if Marks::of_source(self.source)? != *before {
                return Err(changed(self.source));
            }
            Entry::write(&aside, &path).map_err(writing(&path))?;
            sync_folder(&aside)?;
            match fs::rename(&aside, &entry) {
                Err(_) if self.find(folder, key).is_some() => Ok(()),
                renamed => renamed.map_err(writing(&entry)),
            }
        })();
        // Nothing is there any more where all went well.
        let _ = fs::remove_dir_all(&aside);
        attempt?;
        sync_folder(folder)?;
        Ok(entry.join(self.name))
    }
}

/// That a file is not what it was when it was begun to be read.
fn changed(path: &Path) -> Error {
    refuse(path, "it has changed while it was read. Start again when nothing writes to it")
}

/// Turns what the system said of a file that is read into an error.
pub(super) fn reading(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    let way_out = "Check that it is there and may be read".into();
    move |source| Error::Io { action: "read", path, source, way_out }
}

/// Turns what the system said of a file in the cache into an error.
pub(super) fn writing(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { action: "write", path, source, way_out: WAY_OUT.into() }
}

/// Whether the disk that `to` is written on has room for so many bytes. It is not filled up for want of asking.
pub(super) fn check_room(to: &Path, bytes: u64) -> Result<()> {
    let free = free_bytes(to.parent().unwrap_or(Path::new("."))).map_err(writing(to))?;
    if free < bytes {
        let text = format!("it takes up to {bytes} bytes on its disk, and {free} are free");
        return Err(writing(to)(io::Error::new(ErrorKind::StorageFull, text)));
    }
    Ok(())
}

/// The folders to look in, best first.
fn folders(source: &Path, cache_dir: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if let Some(asked) = cache_dir {
        return vec![asked.to_path_buf()];
    }
    let beside = source.parent().unwrap_or(Path::new("")).join(".ddp-cache");
    let set = |name: &str| variable(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    let user = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    [Some(beside), user.map(|user| user.join("ddp-train/data"))].into_iter().flatten().collect()
}

/// The first of the folders that can be written to.
fn writable(folders: &[PathBuf]) -> Result<&PathBuf> {
    let mut first_error = None;
    for folder in folders {
        let tried = fs::create_dir_all(folder).and_then(|()| new_folder(folder, ".unfinished-trial"));
        match tried.and_then(fs::remove_dir) {
            Ok(()) => return Ok(folder),
            Err(error) => {
                tracing::info!("nothing can be kept in {}: {error}", folder.display());
                first_error.get_or_insert_with(|| writing(folder)(error));
            }
        }
    }
    Err(first_error.unwrap_or_else(|| Error::Internal("a cache without folders".into())))
}

/// A new folder in `folder` whose name begins so.
fn new_folder(folder: &Path, beginning: &str) -> io::Result<PathBuf> {
    for number in 0.. {
        let path = folder.join(format!("{beginning}-{}-{number}", std::process::id()));
        match fs::create_dir(&path) {
            // Left by a process of this number that was killed, or of another container.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 1000 => {}
            made => return made.map(|()| path),
        }
    }
    unreachable!("the last name is not passed over")
}

/// Takes an entry away at once, then deletes it. What cannot be removed is not believed the next time either.
fn remove(entry: &Path, folder: &Path) {
    let removed = new_folder(folder, ".unfinished-removing").and_then(|aside| {
        let moved = fs::rename(entry, aside.join("entry"));
        fs::remove_dir_all(&aside).and(moved)
    });
    if let Err(error) = removed {
        tracing::debug!("{} cannot be removed: {error}", entry.display());
    }
}

/// Removes what processes that were killed have left: of this entry what was made under the lock that is held now, and whatever nobody has
/// written to for hours. All else may be in the making: locks are not seen everywhere, and whoever makes an entry without one has none to show.
fn remove_left_over(folder: &Path, key: &str, lock: Option<&Lock>) {
    let own = lock.map(|_| unfinished(key, &kernel()) + "-");
    for (name, path) in entries(folder) {
        let was_ours = own.as_ref().is_some_and(|own| name.starts_with(own));
        let key = name.strip_prefix(".unfinished-").and_then(|rest| rest.split('-').next());
        if was_ours || key.is_some_and(is_key) && untouched(&path) > LEFT {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// How the names of an entry's folders begin while it is made.
fn unfinished(key: &str, holder: &str) -> String {
    format!(".unfinished-{key}-{holder}")
}

/// What stands for the kernel that runs now: whoever has another one, on another host or before a restart, may not see the same locks.
fn kernel() -> String {
    let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut hash = Xxh3::new();
    hash.update(&boot);
    format!("{:016x}", hash.digest())
}

/// What is in a folder, by name: nothing of what cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

/// How long ago somebody has written to a folder or to a file in it; no time at all where that cannot be told.
fn untouched(folder: &Path) -> Duration {
    let all = entries(folder).map(|(_, path)| path).chain([folder.to_path_buf()]);
    let ages = all.map(|path| fs::metadata(path).and_then(|about| about.modified()).ok()?.elapsed().ok());
    ages.map(Option::unwrap_or_default).min().unwrap_or_default()
}

/// How a file lies on the disk: as long as this is the same, nobody has written to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Marks {
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    inode: u64,
}

impl Marks {
    fn of(path: &Path) -> io::Result<Marks> {
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is not an ordinary file"));
        }
        Ok(Marks {
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            inode: metadata.ino(),
        })
    }

    fn of_source(path: &Path) -> Result<Marks> {
        Marks::of(path).map_err(reading(path))
    }

    /// Whether the last change is so long ago that another one would show.
    fn settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(self.changed.0).is_ok_and(|changed_s| now.as_secs() > changed_s + SETTLED.as_secs())
    }
}

/// What an entry says of its file.
#[derive(Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    xxh3: String,
    /// How the file lay when it had this checksum, if that can be told.
    marks: Option<Marks>,
}

impl Entry {
    /// Whether the file at `path` is what was made.
    fn check(entry: &Path, path: &Path) -> io::Result<()> {
        let damaged = |why: &str| io::Error::new(ErrorKind::InvalidData, why.to_string());
        let mut text = String::new();
        File::open(entry.join(ENTRY))?.take(1 << 16).read_to_string(&mut text)?;
        let said: Entry = serde_json::from_str(&text).map_err(|_| damaged("its entry is damaged"))?;
        let marks = Marks::of(path)?;
        if marks.bytes != said.bytes {
            return Err(damaged("its size is wrong"));
        }
        if said.marks.as_ref() == Some(&marks) {
            return Ok(());
        }
        if hex(&hash_of(path)?) != said.xxh3 {
            return Err(damaged("its checksum is wrong"));
        }
        if marks.settled() {
            // Where nothing can be written it is only checked again the next time.
            let _ = replace(&entry.join(ENTRY), &Entry { marks: Some(marks), ..said });
        }
        Ok(())
    }

    /// Makes the file durable and writes down what it is.
    fn write(entry: &Path, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()?;
        let marks = Marks::of(path)?;
        let xxh3 = hex(&hash_of(path)?);
        replace(&entry.join(ENTRY), &Entry { bytes: marks.bytes, xxh3, marks: Some(marks).filter(Marks::settled) })
    }
}

/// What is known of a source by its path.
#[derive(Serialize, Deserialize)]
struct Seen {
    marks: Marks,
    key: String,
}

impl Seen {
    fn read(path: &Path) -> Option<Seen> {
        let mut text = String::new();
        File::open(path).ok()?.take(1 << 16).read_to_string(&mut text).ok()?;
        let seen: Seen = serde_json::from_str(&text).ok()?;
        // It becomes part of a path.
        is_key(&seen.key).then_some(seen)
    }
}

/// Writes down a source's key, so that it need not be read to find its entry. Where that fails it is read again.
fn remember(folder: &Path, seen: &str, marks: &Marks, key: &str) {
    let path = folder.join(seen);
    if marks.settled() && Seen::read(&path).is_none_or(|seen| seen.marks != *marks || seen.key != key) {
        let _ = replace(&path, &Seen { marks: marks.clone(), key: key.to_string() });
    }
}

fn is_key(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Puts a small file in the place of `path`.
fn replace(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let aside = new_folder(folder, ".unfinished-note")?;
    let written = File::create(aside.join("note")).and_then(|mut file| {
        file.write_all(&serde_json::to_vec(value)?)?;
        file.sync_all()?;
        fs::rename(aside.join("note"), path)
    });
    let _ = fs::remove_dir_all(&aside);
    written
}

fn hex(hash: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*hash))
}

/// xxh3-128 of a file's content.
fn hash_of(path: &Path) -> io::Result<[u8; 16]> {
    let mut file = File::open(path)?;
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hash.digest128().to_be_bytes()),
            Ok(count) => hash.update(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Held while an entry is made, so that others wait for it and do not make it too. It ends with its process.
struct Lock {
    path: PathBuf,
    /// The thread that shows life, which ends when nobody can tell it anything any more. It keeps the file open, and so the lock.
    pulse: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Lock {
    /// Waits until nobody makes the entry. `None` where the file system has no locks, or whoever has it shows no life for as long as
    /// `stalled`: then it is made twice, which costs time alone.
    fn wait(folder: &Path, key: &str, source: &Path, stalled: Duration) -> Option<Lock> {
        let path = folder.join(format!(".lock-{key}"));
        let (begun, mut said) = (Instant::now(), false);
        let (mut length, mut beaten) = (0, Instant::now());
        loop {
            let now = match Lock::attempt(&path) {
                Ok(Attempt::Held(lock)) => return Some(lock),
                Ok(Attempt::Taken(length)) => length,
                Err(_) => return None,
            };
            if !said && begun.elapsed() > Duration::from_secs(2) {
                tracing::info!("waiting for another process that converts {}", source.display());
                said = true;
            }
            if now != length {
                (length, beaten) = (now, Instant::now());
            }
            if beaten.elapsed() > stalled {
                tracing::warn!(
                    "whoever holds {} seems to have stopped: {} is converted here too",
                    path.display(),
                    source.display()
                );
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn attempt(path: &Path) -> io::Result<Attempt> {
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(Attempt::Taken(file.metadata()?.len())),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Whoever had it has removed its name: another process may have the lock of a file of the same name.
        let same = fs::metadata(path).is_ok_and(|named| file.metadata().is_ok_and(|held| held.ino() == named.ino()));
        if !same {
            return Ok(Attempt::Taken(0));
        }
        Ok(Attempt::Held(Lock { path: path.to_path_buf(), pulse: Some(beat(file)?) }))
    }
}

/// What came of trying to have a lock.
enum Attempt {
    Held(Lock),
    /// Somebody else has it, and its file is so long.
    Taken(u64),
}

/// Makes a file a byte longer now and then, until the other end is gone. Its length is seen by other hosts sooner than its contents or times, and
/// however long the process takes to write, to make durable or to read.
fn beat(file: File) -> io::Result<(mpsc::Sender<()>, JoinHandle<()>)> {
    let (stop, stopped) = mpsc::channel();
    let thread = thread::Builder::new().name("cache pulse".into()).spawn(move || {
        let mut length = file.metadata().map_or(0, |about| about.len());
        while stopped.recv_timeout(PULSE) == Err(RecvTimeoutError::Timeout) {
            length += 1;
            // Where that fails others may make the entry too.
            let _ = file.set_len(length);
        }
    })?;
    Ok((stop, thread))
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is still held: from then on nobody who opens the name finds this file.
        let _ = fs::remove_file(&self.path);
        if let Some((stop, thread)) = self.pulse.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
