//! Communicators: unique ids, the meeting of all ranks, and the end of one.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::flight::Flight;
use super::segment::{Made, RANKS_MAX, Segment, UniqueId};
use super::{Refusal, call, code, group, progress, resolve};
use crate::context;
use crate::event::Record;
use crate::graph::capture::{CaptureId, Captured};
use crate::machine::{Held, Machine, Out};
use crate::scheduler::{self, Goal};
use crate::stream::{HandleKind, encode};

/// A rank's end of a communicator.
pub struct Comm {
    pub(super) rank: usize,
    pub(super) device: usize,
    pub(super) segment: Segment,
    /// Ranks of this process.
    siblings: Vec<usize>,
    is_aborted: AtomicBool,
    is_finalized: AtomicBool,
    /// It is over: its thread ends.
    pub(super) is_closed: AtomicBool,
    pub(super) async_error: AtomicI32,
    books: Mutex<Books>,
}

/// What was queued.
#[derive(Default)]
struct Books {
    /// Unfinished pieces, in call order.
    flights: VecDeque<Arc<Flight>>,
    /// The end of the latest.
    last: Option<Arc<Record>>,
    /// The latest that was captured.
    captured: Option<(CaptureId, usize)>,
}

impl Comm {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }

    /// How many ranks are of this process.
    pub(super) fn ranks_here(&self) -> usize {
        self.siblings.len()
    }

    /// How many ends of a send are of this process.
    pub(super) fn parties_here(&self, (from, to, _): &(u64, u64, u64)) -> usize {
        [from, to]
            .into_iter()
            .filter(|rank| self.siblings.contains(&(**rank as usize - 1)))
            .count()
    }

    /// Whether a rank is of this process.
    pub(super) fn is_here(&self, rank: usize) -> bool {
        self.siblings.contains(&rank)
    }

    /// A piece is queued after the previous one.
    pub(super) fn takes_off(&self, flight: &Arc<Flight>) {
        let mut books = self.books();
        if let Some(previous) = books.last.replace(flight.end.clone()) {
            flight.follows(previous);
        }
        books.flights.push_back(flight.clone());
        drop(books);
        if self.segment.is_wanted(self.rank) {
            self.segment.call(self.rank);
        }
    }

    /// The piece with this end is over.
    pub(super) fn leave(&self, end: &Arc<Record>) {
        self.books()
            .flights
            .retain(|flight| !Arc::ptr_eq(&flight.end, end));
        progress::want(self, &[]);
    }

    /// The oldest piece that is not over.
    pub(super) fn oldest(&self) -> Option<Arc<Flight>> {
        self.books().flights.front().cloned()
    }

    /// The node that the next one of this capture must follow; remembers this one instead.
    pub(super) fn captured(&self, capture: CaptureId) -> Option<usize> {
        self.books()
            .captured
            .filter(|(of, _)| *of == capture)
            .map(|(_, node)| node)
    }

    pub(super) fn set_captured(&self, capture: CaptureId, node: usize) {
        self.books().captured = Some((capture, node));
    }

    /// Why nothing more can be called.
    pub(super) fn check_usable(&self) -> Result<(), Refusal> {
        if self.is_aborted() || self.is_finalized.load(Ordering::Relaxed) {
            return Err(Refusal::argument(
                "the communicator was finalized or aborted",
            ));
        }
        match self.async_error.load(Ordering::SeqCst) {
            0 => Ok(()),
            error => Err(Refusal::new(
                error,
                "the communicator has an asynchronous error (ncclCommGetAsyncError)",
            )),
        }
    }

    fn describe(&self) -> String {
        format!(
            "the communicator of rank {} of {} on device {}",
            self.rank,
            self.segment.ranks(),
            self.device
        )
    }
}

/// The fields of a communicator's configuration common to all versions since 2.14.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// NCCL_CONFIG_UNDEF_INT.
const UNDEFINED: c_int = c_int::MIN;

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(id: Out<'_, UniqueId>) -> c_int {
    call("ncclGetUniqueId", |held| {
        let id = id.ok_or_else(|| Refusal::argument("no place for the id"))?;
        let made = Made::new().map_err(|problem| Refusal::new(code::SYSTEM_ERROR, problem))?;
        id.write(made.id);
        held.nccl.made.push(made);
        Ok(())
    })
}

/// What a rank brings to the meeting.
pub(super) struct Coming {
    ranks: usize,
    id: UniqueId,
    rank: usize,
    device: usize,
}

/// A rank that arrived and waits for the others.
pub(super) struct Come {
    segment: Segment,
    coming: Coming,
}

fn coming(machine: &Machine, ranks: c_int, id: UniqueId, rank: c_int) -> Result<Coming, Refusal> {
    let count = usize::try_from(ranks)
        .ok()
        .filter(|ranks| (1..=RANKS_MAX).contains(ranks));
    let count = count.ok_or_else(|| {
        Refusal::argument(format!("{ranks} ranks: 1 to {RANKS_MAX} are simulated"))
    })?;
    let own = usize::try_from(rank).ok().filter(|rank| *rank < count);
    let own = own.ok_or_else(|| Refusal::argument(format!("rank {rank} of {ranks} ranks")))?;
    let device = context::current(machine).ok_or_else(|| {
        let message = "no context is current on this thread: NCCL would take device 0, which is seldom what is meant (cuCtxSetCurrent)";
        Refusal::new(code::INVALID_USAGE, message)
    })?;
    if let Some(lost) = machine.devices[device].lost {
        return Err(lost.into());
    }
    Ok(Coming {
        ranks: count,
        id,
        rank: own,
        device,
    })
}

/// What distinguishes machines: read once, as NCCL does.
fn host_hash() -> u64 {
    static HOST: OnceLock<u64> = OnceLock::new();
    *HOST.get_or_init(|| {
        let name = std::env::var_os("NCCL_HOSTID").unwrap_or_default();
        xxhash_rust::xxh3::xxh3_64(name.as_encoded_bytes())
    })
}

/// Arrives at the meeting without waiting.
pub(super) fn come(coming: Coming) -> Result<Come, Refusal> {
    let system = |problem| Refusal::new(code::SYSTEM_ERROR, problem);
    let segment = Segment::open(&coming.id, coming.ranks).map_err(system)?;
    segment
        .join(coming.rank, host_hash(), coming.device)
        .map_err(|problem| Refusal::new(code::INVALID_USAGE, problem))?;
    Ok(Come { segment, coming })
}

/// Waits for all ranks, without a limit and without the machine's lock.
pub(super) fn meet(come: &Come) {
    loop {
        let heard = come.segment.bell();
        if come.segment.is_complete() {
            return;
        }
        come.segment.sleep(heard, Duration::from_millis(100));
    }
}

/// All arrived: creates the communicator.
pub(super) fn found(machine: &mut Machine, come: Come) -> Result<*mut Comm, Refusal> {
    let Come {
        segment,
        coming: Coming {
            rank, device, id, ..
        },
    } = come;
    // Later arrivals are too late: the memory lives on in those who have it.
    machine.nccl.made.retain(|made| made.id != id);
    let member = |rank: usize| {
        let member = segment.member(rank);
        (
            member.host.load(Ordering::Relaxed),
            member.device.load(Ordering::Relaxed),
        )
    };
    let ranks = segment.ranks();
    for second in 0..ranks {
        if let Some(first) = (0..second).find(|first| member(*first) == member(second)) {
            let device = member(second).1;
            let message = format!(
                "Duplicate GPU detected : rank {first} and rank {second} both on CUDA device {device}"
            );
            return Err(Refusal::new(code::INVALID_USAGE, message));
        }
    }
    let process = std::process::id();
    let is_here = |rank: &usize| segment.member(*rank).process.load(Ordering::Relaxed) == process;
    let siblings: Vec<usize> = (0..ranks).filter(is_here).collect();
    let comm = Arc::new(Comm {
        rank,
        device,
        siblings,
        is_aborted: AtomicBool::new(false),
        is_finalized: AtomicBool::new(false),
        is_closed: AtomicBool::new(false),
        async_error: AtomicI32::new(0),
        books: Mutex::default(),
        segment,
    });
    if comm.ranks_here() < ranks {
        progress::spawn(comm.clone());
    }
    machine.nccl.comms.push(Some(comm));
    Ok(encode(
        HandleKind::Communicator,
        machine.nccl.comms.len() - 1,
    ))
}

fn init(
    name: &'static str,
    to: Option<&mut MaybeUninit<*mut Comm>>,
    (ranks, id, rank): (c_int, UniqueId, c_int),
    config: Option<&Config>,
) -> c_int {
    call(name, |held| {
        let to = to.ok_or_else(|| Refusal::argument("no place for the communicator"))?;
        if let Some(config) = config {
            check_config(config)?;
        }
        let coming = coming(held, ranks, id, rank)?;
        if group::is_open() {
            group::defer_init(to, coming);
            return Ok(());
        }
        let come = come(coming)?;
        held.without(|| meet(&come));
        to.write(found(held, come)?);
        Ok(())
    })
}

fn check_config(config: &Config) -> Result<(), Refusal> {
    if config.magic != CONFIG_MAGIC || config.size < size_of::<Config>() {
        return Err(Refusal::argument(format!(
            "the configuration has the magic number {:#x} and {} bytes: expected {CONFIG_MAGIC:#x} (NCCL_CONFIG_INITIALIZER) and at least {}",
            config.magic,
            config.size,
            size_of::<Config>()
        )));
    }
    if !(21400..=29999).contains(&config.version) {
        return Err(Refusal::argument(format!(
            "the configuration is of version {}: expected 21400 (2.14.0) or later",
            config.version
        )));
    }
    match config.blocking {
        UNDEFINED | 1 => Ok(()),
        0 => Err(Refusal::argument(
            "blocking = 0: only blocking communicators are simulated",
        )),
        other => Err(Refusal::argument(format!(
            "blocking = {other}: expected 0 or 1"
        ))),
    }
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(
    comm: Option<&mut MaybeUninit<*mut Comm>>,
    ranks: c_int,
    id: UniqueIdByValue,
    rank: c_int,
) -> c_int {
    init("ncclCommInitRank", comm, (ranks, id.internal, rank), None)
}

/// An id as C passes it: a struct by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueIdByValue {
    /// The bytes.
    pub internal: UniqueId,
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    comm: Option<&mut MaybeUninit<*mut Comm>>,
    ranks: c_int,
    id: UniqueIdByValue,
    rank: c_int,
    config: Option<&Config>,
) -> c_int {
    init(
        "ncclCommInitRankConfig",
        comm,
        (ranks, id.internal, rank),
        config,
    )
}

/// Waits until all calls are done.
fn finish(held: &mut Held, comm: &Comm) -> Result<(), Refusal> {
    if comm.is_finalized.swap(true, Ordering::Relaxed) || held.devices[comm.device].lost.is_some() {
        return Ok(());
    }
    let ends: Vec<Arc<Record>> = comm
        .books()
        .flights
        .iter()
        .map(|flight| flight.end.clone())
        .collect();
    scheduler::wait_without_promise(held, &Goal::new(ends))?;
    Ok(())
}

/// How many graphs and executables contain calls of this communicator.
fn graphs_with(machine: &Machine, comm: &Comm) -> usize {
    let holds = |nodes: &[crate::graph::Node]| {
        nodes
            .iter()
            .any(|node| matches!(&node.what, Captured::Nccl(piece) if piece.is_of(comm)))
    };
    let graphs = machine
        .graphs
        .graphs
        .iter()
        .filter(|graph| graph.destroyed.is_none() && holds(&graph.nodes));
    let executables = machine.graphs.executables.iter();
    graphs.count()
        + executables
            .filter(|executable| holds(&executable.plan.nodes))
            .count()
}

/// Since 2.26 a communicator ends only when no graph that captured its calls is left.
fn wait_for_graphs(held: &mut Held, name: &str, comm: &Comm) {
    let since = Instant::now();
    let mut is_told = false;
    loop {
        let graphs = graphs_with(held, comm);
        if graphs == 0 {
            return;
        }
        if !is_told && since.elapsed() > Duration::from_secs(1) {
            is_told = true;
            eprintln!(
                "simcuda: {name} of {} waits until {graphs} graphs that hold its collectives are destroyed, as NCCL does since 2.26",
                comm.describe()
            );
        }
        // Its launches must end, and no other thread may be running it.
        if let Some(oldest) = comm.oldest() {
            scheduler::run_towards(held, oldest.end.clone(), |_| false);
        }
        held.without(|| std::thread::sleep(Duration::from_millis(1)));
    }
}

/// Takes it out of the machine.
fn close(machine: &mut Machine, comm: &Arc<Comm>) {
    comm.is_closed.store(true, Ordering::SeqCst);
    comm.segment.call(comm.rank);
    for place in &mut machine.nccl.comms {
        if place.as_ref().is_some_and(|other| Arc::ptr_eq(other, comm)) {
            *place = None;
        }
    }
}

/// See NCCL's documentation. It waits for its calls.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: *mut Comm) -> c_int {
    call("ncclCommFinalize", |held| {
        let comm = resolve(held, comm)?;
        comm.check_usable()?;
        finish(held, &comm)
    })
}

/// See NCCL's documentation. It waits for its calls, and until graphs with its calls are destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: *mut Comm) -> c_int {
    call("ncclCommDestroy", |held| {
        if comm.is_null() {
            return Ok(());
        }
        let comm = resolve(held, comm)?;
        finish(held, &comm)?;
        wait_for_graphs(held, "ncclCommDestroy", &comm);
        close(held, &comm);
        Ok(())
    })
}

/// See NCCL's documentation. Hanging calls are freed at once; it waits until graphs with its calls
/// are destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: *mut Comm) -> c_int {
    call("ncclCommAbort", |held| {
        if comm.is_null() {
            return Ok(());
        }
        let comm = resolve(held, comm)?;
        comm.is_aborted.store(true, Ordering::SeqCst);
        comm.segment.ring_bell();
        wait_for_graphs(held, "ncclCommAbort", &comm);
        close(held, &comm);
        Ok(())
    })
}

/// See NCCL's documentation. It runs nothing.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(comm: *mut Comm, error: Option<&mut c_int>) -> c_int {
    call("ncclCommGetAsyncError", |held| {
        let comm = resolve(held, comm)?;
        let error = error.ok_or_else(|| Refusal::argument("no place for the error"))?;
        *error = comm.async_error.load(Ordering::SeqCst);
        Ok(())
    })
}

fn tell(
    name: &'static str,
    comm: *mut Comm,
    to: Option<&mut c_int>,
    what: impl FnOnce(&Comm) -> usize,
) -> c_int {
    call(name, |held| {
        let comm = resolve(held, comm)?;
        *to.ok_or_else(|| Refusal::argument("no place for the answer"))? = what(&comm) as c_int;
        Ok(())
    })
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(comm: *mut Comm, count: Option<&mut c_int>) -> c_int {
    tell("ncclCommCount", comm, count, |comm| comm.segment.ranks())
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCuDevice(comm: *mut Comm, device: Option<&mut c_int>) -> c_int {
    tell("ncclCommCuDevice", comm, device, |comm| comm.device)
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(comm: *mut Comm, rank: Option<&mut c_int>) -> c_int {
    tell("ncclCommUserRank", comm, rank, |comm| comm.rank)
}
