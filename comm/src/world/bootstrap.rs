//! How ranks find each other: they exchange over MPI or sockets who they are, and then those of one
//! host share memory. On one host the sockets are closed after that.

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::{Arc, Mutex};

use ddp_kernels::panics;
use serde::Deserialize;
use serde_json::json;

use super::between_hosts::connect_hosts;
use super::links::{Links, ProcessRank, Start};
use super::meeting::{ACTION, Meeting};
use super::options::Options;
#[cfg(feature = "mpi")]
use super::over_mpi;
use super::star::Star;
use crate::error::{Error, Problem, Result};
use crate::identity::{RankIdentity, host_name};
use crate::launch::cores::{self, Cores};
use crate::launch::limits;
use crate::launcher::{Launch, Launcher, Lookup, OWN_JOB};
use crate::process::{Peer, Process};
use crate::rendezvous::Rendezvous;
use crate::transport::failure::Failure;
use crate::transport::failure::alerts::Alerts;
use crate::transport::nccl::environment::{self, RankKind};
use crate::transport::placement::Placement;
use crate::transport::shared::{Board, Segment};
use crate::transport::tcp::{Mesh, MeshChannel, Secret};

/// Makes this rank claim a host of this name, so that one machine can stand in for several hosts.
/// For tests.
const TEST_HOST: &str = "DDP_TEST_HOST";

/// What the world of the ranks that another launcher has started begins with; None if MPI finds
/// this rank alone.
pub(super) fn connect(options: &Options, launch: &Launch) -> Result<Option<Start>> {
    let lookup = |name: &str| std::env::var(name).ok();
    #[cfg(feature = "mpi")]
    if launch.launcher.is_of_mpi() {
        over_mpi::check_limits(launch)?;
        environment::apply(over_mpi::settings(launch, &lookup));
        apply_settings(options, launch.is_on_one_host());
        let Some(mut meeting) = over_mpi::MpiRanks::meet(options)? else {
            return Ok(None);
        };
        let start = join(options, launch.launcher, &mut meeting, Ok(()))?;
        let job = Some(meeting.into_job());
        return Ok(Some(Start { job, ..start }));
    }
    apply_settings(options, launch.is_on_one_host());
    let limits = limits::check(launch.local_size.unwrap_or(1).max(1), 1);
    let place = match launch.launcher {
        Launcher::Slurm => Rendezvous::of_slurm(&lookup)?,
        Launcher::Own
        | Launcher::OpenMpi
        | Launcher::Pmi
        | Launcher::Pmix
        | Launcher::Torchrun
        | Launcher::Variables => Rendezvous::of_torch(&lookup)?,
    };
    let Some(place) = place else {
        return Ok(None);
    };
    let secret = Secret::read(&lookup)?;
    let mut meeting = Star::over_tcp(place, None, (secret, None), options)?;
    join(options, launch.launcher, &mut meeting, limits).map(Some)
}

/// What the world starts with, once its ranks know each other. A rank whose limits are too small
/// brings the error: all ranks get it.
pub(super) fn join(
    options: &Options,
    launcher: Launcher,
    meeting: &mut dyn Meeting,
    limits: Result<()>,
) -> Result<Start> {
    let lookup = |name: &str| std::env::var(name).ok();
    let infos = exchange_infos(meeting, &lookup)?;
    let (infos, rank) = by_host(meeting, infos)?;
    let keys: Vec<&str> = infos.iter().map(|info| info.key.as_str()).collect();
    let placement = Placement::new(&keys, rank);
    let segment = share_memory(meeting, &placement, &infos, limits)?
        .and_then(|segment| match placement.hosts.len() {
            1 => Ok(segment),
            _ => meeting.check_hosts(&placement).map(|()| segment),
        })
        .map_err(|error| match rank {
            0 => error,
            _ => error.reported_by_rank_0(),
        })?;
    let names: Vec<&str> = infos.iter().map(|info| info.host.as_str()).collect();
    let mesh = match placement.hosts.len() {
        1 => None,
        _ => Some(Arc::new(connect_hosts(meeting, &placement, &names)?)),
    };
    start(options, launcher, &infos, placement, segment, mesh)
}

/// What the world of ranks that have met starts with. `segment` is the memory of this host's ranks,
/// `mesh` its connection to other hosts.
fn start(
    options: &Options,
    launcher: Launcher,
    infos: &[RankInfo],
    placement: Placement,
    segment: Segment,
    mesh: Option<Arc<Mesh>>,
) -> Result<Start> {
    let board = Board::new(&segment);
    let peers = peers(&placement, &board)?;
    board.show_beats(placement.local_rank);
    let (here, rank) = (placement.here(), placement.here()[placement.local_rank]);
    let masks: Vec<Cores> = here.iter().map(|&rank| infos[rank].cores.clone()).collect();
    let channel = || mesh.as_ref().map(MeshChannel::new);
    let (alerts, base) = (channel(), channel());
    let failure = Failure {
        identity: RankIdentity {
            program: options.program.clone(),
            rank,
            size: infos.len(),
            local_rank: placement.local_rank,
            local_size: here.len(),
            host: infos[rank].host.clone(),
        },
        board,
        remedy_text: options.remedy_text,
        peers,
        launcher: Process::parent().filter(|_| launcher.stays()),
        // These launchers end the ranks that are left, and their exit code is that of the first to
        // end, which must not be a kill.
        must_kill: !matches!(launcher, Launcher::OpenMpi | Launcher::Own),
        alerts: alerts.map(|channel| Alerts {
            channel,
            placement: placement.clone(),
        }),
        client: None,
        link: None,
        job_ranks: Vec::new(),
    };
    Ok(Start {
        host_count: placement.hosts.len(),
        links: Links::Processes(ProcessRank {
            base,
            segment,
            is_roomy: cores::are_roomy(&masks, here.len()),
            placement,
        }),
        failure,
        masks,
        launcher_cores: cores::launcher_cores(),
        unbind: launcher.unbind(&|name| std::env::var(name).ok()),
        #[cfg(feature = "mpi")]
        job: None,
        mesh,
    })
}

/// What the ranks are, and this rank's number once ranks are numbered host by host: sums add in
/// this order, along the hosts.
fn by_host(meeting: &mut dyn Meeting, infos: Vec<RankInfo>) -> Result<(Vec<RankInfo>, usize)> {
    let host = |rank: usize| infos.iter().position(|info| info.key == infos[rank].key);
    let mut order: Vec<usize> = (0..infos.len()).collect();
    order.sort_by_key(|&rank| host(rank));
    meeting.numbers().order.clone_from(&order);
    let infos = order.iter().map(|&rank| infos[rank].clone()).collect();
    Ok((infos, meeting.rank()))
}

/// The other ranks of this host, whose processes have opened its memory: only these are killed
/// when they do not end.
fn peers(placement: &Placement, board: &Board) -> Result<Vec<Peer>> {
    let all = placement.here().iter().enumerate();
    let others = all.filter(|(local_rank, _)| *local_rank != placement.local_rank);
    let peer = |(local_rank, &rank): (usize, &usize)| {
        let pid = board.pid(local_rank).ok_or_else(|| {
            let reason =
                format!("rank {rank} says that it is on this host, and has not opened its memory");
            Error::setup(
                ACTION,
                reason,
                "run the same build of this program on all ranks",
            )
        })?;
        let process = Process::open(pid);
        Ok(Peer {
            rank,
            local_rank,
            process,
        })
    };
    others.map(peer).collect()
}

/// What a rank tells all others about itself.
#[derive(Clone, Default, Deserialize)]
struct RankInfo {
    host: String,
    /// Ranks with equal keys can share memory.
    key: String,
    /// The cores that it may run on.
    cores: Cores,
}

fn exchange_infos(meeting: &mut dyn Meeting, lookup: Lookup<'_>) -> Result<Vec<RankInfo>> {
    let host = lookup(TEST_HOST).unwrap_or_else(host_name);
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // Ranks in two containers of one machine do not see each other's processes.
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    // SAFETY: geteuid takes nothing, touches nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let key = format!("{host} {} {} {user}", boot.trim(), namespace.display());
    let infos = meeting.exchange(&json!([host, key, cores::own_cores()]))?;
    let info = |info| serde_json::from_value(info).unwrap_or_default();
    Ok(infos.into_iter().map(info).collect())
}

/// The memory that the ranks of this host share. The inner error, that some ranks could not, is the
/// same on all ranks of the job.
fn share_memory(
    meeting: &mut dyn Meeting,
    placement: &Placement,
    infos: &[RankInfo],
    limits: Result<()>,
) -> Result<Result<Segment>> {
    let (leader, local_size) = (placement.here()[0], placement.here().len());
    let made = (placement.local_rank == 0).then(|| Segment::create(local_size));
    let fd = made
        .as_ref()
        .and_then(|made| made.as_ref().ok())
        .map(Segment::fd);
    let fds = meeting.exchange(&json!([std::process::id(), fd.unwrap_or(-1)]))?;
    let segment = made.unwrap_or_else(|| {
        let [pid, fd] = [0, 1].map(|at| fds[leader][at].as_i64().unwrap_or(-1) as i32);
        Segment::open(pid as u32, fd, local_size)
    });
    let segment = limits.and(segment);
    if let Ok(segment) = &segment {
        Board::new(segment).enrol(placement.local_rank);
    }
    let problem = segment.as_ref().err();
    let is_limit = matches!(problem, Some(Error::Limit(_)));
    let problems = meeting.exchange(&json!([problem.map(ToString::to_string), is_limit]))?;
    let mut problems = problems.iter().enumerate();
    Ok(
        match problems.find_map(|(rank, problem)| Some((rank, problem[0].as_str()?, &problem[1]))) {
            None => segment,
            Some((rank, problem, is_limit)) => {
                let action = format!("share memory between the ranks of {}", infos[rank].host);
                const HELP: &str =
                    "run the ranks of a host as one user in one PID namespace, with /proc mounted";
                let (reason, help) = problem.split_once("; help: ").unwrap_or((problem, HELP));
                let problem = Problem::new(action, format!("rank {rank}: {reason}"), help);
                Err(match is_limit.as_bool() {
                    Some(true) => Error::Limit(problem),
                    _ => Error::Setup(problem),
                })
            }
        },
    )
}

/// Makes the settings of NCCL, which it reads from the environment only. What the user has set
/// stays.
pub(super) fn apply_settings(options: &Options, are_on_one_host: bool) {
    let ranks = RankKind::Processes {
        share_gpus: options.share_gpus,
        are_on_one_host,
    };
    let lookup = |name: &str| std::env::var(name).ok();
    environment::apply(environment::settings(ranks, options.nccl, &lookup));
}

/// A socket that our own launcher has given to this process. A copy that programs started by this
/// process do not inherit.
pub(super) fn inherited(fd: RawFd) -> Result<OwnedFd> {
    static TAKEN: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
    let mut taken = panics::lock(&TAKEN);
    if taken.contains(&fd) {
        let help = "connect one world in a process";
        return Err(Error::setup(ACTION, "its sockets are taken already", help));
    }
    let refused = |got: String| Error::launch(OWN_JOB, "an inherited socket", got);
    let kind = std::fs::metadata(format!("/proc/self/fd/{fd}"));
    let kind = kind.map_err(|error| refused(format!("descriptor {fd}: {error}")))?;
    if !kind.file_type().is_socket() {
        return Err(refused(format!("descriptor {fd}, which is not a socket")));
    }
    taken.push(fd);
    // SAFETY: the variable gives this process the descriptor, which is open, a socket and above the
    // standard streams. Nothing else in this process owns it: it was inherited, and `TAKEN` lets
    // one call take it.
    let socket = File::from(unsafe { OwnedFd::from_raw_fd(fd) }).try_clone();
    let socket = socket.map_err(|error| Error::setup(ACTION, error, "start the job again"))?;
    Ok(OwnedFd::from(socket))
}

#[cfg(test)]
mod tests;
