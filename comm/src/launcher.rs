//! Which launcher or scheduler started this process, according to its environment variables.
//!
//! MPI is initialised only if the variables of an MPI launcher are set, because it takes 0.3 s. A
//! build without MPI ignores them. A process that finds itself alone although several were started
//! is warned.

use std::fs;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use ddp_kernels::panics;

use crate::error::{Error, Problem, RankList, Result};
use crate::identity::{RANKS_MAX, host_name};
use crate::process;
pub(crate) use crate::rendezvous::Lookup;
use crate::rendezvous::Rendezvous;

/// Who started this process as one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// This program itself, which started one process a rank on this host.
    Own,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH or Intel MPI (Hydra), or another that speaks PMI: `srun --mpi=pmi2`.
    Pmi,
    /// Another that speaks PMIx: `srun --mpi=pmix`, PRRTE.
    Pmix,
    /// `torchrun`.
    Torchrun,
    /// Whatever sets the variables of torchrun, such as Kubeflow.
    Variables,
    /// `srun` without PMI.
    Slurm,
}

/// What the launcher's variables say. Numbers that they do not give are None.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) launcher: Launcher,
    pub(crate) rank: usize,
    pub(crate) size: Option<usize>,
    /// Ranks on this host.
    pub(crate) local_size: Option<usize>,
}

/// The rank by the launcher's variables, 0 without any: for what happens before `World::connect`,
/// such as logging. `World::rank` is the reliable one.
pub fn likely_rank() -> usize {
    rank_by(&|name| std::env::var(name).ok()).unwrap_or(0)
}

/// The number of this process's job, if the job is elastic.
pub fn job_number() -> Option<String> {
    std::env::var(JOB_NUMBER).ok()
}

/// For how long the job of this process has run, if the program itself has started its ranks: a
/// rank may come later.
pub fn job_age() -> Duration {
    let is_own = std::env::var_os(OWN_JOB).is_some();
    let age = is_own.then(process::age_of_parent).flatten();
    age.unwrap_or_default()
}

/// 0: as `likely_rank` says; 1: this process is rank 0; 2: it is not.
static IS_RANK_0: AtomicU8 = AtomicU8::new(0);

/// Whether this process is rank 0, as far as it knows, now: in a job that continues without
/// lost ranks, another one may become it.
pub fn is_rank_0() -> bool {
    match IS_RANK_0.load(Ordering::Relaxed) {
        0 => likely_rank() == 0,
        is => is == 1,
    }
}

/// From now on this process is rank 0, or is not.
pub(crate) fn set_rank_0(is: bool) {
    IS_RANK_0.store(if is { 1 } else { 2 }, Ordering::Relaxed);
}

/// By rank, the numbers with which the ranks of this process's world were started.
static JOB_RANKS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

pub(crate) fn set_job_ranks(ranks: &[usize]) {
    *panics::lock(&JOB_RANKS) = ranks.to_vec();
}

/// A rank's number in the job, which people know.
pub(crate) fn job_rank(rank: usize) -> usize {
    panics::lock(&JOB_RANKS).get(rank).copied().unwrap_or(rank)
}

/// `rank 1 on node7: ` by the launcher's variables, or nothing for a process that is alone: for
/// errors while ranks meet.
pub(crate) fn rank_on_host() -> String {
    let lookup = |name: &str| std::env::var(name).ok();
    let launch = Launch::detect(&lookup).ok().flatten();
    let launch = launch.filter(|launch| !launch.is_of_one());
    launch.map_or_else(String::new, |launch| {
        format!("rank {} on {}: ", launch.rank, host_name())
    })
}

/// The rank by the launcher's variables.
fn rank_by(lookup: Lookup<'_>) -> Option<usize> {
    let launch = Launch::detect(lookup).ok().flatten();
    launch
        .or_else(|| Launch::of_mpi(lookup))
        .map(|launch| launch.rank)
}

/// The variable that our own launcher gives to each rank: `2/4:8` is rank 2 of 4, which has
/// inherited a socket to what started it as descriptor 8.
pub(crate) const OWN_JOB: &str = "DDP_JOB";

/// In a job that can be on several hosts: their addresses as this one reaches them, in order.
pub(crate) const HOST_ADDRESSES: &str = "DDP_JOB_HOSTS";
/// In an elastic job: a number that no other job has.
pub(crate) const JOB_NUMBER: &str = "DDP_JOB_NUMBER";

/// What that variable says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnJob {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The socket to what started this rank, which brings the ranks together.
    pub(crate) socket: RawFd,
}

impl OwnJob {
    /// None if this process is not of such a job.
    pub(crate) fn read(lookup: Lookup<'_>) -> Result<Option<OwnJob>> {
        let Some(text) = lookup(OWN_JOB) else {
            return Ok(None);
        };
        let job = OwnJob::parse(&text);
        let wrong = || Error::launch(OWN_JOB, "RANK/SIZE:SOCKET", format!("{text:?}"));
        let job = job.ok_or_else(wrong)?;
        Ok(Some(job))
    }

    fn parse(text: &str) -> Option<OwnJob> {
        let (place, socket) = text.split_once(':')?;
        let (rank, size) = place.split_once('/')?;
        let (rank, size, socket) = (rank.parse().ok()?, size.parse().ok()?, socket.parse().ok()?);
        let is_valid = rank < size && size <= RANKS_MAX && socket > libc::STDERR_FILENO;
        is_valid.then_some(OwnJob { rank, size, socket })
    }
}

/// `; rank 1 is stopped`, if some ranks of this host are: for waits that cannot tell which ranks
/// are missing. The launcher started them, as it did this process.
pub(crate) fn stopped_note() -> String {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut ranks: Vec<usize> = entries.filter_map(|entry| stopped(&entry.path())).collect();
    ranks.sort_unstable();
    match ranks.len() {
        0 => String::new(),
        1 => format!("; {} is stopped", RankList(&ranks)),
        _ => format!("; {} are stopped", RankList(&ranks)),
    }
}

/// The rank of a process if it is stopped, and a rank that this process's launcher has started.
fn stopped(process: &Path) -> Option<usize> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    // The name, in brackets, may hold anything. Then come the state and the parent.
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace();
    let (state, parent) = (fields.next()?, fields.next()?);
    let is_sibling = parent.parse() == Ok(std::os::unix::process::parent_id());
    if !matches!(state, "T" | "t") || !is_sibling {
        return None;
    }
    let variables = fs::read(process.join("environ")).ok()?;
    let variables = String::from_utf8_lossy(&variables).into_owned();
    let value = |name: &str| {
        let mut all = variables.split('\0');
        let (_, value) =
            all.find_map(|it| it.split_once('=').filter(|(known, _)| *known == name))?;
        Some(value.to_string())
    };
    rank_by(&value)
}

impl Launcher {
    /// Whether the process that started this one stays until its end, which a script that sets
    /// variables may not.
    pub(crate) fn stays(self) -> bool {
        self != Launcher::Variables
    }

    /// How to let a rank run on all cores of its share.
    pub(crate) fn unbind(self, lookup: Lookup<'_>) -> &'static str {
        match self {
            _ if lookup("SLURM_STEP_ID").is_some() => {
                "srun --cpu-bind=none, or more cores a task with --cpus-per-task"
            }
            Launcher::Own | Launcher::Torchrun | Launcher::Variables | Launcher::Slurm => {
                "a wider taskset or cpuset for the program that starts the ranks"
            }
            Launcher::OpenMpi | Launcher::Pmix => "mpirun --bind-to none",
            Launcher::Pmi => "mpiexec -bind-to none (Intel MPI: I_MPI_PIN=0)",
        }
    }

    /// Whether ranks meet over MPI.
    #[cfg(feature = "mpi")]
    pub(crate) fn is_of_mpi(self) -> bool {
        matches!(self, Launcher::OpenMpi | Launcher::Pmi | Launcher::Pmix)
    }
}

impl Launch {
    /// The launch this process is part of; None if no launcher started it. An own launcher runs
    /// inside of what started it, so its variable comes first.
    pub(crate) fn detect(lookup: Lookup<'_>) -> Result<Option<Launch>> {
        Ok(match OwnJob::read(lookup)? {
            Some(job) => Some(Launch {
                launcher: Launcher::Own,
                rank: job.rank,
                size: Some(job.size),
                // The socket tells.
                local_size: None,
            }),
            None => match Launch::of_mpi(lookup).filter(|_| cfg!(feature = "mpi")) {
                Some(launch) => Some(launch),
                None => Launch::of_meeting(lookup)?,
            },
        })
    }

    /// The launch of ranks that meet over TCP.
    fn of_meeting(lookup: Lookup<'_>) -> Result<Option<Launch>> {
        let launch = |launcher| {
            move |place: Rendezvous| Launch {
                launcher,
                rank: place.rank,
                size: Some(place.size),
                local_size: place.local_size,
            }
        };
        Ok(match Rendezvous::of_torch(lookup)? {
            Some(place) if place.is_of_torchrun => Some(launch(Launcher::Torchrun)(place)),
            Some(place) => Some(launch(Launcher::Variables)(place)),
            None => Rendezvous::of_slurm(lookup)?.map(launch(Launcher::Slurm)),
        })
    }

    /// The launch of MPI's launchers, whether or not this build can use MPI.
    pub(crate) fn of_mpi(lookup: Lookup<'_>) -> Option<Launch> {
        let number = |name: &str| lookup(name)?.trim().parse::<usize>().ok();
        let launch = |launcher, rank: &str, size: &str, local_size: &str| {
            number(rank).map(|rank| Launch {
                launcher,
                rank,
                size: number(size),
                local_size: number(local_size),
            })
        };
        let [open_mpi, sizes] = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"];
        launch(
            Launcher::OpenMpi,
            open_mpi,
            sizes,
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        )
        .or_else(|| launch(Launcher::Pmi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"))
        // PMIx gives the size by its protocol only.
        .or_else(|| launch(Launcher::Pmix, "PMIX_RANK", "", ""))
    }

    /// Whether this is the only rank.
    pub(crate) fn is_of_one(&self) -> bool {
        self.size == Some(1)
    }

    /// Whether all ranks are known to be on this host.
    pub(crate) fn is_on_one_host(&self) -> bool {
        self.size.is_some() && self.size == self.local_size
    }
}

/// Who says that several processes were started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claimant {
    MpiLauncher,
    Slurm,
    Pbs,
    Torchrun,
}

/// The first variable that says that more than one process was started, and how many.
fn claim(lookup: Lookup<'_>) -> Option<(Claimant, &'static str, usize)> {
    // A step's own count takes precedence over the allocation's: `srun -n 1` in a job of four.
    let slurm = match lookup("SLURM_STEP_NUM_TASKS") {
        Some(_) => "SLURM_STEP_NUM_TASKS",
        None => "SLURM_NTASKS",
    };
    let claims = [
        (Claimant::MpiLauncher, "OMPI_COMM_WORLD_SIZE"),
        (Claimant::MpiLauncher, "PMI_SIZE"),
        (Claimant::Slurm, slurm),
        (Claimant::Pbs, "PBS_NP"),
        (Claimant::Torchrun, "WORLD_SIZE"),
    ];
    claims.into_iter().find_map(|(claimant, variable)| {
        let count = lookup(variable)?.trim().parse::<usize>().ok()?;
        (count > 1).then_some((claimant, variable, count))
    })
}

/// Refuses or warns a process that is a world of one although several were started; None if being
/// alone was requested. `with_mpi`: this build can use MPI; `mpi_started`: it did.
pub(crate) fn check_alone(
    lookup: Lookup<'_>,
    with_mpi: bool,
    mpi_started: bool,
) -> Result<Option<String>> {
    let Some((claimant, variable, count)) = claim(lookup) else {
        return Ok(None);
    };
    // `mpirun -n 1` inside an allocation of four is meant.
    let launch = Launch::detect(lookup).ok().flatten();
    if matches!(claimant, Claimant::Slurm | Claimant::Pbs)
        && launch
            .or_else(|| Launch::of_mpi(lookup))
            .is_some_and(|launch| launch.is_of_one())
    {
        return Ok(None);
    }
    let name = match claimant {
        Claimant::MpiLauncher => "the MPI launcher",
        Claimant::Slurm => "Slurm",
        Claimant::Pbs => "PBS",
        Claimant::Torchrun => "torchrun (or whatever set its variables)",
    };
    let help = match claimant {
        Claimant::MpiLauncher if !with_mpi => format!(
            "this program was built without MPI: build it with the feature `mpi`, or start it with \
             torchrun, srun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for each of \
             {count} ranks"
        ),
        Claimant::Slurm if !with_mpi => format!("start it with srun -n {count}"),
        Claimant::MpiLauncher => "the launcher and this program's MPI library do not match: use \
            the mpirun of the MPI that the program was built with (ldd shows its libmpi)"
            .into(),
        Claimant::Slurm if mpi_started => "Slurm's PMI and this program's MPI library do not \
            match: try srun --mpi=pmix, or mpirun inside the allocation"
            .into(),
        Claimant::Slurm => format!(
            "Slurm provided no PMI: start it with srun --mpi=pmix (srun --mpi=list shows the \
             choices), or with mpirun -n {count} inside the allocation"
        ),
        Claimant::Pbs => format!("if {count} ranks are meant, start it with mpirun -n {count}"),
        Claimant::Torchrun => "set RANK, MASTER_ADDR and MASTER_PORT too, as torchrun does".into(),
    };
    let reason = format!(
        "this process is alone, but {name} reports {count} tasks ({variable}={count}): {count} \
         such processes would each train alone and write the same files"
    );
    match claimant {
        // It starts all ranks at once. Within a batch job a script may run processes one by one.
        Claimant::MpiLauncher => Err(Error::Launch(Problem::new(
            "join the other ranks",
            reason,
            help,
        ))),
        _ => Ok(Some(format!("{reason}; help: {help}"))),
    }
}

/// How much longer than rank 0 the other ranks wait if all would report the same: `mpirun` needs a
/// second to end them once rank 0 has. If rank 0 is missing, the first of each host reports.
const PRECEDENCE: Duration = Duration::from_millis(1500);

/// How much longer `rank` waits than rank 0, where all would report the same.
pub(crate) fn patience(rank: usize) -> Duration {
    if rank == 0 {
        Duration::ZERO
    } else {
        PRECEDENCE
    }
}

/// The folder that the launcher shares with the ranks it started on this host, if it speaks PMIx.
/// Read at the first call: MPI changes the environment when it starts.
pub(crate) fn launcher_folder() -> Option<PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = || std::env::var_os("PMIX_SERVER_TMPDIR").map(PathBuf::from);
    FOLDER.get_or_init(folder).clone()
}

/// An error that every rank finds by itself: rank 0 reports it, before a launcher ends it because
/// another has ended.
pub(crate) fn of_all_ranks(error: Error) -> Error {
    match likely_rank() {
        0 => error,
        rank => {
            std::thread::sleep(patience(rank));
            error.reported_by_rank_0()
        }
    }
}

/// The file in that folder which says that a rank has reported why the job ends.
const REPORTED: &str = "ddp-late";

/// Whether a rank of this host has reported why ranks could not meet.
pub(crate) fn is_reported() -> bool {
    launcher_folder().is_some_and(|folder| folder.join(REPORTED).exists())
}

/// Whether this rank is the first of its host to ask, by a file in the launcher's folder, which
/// the launcher removes. Without a folder every rank is. The job ends soon after.
#[cfg(feature = "mpi")]
pub(crate) fn is_first_of_host(launcher_folder: Option<&Path>) -> bool {
    let Some(folder) = launcher_folder else {
        return true;
    };
    let path = folder.join(REPORTED);
    let created = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path);
    !created.is_err_and(|error| error.kind() == std::io::ErrorKind::AlreadyExists)
}

#[cfg(test)]
mod tests;
