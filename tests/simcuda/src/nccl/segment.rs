//! What the ranks of a communicator share: memory named by the unique id, through which they meet
//! and move bytes.
//!
//! It is a memfd of the process that created the id; the others open it through `/proc`. No file
//! exists in any folder, so none can be left. It is sparse: unused rings take no memory.
//!
//! All words are atomics, each written by one rank (except the bell, which all ring, and `wants`,
//! one per pair). A word that announces bytes is written after them (release) and read before them
//! (acquire).

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The most ranks: the size of the table.
pub(super) const RANKS_MAX: usize = 64;

/// What a rank can be connected by: the other ranks, then NCCL's algorithms.
pub(super) const LINKS: usize = RANKS_MAX + 3;

/// Bytes a rank may stage for all others until they fetch them.
pub(super) const RING_BYTES: u64 = 4 << 20;

/// Bytes a rank may stage for one other.
pub(super) const PAIR_BYTES: u64 = 256 << 10;

const MAGIC: u64 = 0x5349_4d4e_4343_4c31;

/// The description of a rank's call. Compared as a whole: any difference is a mismatch.
pub(super) type Words = [u64; WORDS];
const WORDS: usize = 6;
/// How many collectives are remembered with their place among all calls of their device.
pub(super) const PLACES: u64 = 16;
const TEXT_WORDS: usize = 96;

/// The place of one rank in the table.
#[repr(C)]
pub(super) struct Member {
    /// 1 once the rest is filled in.
    pub(super) is_here: AtomicU32,
    pub(super) device: AtomicU32,
    pub(super) process: AtomicU32,
    pub(super) host: AtomicU64,
    /// How many collective calls it has entered.
    pub(super) arrived: AtomicU64,
    /// How many collective calls were made, run or not, and by number the places of the latest
    /// among the NCCL calls of its process.
    pub(super) made: AtomicU64,
    pub(super) places: [AtomicU64; PLACES as usize],
    /// Its calls by parity: no rank is two calls ahead of another.
    pub(super) calls: [[AtomicU64; WORDS]; 2],
    /// Total bytes it has put into its ring.
    pub(super) published: AtomicU64,
    /// Total bytes it has taken from each rank's ring.
    pub(super) consumed: [AtomicU64; RANKS_MAX],
    /// Whether it waits for each of the others.
    pub(super) wants: [AtomicU32; RANKS_MAX],
    /// Which connections it asked for: to each rank, and of each algorithm.
    pub(super) connects: [AtomicU32; LINKS],
    /// Threads that wait for other ranks to ask for the same ones.
    pub(super) connecting: AtomicU32,
    /// Incremented when another rank begins to wait for it: its background thread sleeps on this.
    pub(super) called: AtomicU32,
    /// The readable form of `calls`: what, and from where.
    pub(super) texts: [[AtomicU64; TEXT_WORDS]; 2],
}

/// What one rank sends to one other.
#[repr(C)]
pub(super) struct Pair {
    /// Sends and receives that were come to.
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// What each moves by its parity: elements, type, and [`super::transfer::Endpoint::group`].
    pub(super) sends: [[AtomicU64; 3]; 2],
    pub(super) receives: [[AtomicU64; 3]; 2],
    /// Receives that are over, and with them their sends.
    pub(super) over: AtomicU64,
    pub(super) published: AtomicU64,
    pub(super) consumed: AtomicU64,
}

#[repr(C)]
struct Header {
    /// Both exist from the beginning: the opened file is this id's memory, not another file that
    /// reused its number.
    magic: AtomicU64,
    nonce: AtomicU64,
    ranks: AtomicU32,
    joined: AtomicU32,
    /// Incremented with every event; waiters sleep on it.
    bell: AtomicU32,
    sleepers: AtomicU32,
    members: [Member; RANKS_MAX],
}

/// The mapped memory.
pub(super) struct Segment {
    base: *mut u8,
    bytes: usize,
    ranks: usize,
    /// Tells communicators apart within a process.
    pub(super) nonce: u64,
}

// SAFETY: the mapping stays until this is dropped, and all shared words in it are atomics; the
// bytes of rings are touched only by the rank that the words give them to.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// What an id holds: where the memory is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Name {
    magic: u64,
    process: u32,
    file: u32,
    nonce: u64,
}

/// The unique id, as NCCL has it.
pub(super) type UniqueId = [u8; 128];

impl Name {
    pub(super) fn from_id(id: &UniqueId) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(id[at..at + 8].try_into().expect("eight bytes"));
        let places = word(8);
        (word(0) == MAGIC).then_some(Self {
            magic: MAGIC,
            process: places as u32,
            file: (places >> 32) as u32,
            nonce: word(16),
        })
    }

    fn to_id(self) -> UniqueId {
        let mut id = [0; 128];
        id[..8].copy_from_slice(&self.magic.to_le_bytes());
        id[8..16]
            .copy_from_slice(&(u64::from(self.process) | u64::from(self.file) << 32).to_le_bytes());
        id[16..24].copy_from_slice(&self.nonce.to_le_bytes());
        id
    }
}

/// Memory that waits for its ranks: the creator of the id keeps it until they have come.
pub(super) struct Made {
    _file: File,
    /// The id that names it.
    pub(super) id: UniqueId,
}

fn pairs_at() -> usize {
    size_of::<Header>().next_multiple_of(4096)
}

fn rings_at(ranks: usize) -> usize {
    (pairs_at() + ranks * ranks * size_of::<Pair>()).next_multiple_of(4096)
}

fn bytes_of(ranks: usize) -> usize {
    rings_at(ranks) + ranks * RING_BYTES as usize + ranks * ranks * PAIR_BYTES as usize
}

impl Made {
    /// New memory without a size: the ranks know how many they are.
    pub(super) fn new() -> Result<Self, String> {
        // SAFETY: the name is a constant string that ends in zero.
        let file = unsafe { libc::memfd_create(c"simcuda-nccl".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(format!(
                "no shared memory (memfd_create): {}",
                std::io::Error::last_os_error()
            ));
        }
        // SAFETY: the file is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let time = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let name = Name {
            magic: MAGIC,
            process: std::process::id(),
            file: file.as_raw_fd() as u32,
            nonce: (time.as_nanos() as u64) ^ u64::from(std::process::id()) << 40,
        };
        let file = File::from(file);
        let header = [MAGIC.to_ne_bytes(), name.nonce.to_ne_bytes()].concat();
        file.write_all_at(&header, 0)
            .map_err(|problem| format!("no shared memory: {problem}"))?;
        Ok(Self {
            _file: file,
            id: name.to_id(),
        })
    }
}

/// Whether `file` is the memory of this id. Only regular files are read: it could be someone's
/// pipe.
fn check(file: &File, name: &Name) -> std::io::Result<()> {
    let mut header = [0; 16];
    if file.metadata()?.is_file() {
        file.read_exact_at(&mut header, 0)?;
    }
    let expected = [MAGIC.to_ne_bytes(), name.nonce.to_ne_bytes()].concat();
    if header[..] == expected {
        Ok(())
    } else {
        Err(std::io::Error::other("something else is there"))
    }
}

impl Segment {
    /// Maps the memory of `id`, sized for `ranks` ranks by the first to come.
    pub(super) fn open(id: &UniqueId, ranks: usize) -> Result<Self, String> {
        let name = Name::from_id(id)
            .ok_or("the unique id is not one that ncclGetUniqueId of this library gave")?;
        let path = format!("/proc/{}/fd/{}", name.process, name.file);
        let gone = |problem: std::io::Error| {
            format!(
                "the memory that process {} made for the unique id cannot be reached ({path}: {problem}): the process has ended, the id was used \
                 before, or it is of another user or another machine; only ranks of one machine are simulated",
                name.process
            )
        };
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(gone)?;
        check(&file, &name).map_err(gone)?;
        let bytes = bytes_of(ranks);
        // SAFETY: the file is ours, opened for writing. Larger is allowed, and every rank asks for
        // the same.
        if unsafe { libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t) } != 0 {
            return Err(format!(
                "no shared memory: {}",
                std::io::Error::last_os_error()
            ));
        }
        // SAFETY: a new mapping of a file that is as long.
        let base = unsafe {
            let allowed = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                allowed,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(format!(
                "no shared memory: {}",
                std::io::Error::last_os_error()
            ));
        }
        Ok(Self {
            base: base.cast(),
            bytes,
            ranks,
            nonce: name.nonce,
        })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping is larger than the header and begins at a page; all in it are
        // atomics, for which zeros are valid.
        unsafe { &*self.base.cast::<Header>() }
    }

    pub(super) fn member(&self, rank: usize) -> &Member {
        &self.header().members[rank]
    }

    pub(super) fn pair(&self, from: usize, to: usize) -> &Pair {
        assert!(from < self.ranks && to < self.ranks);
        // SAFETY: the table of pairs has ranks * ranks places from here; all in it are atomics, for
        // which zeros are valid.
        unsafe {
            &*self
                .base
                .add(pairs_at())
                .cast::<Pair>()
                .add(from * self.ranks + to)
        }
    }

    /// The ring of a rank, from its first byte.
    pub(super) fn ring(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.ranks);
        // SAFETY: the rings of the ranks lie behind one another from here.
        unsafe {
            self.base
                .add(rings_at(self.ranks) + rank * RING_BYTES as usize)
        }
    }

    /// The ring of a pair, from its first byte.
    pub(super) fn pair_ring(&self, from: usize, to: usize) -> *mut u8 {
        assert!(from < self.ranks && to < self.ranks);
        let before =
            self.ranks * RING_BYTES as usize + (from * self.ranks + to) * PAIR_BYTES as usize;
        // SAFETY: the rings of the pairs lie behind those of the ranks.
        unsafe { self.base.add(rings_at(self.ranks) + before) }
    }

    /// Comes to the meeting of all ranks, as `rank` on this device of this host.
    pub(super) fn join(&self, rank: usize, host: u64, device: usize) -> Result<(), String> {
        let header = self.header();
        let before = header.ranks.compare_exchange(
            0,
            self.ranks as u32,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        if let Err(others) = before
            && others as usize != self.ranks
        {
            return Err(format!(
                "rank {rank} was told of {} ranks, another one of {others}",
                self.ranks
            ));
        }
        let own = self.member(rank);
        if own.is_here.swap(2, Ordering::AcqRel) != 0 {
            return Err(format!("two ranks with the number {rank}"));
        }
        own.device.store(device as u32, Ordering::Relaxed);
        own.process.store(std::process::id(), Ordering::Relaxed);
        own.host.store(host, Ordering::Relaxed);
        own.is_here.store(1, Ordering::Release);
        header.joined.fetch_add(1, Ordering::AcqRel);
        self.ring_bell();
        Ok(())
    }

    /// Whether all ranks have come.
    pub(super) fn is_complete(&self) -> bool {
        self.header().joined.load(Ordering::Acquire) as usize >= self.ranks
    }

    /// The bell's current value, to wait for a change.
    pub(super) fn bell(&self) -> u32 {
        self.header().bell.load(Ordering::Acquire)
    }

    /// Something has happened.
    pub(super) fn ring_bell(&self) {
        let header = self.header();
        header.bell.fetch_add(1, Ordering::SeqCst);
        if header.sleepers.load(Ordering::SeqCst) > 0 {
            wake(&header.bell);
        }
    }

    /// Sleeps until the bell differs from `heard`, or for this long.
    pub(super) fn sleep(&self, heard: u32, longest: Duration) {
        let header = self.header();
        header.sleepers.fetch_add(1, Ordering::SeqCst);
        sleep_on(&header.bell, heard, longest);
        header.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes the thread in the background of a rank.
    pub(super) fn call(&self, rank: usize) {
        let called = &self.member(rank).called;
        called.fetch_add(1, Ordering::SeqCst);
        wake(called);
    }

    /// Whether any rank of another process waits for `rank`.
    pub(super) fn is_wanted(&self, rank: usize) -> bool {
        (0..self.ranks).any(|other| self.member(other).wants[rank].load(Ordering::SeqCst) != 0)
    }

    /// How many ranks there are.
    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }
}

impl Member {
    /// Keeps a text with a call, truncated if too long.
    pub(super) fn set_text(&self, parity: usize, text: &str) {
        let mut bytes = text.as_bytes().iter().copied().chain(std::iter::repeat(0));
        for word in &self.texts[parity] {
            let eight: [u8; 8] = std::array::from_fn(|_| bytes.next().unwrap_or(0));
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
    }

    /// The text of a call; empty if texts are off.
    pub(super) fn text(&self, parity: usize) -> String {
        let words = self.texts[parity]
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        String::from_utf8_lossy(&words.take_while(|byte| *byte != 0).collect::<Vec<u8>>())
            .into_owned()
    }
}

fn wake(word: &AtomicU32) {
    // SAFETY: the word is borrowed; waking takes nothing else.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            std::ptr::from_ref(word),
            libc::FUTEX_WAKE,
            c_int::MAX,
        )
    };
}

/// Sleeps while `word` is `seen`, but not longer than `longest`.
pub(super) fn sleep_on(word: &AtomicU32, seen: u32, longest: Duration) {
    let time = libc::timespec {
        tv_sec: longest.as_secs() as _,
        tv_nsec: longest.subsec_nanos().into(),
    };
    // SAFETY: the word is borrowed, and the time lives as long as the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            std::ptr::from_ref(word),
            libc::FUTEX_WAIT,
            seen,
            &raw const time,
        )
    };
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever borrowed from it has borrowed this.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// Copies `bytes` into a ring of `size` bytes, at the place that `at` bytes ever have.
///
/// # Safety
/// `ring` has `size` bytes, `from` has `bytes`, which are at most `size`, and nobody else touches
/// that part of the ring now.
pub(super) unsafe fn put(ring: *mut u8, size: u64, at: u64, from: *const u8, bytes: u64) {
    let (place, first) = split(size, at, bytes);
    // SAFETY: both parts lie in the ring, and together are `bytes`, which the caller vouches for at
    // `from`.
    unsafe {
        std::ptr::copy_nonoverlapping(from, ring.add(place as usize), first as usize);
        std::ptr::copy_nonoverlapping(from.add(first as usize), ring, (bytes - first) as usize);
    }
}

/// Copies out of a ring.
///
/// # Safety
/// As for [`put`], with the room at `to`.
pub(super) unsafe fn take(ring: *const u8, size: u64, at: u64, to: *mut u8, bytes: u64) {
    let (place, first) = split(size, at, bytes);
    // SAFETY: as in `put`.
    unsafe {
        std::ptr::copy_nonoverlapping(ring.add(place as usize), to, first as usize);
        std::ptr::copy_nonoverlapping(ring, to.add(first as usize), (bytes - first) as usize);
    }
}

fn split(size: u64, at: u64, bytes: u64) -> (u64, u64) {
    assert!(bytes <= size);
    let place = at % size;
    (place, bytes.min(size - place))
}
