//! How ranks that a launcher started find each other: over MPI they exchange who they are; then
//! those of one host share memory. On a single host MPI is idle from then on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::links::processes::ProcessRank;
use super::links::{Links, Start};
use super::options::Options;
use crate::background::Background;
use crate::cores::{self, Cores};
use crate::error::{Error, Problem, Remedy, Result, Seconds};
use crate::failure::lifeline::Lifeline;
use crate::failure::{self, Failure};
use crate::hosts::Placement;
use crate::identity::{Identity, host_name};
use crate::launcher::{
    Launch, Launcher, Lookup, is_first_of_host, launcher_folder, likely_rank, patience,
    stopped_note,
};
use crate::limits;
use crate::mpi::{Comm, Job, reported_by_rank_0};
use crate::nccl::environment::{self, RankKind};
use crate::process::{Peer, Process};
use crate::say::print_line;
use crate::shared::{Board, Segment};

/// Makes this rank claim a host of this name, so that one machine can stand in for several hosts.
/// For tests.
const TEST_HOST: &str = "DDP_TEST_HOST";
/// The exit code of a rank that waited for others without success.
const EXIT_LATE: u8 = 77;
/// How long a rank that has finished its work waits for MPI to end.
const FINALIZE_MAX: Duration = Duration::from_secs(10);
/// How much longer than the deadlines of a step, which name the missing ranks, its guard waits.
const GUARD_MARGIN: Duration = Duration::from_secs(5);

/// What the world of the ranks of `launch` starts with; None if MPI finds this rank alone.
pub(super) fn connect(options: &Options, launch: &Launch) -> Result<Option<Start>> {
    let lookup = |name: &str| std::env::var(name).ok();
    check_limits(options, launch)?;
    apply_settings(options, launch, &lookup);
    let job = start_mpi(options)?;
    let (rank, size) = (job.world().rank(), job.world().size());
    if size == 1 {
        let _guard = Background::deadline(FINALIZE_MAX, || failure::leave_at_once(EXIT_LATE))?;
        job.finalize();
        return Ok(None);
    }
    let launched = Meeting {
        comm: job.world(),
        options,
        rank,
    };
    let mut cards = exchange_cards(&launched, &lookup)?;
    let (base, rank) = launched.by_host(&mut cards)?;
    let meeting = Meeting {
        comm: &base,
        options,
        rank,
    };
    let keys: Vec<&str> = cards.iter().map(|card| card.key.as_str()).collect();
    let placement = Placement::new(&keys, rank);
    let segment = share_memory(&meeting, &placement, &cards)?
        .and_then(|segment| check_threads(&placement, &job).map(|()| segment))
        .map_err(|error| match rank {
            0 => error,
            _ => reported_by_rank_0(error),
        })?;
    let lifeline = lifeline(&meeting, &placement)?;
    let (here, board) = (placement.here(), Board::new(&segment));
    board.show_beats(placement.local_rank);
    let failure = Failure {
        identity: Identity {
            program: options.program.clone(),
            rank,
            size,
            local_rank: placement.local_rank,
            local_size: here.len(),
            host: cards[rank].host.clone(),
        },
        board,
        remedy_text: options.remedy_text,
        peers: peers(&placement, &cards),
        launcher: Process::parent(),
        // mpirun ends the ranks that are left, and its exit code is that of the first to end, which
        // must not be a kill.
        must_kill: launch.launcher != Launcher::OpenMpi,
        lifeline,
    };
    let masks: Vec<Cores> = here.iter().map(|&rank| cards[rank].cores.clone()).collect();
    let rank = ProcessRank {
        timeout: options.timeout,
        base,
        segment,
        is_roomy: cores::are_roomy(&masks, here.len()),
        placement,
    };
    Ok(Some(Start {
        host_count: rank.placement.hosts.len(),
        links: Links::Processes(rank),
        failure,
        masks,
        launcher_cores: cores::launcher_cores(),
        unbind: launch.unbind(&lookup),
        job: Some(job),
    }))
}

/// How this rank hears of other hosts, if there are any.
fn lifeline(meeting: &Meeting<'_>, placement: &Placement) -> Result<Option<Lifeline>> {
    let others = placement.elsewhere();
    if others.is_empty() {
        return Ok(None);
    }
    Ok(Some(Lifeline {
        comm: meeting.duplicate()?,
        others,
        is_on_first_host: placement.host == 0,
        host: placement.host,
        leaders: placement.other_leaders(),
    }))
}

/// Refuses limits that are too small for this rank, before MPI fails on them: an error of the first
/// rank of the host that has them.
fn check_limits(options: &Options, launch: &Launch) -> Result<()> {
    let checked = limits::check(launch.local_size.unwrap_or(1).max(1));
    checked.map_err(|error| {
        if !is_first_of_host(launcher_folder().as_deref()) {
            return reported_by_rank_0(error);
        }
        let (program, rank) = (&options.program, likely_rank());
        print_line(&format!(
            "{program}: rank {rank} on {}: {error}\n",
            host_name()
        ));
        reported_by_rank_0(error)
    })
}

fn check_threads(placement: &Placement, job: &Job) -> Result<()> {
    if placement.hosts.len() == 1 || job.threads_may_call() {
        return Ok(());
    }
    let reason = "this MPI library may only be used by one thread (no MPI_THREAD_MULTIPLE)";
    let help = "use one built for threads: Open MPI and MPICH are by default";
    Err(Error::setup("bring the ranks together", reason, help))
}

fn peers(placement: &Placement, cards: &[Card]) -> Vec<Peer> {
    let all = placement.here().iter().enumerate();
    let others = all.filter(|(local_rank, _)| *local_rank != placement.local_rank);
    let peer = |(local_rank, &rank): (usize, &usize)| Peer {
        rank,
        local_rank,
        process: Process::open(cards[rank].pid),
    };
    others.map(peer).collect()
}

/// What a rank tells all others about itself.
struct Card {
    host: String,
    /// Ranks with equal keys can share memory.
    key: String,
    pid: u32,
    /// The cores that it may run on.
    cores: Cores,
}

fn exchange_cards(meeting: &Meeting<'_>, lookup: Lookup<'_>) -> Result<Vec<Card>> {
    let host = lookup(TEST_HOST).unwrap_or_else(host_name);
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // Ranks in two containers of one machine do not see each other's processes.
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    // SAFETY: geteuid takes nothing, touches nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let key = format!("{host} {} {} {user}", boot.trim(), namespace.display());
    let cards = meeting.exchange(&json!([host, key, std::process::id(), cores::own_cores()]))?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let number = |value: &Value| value.as_u64().unwrap_or(0) as usize;
    let card = |card: &Value| Card {
        host: text(&card[0]),
        key: text(&card[1]),
        pid: number(&card[2]) as u32,
        cores: card[3]
            .as_array()
            .map_or_else(Vec::new, |all| all.iter().map(number).collect()),
    };
    Ok(cards.iter().map(card).collect())
}

/// The memory that the ranks of this host share. The inner error, that some ranks could not, is the
/// same on all ranks of the job.
fn share_memory(
    meeting: &Meeting<'_>,
    placement: &Placement,
    cards: &[Card],
) -> Result<Result<Segment>> {
    let (leader, local_size) = (placement.here()[0], placement.here().len());
    let made = (placement.local_rank == 0).then(|| Segment::create(local_size));
    let fd = made
        .as_ref()
        .and_then(|made| made.as_ref().ok())
        .map(Segment::fd);
    let fds = meeting.exchange(&json!([fd.unwrap_or(-1)]))?;
    let segment = made.unwrap_or_else(|| {
        let fd = fds[leader][0].as_i64().unwrap_or(-1) as i32;
        Segment::open(cards[leader].pid, fd, local_size)
    });
    let problem = segment.as_ref().err();
    let is_limit = matches!(problem, Some(Error::Limit(_)));
    let problems = meeting.exchange(&json!([problem.map(ToString::to_string), is_limit]))?;
    let mut problems = problems.iter().enumerate();
    Ok(
        match problems.find_map(|(rank, problem)| Some((rank, problem[0].as_str()?, &problem[1]))) {
            None => segment,
            Some((rank, problem, is_limit)) => {
                let action = format!("share memory between the ranks of {}", cards[rank].host);
                let reason = format!("rank {rank}: {problem}");
                let help =
                    "run the ranks of a host as one user in one PID namespace, with /proc mounted";
                Err(match is_limit.as_bool() {
                    Some(true) => {
                        let help = "give all ranks the same limits";
                        Error::Limit(Problem::new(action, reason, help))
                    }
                    _ => Error::setup(action, reason, help),
                })
            }
        },
    )
}

/// Starts MPI, and ends this process if that takes too long: a rank that never comes would keep the
/// others waiting in there.
fn start_mpi(options: &Options) -> Result<Job> {
    let rank = likely_rank();
    let text = format!(
        "not all ranks started MPI within {}",
        Seconds(options.timeout)
    );
    let help = "check whether one has ended, is stopped or is still starting";
    let action = report_and_leave(options, rank, text, help);
    let limit = options.timeout.saturating_add(patience(rank));
    let _guard = Background::deadline(limit, action)?;
    Job::start()
}

/// The end of a process that cannot reach the other ranks.
fn report_and_leave(
    options: &Options,
    rank: usize,
    text: String,
    help: &'static str,
) -> impl FnOnce() + Send + 'static {
    let (program, host) = (&options.program, host_name());
    let remedy = (options.remedy_text)(Remedy::LongerTimeout);
    let start = format!("{program}: rank {rank} on {host}: {text}");
    // Read now: MPI changes the environment when it starts.
    let folder = launcher_folder();
    move || {
        if is_first_of_host(folder.as_deref()) {
            let line = format!("{start}{}; help: {help}; {remedy}", stopped_note());
            print_line(&format!("{}\n", line.trim_end_matches("; ")));
        }
        failure::leave_at_once(EXIT_LATE)
    }
}

/// Ends MPI in good order, or this process if another rank prevents that.
pub(super) fn end(job: Job, failure: &Arc<Failure>, timeout: Duration) {
    let (bound, failure) = (timeout.min(FINALIZE_MAX), Arc::clone(failure));
    let text = format!(
        "MPI did not end within {}: another rank is stopped or stuck at its end (all ranks had \
         finished their work)",
        Seconds(bound)
    );
    let text = move || text + &stopped_note();
    let limit = bound.saturating_add(patience(failure.identity.rank));
    // Without a thread there is no guard.
    let _guard = Background::deadline(limit, move || failure.give_up(text(), EXIT_LATE));
    job.finalize();
}

/// Ranks that meet over MPI.
struct Meeting<'a> {
    comm: &'a Comm,
    options: &'a Options,
    rank: usize,
}

impl Meeting<'_> {
    /// A guard for a step that ends within the timeout or names the missing ranks: it ends this
    /// process if MPI does neither.
    fn guard(&self) -> Result<Background> {
        let limit = self.options.timeout.saturating_mul(2);
        let limit = limit.saturating_add(GUARD_MARGIN + patience(self.rank));
        let text = format!(
            "MPI did not bring the ranks together within {}",
            Seconds(limit)
        );
        let help = "check whether they are stopped";
        Background::deadline(limit, report_and_leave(self.options, self.rank, text, help))
    }

    /// The same ranks, numbered host by host, and this rank's number: sums add in this order,
    /// along the hosts. Sorts `cards` alike.
    fn by_host(&self, cards: &mut [Card]) -> Result<(Comm, usize)> {
        let keys: Vec<String> = cards.iter().map(|card| card.key.clone()).collect();
        let host = |key: &String| keys.iter().position(|other| other == key);
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by_key(|&rank| host(&keys[rank]));
        let rank = order.iter().position(|&rank| rank == self.rank);
        let rank = rank.expect("every rank has a card");
        cards.sort_by_cached_key(|card| host(&card.key));
        let _guard = self.guard()?;
        let comm = match order.is_sorted() {
            true => self.comm.duplicate(self.options.timeout)?,
            false => self.comm.reordered(rank, self.options.timeout)?,
        };
        Ok((comm, rank))
    }

    fn duplicate(&self) -> Result<Comm> {
        let _guard = self.guard()?;
        self.comm.duplicate(self.options.timeout)
    }

    /// The `value` of every rank. A value that is too long becomes null.
    fn exchange(&self, value: &Value) -> Result<Vec<Value>> {
        const BLOCK_BYTES: usize = 8192;
        let _guard = self.guard()?;
        let mut block = value.to_string().into_bytes();
        block.resize(BLOCK_BYTES, b' ');
        let blocks = self.comm.all_gather(block, self.options.timeout)?;
        let values = blocks
            .iter()
            .map(|block| serde_json::from_slice(block).unwrap_or_default());
        Ok(values.collect())
    }
}

/// Makes the settings of Open MPI and NCCL, which they read from the environment only. What the
/// user has set stays.
fn apply_settings(options: &Options, launch: &Launch, lookup: Lookup<'_>) {
    let ranks = RankKind::Processes {
        share_gpus: options.share_gpus,
        are_on_one_host: launch.is_on_one_host(),
    };
    let of_mpi = mpi_settings(launch, lookup, &|folder| Path::new(folder).is_dir());
    let of_nccl = environment::settings(ranks, options.nccl, lookup);
    environment::apply(of_mpi.into_iter().chain(of_nccl));
}

/// Open MPI's settings: its files are kept out of /dev/shm, where they stay when it is killed; and
/// its sockets off the network if all ranks are on this host, where it only connects them at first.
fn mpi_settings(
    launch: &Launch,
    lookup: Lookup<'_>,
    is_folder: &dyn Fn(&str) -> bool,
) -> Vec<(&'static str, String)> {
    if launch.launcher != Launcher::OpenMpi {
        return Vec::new();
    }
    let mut all = Vec::new();
    if launch.is_on_one_host() {
        // Open MPI's own shared memory only: TCP listens on every interface, OFI on the first.
        // Without them MPI also starts in 0.04 s instead of 0.3 s.
        all.push(("OMPI_MCA_pml", "ob1".to_string()));
        all.push(("OMPI_MCA_btl", "^tcp,ofi,openib,usnic,uct".to_string()));
    }
    // The launcher's own folder, which it removes however ranks end. The names are those of
    // versions 4 and 5.
    if let Some(folder) = lookup("PMIX_SERVER_TMPDIR").filter(|folder| is_folder(folder)) {
        all.push(("OMPI_MCA_btl_vader_backing_directory", folder.clone()));
        all.push(("OMPI_MCA_btl_sm_backing_directory", folder));
    }
    all.retain(|(name, _)| lookup(name).is_none());
    all
}

#[cfg(test)]
mod tests;
