//! Requests to stop: SIGUSR1 (a scheduler's time limit is near), SIGTERM, Ctrl-C, SIGHUP (a closed
//! terminal) and SIGQUIT.
//!
//! The program asks for them ([`StopSignals`]) and decides what to do. A second Ctrl-C ends the
//! process at once. SIGTERM is also what `mpirun` sends to all ranks when one has died, so the
//! watch (`world/watch.rs`) catches it too, to find out why before the process ends. A signal that
//! the process ignores (as under `nohup`), or that other code handles, is left alone.
//!
//! Orders of memory: a signal handler runs on any thread at any time and reads several of these
//! words. They are SeqCst, so every thread sees their changes in the same order. The cost does not
//! matter: signals are rare.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

use ddp_kernels::named;
use ddp_kernels::panics;

use crate::membership::client::{self, REQUESTED};
/// The numbers of these signals.
pub(crate) use crate::membership::decide::STOPS;
use crate::say;

named! {
    /// A signal that asks to stop.
    pub enum Signal {
        /// SIGUSR1: sent by schedulers some time before they end a job, if they are told to.
        User1 = "SIGUSR1 (sent by schedulers, and by launchers on Ctrl-C)",
        /// SIGTERM.
        Terminate = "SIGTERM",
        /// SIGINT.
        Interrupt = "SIGINT (Ctrl-C)",
        /// SIGHUP: the terminal is closed.
        Hangup = "SIGHUP (its terminal was closed)",
        /// SIGQUIT.
        Quit = "SIGQUIT",
    }
}

impl Signal {
    /// A number from 1, to send to other ranks.
    pub fn code(self) -> u8 {
        self as u8 + 1
    }

    /// The signal of this number.
    pub fn of_code(code: u8) -> Option<Signal> {
        Signal::ALL.into_iter().find(|signal| signal.code() == code)
    }

    fn number(self) -> c_int {
        STOPS[self as usize]
    }
}

/// How many [`StopSignals`] live in this process: one a rank where ranks are threads.
static CATCHING: AtomicUsize = AtomicUsize::new(0);
/// Whether Ctrl-C came while some lived: from what started this process, and from elsewhere. A
/// launcher passes on one that may have reached this process, too.
static INTERRUPTED: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];
/// What the first and the second Ctrl-C print; null for nothing.
static SAID: AtomicPtr<[&str; 2]> = AtomicPtr::new(std::ptr::null_mut());
/// Whether a [`Termination`] lives.
static WATCHING: AtomicBool = AtomicBool::new(false);
/// Whether SIGTERM came since it was last asked for.
static TERMINATED: AtomicBool = AtomicBool::new(false);

/// While this lives, signals that ask to stop are recorded instead of ending the process.
#[derive(Debug)]
pub struct StopSignals(());

impl StopSignals {
    pub(crate) fn catch() -> StopSignals {
        let _handlers = handlers();
        if CATCHING.fetch_add(1, SeqCst) == 0 {
            REQUESTED.store(0, SeqCst);
            INTERRUPTED.iter().for_each(|it| it.store(false, SeqCst));
            Signal::ALL
                .into_iter()
                .for_each(|signal| _ = catch(signal.number()));
        }
        StopSignals(())
    }

    /// The first and the second Ctrl-C print these texts at once, on standard error.
    pub fn say_on_interrupt(&self, texts: &'static [&'static str; 2]) {
        SAID.store(std::ptr::from_ref(texts).cast_mut(), SeqCst);
    }

    /// The first signal that has asked this process to stop.
    pub fn requested(&self) -> Option<Signal> {
        requested()
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        let _handlers = handlers();
        if CATCHING.fetch_sub(1, SeqCst) == 1 {
            SAID.store(std::ptr::null_mut(), SeqCst);
            let is_watched = |signal: Signal| signal == Signal::Terminate && WATCHING.load(SeqCst);
            let unused = Signal::ALL
                .into_iter()
                .filter(|&signal| !is_watched(signal));
            unused.for_each(|signal| release(signal.number()));
        }
    }
}

/// The first signal that came while [`StopSignals`] lived.
pub(crate) fn requested() -> Option<Signal> {
    let number = REQUESTED.load(SeqCst);
    let mut all = Signal::ALL.into_iter();
    all.find(|signal| signal.number() == number)
}

/// Whether Ctrl-C came while [`StopSignals`] lived.
pub(crate) fn is_interrupted() -> bool {
    INTERRUPTED.iter().any(|it| it.load(SeqCst))
}

/// SIGTERM, caught for the watch. Released when dropped.
#[derive(Debug)]
pub(crate) struct Termination(());

impl Termination {
    /// None if other code handles SIGTERM, or the process ignores it.
    pub(crate) fn catch() -> Option<Termination> {
        let _handlers = handlers();
        if WATCHING.load(SeqCst) || !catch(libc::SIGTERM) {
            return None;
        }
        TERMINATED.store(false, SeqCst);
        WATCHING.store(true, SeqCst);
        Some(Termination(()))
    }

    /// Whether SIGTERM came and the program does not handle it as a request to stop.
    pub(crate) fn has_come(&self) -> bool {
        TERMINATED.swap(false, SeqCst) && CATCHING.load(SeqCst) == 0
    }

    /// Ends this process as SIGTERM does by default, unless other code handles it by now.
    pub(crate) fn obey(self) {
        let is_ours = current(libc::SIGTERM) == Some(on_signal as *const () as usize);
        drop(self);
        if is_ours {
            // SAFETY: sends this process a signal.
            unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
        }
    }
}

impl Drop for Termination {
    fn drop(&mut self) {
        let _handlers = handlers();
        WATCHING.store(false, SeqCst);
        if CATCHING.load(SeqCst) == 0 {
            release(libc::SIGTERM);
        }
    }
}

/// Holds requests to stop back until [`crate::World::connect`] or a launcher can handle them.
/// Call it first in `main`: without it they end a process that has no handler yet. Ranks that a
/// [`crate::spawn::Spawner`] starts have these signals blocked from the start.
pub fn hold_stops() {
    mask(libc::SIG_BLOCK, &set_of(STOPS));
}

/// From now on this thread, and those that it starts, receive requests to stop.
pub(crate) fn hear() {
    mask(libc::SIG_UNBLOCK, &set_of(STOPS));
}

/// Blocks or unblocks these signals in this thread. Safe between fork and exec.
pub(crate) fn mask(how: c_int, signals: &libc::sigset_t) {
    // SAFETY: reads the set; null asks for nothing.
    unsafe { libc::pthread_sigmask(how, signals, std::ptr::null_mut()) };
}

/// The set of these signals.
pub(crate) fn set_of(signals: impl IntoIterator<Item = c_int>) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: sets of signals are plain data, of which all zeros is a value, and this one is ours.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// One thread at a time changes handlers.
fn handlers() -> MutexGuard<'static, ()> {
    static HANDLERS: Mutex<()> = Mutex::new(());
    panics::lock(&HANDLERS)
}

/// From now on a file that would grow beyond the limit on its size (ulimit -f) is an error of the
/// call that writes to it, and not the end of this process.
pub(crate) fn ignore_file_limit() {
    let _handlers = handlers();
    if current(libc::SIGXFSZ) == Some(libc::SIG_DFL) {
        set(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// From now on Ctrl-Z does not suspend this process.
pub(crate) fn ignore_suspension() {
    let _handlers = handlers();
    set(libc::SIGTSTP, libc::SIG_IGN);
}

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    if signal == libc::SIGTERM {
        TERMINATED.store(true, SeqCst);
    }
    if CATCHING.load(SeqCst) == 0 {
        return;
    }
    // SAFETY: errno belongs to this thread. The code that this handler interrupts keeps it.
    let errno = unsafe { *libc::__errno_location() };
    if REQUESTED.compare_exchange(0, signal, SeqCst, SeqCst) == Ok(0) {
        client::tell_of(signal);
    }
    if signal == libc::SIGINT {
        on_interrupt(info);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Says what Ctrl-C does. The second one ends the process.
fn on_interrupt(info: *const libc::siginfo_t) {
    // SAFETY: the kernel gives this handler a description of the signal, since `set` asks for it.
    let is_of_parent = unsafe { (*info).si_pid() == libc::getppid() };
    let was_interrupted = is_interrupted();
    let is_second = INTERRUPTED[usize::from(is_of_parent)].swap(true, SeqCst);
    // SAFETY: null, or from a reference that is valid for the whole program.
    if let Some(texts) = unsafe { SAID.load(SeqCst).as_ref() }
        // Not for the copy that the launcher passes on.
        && was_interrupted == is_second
    {
        say::print_now(texts[usize::from(is_second)].as_bytes());
    }
    if is_second {
        release(libc::SIGINT);
        // SAFETY: sends this process a signal, which is held back until this handler returns and
        // then ends the process. The call is safe in a handler.
        unsafe { libc::kill(libc::getpid(), libc::SIGINT) };
    }
}

/// Handles `signal` here if nothing else does. Whether it is handled here now.
fn catch(signal: c_int) -> bool {
    if current(signal) == Some(libc::SIG_DFL) {
        set(signal, on_signal as *const () as usize);
    }
    current(signal) == Some(on_signal as *const () as usize)
}

/// Gives `signal` back its default action if it is handled here. Safe in a handler.
fn release(signal: c_int) {
    if current(signal) == Some(on_signal as *const () as usize) {
        set(signal, libc::SIG_DFL);
    }
}

/// Whether this process ignores `signal`.
pub(crate) fn is_ignored(signal: c_int) -> bool {
    current(signal) == Some(libc::SIG_IGN)
}

/// The action on `signal`: `SIG_DFL`, `SIG_IGN`, or the address of a handler.
fn current(signal: c_int) -> Option<libc::sighandler_t> {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: only asks. All zeros is a value of this plain struct, whether it is written or not.
    unsafe {
        let asked = libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr()) == 0;
        asked.then(|| now.assume_init().sa_sigaction)
    }
}

fn set(signal: c_int, handler: libc::sighandler_t) {
    // SAFETY: all zeros is a value of this plain struct, with an empty mask. The handler is the
    // default, none, or `on_signal`, which only does what is safe in a handler.
    unsafe {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

#[cfg(test)]
pub(crate) mod tests;
