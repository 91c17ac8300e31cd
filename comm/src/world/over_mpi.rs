//! How ranks meet over MPI: starting it with a deadline, its settings, and its end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::meeting::{ACTION, Meeting, Network, Numbers};
use super::options::Options;
use crate::background::Background;
use crate::error::{Error, Remedy, Result, Seconds};
use crate::identity::host_name;
use crate::launch::limits;
use crate::launcher::{
    Launch, Launcher, Lookup, is_first_of_host, launcher_folder, likely_rank, patience,
    stopped_note,
};
use crate::say::print_line;
use crate::transport::failure::{self, Failure};
use crate::transport::mpi::{self, MpiJob};
use crate::transport::placement::Placement;
use crate::transport::tcp::{self, SECRET, Secret};

/// The exit code of a rank that waited for others without success.
const EXIT_LATE: u8 = 77;
/// How long a rank that has finished its work waits for MPI to end.
const FINALIZE_MAX: Duration = Duration::from_secs(10);
/// How often MPI works on what is under way while ranks connect.
const PERIOD: Duration = Duration::from_millis(10);

/// Ranks that meet over MPI.
pub(super) struct MpiRanks<'a> {
    job: MpiJob,
    numbers: Numbers,
    options: &'a Options,
    /// Lets MPI work between exchanges: what a rank has sent in one may not have left yet.
    progress: Option<Background>,
}

impl MpiRanks<'_> {
    /// Starts MPI. None if this rank is alone.
    pub(super) fn meet(options: &Options) -> Result<Option<MpiRanks<'_>>> {
        let job = start_mpi(options)?;
        let numbers = Numbers::new(job.rank(), job.size());
        if job.size() == 1 {
            let _guard = Background::deadline(FINALIZE_MAX, || failure::leave_at_once(EXIT_LATE))?;
            job.finalize();
            return Ok(None);
        }
        Ok(Some(MpiRanks {
            job,
            numbers,
            options,
            progress: None,
        }))
    }

    /// MPI, to be ended by [`end`].
    pub(super) fn into_job(self) -> MpiJob {
        self.job
    }
}

impl Meeting for MpiRanks<'_> {
    fn numbers(&mut self) -> &mut Numbers {
        &mut self.numbers
    }

    fn timeout(&self) -> Duration {
        self.options.timeout
    }

    fn exchange_within(&mut self, value: &Value, limit: Duration) -> Result<Vec<Value>> {
        // One thread at a time calls MPI.
        self.progress = None;
        let values = self.job.exchange(value, limit)?;
        self.progress = Some(Background::start("mpi", |cancelled| {
            while !cancelled.within(PERIOD) {
                mpi::advance();
            }
        })?);
        Ok(values)
    }

    fn network(&mut self, _: &Placement) -> Result<Network> {
        let lookup = |name: &str| std::env::var(name).ok();
        let mut mine = Value::Null;
        if self.numbers.came_as == 0 {
            mine = introduction(&lookup)?;
        }
        let told = self.exchange(&mine)?;
        let addresses = tcp::own_addresses(&lookup);
        if addresses.is_empty() {
            let help = "choose others with NCCL_SOCKET_IFNAME, or unset it";
            let reason = "no network interface is chosen and up";
            return Err(Error::setup(ACTION, reason, help));
        }
        Ok(Network {
            job: format!("mpi {}", told[0][0]),
            secret: secret_by(&told[0], &lookup)?,
            addresses,
            client: None,
        })
    }
}

/// What rank 0 tells all: the number of the job, and its secret, unless its user has set one, which
/// then all ranks need, and which MPI does not carry.
fn introduction(lookup: Lookup<'_>) -> Result<Value> {
    let made = lookup(SECRET).is_none().then(tcp::nonce).transpose()?;
    Ok(json!([tcp::nonce()?, made]))
}

/// The secret of a job whose rank 0 has told this.
fn secret_by(told: &Value, lookup: Lookup<'_>) -> Result<Secret> {
    let made = |name: &str| told[1].as_str().filter(|_| name == SECRET);
    Secret::read(&|name| made(name).map(String::from).or_else(|| lookup(name)))
}

/// Refuses limits that are too small for this rank, before MPI fails on them: an error of the first
/// rank of the host that has them.
pub(super) fn check_limits(launch: &Launch) -> Result<()> {
    let checked = limits::check(launch.local_size.unwrap_or(1).max(1), 1);
    checked.map_err(
        |error| match is_first_of_host(launcher_folder().as_deref()) {
            true => error,
            false => error.reported_by_rank_0(),
        },
    )
}

/// Starts MPI, and ends this process if that takes too long: a rank that never comes would keep the
/// others waiting in there.
fn start_mpi(options: &Options) -> Result<MpiJob> {
    let (program, host, rank) = (&options.program, host_name(), likely_rank());
    // A busy machine starts processes late, however short the timeout is.
    let limit = options.timeout.max(options.join_timeout);
    let within = Seconds(limit);
    let start =
        format!("{program}: rank {rank} on {host}: not all ranks started MPI within {within}");
    let remedy = (options.remedy_text)(Remedy::LongerTimeout);
    // Read now: MPI changes the environment when it starts.
    let folder = launcher_folder();
    let action = move || {
        // Once a rank has ended, mpirun lets stopped ones go on, and ends all.
        let stopped = stopped_note();
        let help = "check whether one has ended, is stopped or is still starting";
        if is_first_of_host(folder.as_deref()) {
            let line = format!("{start}{stopped}; help: {help}; {remedy}");
            print_line(&format!("{}\n", line.trim_end_matches("; ")));
        } else {
            std::thread::sleep(patience(1));
        }
        failure::leave_at_once(EXIT_LATE)
    };
    let _guard = Background::deadline(limit.saturating_add(patience(rank)), action)?;
    MpiJob::start()
}

/// Ends MPI in good order, or this process if another rank prevents that.
pub(super) fn end(job: MpiJob, failure: &Arc<Failure>, timeout: Duration) {
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

/// Open MPI's settings, which it reads from the environment only. What the user has set stays.
pub(super) fn settings(launch: &Launch, lookup: Lookup<'_>) -> Vec<(&'static str, String)> {
    settings_with(launch, lookup, &|folder| Path::new(folder).is_dir())
}

/// Its files are kept out of /dev/shm, where they stay when it is killed; and
/// its sockets off the network if all ranks are on this host, where it only connects them at first.
fn settings_with(
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
