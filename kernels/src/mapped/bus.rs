//! SIGBUS in a mapped file: the file was truncated, or its disk failed. The handler puts a page of
//! zeros there and marks the mapping, so that the interrupted copy ends and its caller checks. Any
//! other SIGBUS goes to the previous handler.
//!
//! The handler takes no lock and allocates nothing: it searches a table that only grows. A
//! generation number guards the two numbers of an entry; it is odd while they change. An entry that
//! is changing cannot be the one in question, because the interrupted read borrows that mapping.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void, siginfo_t};

/// An entry for one mapping, or a free one.
pub(super) struct Region {
    /// Odd while the next two change.
    generation: AtomicUsize,
    start: AtomicUsize,
    /// 0 while there is no mapping.
    bytes: AtomicUsize,
    cut: AtomicBool,
}

/// How many mappings the table grows by.
const BLOCK: usize = 64;

struct Block {
    regions: [Region; BLOCK],
    next: OnceLock<Box<Block>>,
}

impl Block {
    const fn new() -> Block {
        Block {
            regions: [const { Region::new() }; BLOCK],
            next: OnceLock::new(),
        }
    }
}

static TABLE: Block = Block::new();
/// Free entries; `None` before the first block was added.
static FREE: Mutex<Option<Vec<&'static Region>>> = Mutex::new(None);

impl Region {
    const fn new() -> Region {
        Region {
            generation: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            cut: AtomicBool::new(false),
        }
    }

    /// Watches `bytes` bytes from the address `start` on.
    pub(super) fn watch(start: usize, bytes: usize) -> &'static Region {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let list = free.get_or_insert_with(|| TABLE.regions.iter().collect());
        if list.is_empty() {
            let mut last = &TABLE;
            while let Some(next) = last.next.get() {
                last = next;
            }
            list.extend(&last.next.get_or_init(|| Box::new(Block::new())).regions);
        }
        let region = list.pop().expect("just filled");
        region.cut.store(false, Ordering::Relaxed);
        region.set(start, bytes);
        region
    }

    /// Ends the watch; called before the mapping is removed.
    pub(super) fn forget(&'static self) {
        self.set(0, 0);
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.get_or_insert_default().push(self);
    }

    /// Whether a read met a missing page.
    pub(super) fn was_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    fn set(&self, start: usize, bytes: usize) {
        // One thread at a time owns this entry.
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation.store(generation + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.generation.store(generation + 2, Ordering::Release);
    }

    fn holds(&self, address: usize) -> bool {
        let before = self.generation.load(Ordering::Acquire);
        let (start, bytes) = (
            self.start.load(Ordering::Relaxed),
            self.bytes.load(Ordering::Relaxed),
        );
        fence(Ordering::Acquire);
        let same = before.is_multiple_of(2) && self.generation.load(Ordering::Relaxed) == before;
        // A mapping's last page exists as a whole, also what follows the end of the file.
        let pages = bytes.next_multiple_of(PAGE_BYTES.load(Ordering::Relaxed));
        same && address.wrapping_sub(start) < pages
    }
}

fn region_at(address: usize) -> Option<&'static Region> {
    let mut block = &TABLE;
    loop {
        if let Some(region) = block.regions.iter().find(|region| region.holds(address)) {
            return Some(region);
        }
        block = block.next.get()?;
    }
}

/// Set before the handler can run.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
/// The previous handler of SIGBUS.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler of SIGBUS, once.
pub(super) fn catch() -> io::Result<()> {
    static CAUGHT: Mutex<bool> = Mutex::new(false);
    let mut caught = CAUGHT.lock().unwrap_or_else(PoisonError::into_inner);
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
    // what a handler may: atomic loads and stores, system calls, and the previous handler.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    *caught = true;
    Ok(())
}

extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid description. The address is meaningful if
    // the kernel sent the signal.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // Codes up to 0 mark signals that a program sent.
    if code > 0
        && let Some(region) = region_at(address)
    {
        // Set the mark before the zeros exist, so that every reader of them finds it.
        region.cut.store(true, Ordering::Release);
        if put_zeros(address) {
            return;
        }
    }
    pass_on(code, signal, info, context);
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

/// Does what would have happened without this handler.
fn pass_on(code: c_int, signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(previous) = PREVIOUS.get() else {
        return;
    };
    match previous.sa_sigaction {
        libc::SIG_IGN if code <= 0 => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores the default. The access is repeated when we return and then ends the
            // process; a signal that a program sent is not repeated.
            unsafe {
                libc::sigaction(signal, previous, std::ptr::null_mut());
                if code <= 0 {
                    libc::raise(signal);
                }
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: whoever installed it with this flag gave a function of this type; the
            // arguments are the kernel's.
            unsafe {
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
        }
        handler => {
            // SAFETY: without the flag it is a function of one number.
            unsafe {
                let handler: extern "C" fn(c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}
