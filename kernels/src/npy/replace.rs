//! Replaces a file so that no reader sees half of it: writes a temporary file beside it, syncs it,
//! then renames it. Until the rename the old file is unchanged; a failure removes the temporary
//! file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::file::check_regular;
use crate::error::{Error, Result};

/// How many taken names to skip: killed runs leave some, in containers even with the same process
/// id.
const NAMES_TRIED_MAX: usize = 1000;

/// Lets `write` fill a new file, which then replaces `path`. Links are followed; permissions are
/// kept.
pub(super) fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
    let failed = |doing: &'static str| {
        move |source| Error::Io {
            path: path.to_path_buf(),
            doing,
            source,
        }
    };
    let old = match fs::metadata(path) {
        Ok(old) => Some(old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed("looking at it")(error)),
    };
    if let Some(old) = &old {
        check_regular(path, old)?;
        if old.permissions().readonly() {
            return Err(failed("replacing it")(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it is read-only",
            )));
        }
    }
    let target = follow(path).map_err(failed("following it"))?;
    let directory = match target.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    let (mut file, beside) =
        create_beside(directory).map_err(failed("creating a file beside it"))?;
    let attempt = (|| {
        if let Some(old) = &old {
            file.set_permissions(old.permissions())
                .map_err(failed("setting its permissions"))?;
        }
        write(&mut file).map_err(failed("writing"))?;
        file.sync_all().map_err(failed("making it durable"))?;
        fs::rename(&beside, &target).map_err(failed("putting it in its place"))
    })();
    if attempt.is_err() {
        // Report the first error; whether the file can be removed does not matter.
        let _ = fs::remove_file(&beside);
        return attempt;
    }
    match File::open(directory).and_then(|directory| directory.sync_all()) {
        // Some file systems cannot sync a directory.
        Err(error)
            if !matches!(
                error.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
            ) =>
        {
            Err(failed("making its new name durable")(error))
        }
        _ => Ok(()),
    }
}

/// Where a chain of links ends, whether or not a file is there.
fn follow(path: &Path) -> io::Result<PathBuf> {
    /// Linux's own limit.
    const LINKS_MAX: usize = 40;
    let mut target = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&target) {
            // A relative link starts from its folder; `join` lets an absolute one replace the path.
            Ok(next) => target = target.parent().unwrap_or(Path::new("")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "it is a link that leads to itself",
    ))
}

fn create_beside(directory: &Path) -> io::Result<(File, PathBuf)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut tried = 0;
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let beside = directory.join(format!(".unfinished-{}-{number}.tmp", std::process::id()));
        match OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&beside)
        {
            Ok(file) => return Ok((file, beside)),
            Err(error)
                if error.kind() != io::ErrorKind::AlreadyExists || tried == NAMES_TRIED_MAX =>
            {
                return Err(error);
            }
            Err(_) => tried += 1,
        }
    }
}
