//! Memory that the ranks of one host share. It has no name, so the kernel frees it when the last
//! rank is gone, however ranks end. Nothing appears in /dev/shm, whose limits do not apply.
//!
//! Between processes it is a memfd, which the others open through `/proc/PID/fd/FD` of its maker.
//! It is sealed against shrinking: a mapping cannot lose its memory.
//!
//! Orders of memory: the layout's words are written before the first word (a release), and read
//! after it (an acquire). What is in the rest of a segment has the orders of its users.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::layout::Layout;
use super::mapping::{self, Mapping, map, memfd};
use crate::error::{Error, Result};

/// The first word of a segment, written last. Its last byte is the version of the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"ddpseg\0\x04");
const MAGIC_AT: usize = 0;
/// Then the layout, so that builds with different layouts are detected.
const LAYOUT_AT: usize = 8;

/// Memory shared by the ranks of one host. A handle: clones are the same memory.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    mapping: Arc<Mapping>,
    layout: Layout,
}

impl Segment {
    /// A new segment for `local_size` ranks that are processes. The others `open` it.
    pub(crate) fn create(local_size: usize) -> Result<Segment> {
        let layout = Layout::new(local_size)?;
        let failed = |error: io::Error| {
            let action = format!("make {} MiB of memory to share", layout.bytes() >> 20);
            Error::no_memory(action, &error)
        };
        let file = memfd(layout.bytes()).map_err(failed)?;
        let mapping = map(layout.bytes(), Some(file)).map_err(failed)?;
        Ok(Segment::describe(mapping, layout))
    }

    /// The bytes of a segment for `local_size` ranks.
    pub(crate) fn bytes_for(local_size: usize) -> Result<usize> {
        Ok(Layout::new(local_size)?.bytes())
    }

    /// The segment that process `pid` of this host made and has open as `fd`.
    pub(crate) fn open(pid: u32, fd: RawFd, local_size: usize) -> Result<Segment> {
        let layout = Layout::new(local_size)?;
        let path = format!("/proc/{pid}/fd/{fd}");
        let failed = |reason: String, help: &str| {
            let action = format!("open the memory shared by the ranks of this host ({path})");
            Error::setup(action, reason, help)
        };
        let refused = |error: io::Error| {
            if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EMFILE)) {
                return Error::no_memory(format!("open {path}"), &error);
            }
            let help = "run the ranks of a host as the same user, in one PID namespace, with /proc \
                mounted (in containers: all ranks of a host in one container, or --pid=host)";
            failed(error.to_string(), help)
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(refused)?;
        let found = file.metadata().map_err(refused)?;
        if !mapping::is_own(&file, &found) {
            let reason = "it is not sealed memory of this user".to_string();
            return Err(failed(reason, "start all ranks of the job as one user"));
        }
        let wrong = |what: String| failed(what, "run the same build of this program on all ranks");
        if !found.is_file() || found.len() != layout.bytes() as u64 {
            let (found, expected) = (found.len(), layout.bytes());
            return Err(wrong(format!(
                "expected {expected} bytes for {local_size} ranks, found {found}"
            )));
        }
        // The mapping keeps the memory; the file can be closed.
        let mut mapping = map(layout.bytes(), Some(OwnedFd::from(file))).map_err(refused)?;
        mapping.file = None;
        let segment = Segment {
            mapping: Arc::new(mapping),
            layout,
        };
        let described = segment.u64_at(MAGIC_AT).load(Ordering::Acquire) == MAGIC
            && (0..4).all(|word| {
                segment.u64_at(LAYOUT_AT + 8 * word).load(Ordering::Relaxed) == words(&layout)[word]
            });
        if !described {
            return Err(wrong("it has the layout of another version".into()));
        }
        Ok(segment)
    }

    /// A segment for `local_size` ranks that are threads of this process. Each gets a clone.
    pub(crate) fn in_process(local_size: usize) -> Result<Segment> {
        Segment::in_process_as(Layout::new(local_size)?)
    }

    pub(super) fn in_process_as(layout: Layout) -> Result<Segment> {
        let mapping = map(layout.bytes(), None).map_err(|error| {
            let action = format!("map {} MiB to share between threads", layout.bytes() >> 20);
            Error::no_memory(action, &error)
        })?;
        Ok(Segment::describe(mapping, layout))
    }

    fn describe(mapping: Mapping, layout: Layout) -> Segment {
        let segment = Segment {
            mapping: Arc::new(mapping),
            layout,
        };
        for (index, word) in words(&layout).into_iter().enumerate() {
            segment
                .u64_at(LAYOUT_AT + 8 * index)
                .store(word, Ordering::Relaxed);
        }
        segment.u64_at(MAGIC_AT).store(MAGIC, Ordering::Release);
        segment
    }

    /// The descriptor that other processes `open`; -1 if they cannot: for a segment within a
    /// process, or one that was itself opened.
    pub(crate) fn fd(&self) -> RawFd {
        self.mapping.fd()
    }

    /// How many ranks it was made for.
    pub(crate) fn local_size(&self) -> usize {
        self.layout.ranks
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A control word. `at` comes from the layout, and is used as this control word only.
    #[inline]
    pub(super) fn u32_at(&self, at: usize) -> &AtomicU32 {
        self.mapping.u32_at(at)
    }

    /// A control word of 64 bits.
    #[inline]
    pub(super) fn u64_at(&self, at: usize) -> &AtomicU64 {
        self.mapping.u64_at(at)
    }

    /// The `bytes` bytes from `at` on. Users of the pointer ensure that accesses do not conflict.
    #[inline]
    pub(super) fn pointer(&self, at: usize, bytes: usize) -> *mut u8 {
        assert!(at <= self.mapping.bytes && bytes <= self.mapping.bytes - at);
        self.mapping.start.as_ptr().wrapping_add(at)
    }
}

fn words(layout: &Layout) -> [u64; 4] {
    [
        layout.ranks,
        layout.piece_bytes,
        layout.small_bytes,
        layout.chunk_bytes,
    ]
    .map(|value| value as u64)
}

#[cfg(test)]
mod tests;
