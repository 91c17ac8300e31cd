//! A fork-join pool: the caller posts one job to the workers it needs, does its own share, helps where somebody is
//! behind (a core may be taken by another program), and waits for the rest.
//!
//! Each worker has a mailbox: STARTING, IDLE, POSTED (a job lies in it), ASLEEP or CLOSED. The caller writes the job, then POSTED; the
//! worker takes it, runs its share and counts the job's `open` down. The caller returns only when `open` is zero, so
//! everything a job points to outlives its use.

use std::any::Any;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::cut;

const IDLE: u8 = 0;
const POSTED: u8 = 1;
const ASLEEP: u8 = 2;
const CLOSED: u8 = 3;
const STARTING: u8 = 4;

/// How long a thread spins before it sleeps: longer than the gap between two operations of a training step.
const SPIN: Duration = Duration::from_micros(40);

#[derive(Debug)]
pub(super) struct Pool {
    workers: Vec<Worker>,
    /// How far each sharer's pieces are taken, the caller's first.
    taken: Vec<Taken>,
    /// Held by the caller whose job is running.
    busy: Mutex<()>,
    /// Spinning only pays while every thread has a core to itself.
    spins: bool,
}

#[derive(Debug)]
struct Worker {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

/// How many of one sharer's pieces are taken. On a line of its own: every sharer counts here all the time.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Taken(AtomicUsize);

/// One line of cache for each worker, so that posting to one does not disturb the others.
#[derive(Debug)]
#[repr(align(128))]
struct Mailbox {
    state: AtomicU8,
    job: UnsafeCell<Option<Job>>,
}

// SAFETY: the state hands the cell over: the caller writes it only while IDLE or ASLEEP, the worker reads it only
// after it saw POSTED (acquire), and sets IDLE when it is done with it.
unsafe impl Sync for Mailbox {}
// SAFETY: as above; what the job points to is shared by `Sync` references (see `Job`).
unsafe impl Send for Mailbox {}

/// One worker's share of a job. The pointers are good until `open` has been counted down for this worker.
#[derive(Clone, Copy, Debug)]
struct Job {
    shared: *const Shared<'static>,
    /// Which of `sharers` this worker is; 0 is the caller.
    sharer: usize,
}

struct Shared<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    pieces: usize,
    sharers: usize,
    taken: &'a [Taken],
    /// Workers that have not finished yet.
    open: AtomicUsize,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Shared<'_> {
    /// Runs the pieces of `sharer`, then those that others have not come to yet.
    fn run_share(&self, sharer: usize) {
        for step in 0..self.sharers {
            let owner = (sharer + step) % self.sharers;
            let theirs = cut(self.pieces, 1, self.sharers, owner);
            loop {
                let piece = theirs.start + self.taken[owner].0.fetch_add(1, Ordering::Relaxed);
                if piece >= theirs.end {
                    break;
                }
                (self.body)(piece);
            }
        }
    }
}

impl Pool {
    /// Thread `i` is kept on the core `i` places behind the one pinned from, the caller being thread 0.
    pub(super) fn new(count: usize, pinned_from: Option<usize>) -> Pool {
        let cores = super::cores();
        let spins = count <= cores.len().max(1);
        let core_of = |index: usize| {
            let first = pinned_from.filter(|_| !cores.is_empty())?;
            Some(cores[(first + index) % cores.len()])
        };
        if let Some(core) = core_of(0) {
            keep_on(&[core]);
        }
        let start = |index: usize| {
            let mailbox = Arc::new(Mailbox { state: AtomicU8::new(STARTING), job: UnsafeCell::new(None) });
            let theirs = mailbox.clone();
            let core = core_of(index);
            let body = move || {
                // A new thread starts with the mask of the one that starts it, which may be pinned.
                match core {
                    Some(core) => keep_on(&[core]),
                    None => keep_on(super::cores()),
                }
                theirs.state.store(IDLE, Ordering::Release);
                serve(&theirs, spins);
            };
            let thread = std::thread::Builder::new().name(format!("ddp-math-{index}")).spawn(body).ok()?;
            Some(Worker { mailbox, thread: Some(thread) })
        };
        // Where the system grants fewer threads than asked, those there are do the work.
        let workers: Vec<Worker> = (1..count).map_while(start).collect();
        // A pool that is there is ready: every worker runs, on the cores it was given.
        let starting = |worker: &Worker| worker.mailbox.state.load(Ordering::Acquire) == STARTING;
        while workers.iter().any(starting) {
            std::thread::yield_now();
        }
        let taken = (0..=workers.len()).map(|_| Taken::default()).collect();
        Pool { workers, taken, busy: Mutex::new(()), spins }
    }

    pub(super) fn count(&self) -> usize {
        self.workers.len() + 1
    }

    pub(super) fn run(&self, pieces: usize, body: &(dyn Fn(usize) + Sync)) {
        let sharers = self.count().min(pieces);
        let guard = match self.busy.try_lock() {
            Ok(guard) => Some(guard),
            // A panic passed through `run` after every worker had finished: the pool is sound.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if guard.is_none() || sharers == 1 {
            return (0..pieces).for_each(body);
        }
        // Posting makes these visible to the workers.
        self.taken.iter().take(sharers).for_each(|taken| taken.0.store(0, Ordering::Relaxed));
        let shared = Shared {
            body,
            pieces,
            sharers,
            taken: &self.taken,
            open: AtomicUsize::new(sharers - 1),
            caller: std::thread::current(),
            panic: Mutex::new(None),
        };
        for (index, worker) in self.workers.iter().take(sharers - 1).enumerate() {
            worker.post(Job { shared: std::ptr::from_ref(&shared).cast(), sharer: index + 1 });
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.run_share(0)));
        wait_until(self.spins, || shared.open.load(Ordering::SeqCst) == 0);
        drop(guard);
        let theirs = shared.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(payload) = own.err().or(theirs) {
            std::panic::resume_unwind(payload);
        }
    }
}

/// One wait: busy for a moment, then offering the core to whoever needs it (the very thread that is waited for may
/// have landed on this one), then, by the caller's choice, asleep.
struct Wait {
    rounds: u32,
    since: Option<Instant>,
}

impl Wait {
    /// Busy rounds before the clock is looked at: about two microseconds.
    const BUSY_ROUNDS: u32 = 64;

    fn new() -> Wait {
        Wait { rounds: 0, since: None }
    }

    /// Passes a little time; false once it is time to sleep.
    fn goes_on(&mut self) -> bool {
        if self.rounds < Wait::BUSY_ROUNDS {
            self.rounds += 1;
            std::hint::spin_loop();
            return true;
        }
        std::thread::yield_now();
        self.since.get_or_insert_with(Instant::now).elapsed() < SPIN
    }
}

/// Waits for `done`. Whoever makes it true unparks this thread afterwards; an unpark that comes before `park` makes it
/// return at once, so none is lost.
fn wait_until(spins: bool, done: impl Fn() -> bool) {
    let mut wait = Wait::new();
    while !done() {
        if !spins || !wait.goes_on() {
            std::thread::park();
        }
    }
}

impl Worker {
    fn post(&self, job: Job) {
        // SAFETY: the mailbox is IDLE or ASLEEP: its last job was counted down before `run` returned, and `busy`
        // is held, so nobody else posts.
        unsafe { *self.mailbox.job.get() = Some(job) };
        if self.mailbox.state.swap(POSTED, Ordering::AcqRel) == ASLEEP
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.mailbox.state.store(CLOSED, Ordering::Release);
            if let Some(thread) = worker.thread.take() {
                thread.thread().unpark();
                // A worker catches every panic of the jobs it runs; if it still died there is nothing to save.
                let _ = thread.join();
            }
        }
    }
}

/// A worker's life.
fn serve(mailbox: &Mailbox, spins: bool) {
    loop {
        let mut wait = Wait::new();
        loop {
            match mailbox.state.load(Ordering::Acquire) {
                POSTED => break,
                CLOSED => return,
                IDLE if spins && wait.goes_on() => {}
                IDLE => {
                    let _ = mailbox.state.compare_exchange(IDLE, ASLEEP, Ordering::AcqRel, Ordering::Acquire);
                }
                _ => std::thread::park(),
            }
        }
        // SAFETY: POSTED was seen with acquire, so the job is written and nobody writes until it is counted down.
        let Some(Job { shared, sharer }) = (unsafe { *mailbox.job.get() }) else { continue };
        // SAFETY: the caller keeps `shared` alive until `open` is zero, which needs the count-down below.
        let shared = unsafe { &*shared };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.run_share(sharer)));
        if let Err(payload) = outcome {
            shared.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
        // IDLE before the count-down: after it the next job may be posted at any moment.
        let closed = mailbox.state.compare_exchange(POSTED, IDLE, Ordering::AcqRel, Ordering::Acquire).is_err();
        let caller = shared.caller.clone();
        // Nothing of the job may be touched after this. Waking a caller that is awake costs no system call.
        if shared.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            caller.unpark();
        }
        if closed {
            return;
        }
    }
}

/// The cores that this process's first thread may run on, as the system started it.
pub(super) fn affinity_cores() -> Vec<usize> {
    // SAFETY: the set is plain bits, all zero is a value of it, and the calls write no more than its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(libc::getpid(), size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
        }
        set
    };
    // SAFETY: every index is below the number of bits in the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Keeps the calling thread on these cores. A refusal by the system changes nothing but speed.
pub(super) fn keep_on(cores: &[usize]) {
    // SAFETY: as in `affinity_cores`; the cores came from there.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}
