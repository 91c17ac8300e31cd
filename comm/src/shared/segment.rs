//! Memory that the ranks of one host share: nameless, so that the kernel takes it back when the last of them is gone,
//! however they end. Nothing ever appears in /dev/shm, and its limits do not apply.
//!
//! Between processes it is a memfd, which the others open through `/proc/PID/fd/FD` of the one that made it. Sealed
//! against shrinking: a mapping cannot lose its memory under a rank.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::layout::Layout;
use crate::error::{Error, Result};

/// The first word of a segment, once everything behind it is written. Its last byte is the version of the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"ddpseg\0\x02");
const MAGIC_AT: usize = 0;
/// Then the layout, so that two builds that disagree on it find out.
const LAYOUT_AT: usize = 8;

/// Memory shared by the ranks of one host. A handle: clones are the same memory.
#[derive(Clone, Debug)]
pub struct Segment {
    mapping: Arc<Mapping>,
    layout: Layout,
}

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    /// Kept open by the creator for the others to find.
    file: Option<OwnedFd>,
}

// SAFETY: a mapping is plain memory, and what may be done to it from which thread is the business of those who touch it:
// atomics for control words, and for the rest the rules of the channel (`shared.rs`).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map` with these bounds, and every reference into it borrowed the segment.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl Segment {
    /// A new segment for `local_size` ranks in processes of their own. The others `open` it.
    pub fn create(local_size: usize) -> Result<Segment> {
        let layout = Layout::new(local_size)?;
        let failed = |error: io::Error| Error::Setup {
            action: format!("make {} MiB of memory to share between ranks", layout.bytes() >> 20),
            reason: error.to_string(),
            way_out: "The kernel must allow memfd_create (Linux 3.17 or later, seccomp), and the memory limit must \
                      leave some room."
                .to_string(),
        };
        let file = memfd(layout.bytes()).map_err(failed)?;
        let mapping = map(layout.bytes(), Some(file)).map_err(failed)?;
        Ok(Segment::describe(mapping, layout))
    }

    /// The segment that process `pid` of this host made, and has open as `fd`.
    pub fn open(pid: u32, fd: RawFd, local_size: usize) -> Result<Segment> {
        let layout = Layout::new(local_size)?;
        let path = format!("/proc/{pid}/fd/{fd}");
        let failed = |reason: String, way_out: &str| Error::Setup {
            action: format!("open the memory shared by the ranks of this host ({path})"),
            reason,
            way_out: way_out.to_string(),
        };
        let refused = |error: io::Error| {
            let way_out = "The ranks of a host must run as the same user, in one PID namespace, with /proc mounted \
                           (in containers: all ranks of a host in one container, or --pid=host).";
            failed(error.to_string(), way_out)
        };
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(refused)?;
        let found = file.metadata().map_err(refused)?;
        let wrong = |what: String| failed(what, "All ranks must run the same build of this program.");
        if !found.is_file() || found.len() != layout.bytes() as u64 {
            let (found, expected) = (found.len(), layout.bytes());
            return Err(wrong(format!("expected {expected} bytes for {local_size} ranks, found {found}")));
        }
        // The mapping keeps the memory; the file is closed again.
        let mut mapping = map(layout.bytes(), Some(OwnedFd::from(file))).map_err(refused)?;
        mapping.file = None;
        let segment = Segment { mapping: Arc::new(mapping), layout };
        let described = segment.u64_at(MAGIC_AT).load(Ordering::Acquire) == MAGIC
            && (0..4).all(|word| segment.u64_at(LAYOUT_AT + 8 * word).load(Ordering::Relaxed) == words(&layout)[word]);
        if !described {
            return Err(wrong("it was laid out by another version".to_string()));
        }
        Ok(segment)
    }

    /// A segment for `local_size` ranks that are threads of this process; each gets a clone.
    pub fn in_process(local_size: usize) -> Result<Segment> {
        Segment::in_process_as(Layout::new(local_size)?)
    }

    pub(super) fn in_process_as(layout: Layout) -> Result<Segment> {
        let mapping = map(layout.bytes(), None).map_err(|error| Error::Setup {
            action: format!("map {} MiB to share between threads", layout.bytes() >> 20),
            reason: error.to_string(),
            way_out: "Raise the limit on virtual memory (ulimit -v).".to_string(),
        })?;
        Ok(Segment::describe(mapping, layout))
    }

    fn describe(mapping: Mapping, layout: Layout) -> Segment {
        let segment = Segment { mapping: Arc::new(mapping), layout };
        for (index, word) in words(&layout).into_iter().enumerate() {
            segment.u64_at(LAYOUT_AT + 8 * index).store(word, Ordering::Relaxed);
        }
        segment.u64_at(MAGIC_AT).store(MAGIC, Ordering::Release);
        segment
    }

    /// What other processes `open`; -1 for a segment that they cannot: one within a process, or one opened itself.
    pub fn fd(&self) -> RawFd {
        self.mapping.file.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// How many ranks it was made for.
    pub fn local_size(&self) -> usize {
        self.layout.ranks
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A control word. `at` comes from the layout, and is never used for anything else.
    #[inline]
    pub(super) fn u32_at(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at <= self.mapping.bytes - 4);
        // SAFETY: within the mapping and aligned; the mapping outlives the borrow of `self`; fresh memory is zero, and
        // any bits are a valid value. All processes use control words as atomics of this width alone.
        unsafe { AtomicU32::from_ptr(self.mapping.start.as_ptr().add(at).cast()) }
    }

    /// A control word of 64 bits.
    #[inline]
    pub(super) fn u64_at(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at <= self.mapping.bytes - 8);
        // SAFETY: as in `u32_at`.
        unsafe { AtomicU64::from_ptr(self.mapping.start.as_ptr().add(at).cast()) }
    }

    /// The `bytes` bytes from `at` on. Whoever uses the pointer answers for what else happens to them meanwhile.
    #[inline]
    pub(super) fn pointer(&self, at: usize, bytes: usize) -> *mut u8 {
        assert!(at <= self.mapping.bytes && bytes <= self.mapping.bytes - at);
        self.mapping.start.as_ptr().wrapping_add(at)
    }
}

fn words(layout: &Layout) -> [u64; 4] {
    [layout.ranks, layout.piece_bytes, layout.small_bytes, layout.chunk_bytes].map(|value| value as u64)
}

/// A nameless file in memory, as long as asked, of which nothing is there yet.
fn memfd(bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the call touches nothing else of ours.
    let fd = unsafe { libc::memfd_create(c"ddp".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given this descriptor to us alone.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(bytes as u64)?;
    // SAFETY: a descriptor of ours and plain numbers.
    let sealed = unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) };
    if sealed < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(OwnedFd::from(file))
}

fn map(bytes: usize, file: Option<OwnedFd>) -> io::Result<Mapping> {
    let fd = file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let kind = if file.is_some() { 0 } else { libc::MAP_ANONYMOUS };
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE | kind);
    // SAFETY: a new mapping at a place of the kernel's choice replaces nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
    Ok(Mapping { start, bytes, file })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_writes_the_other_reads() {
        let created = Segment::create(3).unwrap();
        let opened = Segment::open(std::process::id(), created.fd(), 3).unwrap();
        assert_eq!((opened.local_size(), opened.fd()), (3, -1));
        created.u32_at(4096).store(7, Ordering::Release);
        assert_eq!(opened.u32_at(4096).load(Ordering::Acquire), 7);
        // The creator may go first.
        drop(created);
        assert_eq!(opened.u32_at(4096).load(Ordering::Acquire), 7);
    }

    #[test]
    fn another_number_of_ranks_is_refused() {
        let created = Segment::create(2).unwrap();
        let message = Segment::open(std::process::id(), created.fd(), 3).unwrap_err().to_string();
        assert!(message.contains("expected") && message.contains("for 3 ranks"), "{message}");
    }

    #[test]
    fn another_version_is_refused() {
        let created = Segment::create(2).unwrap();
        created.u64_at(MAGIC_AT).store(MAGIC + 1, Ordering::Release);
        let message = Segment::open(std::process::id(), created.fd(), 2).unwrap_err().to_string();
        assert!(message.contains("another version"), "{message}");
    }

    #[test]
    fn a_process_that_is_not_there_is_refused_with_a_way_out() {
        let message = Segment::open(u32::MAX, 5, 2).unwrap_err().to_string();
        assert!(message.contains("/fd/5") && message.contains("PID namespace"), "{message}");
    }

    #[test]
    fn a_file_that_is_no_segment_is_refused() {
        let other = File::open("/dev/null").unwrap();
        assert!(Segment::open(std::process::id(), other.as_raw_fd(), 2).is_err());
    }

    #[test]
    fn the_memory_cannot_be_taken_away() {
        let created = Segment::create(1).unwrap();
        // SAFETY: a descriptor that `created` keeps open, and a number.
        let shrunk = unsafe { libc::ftruncate(created.fd(), 0) };
        assert_eq!(shrunk, -1);
    }

    #[test]
    fn a_segment_takes_only_the_memory_that_is_touched() {
        let created = Segment::create(8).unwrap();
        let file = File::from(created.mapping.file.as_ref().unwrap().try_clone().unwrap());
        let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
        assert!(blocks * 512 <= 16 << 10, "{blocks} blocks of 512 bytes");
    }
}
