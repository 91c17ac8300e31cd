//! How ranks that each have a GPU come together: they compare versions, rank 0 makes an id, and all join with it, on a thread that nobody
//! waits for beyond the deadline.

use std::ffi::{c_char, c_int};
use std::panic::Location;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};
use ddp_kernels::error::Site;
use ddp_kernels::progress::Progress;
use ddp_kernels::{Device, foreign};

use super::communicator::Communicator;
use super::library::{self, nccl};
use super::watch::{AT_IT, Common, JOINED, Watch};
use super::{Nccl, State, environment, warm};
use crate::collective::Collective;
use crate::error::{Cause, Error, Line, Result, Seconds};
use crate::failure::GRACE;
use crate::group::Group;
use crate::handshake::Field;
use crate::shared::LANES;
use crate::waited::Waited;
use crate::world::World;

/// The stack of the thread that joins: NCCL's own for its threads, which is more than Rust's.
const STACK_BYTES: usize = 8 << 20;

/// How often a rank that waits looks up.
const PERIOD: Duration = Duration::from_millis(50);

/// The group `name` of all ranks of `world`, this one with `device`, over the same ranks in host memory on `channel`.
pub(crate) fn join(
    world: &World,
    name: &'static str,
    device: Device,
    (channel, host): (usize, Arc<dyn Collective>),
    of_processes: bool,
    site: Site,
) -> Result<Group> {
    let what = format!("join group {name} with {device} (at {})", Line(site));
    // The device's own faults are this rank's own error, before anybody waits for anybody.
    foreign::bind(device, "gpu_group", site)?;
    // Compiles kernels, if nobody has yet: not while others wait in a call.
    let progress = Progress::new(device, LANES)?;
    environment::warn_of_registration();
    let nccl = find_library(world, name, &what)?;
    let id = share_id(world, nccl.functions, &what)?;
    let common = Arc::new(Common::new(world, name, channel, of_processes));
    common.pages.set_stage(common.local_rank, AT_IT);
    let raw = initialise(world, nccl.functions, device, id, &common, &what)?;
    common.pages.set_stage(common.local_rank, JOINED);
    let communicator = Arc::new(Communicator { functions: nccl.functions, raw: raw.0 });
    let watch = Arc::new(Watch::start(Arc::clone(&common), Arc::clone(&communicator), progress.board())?);
    world.gpu_watches().add(&watch);
    let group = Group::new(
        Arc::new(Nccl {
            communicator,
            host,
            device,
            rank: world.rank(),
            size: world.size(),
            progress,
            common: Arc::clone(&common),
            state: Mutex::new(State::default()),
            was_captured: AtomicBool::new(false),
            watch,
        }),
        name,
        world.timeout(),
    );
    warm::warm_up(&group, device, &common)?;
    tracing::debug!("group {name}: NCCL {} joined {} ranks, this one with {device}", nccl.version, world.size());
    Ok(group)
}

/// NCCL, where all ranks have it, and the same, and make the same group. The error is the same on all ranks.
fn find_library(world: &World, group: &str, what: &str) -> Result<library::Nccl> {
    let found = library::get();
    let own = found.as_ref().err().map_or_else(String::new, |why| format!("on {}: {why}", world.host()));
    for (rank, problem) in world.all_gather_bytes(own.as_bytes())?.iter().enumerate() {
        if !problem.is_empty() {
            return Err(Error::Setup {
                action: what.to_string(),
                reason: format!("rank {rank} {}", String::from_utf8_lossy(problem)),
                way_out: "One GPU does without: start one rank, or train on the CPU with --device cpu.".into(),
            });
        }
    }
    let nccl = found.expect("a rank without it has said so, and all have heard it");
    let way_out = "Let all ranks find the same NCCL (LD_LIBRARY_PATH, the active Python environment).";
    let way_out_of_groups =
        "All ranks must make the same groups in the same order: look for a condition that differs between ranks.";
    world.handshake(&[
        Field::must_match("the group", group, way_out_of_groups),
        Field::must_match("the version of NCCL", nccl.version, way_out),
    ])?;
    Ok(nccl)
}

/// The id that rank 0 makes, on all ranks.
fn share_id(world: &World, functions: &'static library::Functions, what: &str) -> Result<ncclUniqueId> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    // An id, or an exit code and the text of an error: the two differ in their first byte.
    let (mut message, mut refusal) = (Vec::new(), None);
    if world.rank() == 0 {
        // SAFETY: writes an id, to a variable of ours.
        match unsafe { nccl!(functions, ncclGetUniqueId(&mut id)) } {
            Ok(()) => message.extend(std::iter::once(0).chain(id.internal.iter().map(|&byte| byte.to_ne_bytes()[0]))),
            Err(fault) => {
                let error = functions.error(what.to_string(), fault);
                message.push(error.exit_code());
                message.extend(error.to_string().into_bytes());
                refusal = Some(error);
            }
        }
    }
    world.broadcast_bytes(&mut message, 0)?;
    if let Some(error) = refusal {
        return Err(error);
    }
    match message.split_first() {
        Some((0, bytes)) if bytes.len() == id.internal.len() => {
            id.internal.iter_mut().zip(bytes).for_each(|(target, byte)| *target = c_char::from_ne_bytes([*byte]));
            Ok(id)
        }
        other => {
            // Rank 0 says it first.
            let said = world.failure().board.wait_for_abort(GRACE);
            let (exit_code, text) = other.map_or((70, &[][..]), |(code, text)| (*code, text));
            let text = String::from_utf8_lossy(text).into_owned();
            let cause = said.unwrap_or_else(|| Cause { rank: 0, host: "this job".into(), exit_code, text });
            Err(Error::PeerFailed(Box::new(cause)))
        }
    }
}

/// NCCL's handle, on its way from the thread that made it.
struct Raw(ncclComm_t);

// SAFETY: a communicator may be used from any thread, by one at a time, and this is handed over.
unsafe impl Send for Raw {}

/// Joins, on a thread of its own: NCCL waits for all ranks, for ever if need be.
fn initialise(
    world: &World,
    functions: &'static library::Functions,
    device: Device,
    id: ncclUniqueId,
    common: &Common,
    what: &str,
) -> Result<Raw> {
    let (rank, size, site) = (world.rank() as c_int, world.size() as c_int, Location::caller());
    let (answer, answered) = mpsc::channel();
    let action = what.to_string();
    let body = move || {
        let joined = foreign::bind(device, "gpu_group", site).map_err(Error::from).and_then(|()| {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the device's context is this thread's, the id is rank 0's, and the pointer is to a variable of ours.
            let joined = unsafe { nccl!(functions, ncclCommInitRank(&mut raw, size, id, rank)) };
            joined.map(|()| Raw(raw)).map_err(|fault| functions.error(action, fault))
        });
        // Nobody listens any more where time was up: then the process ends.
        _ = answer.send(joined);
    };
    let started = std::thread::Builder::new().name("nccl start".into()).stack_size(STACK_BYTES).spawn(body);
    started.map_err(|error| Error::Setup {
        action: what.to_string(),
        reason: format!("no thread for it: {error}"),
        way_out: "Raise the limit on threads (ulimit -u).".into(),
    })?;
    let mut waited = Waited::new();
    loop {
        match answered.recv_timeout(PERIOD) {
            Ok(joined) => return joined,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::Broken {
                    action: what.to_string(),
                    reason: "the thread that called NCCL ended without an answer".into(),
                    way_out: "What it said before stands above.".into(),
                });
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(cause) = world.failure().cause() {
            return Err(Error::PeerFailed(Box::new(cause)));
        }
        if waited.after(PERIOD) >= world.timeout() {
            return Err(too_late(world, common, what));
        }
    }
}

/// Time is up: who has not come, as far as this host knows.
fn too_late(world: &World, common: &Common, what: &str) -> Error {
    let missing = common.others().filter(|(local_rank, _)| common.pages.stage(*local_rank) < AT_IT);
    let missing: Vec<usize> = missing.map(|(_, rank)| rank).collect();
    if !missing.is_empty() {
        return Error::Timeout { call: what.to_string(), missing, waited: world.timeout() };
    }
    let whose = if common.knows_all() {
        "all ranks are"
    } else {
        "all ranks of this host are (of other hosts nothing is known here)"
    };
    Error::Setup {
        action: what.to_string(),
        reason: format!("{whose} at it, but NCCL did not bring them together within {}", Seconds(world.timeout())),
        way_out: "NCCL_DEBUG=INFO shows what it waits for: often a firewall, or an interface that cannot be reached \
                  (NCCL_SOCKET_IFNAME chooses one); --timeout-s sets how long to wait."
            .into(),
    }
}
