//! The entry points of communicators: unique ids, beginning and end, questions.

use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::comm::Comm;
use super::entry::{call, resolve};
use super::group;
use super::meeting::{come, coming, found, meet};
use super::refusal::{Refusal, code};
use super::segment::{Made, UniqueId};
use crate::event::Record;
use crate::graph::{Captured, Node};
use crate::machine::{LockedMachine, Machine, Out};
use crate::scheduler::{self, Goal};

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
        let join = held.config.join;
        held.without(|| {
            meet(&come);
            std::thread::sleep(join);
        });
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
fn finish(held: &mut LockedMachine, comm: &Comm) -> Result<(), Refusal> {
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
    let holds = |nodes: &[Node]| {
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
fn wait_for_graphs(held: &mut LockedMachine, name: &str, comm: &Comm) {
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
    let bytes = comm.buffer_bytes.swap(0, Ordering::Relaxed);
    machine.memory.give_back_directly(comm.device, bytes);
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
