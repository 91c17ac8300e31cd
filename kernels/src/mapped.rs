//! Files mapped for reading: data of any size, in the memory that the system gives to files anyway.
//!
//! Other programs may write to a mapped file, cut it short or replace it while it is in use. So no slice of it is ever handed
//! out: `read` copies, and nothing is known of the bytes but that they are bytes. Where a file ends earlier than it did, touching its
//! mapping is a SIGBUS; that is caught (`bus.rs`), and `read` says that the file was cut short.

mod bus;

use std::ffi::CString;
use std::fmt;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence};

use self::bus::Region;
use crate::Element;

/// A file, mapped for reading. Never hands out a slice: others may write to the file.
pub struct Mapped {
    path: PathBuf,
    identity: Identity,
    /// `None` for an empty file, which cannot be mapped.
    mapping: Option<Mapping>,
}

/// What tells one content of a file from another, without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The file system that it is on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Its length.
    pub bytes: u64,
    /// When its contents were last written.
    pub modified_ns: i128,
    /// When its contents, name, owner or permissions last changed.
    pub changed_ns: i128,
}

impl Identity {
    /// As the system tells it.
    pub fn of(metadata: &Metadata) -> Identity {
        let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl Mapped {
    /// Maps the file at `path`, which must be an ordinary one. The file itself is not kept open: thousands of shards need no more
    /// descriptors than one.
    pub fn open(path: &Path) -> io::Result<Mapped> {
        // Opening a FIFO would wait for its other end.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let metadata = file.metadata()?;
        check_ordinary(&metadata)?;
        let identity = Identity::of(&metadata);
        let bytes = usize::try_from(identity.bytes)
            .map_err(|_| io::Error::new(ErrorKind::FileTooLarge, "it is larger than this machine can address"))?;
        let mapping = (bytes > 0).then(|| Mapping::new(&file, bytes)).transpose()?;
        Ok(Mapped { path: path.to_path_buf(), identity, mapping })
    }

    /// Its length when it was opened.
    pub fn len(&self) -> u64 {
        self.identity.bytes
    }

    /// Whether it was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.mapping.is_none()
    }

    /// Under which name it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it was when it was opened.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Copies the bytes from `offset` on. Bytes beyond the end are an error, and so is a file that was cut short underneath, from the
    /// first read that meets it on: what `into` then holds is of no use.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_elements(offset, into)
    }

    /// As `read`, for elements in this machine's byte order. `offset` is in bytes and need not be a multiple of anything.
    pub fn read_elements<T: Element>(&self, offset: u64, into: &mut [T]) -> io::Result<()> {
        let bytes = size_of_val(into);
        // A slice's bytes fit isize.
        if offset.checked_add(bytes as u64).is_none_or(|end| end > self.len()) {
            return Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                format!("bytes {offset} to {} are beyond its {}", u128::from(offset) + bytes as u128, self.len()),
            ));
        }
        let Some(mapping) = &self.mapping else { return Ok(()) };
        if !mapping.copy(offset as usize, into) {
            return Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                "it was cut short while it was in use, or its disk failed",
            ));
        }
        Ok(())
    }

    /// What has become of the file since it was opened, in words that follow its name: `None` while it is as it was. Asks the
    /// system once. The time of the last change of names and permissions is no part of it: a backup by hard links changes that.
    pub fn change(&self) -> io::Result<Option<String>> {
        let now = match fs::metadata(&self.path) {
            Ok(metadata) => Identity::of(&metadata),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some("was removed".into())),
            Err(error) => return Err(error),
        };
        let then = self.identity;
        Ok(if (now.device, now.inode) != (then.device, then.inode) {
            Some("was replaced by another file".into())
        } else if now.bytes != then.bytes {
            Some(format!("had {} bytes and has {} now", then.bytes, now.bytes))
        } else if now.modified_ns != then.modified_ns {
            Some("was written to".into())
        } else {
            None
        })
    }

    /// Says that what is read next lies anywhere: then the system reads no more from disk than is asked for. Worth it for files that
    /// are larger than memory; for others reading ahead brings them there sooner. Advice only.
    pub fn random_order(&self, random: bool) {
        let advice = if random { libc::MADV_RANDOM } else { libc::MADV_NORMAL };
        if let Some(mapping) = &self.mapping {
            // SAFETY: a mapping of our own, in its whole length; this advice changes when pages come, never what they hold.
            unsafe { libc::madvise(mapping.start.as_ptr().cast(), mapping.bytes, advice) };
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapped({:?}, {} bytes)", self.path, self.len())
    }
}

/// Refuses what is not an ordinary file, saying what it is.
fn check_ordinary(metadata: &Metadata) -> io::Result<()> {
    refusal(metadata).map_or(Ok(()), |refusal| Err(io::Error::new(ErrorKind::InvalidInput, refusal)))
}

/// What a file is that is not an ordinary one, as words for an error.
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

/// The pages of a file. Read only, shared with whoever writes to it.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    region: &'static Region,
}

// SAFETY: the pointer is to pages that nobody writes to through it and that stay until the drop; they are read by copying alone,
// which any number of threads may do at once.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, bytes: usize) -> io::Result<Mapping> {
        bus::catch()?;
        // SAFETY: a new mapping at an address of the kernel's choosing touches nothing of ours.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast::<u8>()).expect("no mapping is at address 0 that did not ask for it");
        Ok(Mapping { start, bytes, region: Region::watch(start.addr().get(), bytes) })
    }
}

impl Mapping {
    /// Copies from `offset` on, and says whether everything was there. Never inlined: a copy that nobody looks at could be left out, and
    /// its error with it.
    #[inline(never)]
    fn copy<T: Element>(&self, offset: usize, into: &mut [T]) -> bool {
        let bytes = size_of_val(into);
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "bytes of the mapping alone");
        // SAFETY: the bytes from `offset` on lie within the mapping, as just checked, and it stays while `self` is borrowed; `into` is
        // the caller's alone, so the two cannot overlap. No reference to the mapped bytes is made, so that another program may
        // change them meanwhile: whatever arrives is valid, because every pattern of bytes is a value of an `Element`. Where the file
        // has become shorter, the handler of `bus.rs` puts zeros there and says so.
        unsafe {
            let from = self.start.as_ptr().add(offset);
            libc::memcpy(into.as_mut_ptr().cast(), from.cast(), bytes);
        }
        // The handler runs within the copy, which the compiler does not know of: it shall not look before.
        compiler_fence(Ordering::SeqCst);
        !self.region.was_cut()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: another mapping may come to the same addresses.
        self.region.forget();
        // SAFETY: made by `new` in this length, and nothing reads it any more: reads borrow what is being dropped.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// How many bytes can still be written to the file system that `folder` is on, by who we are.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: all fields are whole numbers, for which zeros are values.
    let mut about: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with a zero byte and both are ours for the length of the call.
    if unsafe { libc::statvfs(path.as_ptr(), &mut about) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(about.f_bavail.saturating_mul(about.f_frsize))
}

#[cfg(test)]
mod tests;
