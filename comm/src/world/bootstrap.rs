//! How ranks that a launcher started find each other: over MPI they tell who they are; then those of one host share memory.
//! On a single host MPI is idle from then on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::guard::{Guard, is_first_of_host, launcher_folder, turn};
use super::{Links, Options, Transport, World, host_name};
use crate::collective::Collective;
use crate::error::{Cause, Error, Result, Seconds};
use crate::failure::lifeline::Lifeline;
use crate::failure::{self, Failure, Peer};
use crate::hosts::{Hosts, Placement};
use crate::launcher::{Launch, Launcher, Lookup, likely_rank};
use crate::mpi::{Comm, Job, Mpi};
use crate::nccl::environment::{self, Ranks};
use crate::share;
use crate::shared::{Board, Segment, Shared};
use crate::watch::Process;

/// Makes this rank claim to be on a host of this name, so that one machine can stand in for several. For tests.
const TEST_HOST: &str = "DDP_TEST_HOST";

/// The world of the ranks that `launch` speaks of; none if MPI finds this rank alone.
pub(super) fn connect(options: &Options, launch: &Launch) -> Result<Option<World>> {
    let lookup = |name: &str| std::env::var(name).ok();
    restrain(options, launch, &lookup);
    let timeout = options.timeout;
    let guard = guarded(options)?;
    let job = Job::start()?;
    let (rank, size) = (job.world().rank(), job.world().size());
    if size == 1 {
        guard.next(FINALIZE_MAX, || failure::leave_at_once(EXIT_LATE));
        job.finalize();
        return Ok(None);
    }
    let meeting = Meeting { comm: job.world(), guard: &guard, options, rank };
    let cards = exchange_cards(&meeting, &lookup)?;
    let keys: Vec<&str> = cards.iter().map(|card| card.key.as_str()).collect();
    let mut placement = Placement::new(&keys, rank);
    let segment = match share_memory(&meeting, &placement, &cards)? {
        Ok(segment) => segment,
        Err(error) if options.transport == Transport::SharedMemory => return Err(said_by_rank_0(rank, &cards, error)),
        Err(error) => {
            if rank == 0 {
                tracing::warn!("ranks of one host talk through MPI, which is slower: {error}");
            }
            placement = Placement::apart(size, rank);
            Segment::in_process(1)?
        }
    };
    check_transport(options.transport, &placement, &job).map_err(|error| said_by_rank_0(rank, &cards, error))?;
    let board = Board::new(&segment);
    board.set_pid(placement.local_rank, std::process::id());

    let others = placement.elsewhere();
    let lifeline = if others.is_empty() {
        None
    } else {
        Some(Lifeline { comm: meeting.duplicate()?, others, is_on_first_host: placement.host == 0 })
    };
    let failure = Failure {
        program: options.program.clone(),
        rank,
        size,
        local_rank: placement.local_rank,
        local_size: placement.here().len(),
        host: cards[rank].host.clone(),
        board: board.clone(),
        peers: peers(&placement, &cards),
        // SAFETY: getppid takes nothing, touches nothing and cannot fail. 0 is a parent outside this PID namespace.
        launcher: Some(unsafe { libc::getppid() } as u32).filter(|&pid| pid != 0).map(Process::open),
        // mpirun ends the ranks that are left, and its exit code is that of the first to end: let that not be a kill.
        must_kill: launch.launcher != Launcher::OpenMpi,
        lifeline,
    };
    let (host_count, here) = (placement.hosts.len(), placement.here().to_vec());
    let base = meeting.duplicate()?;
    // The control group may be a communicator too.
    meeting.step();
    let links = Links::Mpi(Wide { transport: options.transport, timeout, base, segment, board, placement });
    let mut world = World::new(links, timeout, host_count, failure, vec![share::own_cores(); here.len()])?;
    drop(guard);
    world.of_processes = true;
    world.share_gpus = options.share_gpus;
    world.job = Some(job);
    world.unbind = launch.unbind(&lookup);

    let masks = world.all_gather_bytes(&share::encode(&share::own_cores()))?;
    let masks: Vec<share::Cores> = here.iter().map(|&rank| share::decode(&masks[rank])).collect();
    world.share = share::share(&masks, world.local_rank(), share::launcher_cores());
    world.warn_of_narrow_cores();
    Ok(Some(world))
}

/// How groups are made of ranks in processes.
#[derive(Debug)]
pub(super) struct Wide {
    transport: Transport,
    timeout: Duration,
    base: Comm,
    segment: Segment,
    board: Board,
    placement: Placement,
}

impl Wide {
    pub(super) fn collective(&self, channel: usize) -> Result<Arc<dyn Collective>> {
        let Wide { placement, segment, .. } = self;
        let (local_rank, here) = (placement.local_rank, placement.here().to_vec());
        if self.transport != Transport::Mpi && placement.hosts.len() == 1 {
            return Ok(Arc::new(Shared::new(segment.clone(), channel, local_rank, here.len(), here)?));
        }
        let mpi = Mpi::new(self.base.duplicate(self.timeout)?, self.board.clone());
        if self.transport == Transport::Mpi || !placement.is_in_order() {
            return Ok(Arc::new(mpi));
        }
        let local = Shared::new(segment.clone(), channel, local_rank, here.len(), here)?;
        Ok(Arc::new(Hosts::new(local, mpi, placement.clone())))
    }
}

fn check_transport(transport: Transport, placement: &Placement, job: &Job) -> Result<()> {
    let refuse = |reason: String, way_out: &str| {
        Err(Error::Setup { action: "bring the ranks together".into(), reason, way_out: way_out.into() })
    };
    let host_count = placement.hosts.len();
    if transport == Transport::SharedMemory && host_count > 1 {
        let reason = format!("they are on {host_count} hosts, and shared memory was asked for");
        return refuse(reason, "Start them on one host, or let the transport be chosen (auto).");
    }
    if (transport == Transport::Mpi || host_count > 1) && !job.threads_may_call() {
        let reason = "this MPI library lets one thread only use it (no MPI_THREAD_MULTIPLE)".to_string();
        return refuse(reason, "Use one built for threads: Open MPI and MPICH are by default.");
    }
    Ok(())
}

/// An error that all ranks have found, for one of them to print.
fn said_by_rank_0(rank: usize, cards: &[Card], error: Error) -> Error {
    let cause =
        || Cause { rank: 0, host: cards[0].host.clone(), exit_code: error.exit_code(), text: error.to_string() };
    if rank == 0 { error } else { Error::PeerFailed(Box::new(cause())) }
}

fn peers(placement: &Placement, cards: &[Card]) -> Vec<Peer> {
    let peer = |(local_rank, &rank): (usize, &usize)| {
        (local_rank != placement.local_rank).then(|| Peer { rank, local_rank, process: Process::open(cards[rank].pid) })
    };
    placement.here().iter().enumerate().filter_map(peer).collect()
}

/// What a rank tells all others of itself.
struct Card {
    host: String,
    /// Ranks of one key can share memory.
    key: String,
    pid: u32,
}

fn exchange_cards(meeting: &Meeting<'_>, lookup: Lookup<'_>) -> Result<Vec<Card>> {
    let host = lookup(TEST_HOST).unwrap_or_else(host_name);
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_string()).unwrap_or_default();
    let boot = read("/proc/sys/kernel/random/boot_id");
    // Ranks in two containers of one machine do not see each other's processes.
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    // SAFETY: geteuid takes nothing, touches nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let key = format!("{host} {boot} {} {user}", namespace.display());
    let cards = meeting.exchange(&json!([host, key, std::process::id()]))?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let card =
        |card: &Value| Card { host: text(&card[0]), key: text(&card[1]), pid: card[2].as_u64().unwrap_or(0) as u32 };
    Ok(cards.iter().map(card).collect())
}

/// The memory that the ranks of this host share. The inner error is one that all ranks of the job see alike: some could not.
fn share_memory(meeting: &Meeting<'_>, placement: &Placement, cards: &[Card]) -> Result<Result<Segment>> {
    let (leader, local_size) = (placement.here()[0], placement.here().len());
    let made = (placement.local_rank == 0).then(|| Segment::create(local_size));
    let fd = match &made {
        Some(Ok(segment)) => segment.fd(),
        _ => -1,
    };
    let fds = meeting.exchange(&json!([fd]))?;
    let segment = match made {
        Some(made) => made,
        None => {
            let fd = fds[leader][0].as_i64().unwrap_or(-1) as i32;
            Segment::open(cards[leader].pid, fd, local_size)
        }
    };
    let problem = segment.as_ref().err().map(ToString::to_string);
    let problems = meeting.exchange(&json!([problem]))?;
    let first = problems.iter().enumerate().find_map(|(rank, problem)| Some((rank, problem[0].as_str()?)));
    Ok(match first {
        None => segment,
        Some((rank, problem)) => Err(Error::Setup {
            action: format!("share memory between the ranks of {}", cards[rank].host),
            reason: format!("rank {rank}: {problem}"),
            way_out: "MPI works without it.".into(),
        }),
    })
}

/// The exit code of a rank that waited for others in vain.
const EXIT_LATE: u8 = 77;
/// How long a rank that has done all its work waits for MPI to end.
const FINALIZE_MAX: Duration = Duration::from_secs(10);
/// How much longer than a deadline that is told by name the guard waits: two exchanges, and their words.
const GUARD_MARGIN: Duration = Duration::from_secs(5);

/// A guard that ends this process if MPI does not start in time: a rank that never comes keeps the others in there for ever.
fn guarded(options: &Options) -> Result<Guard> {
    let rank = likely_rank();
    let text = format!(
        "{}: rank {rank} on {}: not all ranks started MPI within {}. See whether one has ended, is stopped or is still \
         starting; --timeout-s sets how long to wait.\n",
        options.program,
        host_name(),
        Seconds(options.timeout)
    );
    Guard::start(options.timeout.saturating_add(turn(rank)), say_and_leave(text)).map_err(|error| Error::Setup {
        action: "guard the start of MPI".into(),
        reason: error.to_string(),
        way_out: "Raise the limit on threads (ulimit -u).".into(),
    })
}

/// The end of a process that hears nothing of the other ranks yet.
fn say_and_leave(text: String) -> impl FnOnce() + Send + 'static {
    // MPI changes the environment when it starts: not to be read then by another thread.
    let folder = launcher_folder();
    move || {
        if is_first_of_host(folder.as_deref()) {
            failure::say(&text);
        }
        failure::leave_at_once(EXIT_LATE)
    }
}

/// Ends MPI in good order, or this process if another rank keeps it from that.
pub(super) fn end(job: Job, failure: &Arc<Failure>, timeout: Duration) {
    let (bound, failure) = (timeout.min(FINALIZE_MAX), Arc::clone(failure));
    let text = format!(
        "MPI did not end within {}: another rank is stopped or stuck at its end. All ranks had done their work.",
        Seconds(bound)
    );
    // Without a thread to spare there is no guard.
    let _guard = Guard::start(bound.saturating_add(turn(failure.rank)), move || failure.give_up(text, EXIT_LATE));
    job.finalize();
}

/// Ranks that come together.
struct Meeting<'a> {
    comm: &'a Comm,
    guard: &'a Guard,
    options: &'a Options,
    rank: usize,
}

impl Meeting<'_> {
    /// Begins a step that is over within the timeout, or else says so: the guard speaks only if MPI lets nobody speak.
    fn step(&self) {
        let Options { timeout, program, .. } = self.options;
        let limit = timeout.saturating_mul(2).saturating_add(GUARD_MARGIN + turn(self.rank));
        let text = format!(
            "{program}: rank {} on {}: MPI did not bring the ranks together within {}. See whether they are stopped; \
             --timeout-s sets how long to wait.\n",
            self.rank,
            host_name(),
            Seconds(limit)
        );
        self.guard.next(limit, say_and_leave(text));
    }

    fn duplicate(&self) -> Result<Comm> {
        self.step();
        self.comm.duplicate(self.options.timeout)
    }

    /// The `value` of every rank; a long one is cut, and then is null.
    fn exchange(&self, value: &Value) -> Result<Vec<Value>> {
        const BLOCK_BYTES: usize = 2048;
        self.step();
        let mut block = value.to_string().into_bytes();
        block.resize(BLOCK_BYTES, b' ');
        let blocks = self.comm.all_gather(block, self.options.timeout)?;
        Ok(blocks.iter().map(|block| serde_json::from_slice(block).unwrap_or(Value::Null)).collect())
    }
}

/// Keeps Open MPI's files out of /dev/shm, where they stay when it is killed; and its sockets off the network where all
/// ranks are on this host, for there it only introduces them to each other. NCCL's settings are made too: `nccl/environment.rs`. What the
/// user has set stays. Both take their settings from the environment alone.
fn restrain(options: &Options, launch: &Launch, lookup: Lookup<'_>) {
    let ranks = Ranks::Processes { share_gpus: options.share_gpus, are_on_one_host: launch.is_on_one_host() };
    let of_nccl = environment::settings(ranks, lookup);
    environment::apply(settings(launch, lookup, &|folder| Path::new(folder).is_dir()).into_iter().chain(of_nccl));
}

/// The settings that `restrain` makes.
fn settings(launch: &Launch, lookup: Lookup<'_>, is_folder: &dyn Fn(&str) -> bool) -> Vec<(&'static str, String)> {
    if launch.launcher != Launcher::OpenMpi {
        return Vec::new();
    }
    let mut all = Vec::new();
    if launch.is_on_one_host() {
        // Point to point by Open MPI's own code, and over no network: what is left is its shared memory. TCP listens on
        // every interface, OFI on the first. Without them MPI also starts in 0.04 s instead of 0.3 s.
        all.push(("OMPI_MCA_pml", "ob1".to_string()));
        all.push(("OMPI_MCA_btl", "^tcp,ofi,openib,usnic,uct".to_string()));
    }
    // The launcher's own folder, which it removes however the ranks end. The two names are those of versions 4 and 5.
    if let Some(folder) = lookup("PMIX_SERVER_TMPDIR").filter(|folder| is_folder(folder)) {
        all.push(("OMPI_MCA_btl_vader_backing_directory", folder.clone()));
        all.push(("OMPI_MCA_btl_sm_backing_directory", folder));
    }
    all.retain(|(name, _)| lookup(name).is_none());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON_ONE_HOST: Launch = Launch { launcher: Launcher::OpenMpi, size: Some(2), local_size: Some(2) };

    #[test]
    fn on_one_host_open_mpi_keeps_to_it_unless_the_user_says_otherwise() {
        let lookup = |name: &str| match name {
            "PMIX_SERVER_TMPDIR" => Some("/tmp/session".to_string()),
            "OMPI_MCA_btl" => Some("self,tcp".to_string()),
            _ => None,
        };
        let set = settings(&ON_ONE_HOST, &lookup, &|_| true);
        let names: Vec<&str> = set.iter().map(|(name, _)| *name).collect();
        let folders = ["OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory"];
        assert_eq!(names, ["OMPI_MCA_pml", folders[0], folders[1]]);
        assert_eq!(settings(&ON_ONE_HOST, &|_| None, &|_| true).len(), 2);
        assert_eq!(settings(&ON_ONE_HOST, &lookup, &|_| false).len(), 1);
    }

    #[test]
    fn between_hosts_the_network_stays_and_other_launchers_are_left_alone() {
        let lookup = |name: &str| (name == "PMIX_SERVER_TMPDIR").then(|| "/tmp/session".to_string());
        let two_hosts = settings(&Launch { size: Some(4), ..ON_ONE_HOST }, &lookup, &|_| true);
        assert!(two_hosts.len() == 2 && two_hosts.iter().all(|(_, value)| value == "/tmp/session"), "{two_hosts:?}");
        let slurm = Launch { launcher: Launcher::Pmix, size: None, local_size: None };
        assert!(settings(&slurm, &lookup, &|_| true).is_empty());
    }
}
