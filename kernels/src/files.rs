//! Writes files and folders so that they appear whole or not at all: under another name, synced,
//! then renamed.
//!
//! Every call that changes the disk asks `may` first, so that tests can let any of them fail.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::heartbeat::{self, Work};

mod opened;

pub(crate) use opened::refusal;
pub use opened::{check_keeps, open_ordinary, open_trusted, read_opened, read_up_to};

#[cfg(any(test, debug_assertions, feature = "faults"))]
use testing::may;

/// Whether the system may be asked for this change: tests can say no.
#[cfg(not(any(test, debug_assertions, feature = "faults")))]
fn may(_: &'static str, _: &Path) -> io::Result<()> {
    Ok(())
}

/// What helps against most failures to write.
const HELP: &str =
    "check the folder's permissions and the space left on its disk, or write to another folder";

/// A result of a change of files.
pub type Result<T, E = FileError> = std::result::Result<T, E>;

/// A file or folder that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}; help: {help}", path.display())]
pub struct FileError {
    /// What was tried.
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
    /// What to do.
    pub help: String,
}

/// The error of a file that the system does not let us change.
pub fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_path_buf();
    move |source| FileError {
        action,
        path,
        help: limit_help(&source).unwrap_or(HELP).into(),
        source,
    }
}

/// What helps if a limit of this process, or of names, is too small.
pub fn limit_help(error: &io::Error) -> Option<&'static str> {
    // EMFILE; `ErrorKind` has no value for it.
    const TOO_MANY_OPEN: i32 = 24;
    match error.kind() {
        ErrorKind::FileTooLarge => Some("raise the limit on the size of files (ulimit -f)"),
        ErrorKind::InvalidFilename => Some("give a shorter name"),
        _ if error.raw_os_error() == Some(TOO_MANY_OPEN) => {
            Some("raise the limit on open files (ulimit -n)")
        }
        _ => None,
    }
}

/// Replaces a file by one with these bytes, or makes it.
pub fn replace_with(path: &Path, bytes: &[u8]) -> Result<()> {
    replace_file(path, |file| {
        file.write_all(bytes).map_err(failed("write", path))
    })
}

/// Makes a folder and those above it, durably; one that is there is fine.
pub fn make_folder(path: &Path) -> Result<()> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.is_dir();
    let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
    if !missing.is_empty() {
        let made = may("mkdir", path).and_then(|()| fs::create_dir_all(path));
        made.map_err(
            // Those above the one that failed may be there by now.
            |source| match missing.iter().find(|it| it.exists() && !it.is_dir()) {
                Some(file) => FileError {
                    action: "make the folder",
                    path: path.to_path_buf(),
                    help: format!("{} is a file: give another folder", file.display()),
                    source,
                },
                None => failed("make the folder", path)(source),
            },
        )?;
    }
    // The highest first.
    missing
        .iter()
        .rev()
        .try_for_each(|made| sync_folder(folder_of(made)))
}

/// Makes one folder, which must not be there yet.
pub fn make_new_folder(path: &Path) -> Result<()> {
    may("mkdir", path)
        .and_then(|()| fs::create_dir(path))
        .map_err(failed("make the folder", path))
}

/// How long a process that was killed may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(3);

/// Makes a folder if it is not there, and locks it until the file is closed. A process that was
/// killed may have left files in it. None: another process holds it.
pub fn lock_folder(path: &Path) -> Result<Option<File>> {
    let began = Instant::now();
    loop {
        make_folder(path)?;
        let lock = File::open(path).map_err(failed("open", path))?;
        if is_ours(&lock, path) {
            return Ok(Some(lock));
        }
        if began.elapsed() > ENDS_WITHIN {
            return Ok(None);
        }
        thread::sleep(ENDS_WITHIN / 50);
    }
}

/// Locks what was opened at `path`. False if another process holds it, or has renamed or removed it
/// since. Some file systems have no locks.
pub fn is_ours(file: &File, path: &Path) -> bool {
    let id = |about: fs::Metadata| (about.dev(), about.ino());
    let is_free = !matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    is_free
        && file
            .metadata()
            .is_ok_and(|here| fs::metadata(path).is_ok_and(|there| id(here) == id(there)))
}

/// Gives what is called `from` the name `to` in the same folder, durably.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    may("rename", to)
        .and_then(|()| fs::rename(from, to))
        .map_err(failed("put in its place", to))?;
    sync_folder(folder_of(to))
}

/// Removes a folder with everything in it; one that is not there is fine.
pub fn remove_folder(path: &Path) -> Result<()> {
    match may("remove", path).and_then(|()| fs::remove_dir_all(path)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Puts a file with the contents that `write` gives it in the place of `path`. It is locked before
/// it has this name, and until it is closed.
pub fn replace_file<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    put_file(path, write, |aside| fs::rename(aside, path))
}

/// The same, but a file that is at `path` by then stays: an error of the kind `AlreadyExists`.
pub fn new_file<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    put_file(path, write, |aside| match fs::hard_link(aside, path) {
        Ok(()) => fs::remove_file(aside),
        Err(_) if fs::symlink_metadata(path).is_ok() => Err(ErrorKind::AlreadyExists.into()),
        // Some file systems have no links. A file made between these two lines is lost.
        Err(_) => fs::rename(aside, path),
    })
}

/// A file with the contents that `write` gives it, which `put` gives the name `path`.
fn put_file<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
    put: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), E> {
    let folder = folder_of(path);
    remove_left(folder);
    let aside = first_free(folder, |aside| {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(aside)?;
        // A process that cleans up may have locked it first.
        if is_ours(&file, aside) {
            return Ok(file);
        }
        Err(ErrorKind::AlreadyExists.into())
    });
    let (mut file, aside) = aside.map_err(failed("make a file beside", path))?;
    let attempt = (|| -> Result<(), E> {
        write(&mut file)?;
        file.sync_all().map_err(failed("make durable", path))?;
        Ok(put(&aside).map_err(failed("put in its place", path))?)
    })();
    if attempt.is_err() {
        // The first error is the one to report; a file that cannot be removed changes nothing about
        // it.
        let _ = fs::remove_file(&aside);
    }
    attempt?;
    Ok(sync_folder(folder)?)
}

/// A new file that is written from its beginning to its end.
#[derive(Debug)]
pub struct NewFile<'a> {
    path: &'a Path,
    file: File,
    hash: blake3::Hasher,
    bytes: u64,
}

/// How often a long file is made durable while it is written: one sync of all of it could take
/// longer than other ranks wait for a sign of progress.
const SYNC_EVERY_BYTES: u64 = 256 << 20;

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileDigest {
    /// How much.
    pub bytes: u64,
    /// Its BLAKE3, as 64 lower-case hexadecimal digits.
    pub blake3: String,
}

impl NewFile<'_> {
    /// Adds `bytes` at the end.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        heartbeat::beat(Work::Writes);
        let written = match may("write", self.path) {
            Ok(()) => self.file.write_all(bytes),
            // A disk that fills up takes a part.
            Err(error) => self
                .file
                .write_all(&bytes[..bytes.len() / 2])
                .and(Err(error)),
        };
        written.map_err(failed("write", self.path))?;
        self.hash.update(bytes);
        let before = self.bytes / SYNC_EVERY_BYTES;
        self.bytes += bytes.len() as u64;
        if self.bytes / SYNC_EVERY_BYTES > before {
            let synced = self.file.sync_data();
            synced.map_err(failed("make durable", self.path))?;
        }
        Ok(())
    }
}

/// A new file in a folder of one's own, filled by `write` and made durable.
pub fn write_file<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut NewFile<'_>) -> Result<(), E>,
) -> Result<FileDigest, E> {
    let made = may("create", path)
        .and_then(|()| OpenOptions::new().write(true).create_new(true).open(path));
    let file = made.map_err(failed("make", path))?;
    let mut output = NewFile {
        path,
        file,
        hash: blake3::Hasher::new(),
        bytes: 0,
    };
    write(&mut output)?;
    may("sync", path)
        .and_then(|()| output.file.sync_all())
        .map_err(failed("make durable", path))?;
    Ok(FileDigest {
        bytes: output.bytes,
        blake3: output.hash.finalize().to_hex().to_string(),
    })
}

/// Makes the names in a folder durable.
pub fn sync_folder(path: &Path) -> Result<()> {
    match may("sync", path)
        .and_then(|()| File::open(path))
        .and_then(|folder| folder.sync_all())
    {
        Ok(()) => Ok(()),
        Err(error) => match error.kind() {
            // Some file systems cannot sync a folder, and some folders may be written and not read:
            // there it is as durable as it gets.
            ErrorKind::InvalidInput | ErrorKind::Unsupported | ErrorKind::PermissionDenied => {
                Ok(())
            }
            _ => Err(failed("make durable", path)(error)),
        },
    }
}

/// The folder that `path` is in.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    }
}

/// Removes the unfinished files of `put_file` that killed processes left: those that are not
/// locked. Where there are no locks, they stay.
fn remove_left(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let numbers = name.to_str().and_then(|name| name.strip_prefix(UNFINISHED));
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let is_named = numbers
            .and_then(|numbers| numbers.split_once('-'))
            .is_some_and(|(process, number)| is_number(process) && is_number(number));
        if !is_named || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        let file = OpenOptions::new().write(true).open(&path);
        let is_left = file.is_ok_and(|file| {
            file.try_lock().is_ok() && is_ours(&file, &path) && fs::remove_file(&path).is_ok()
        });
        if is_left {
            tracing::info!("removed {}, which a killed process left", path.display());
        }
    }
}

/// The prefix of what is not finished, before this process's id.
const UNFINISHED: &str = ".unfinished-";
/// Processes in containers may have the same id.
const NAMES_TRIED_MAX: u32 = 1000;

/// Makes something under the first name in `folder` that is not taken.
pub fn first_free<T>(
    folder: &Path,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(T, PathBuf)> {
    for number in 0.. {
        let aside = folder.join(format!("{UNFINISHED}{}-{number}", std::process::id()));
        match make(&aside) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < NAMES_TRIED_MAX => {}
            made => return Ok((made?, aside)),
        }
    }
    unreachable!("the last name is not skipped")
}

#[cfg(any(test, debug_assertions, feature = "faults"))]
#[doc(hidden)]
#[allow(missing_docs)]
#[path = "files/tests/testing.rs"]
pub mod testing;

#[cfg(test)]
mod tests {
    use super::testing::Scratch;
    use super::*;

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_else() {
        let scratch = Scratch::new();
        let path = scratch.path().join("a");
        replace_file(&path, |file| {
            file.write_all(b"old").map_err(failed("write", &path))
        })
        .unwrap();
        let error = replace_file(&path, |file| {
            file.write_all(b"half").unwrap();
            Err(failed("write", &path)(io::Error::other("torn")))
        });
        assert!(error.unwrap_err().to_string().contains("torn"));
        assert_eq!(
            (fs::read(&path).unwrap(), scratch.names()),
            (b"old".to_vec(), vec!["a".to_string()])
        );
        replace_file(&path, |file| {
            file.write_all(b"new").map_err(failed("write", &path))
        })
        .unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), scratch.names()),
            (b"new".to_vec(), vec!["a".to_string()])
        );
    }

    #[test]
    fn creating_a_file_never_replaces_one() {
        let scratch = Scratch::new();
        let path = scratch.path().join("a");
        new_file(&path, |file| {
            file.write_all(b"first").map_err(failed("write", &path))
        })
        .unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), scratch.names()),
            (b"first".to_vec(), vec!["a".to_string()])
        );
        fs::remove_file(&path).unwrap();
        let error = new_file(&path, |file| {
            // Somebody else's, while this one is written.
            fs::write(&path, "theirs").unwrap();
            file.write_all(b"second").map_err(failed("write", &path))
        });
        assert_eq!(error.unwrap_err().source.kind(), ErrorKind::AlreadyExists);
        assert_eq!(
            (fs::read(&path).unwrap(), scratch.names()),
            (b"theirs".to_vec(), vec!["a".to_string()])
        );
    }

    #[test]
    fn what_killed_processes_left_is_removed_and_what_is_being_written_stays() {
        let scratch = Scratch::new();
        let make = |name: &str| File::create(scratch.path().join(name)).unwrap();
        let written = format!(".unfinished-{}-0", std::process::id());
        let other_writer = make(&written);
        other_writer.try_lock().unwrap();
        let left = [".unfinished-1-0", ".unfinished-98765-12"];
        left.iter().for_each(|name| drop(make(name)));
        // Of other writers, which do not lock.
        let others = [
            ".unfinished-1-0.tmp",
            ".unfinished-1-tokens-000000.bin",
            ".unfinished-1-",
        ];
        others.iter().for_each(|name| drop(make(name)));
        fs::create_dir(scratch.path().join(".unfinished-2-0")).unwrap();
        let path = scratch.path().join("c");
        replace_file(&path, |file| {
            let names = scratch.names();
            assert!(
                left.iter().all(|name| !names.contains(&name.to_string())),
                "{names:?}"
            );
            // This one is locked, too: it survives while others are written beside it.
            replace_file::<FileError>(&scratch.path().join("d"), |_| Ok(()))?;
            file.write_all(b"whole").map_err(failed("write", &path))
        })
        .unwrap();
        let mut expected = [&others[..], &[".unfinished-2-0", &written, "c", "d"]].concat();
        expected.sort_unstable();
        assert_eq!(scratch.names(), expected);
        assert_eq!(fs::read(&path).unwrap(), b"whole");
    }

    #[test]
    fn a_folder_is_locked_by_one_at_a_time_and_under_its_name() {
        let scratch = Scratch::new();
        let [path, done] = ["a", "b"].map(|name| scratch.path().join(name));
        let held = lock_folder(&path).unwrap().unwrap();
        assert!(lock_folder(&path).unwrap().is_none());
        rename(&path, &done).unwrap();
        assert!(!is_ours(&held, &path) && is_ours(&held, &done));
        assert!(lock_folder(&path).unwrap().is_some());
    }

    #[test]
    fn each_folder_that_is_made_is_made_durable() {
        let scratch = Scratch::new();
        let made = scratch.path().join("a/b/c");
        let disk = testing::Failing::at(usize::MAX, false, scratch.path());
        make_folder(&made).unwrap();
        make_folder(&made).unwrap();
        let path = |below: &str| scratch.path().join(below).display().to_string();
        let syncs = [scratch.path().display().to_string(), path("a"), path("a/b")]
            .map(|path| format!("sync {path}"));
        assert_eq!(
            disk.calls(),
            [&[format!("mkdir {}", path("a/b/c"))], &syncs[..]].concat()
        );
    }

    /// The help was that the folder above is a file.
    #[test]
    fn a_name_that_is_too_long_is_named_as_that() {
        let scratch = Scratch::new();
        let path = scratch.path().join("a").join("b".repeat(256));
        let text = make_folder(&path).unwrap_err().to_string();
        assert!(text.ends_with("help: give a shorter name"), "{text}");
        fs::write(scratch.path().join("c"), "").unwrap();
        let text = make_folder(&scratch.path().join("c/d")).unwrap_err();
        assert!(text.to_string().contains("c is a file"), "{text}");
    }

    #[test]
    fn an_error_names_the_file_and_the_help() {
        let error = make_folder(Path::new("/proc/nothing/here")).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("cannot make the folder /proc/nothing/here:")
                && text.contains("or write to another folder"),
            "{text}"
        );
    }
}
