//! Memory that processes share: an unnamed file in memory, mapped.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Mapped memory, unmapped when it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) bytes: usize,
    /// Kept open by the creator, for the others to open.
    pub(super) file: Option<OwnedFd>,
}

// SAFETY: a mapping is plain memory. Each access follows its own rules: atomics for control words,
// and the rules of the channel for everything else (`shared.rs`).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping with these bounds, and every reference into it borrowed
        // the segment.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl Mapping {
    /// The descriptor that other processes open; -1 if they cannot.
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// A control word. `at` comes from a layout, and is used as this control word only.
    #[inline]
    pub(crate) fn u32_at(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at <= self.bytes - 4);
        // SAFETY: within the mapping and aligned; the mapping outlives the borrow of `self`; new
        // memory is zero, and any bits are a valid value. All processes use control words only as
        // atomics of this width.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// A control word of 64 bits.
    #[inline]
    pub(crate) fn u64_at(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at <= self.bytes - 8);
        // SAFETY: as in `u32_at`.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }
}

/// A nameless file in memory of this length, which takes no memory yet.
pub(crate) fn memfd(bytes: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the call reads nothing else.
    let fd =
        unsafe { libc::memfd_create(c"ddp".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given this descriptor to this call alone.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(bytes as u64)?;
    // SAFETY: a descriptor of ours and plain numbers.
    let sealed = unsafe {
        libc::fcntl(
            fd,
            libc::F_ADD_SEALS,
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW,
        )
    };
    if sealed < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(OwnedFd::from(file))
}

/// Whether the file is a memfd that this user has made and whose length cannot change.
pub(crate) fn is_own(file: &File, found: &Metadata) -> bool {
    // SAFETY: a descriptor of ours; the call takes no further argument.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    // SAFETY: geteuid takes nothing, touches nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    found.uid() == user && seals >= 0 && seals & needed == needed
}

/// Maps the file, or memory of this process alone.
pub(crate) fn map(bytes: usize, file: Option<OwnedFd>) -> io::Result<Mapping> {
    let fd = file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let kind = if file.is_some() {
        0
    } else {
        libc::MAP_ANONYMOUS
    };
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED | libc::MAP_NORESERVE | kind,
    );
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start =
        NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
    Ok(Mapping { start, bytes, file })
}
