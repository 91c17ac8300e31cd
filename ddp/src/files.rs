//! Writing files and folders so that nobody ever sees half of one: aside, made durable, then renamed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// What helps against most failures to write.
pub(crate) const WAY_OUT: &str = "Check the folder's permissions and the space left on its disk, or give another --out";

/// Turns what the system said into an error that names the file.
pub(crate) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { action, path, source, way_out: WAY_OUT.into() }
}

/// Makes a folder and those above it; one that is there is fine.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(failed("make the folder", path))
}

/// Puts a file with the contents that `write` gives it in the place of `path`.
pub(crate) fn replace_file(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let folder = folder_of(path);
    let aside = first_free(folder, |aside| OpenOptions::new().write(true).create_new(true).open(aside));
    let (mut file, aside) = aside.map_err(failed("make a file beside", path))?;
    let attempt = (|| {
        write(&mut file)?;
        file.sync_all().map_err(failed("make durable", path))?;
        fs::rename(&aside, path).map_err(failed("put in its place", path))
    })();
    if attempt.is_err() {
        // The first error is the one to report; a file that cannot be removed changes nothing about it.
        let _ = fs::remove_file(&aside);
    }
    attempt?;
    sync_folder(folder)
}

/// Makes the folder `path`, which must not be there yet, with the files that `fill` writes into it.
pub(crate) fn make_whole_folder(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let above = folder_of(path);
    make_folder(above)?;
    if path.exists() {
        return Err(failed("make the folder", path)(io::Error::new(ErrorKind::AlreadyExists, "it is there already")));
    }
    let ((), aside) = first_free(above, |aside| fs::create_dir(aside)).map_err(failed("make a folder beside", path))?;
    let attempt = (|| {
        fill(&aside)?;
        sync_folder(&aside)?;
        fs::rename(&aside, path).map_err(failed("put in its place", path))
    })();
    if attempt.is_err() {
        let _ = fs::remove_dir_all(&aside);
    }
    attempt?;
    sync_folder(above)
}

/// A new file in a folder of one's own, filled by `write` and made durable.
pub(crate) fn write_file(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let made = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = made.map_err(failed("make", path))?;
    write(&mut file)?;
    file.sync_all().map_err(failed("make durable", path))
}

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    match File::open(path).and_then(|folder| folder.sync_all()) {
        // Some file systems cannot sync a folder: there a rename is as durable as it gets.
        Err(error) if !matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
            Err(failed("make durable", path)(error))
        }
        _ => Ok(()),
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

/// Names left by runs that were killed are passed over: in containers even the process id may be the same.
const NAMES_TRIED_MAX: u32 = 1000;

/// Makes something under the first name in `folder` that is not taken.
fn first_free<T>(folder: &Path, make: impl Fn(&Path) -> io::Result<T>) -> io::Result<(T, PathBuf)> {
    for number in 0.. {
        let aside = folder.join(format!(".unfinished-{}-{number}", std::process::id()));
        match make(&aside) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < NAMES_TRIED_MAX => {}
            made => return Ok((made?, aside)),
        }
    }
    unreachable!("the last name is not passed over")
}

#[cfg(test)]
pub(crate) mod testing {
    //! A folder for one test.

    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Removed with everything in it when the test ends.
    pub(crate) struct Scratch(PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Scratch {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("ddp-test-{}-{number}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }

        /// The names in the folder, sorted.
        pub(crate) fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(&self.0).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::testing::Scratch;
    use super::*;

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_else() {
        let scratch = Scratch::new();
        let path = scratch.path().join("a");
        replace_file(&path, |file| file.write_all(b"old").map_err(failed("write", &path))).unwrap();
        let error = replace_file(&path, |file| {
            file.write_all(b"half").unwrap();
            Err(Error::Data("torn".into()))
        });
        assert_eq!(error.unwrap_err().to_string(), "torn");
        assert_eq!((fs::read(&path).unwrap(), scratch.names()), (b"old".to_vec(), vec!["a".to_string()]));
        replace_file(&path, |file| file.write_all(b"new").map_err(failed("write", &path))).unwrap();
        assert_eq!((fs::read(&path).unwrap(), scratch.names()), (b"new".to_vec(), vec!["a".to_string()]));
    }

    #[test]
    fn a_folder_appears_whole_or_not_at_all_and_never_twice() {
        let scratch = Scratch::new();
        let path = scratch.path().join("b");
        let fill = |ok: bool| {
            make_whole_folder(&path, |folder| {
                write_file(&folder.join("x"), |file| file.write_all(b"x").map_err(failed("write", &path)))?;
                if ok { Ok(()) } else { Err(Error::Data("torn".into())) }
            })
        };
        fill(false).unwrap_err();
        assert!(scratch.names().is_empty());
        fill(true).unwrap();
        assert_eq!(scratch.names(), ["b"]);
        let error = fill(true).unwrap_err();
        assert_eq!(error.exit_code(), 74);
        assert!(error.to_string().contains("there already"), "{error}");
    }

    #[test]
    fn names_left_by_killed_runs_are_passed_over() {
        let scratch = Scratch::new();
        fs::write(scratch.path().join(format!(".unfinished-{}-0", std::process::id())), "left").unwrap();
        let path = scratch.path().join("c");
        replace_file(&path, |_| Ok(())).unwrap();
        assert!(path.exists());
    }

    #[test]
    fn an_error_names_the_file_and_the_way_out() {
        let error = make_folder(Path::new("/proc/nothing/here")).unwrap_err();
        assert_eq!(error.exit_code(), 74);
        let text = error.to_string();
        assert!(text.contains("cannot make the folder /proc/nothing/here:") && text.contains("--out"), "{text}");
    }
}
