//! The meeting of all ranks of a unique id, which makes a communicator.

use std::ffi::c_int;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::comm::Comm;
use super::connect;
use super::progress;
use super::refusal::{Refusal, code};
use super::segment::{RANKS_MAX, Segment, UniqueId};
use crate::handle::{HandleKind, encode};
use crate::machine::{Machine, current};

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

pub(super) fn coming(
    machine: &Machine,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> Result<Coming, Refusal> {
    let count = usize::try_from(ranks)
        .ok()
        .filter(|ranks| (1..=RANKS_MAX).contains(ranks));
    let count = count.ok_or_else(|| {
        Refusal::argument(format!("{ranks} ranks: 1 to {RANKS_MAX} are simulated"))
    })?;
    let own = usize::try_from(rank).ok().filter(|rank| *rank < count);
    let own = own.ok_or_else(|| Refusal::argument(format!("rank {rank} of {ranks} ranks")))?;
    let device = current::current(machine).ok_or_else(|| {
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
        twox_hash::XxHash3_64::oneshot(name.as_encoded_bytes())
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

/// Whether NCCL may let NVLink switches add: its default.
fn nvls_is_allowed() -> bool {
    std::env::var_os("NCCL_NVLS_ENABLE").is_none_or(|value| value != "0")
}

/// Writes how the rank is connected to its neighbours, as NCCL does where its log is asked for.
fn log_ways(comm: &Comm) {
    static LOG: OnceLock<Option<File>> = OnceLock::new();
    let log = LOG.get_or_init(|| {
        let is_asked = std::env::var_os("NCCL_DEBUG").is_some_and(|level| level == "INFO");
        let path = std::env::var_os("NCCL_DEBUG_FILE").filter(|_| is_asked)?;
        File::create(path).ok()
    });
    let (Some(mut log), ranks) = (log.as_ref(), comm.segment.ranks()) else {
        return;
    };
    for other in [(comm.rank + 1) % ranks, (comm.rank + ranks - 1) % ranks] {
        let [own, there] = [comm.rank, other].map(|rank| comm.segment.member(rank));
        let hosts = [own, there].map(|it| it.host.load(Ordering::Relaxed));
        let [a, b] = [own, there].map(|it| it.device.load(Ordering::Relaxed));
        let way = if hosts[0] == hosts[1] {
            "via P2P/CUMEM"
        } else {
            "[send] via NET/Socket/0"
        };
        let (from, to) = (comm.rank, other);
        let line = format!("simcuda NCCL INFO Channel 00/0 : {from}[{a}] -> {to}[{b}] {way}\n");
        // A log that cannot be written is no error of NCCL's.
        let _ = log.write_all(line.as_bytes());
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
        nvls: (machine.config.nvls && nvls_is_allowed()).then_some(machine.config.seed),
        is_aborted: AtomicBool::new(false),
        is_finalized: AtomicBool::new(false),
        is_closed: AtomicBool::new(false),
        async_error: AtomicI32::new(0),
        buffer_bytes: AtomicU64::new(0),
        books: Mutex::default(),
        segment,
    });
    connect::load(machine, device)?;
    let at_once = std::env::var_os("NCCL_RUNTIME_CONNECT").is_some_and(|value| value == "0");
    if at_once && ranks > 1 {
        connect::algorithms(machine, &comm)?;
    }
    log_ways(&comm);
    if comm.ranks_here() < ranks {
        progress::spawn(comm.clone());
    }
    machine.nccl.comms.push(Some(comm));
    Ok(encode(
        HandleKind::Communicator,
        machine.nccl.comms.len() - 1,
    ))
}
