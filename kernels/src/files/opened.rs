//! Opens files that others may have made: ordinary ones, of bounded size, and where it matters only
//! those that no other user can have written. What is checked is the opened file.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Opens a file for reading that is an ordinary one, after following links: a pipe would be waited
/// for, and a device may never end.
pub fn open_ordinary(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    match refusal(&file.metadata()?) {
        Some(refusal) => Err(io::Error::new(ErrorKind::InvalidInput, refusal)),
        None => Ok(file),
    }
}

/// The content of an ordinary file; `None` if it has more than `bytes_max` bytes.
pub fn read_up_to(path: &Path, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
    read_opened(open_ordinary(path)?, bytes_max)
}

/// The same of a file that is open.
pub fn read_opened(file: File, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes).filter(|bytes| bytes.len() as u64 <= bytes_max))
}

/// Opens an ordinary file or a folder if only this user, root or the user `owner` can have written
/// it: one of them owns it, and a link to it, and neither its group nor others may write to it.
/// Root is trusted because it can change whatever this user reads.
pub fn open_trusted(path: &Path, owner: u32) -> io::Result<File> {
    let file = open(path)?;
    let (about, link) = (file.metadata()?, fs::symlink_metadata(path)?);
    let refused = |why: String| Err(io::Error::new(ErrorKind::PermissionDenied, why));
    if let Some(refusal) = refusal(&about).filter(|_| !about.is_dir()) {
        return refused(refusal);
    }
    // SAFETY: the call has no conditions and cannot fail.
    let trusted = [unsafe { libc::geteuid() }, owner, 0];
    let mut owners = [link.uid(), about.uid()].into_iter();
    if let Some(other) = owners.find(|uid| !trusted.contains(uid)) {
        return refused(format!("it belongs to another user (uid {other})"));
    }
    // Entries of access control lists are within the group's bits.
    let mode = about.mode() & 0o777;
    if mode & 0o022 != 0 {
        return refused(format!(
            "users other than its owner may write to it (mode {mode:o}; chmod go-w forbids it)"
        ));
    }
    Ok(file)
}

/// An error if a user other than this one and root could put something else in the place of what
/// this user makes in the folder.
pub fn check_keeps(folder: &Path) -> io::Result<()> {
    let about = fs::metadata(folder)?;
    // SAFETY: the call has no conditions and cannot fail.
    let is_own = [unsafe { libc::geteuid() }, 0].contains(&about.uid());
    let is_sticky = about.mode() & 0o1000 != 0;
    if is_own && (is_sticky || about.mode() & 0o022 == 0) {
        return Ok(());
    }
    let why = format!("other users may rename what is in {}", folder.display());
    Err(io::Error::new(ErrorKind::PermissionDenied, why))
}

fn open(path: &Path) -> io::Result<File> {
    // Opening a FIFO would wait for its other end.
    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(libc::O_NONBLOCK);
    options.open(path)
}

/// Why a file is not a regular one, in words for an error.
pub(crate) fn refusal(metadata: &Metadata) -> Option<String> {
    let kind = metadata.file_type();
    let what = match kind {
        _ if kind.is_file() => return None,
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a pipe (FIFO)",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Some(format!("it is {what}; expected an ordinary file"))
}
