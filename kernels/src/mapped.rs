//! Files mapped for reading: data of any size, in the system's page cache.
//!
//! Other programs may write to a mapped file, truncate or replace it during use. So `read` copies,
//! and no slice is handed out.
//!
//! Touching the mapping beyond a new, earlier end raises SIGBUS, as does a failed disk. The handler
//! puts a page of zeros there and marks the mapping, so that the interrupted copy ends and `read`
//! reports it. Any other SIGBUS goes to the previous handler. The signal comes to the thread that
//! copies, which has noted what it reads. So the handler takes no lock, allocates nothing and
//! searches nothing.

use std::cell::Cell;
use std::ffi::CString;
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, OnceLock};

use libc::{c_int, c_void, siginfo_t};

use crate::Element;
use crate::files::open_ordinary;
use crate::panics::lock;

/// A file mapped for reading. Never gives out slices, because other programs may write to the file.
pub struct Mapped {
    path: PathBuf,
    identity: Identity,
    /// `None` for an empty file, which cannot be mapped.
    mapping: Option<FileMapping>,
}

/// Distinguishes contents of a file without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its file system.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Modification time (mtime).
    pub modified_ns: i128,
    /// Status change time (ctime): contents, name, owner or permissions.
    pub changed_ns: i128,
}

impl Identity {
    /// From the system's metadata.
    pub fn of(metadata: &Metadata) -> Identity {
        let nanoseconds =
            |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
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
    /// Maps the file at `path`, which must be a regular one. Closes the file again, so thousands of
    /// shards need no descriptors.
    pub fn open(path: &Path) -> io::Result<Mapped> {
        let file = open_ordinary(path)?;
        let identity = Identity::of(&file.metadata()?);
        let bytes = usize::try_from(identity.bytes).map_err(|_| {
            io::Error::new(
                ErrorKind::FileTooLarge,
                "it is larger than this machine can address",
            )
        })?;
        let mapping = (bytes > 0)
            .then(|| FileMapping::new(&file, bytes))
            .transpose()?;
        Ok(Mapped {
            path: path.to_path_buf(),
            identity,
            mapping,
        })
    }

    /// Its length when it was opened.
    pub fn len(&self) -> u64 {
        self.identity.bytes
    }

    /// Whether it was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.mapping.is_none()
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its identity when it was opened.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Copies the bytes from `offset` on. Bytes beyond the end are an error. If the file was
    /// truncated since, every read from the first that notices it fails, and `into` is then
    /// meaningless.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_elements(offset, into)
    }

    /// As `read`, for elements in this machine's byte order. `offset` is in bytes and need not be
    /// aligned.
    pub fn read_elements<T: Element>(&self, offset: u64, into: &mut [T]) -> io::Result<()> {
        let bytes = size_of_val(into);
        // A slice's bytes fit isize.
        if offset
            .checked_add(bytes as u64)
            .is_none_or(|end| end > self.len())
        {
            return Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                format!(
                    "bytes {offset} to {} are beyond its {}",
                    u128::from(offset) + bytes as u128,
                    self.len()
                ),
            ));
        }
        let Some(mapping) = &self.mapping else {
            return Ok(());
        };
        if !mapping.copy(offset as usize, into) {
            return Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                "it was cut short while it was in use, or its disk failed",
            ));
        }
        Ok(())
    }

    /// What has changed about the file since it was opened, in words that follow its name; `None`
    /// if nothing. Asks the system once. Ignores ctime, which a backup by hard links changes.
    pub fn change(&self) -> io::Result<Option<String>> {
        let now = match fs::metadata(&self.path) {
            Ok(metadata) => Identity::of(&metadata),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Some("was removed".into()));
            }
            Err(error) => return Err(error),
        };
        let then = self.identity;
        Ok(if (now.device, now.inode) != (then.device, then.inode) {
            Some("was replaced by another file".into())
        } else if now.bytes != then.bytes {
            Some(format!(
                "had {} bytes and has {} now",
                then.bytes, now.bytes
            ))
        } else if now.modified_ns != then.modified_ns {
            Some("was written to".into())
        } else {
            None
        })
    }

    /// Tells the system that reads will be at random places, so it does not read ahead. For files
    /// larger than memory; for others read-ahead is faster.
    pub fn random_order(&self, random: bool) {
        let advice = if random {
            libc::MADV_RANDOM
        } else {
            libc::MADV_NORMAL
        };
        if let Some(mapping) = &self.mapping {
            // SAFETY: our own mapping in its whole length. The advice changes when pages are read,
            // never their contents.
            unsafe { libc::madvise(mapping.start.as_ptr().cast(), mapping.bytes, advice) };
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapped({:?}, {} bytes)", self.path, self.len())
    }
}

/// The pages of a file, read-only and shared with its writers.
struct FileMapping {
    start: NonNull<u8>,
    bytes: usize,
    /// Whether a read met a missing page.
    cut: AtomicBool,
}

// SAFETY: nothing writes through the pointer, and the pages stay mapped until the drop. Reads only
// copy, which any number of threads may do at once.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    fn new(file: &File, bytes: usize) -> io::Result<FileMapping> {
        catch_bus_errors()?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast::<u8>())
            .expect("no mapping is at address 0 that did not ask for it");
        Ok(FileMapping {
            start,
            bytes,
            cut: AtomicBool::new(false),
        })
    }

    /// Copies from `offset` on; false if pages were missing. Never inlined: the compiler could omit
    /// a copy whose result is unused, and with it the error.
    #[inline(never)]
    fn copy<T: Element>(&self, offset: usize, into: &mut [T]) -> bool {
        let bytes = size_of_val(into);
        assert!(
            offset <= self.bytes && bytes <= self.bytes - offset,
            "bytes of the mapping alone"
        );
        // SAFETY: within the mapping, as just checked.
        let from = unsafe { self.start.add(offset) };
        let addresses = from.addr().get()..from.addr().get() + bytes;
        watched(addresses, &self.cut, || {
            let (from, into) = (from.as_ptr().cast(), into.as_mut_ptr().cast());
            // SAFETY: the mapping stays while `self` is borrowed; `into` is exclusive, so the two
            // do not overlap. No reference to the mapped bytes is made, so other programs may
            // change them meanwhile; any bytes are a valid `Element`. If the file became shorter,
            // the handler puts zeros there and sets the mark.
            unsafe { libc::memcpy(into, from, bytes) };
        });
        !self.cut.load(Ordering::Acquire)
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: `new` made it with this length, and no read borrows it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// How many bytes this user can still write to the file system of `folder`.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: all fields are integers, for which zeros are valid.
    let mut about: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, and both live during the call.
    if unsafe { libc::statvfs(path.as_ptr(), &mut about) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(about.f_bavail.saturating_mul(about.f_frsize))
}

/// What a thread reads: addresses, and what to mark if a page is missing there.
#[derive(Clone, Copy)]
struct Reading {
    first: usize,
    end: usize,
    cut: *const AtomicBool,
}

thread_local! {
    static READING: Cell<Option<Reading>> = const { Cell::new(None) };
}

/// Runs `copy`, which reads a mapping at these addresses. If a page is missing there, `cut` is set.
fn watched(addresses: Range<usize>, cut: &AtomicBool, copy: impl FnOnce()) {
    let Range { start, end } = addresses;
    let first = start - start % PAGE_BYTES.load(Ordering::Relaxed);
    READING.set(Some(Reading { first, end, cut }));
    // The handler runs during the copy without the compiler's knowledge.
    compiler_fence(Ordering::SeqCst);
    copy();
    compiler_fence(Ordering::SeqCst);
    READING.set(None);
}

/// Set before the handler can run.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
/// The previous handler of SIGBUS.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler of SIGBUS, once.
fn catch_bus_errors() -> io::Result<()> {
    static CAUGHT: Mutex<bool> = Mutex::new(false);
    let mut caught = lock(&CAUGHT);
    if *caught {
        return Ok(());
    }
    // SAFETY: takes and returns a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    PAGE_BYTES.store(
        usize::try_from(page_bytes).unwrap_or(4096),
        Ordering::Relaxed,
    );
    // SAFETY: plain data of the C library; zeros mean no handler, no flags and an empty mask.
    let (mut previous, mut ours): (libc::sigaction, libc::sigaction) =
        unsafe { std::mem::zeroed() };
    // SAFETY: reads the current handler into a local variable.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) } != 0 {
        return Err(io::Error::last_os_error());
    }
    PREVIOUS.get_or_init(|| previous);
    ours.sa_sigaction = on_bus_error as *const () as usize;
    // On the threads' signal stacks, because the previous handler may report stack overflows.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler has the type for SA_SIGINFO, lives as long as the program, and does only
    // what a handler may: atomic loads and stores, and system calls.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    *caught = true;
    Ok(())
}

extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid description. The address is meaningful if
    // the kernel sent the signal.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // Codes up to 0 mark signals that a program sent.
    if code > 0
        && let Some(reading) = READING.get()
        && (reading.first..reading.end).contains(&address)
    {
        // Set the mark before the zeros exist, so that every reader of them finds it.
        // SAFETY: the copy that was interrupted borrows its mapping, and so the mark.
        unsafe { &*reading.cut }.store(true, Ordering::Release);
        if put_zeros(address) {
            return;
        }
    }
    pass_on(code, signal);
}

/// Maps a page of zeros where the file has no page any more.
fn put_zeros(address: usize) -> bool {
    let page_bytes = PAGE_BYTES.load(Ordering::Relaxed);
    let page = address - address % page_bytes;
    // SAFETY: the page belongs to one of our mappings that is being read now, so it is not unmapped
    // meanwhile and nothing else is there. It held nothing readable. The interrupted code must find
    // its errno unchanged.
    unsafe {
        let errno = libc::__errno_location();
        let kept = *errno;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let page = std::ptr::without_provenance_mut(page);
        let put = libc::mmap(page, page_bytes, libc::PROT_READ, flags, -1, 0) != libc::MAP_FAILED;
        *errno = kept;
        put
    }
}

/// Lets the previous handler have this signal, and all later ones.
fn pass_on(code: c_int, signal: c_int) {
    let Some(previous) = PREVIOUS.get() else {
        return;
    };
    // SAFETY: puts the previous handler back. A faulty access is repeated when this one returns,
    // and goes there. A signal that a program sent is not repeated, so it is raised again.
    unsafe {
        libc::sigaction(signal, previous, std::ptr::null_mut());
        if code <= 0 {
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests;
