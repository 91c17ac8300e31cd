//! A fork-join pool: the caller posts one job to the workers it needs, does its own share, helps
//! slower workers (another program may use their core), and waits for the rest. Also the cores that
//! its threads run on, and slices whose parts go to them.
//!
//! Each worker has a mailbox: STARTING, IDLE, POSTED (it holds a job), ASLEEP or CLOSED. The caller
//! writes the job, then POSTED. The worker runs its share and counts the job's `open` down. The
//! caller returns when `open` is zero, so all that a job points to outlives its use.
//!
//! Orders of memory. POSTED is a release, and a worker acquires it: it sees the job, the counts of
//! pieces that were set to 0 (relaxed), and all that the caller wrote. Workers count `open` down by
//! exchanges that release; the caller's look acquires them all, since each continues the one
//! before: after zero it sees what every piece wrote, and the last use of each mailbox and count.
//! Taking a piece is relaxed: it must be one thread's, and pieces do not read what others write.
//! IDLE is set before the count-down, so the next caller, who holds `busy`, finds it. A worker that
//! goes to sleep and a caller that posts change the same word by exchanges: one is first, and who
//! finds ASLEEP unparks. An unpark before a park is kept.

use std::any::Any;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::panics::lock;

const IDLE: u8 = 0;
const POSTED: u8 = 1;
const ASLEEP: u8 = 2;
const CLOSED: u8 = 3;
const STARTING: u8 = 4;

/// How long a thread spins before it sleeps: longer than the gap between two operations of a step.
const SPIN: Duration = Duration::from_micros(40);

#[derive(Debug)]
pub(super) struct ThreadPool {
    workers: Vec<Worker>,
    /// How many pieces of each sharer are taken, the caller's first.
    taken: Vec<TakenPieces>,
    /// Held by the caller whose job is running.
    busy: Mutex<()>,
    /// Spinning is useful only if every thread has its own core.
    spins: bool,
}

#[derive(Debug)]
struct Worker {
    mailbox: Arc<WorkerMailbox>,
    thread: Option<JoinHandle<()>>,
}

/// How many of one sharer's pieces are taken, on its own cache line because all sharers count here.
#[derive(Debug, Default)]
#[repr(align(128))]
struct TakenPieces(AtomicUsize);

/// On its own cache line, so that posting to one worker does not disturb the others.
#[derive(Debug)]
#[repr(align(128))]
struct WorkerMailbox {
    state: AtomicU8,
    job: UnsafeCell<Option<PoolJob>>,
}

// SAFETY: the state hands the cell over. The caller writes it only while IDLE or ASLEEP; the worker
// reads it only after it saw POSTED (acquire), and sets IDLE when it is done.
unsafe impl Sync for WorkerMailbox {}
// SAFETY: as above; a job's pointers are to `Sync` data (see `PoolJob`).
unsafe impl Send for WorkerMailbox {}

/// One worker's share of a job. The pointers are valid until this worker counts `open` down.
#[derive(Clone, Copy, Debug)]
struct PoolJob {
    shared: *const SharedJob<'static>,
    /// Which of `sharers` this worker is; 0 is the caller.
    sharer: usize,
}

struct SharedJob<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    pieces: usize,
    sharers: usize,
    taken: &'a [TakenPieces],
    /// Workers that are not done.
    open: AtomicUsize,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl SharedJob<'_> {
    /// Runs the pieces of `sharer`, then those that other sharers have not begun.
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

impl ThreadPool {
    /// If pinned, thread `i` runs on core number `pinned_from + i`; the caller is thread 0.
    pub(super) fn new(count: usize, pinned_from: Option<usize>) -> ThreadPool {
        let cores = cores();
        let spins = count <= cores.len().max(1);
        let core_of = |index: usize| {
            let first = pinned_from.filter(|_| !cores.is_empty())?;
            Some(cores[(first + index) % cores.len()])
        };
        if let Some(core) = core_of(0) {
            keep_on(&[core]);
        }
        let start = |index: usize| {
            let mailbox = Arc::new(WorkerMailbox {
                state: AtomicU8::new(STARTING),
                job: UnsafeCell::new(None),
            });
            let theirs = mailbox.clone();
            let core = core_of(index);
            let body = move || {
                // A thread inherits the mask of the thread that starts it, which may be pinned.
                match core {
                    Some(core) => keep_on(&[core]),
                    None => keep_on(cores),
                }
                theirs.state.store(IDLE, Ordering::Release);
                serve(&theirs, spins);
            };
            let thread = std::thread::Builder::new()
                .name(format!("ddp-math-{index}"))
                .spawn(body)
                .ok()?;
            Some(Worker {
                mailbox,
                thread: Some(thread),
            })
        };
        // If the system grants fewer threads, those do the work.
        let workers: Vec<Worker> = (1..count).map_while(start).collect();
        // A pool is ready when every worker runs on its cores.
        let starting = |worker: &Worker| worker.mailbox.state.load(Ordering::Acquire) == STARTING;
        while workers.iter().any(starting) {
            std::thread::yield_now();
        }
        let taken = (0..=workers.len()).map(|_| Default::default()).collect();
        ThreadPool {
            workers,
            taken,
            busy: Mutex::new(()),
            spins,
        }
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
        self.taken
            .iter()
            .take(sharers)
            .for_each(|taken| taken.0.store(0, Ordering::Relaxed));
        let shared = SharedJob {
            body,
            pieces,
            sharers,
            taken: &self.taken,
            open: AtomicUsize::new(sharers - 1),
            caller: std::thread::current(),
            panic: Mutex::new(None),
        };
        for (index, worker) in self.workers.iter().take(sharers - 1).enumerate() {
            worker.post(PoolJob {
                shared: std::ptr::from_ref(&shared).cast(),
                sharer: index + 1,
            });
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.run_share(0)));
        wait_until(self.spins, || shared.open.load(Ordering::SeqCst) == 0);
        drop(guard);
        let theirs = shared
            .panic
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(payload) = own.err().or(theirs) {
            std::panic::resume_unwind(payload);
        }
    }
}

/// A wait: spins, then yields the core (the awaited thread may need this very core), then sleeps if
/// the caller chooses to.
struct SpinWait {
    rounds: u32,
    since: Option<Instant>,
}

impl SpinWait {
    /// Rounds before the first look at the clock: about two microseconds.
    const BUSY_ROUNDS: u32 = 64;

    fn new() -> SpinWait {
        SpinWait {
            rounds: 0,
            since: None,
        }
    }

    /// Passes a little time; false when it is time to sleep.
    fn goes_on(&mut self) -> bool {
        if self.rounds < SpinWait::BUSY_ROUNDS {
            self.rounds += 1;
            std::hint::spin_loop();
            return true;
        }
        std::thread::yield_now();
        self.since.get_or_insert_with(Instant::now).elapsed() < SPIN
    }
}

/// Waits for `done`. Whoever makes it true unparks this thread afterwards; an unpark before `park`
/// makes it return at once, so none is lost.
fn wait_until(spins: bool, done: impl Fn() -> bool) {
    let mut wait = SpinWait::new();
    while !done() {
        if !spins || !wait.goes_on() {
            std::thread::park();
        }
    }
}

impl Worker {
    fn post(&self, job: PoolJob) {
        // SAFETY: the mailbox is IDLE or ASLEEP, because its last job was counted down before `run`
        // returned. `busy` is held, so no other thread posts.
        unsafe { *self.mailbox.job.get() = Some(job) };
        if self.mailbox.state.swap(POSTED, Ordering::AcqRel) == ASLEEP
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.mailbox.state.store(CLOSED, Ordering::Release);
            if let Some(thread) = worker.thread.take() {
                thread.thread().unpark();
                // Workers catch panics of jobs, so this cannot fail in a way that matters.
                let _ = thread.join();
            }
        }
    }
}

/// The loop of a worker thread.
fn serve(mailbox: &WorkerMailbox, spins: bool) {
    loop {
        let mut wait = SpinWait::new();
        loop {
            match mailbox.state.load(Ordering::Acquire) {
                POSTED => break,
                CLOSED => return,
                IDLE if spins && wait.goes_on() => {}
                IDLE => {
                    let _ = mailbox.state.compare_exchange(
                        IDLE,
                        ASLEEP,
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    );
                }
                _ => std::thread::park(),
            }
        }
        // SAFETY: POSTED was seen with acquire, so the job is written; it is not written again
        // before the count-down.
        let Some(PoolJob { shared, sharer }) = (unsafe { *mailbox.job.get() }) else {
            continue;
        };
        // SAFETY: the caller keeps `shared` alive until `open` is zero, after the count-down below.
        let shared = unsafe { &*shared };
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.run_share(sharer)));
        if let Err(payload) = outcome {
            lock(&shared.panic).get_or_insert(payload);
        }
        // IDLE before the count-down, because the next job may be posted right after it.
        let closed = mailbox
            .state
            .compare_exchange(POSTED, IDLE, Ordering::AcqRel, Ordering::Acquire)
            .is_err();
        let caller = shared.caller.clone();
        // The job must not be used after this. Unparking a running caller costs no system call.
        if shared.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            caller.unpark();
        }
        if closed {
            return;
        }
    }
}

/// The cores in this process's affinity mask at the first call, before anything was pinned.
pub fn cores() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(affinity_cores)
}

/// Pins the calling thread, and threads it starts (but not the pool's), to core number `index` of
/// `cores()`, modulo their number. If the system refuses, only speed changes.
pub fn pin_current(index: usize) {
    if let Some(&core) = cores().get(index % cores().len().max(1)) {
        keep_on(&[core]);
    }
}

/// The cores that this process's first thread may run on.
fn affinity_cores() -> Vec<usize> {
    // SAFETY: all zeros is a valid set, and the calls write no more than its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(libc::getpid(), size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
        }
        set
    };
    // SAFETY: every index is below the number of bits in the set.
    (0..libc::CPU_SETSIZE as usize)
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect()
}

/// Pins the calling thread to these cores. If the system refuses, only speed changes.
fn keep_on(cores: &[usize]) {
    // SAFETY: as in `affinity_cores`; the cores came from there.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

/// Part `index` of `0..len` in `pieces` nearly equal parts, cut at multiples of `grain`.
pub(crate) fn cut(len: usize, grain: usize, pieces: usize, index: usize) -> Range<usize> {
    let grains = len.div_ceil(grain);
    let edge = |i: usize| (grains * i / pieces * grain).min(len);
    edge(index)..edge(index + 1)
}

/// A mutable slice from which threads take parts that do not overlap. `split_mut` cuts one slice
/// with it; operations whose outputs are cut differently (rows of several tensors, chunks of a
/// table) use it directly.
pub(crate) struct Shares<'a, T> {
    start: *mut T,
    len: usize,
    whole: PhantomData<&'a mut [T]>,
}

// SAFETY: a `&Shares` only gives out `&mut [T]` of ranges that do not overlap (the contract of
// `part`), and any thread may hold those if T is Send.
unsafe impl<T: Send> Sync for Shares<'_, T> {}

impl<'a, T> Shares<'a, T> {
    pub(crate) fn new(whole: &'a mut [T]) -> Shares<'a, T> {
        Shares {
            start: whole.as_mut_ptr(),
            len: whole.len(),
            whole: PhantomData,
        }
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements of `range`, which must lie within the slice.
    ///
    /// # Safety
    /// No two parts taken from these shares may overlap while both live.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice by the assertion. Exclusive, because `new` took the slice by
        // `&mut` and the caller promises that no other live part overlaps this one.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
