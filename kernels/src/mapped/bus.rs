//! SIGBUS in a mapped file: the file was truncated, or its disk failed. The handler puts a page of
//! zeros there and marks the mapping, so that the interrupted copy ends and its caller checks. Any
//! other SIGBUS goes to the previous handler.
//!
//! The signal comes to the thread that copies, which has noted what it reads. So the handler takes
//! no lock, allocates nothing and searches nothing.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, OnceLock};

use libc::{c_int, c_void, siginfo_t};

use crate::sync::lock;

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
pub(super) fn watched(addresses: Range<usize>, cut: &AtomicBool, copy: impl FnOnce()) {
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
pub(super) fn catch() -> io::Result<()> {
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
