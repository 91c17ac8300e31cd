//! How ranks meet over MPI: starting it with a deadline, its settings, and its end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::meeting::Meeting;
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
use crate::transport::messages;
use crate::transport::mpi::{MpiComm, MpiJob};
use crate::transport::placement::Placement;

/// The exit code of a rank that waited for others without success.
const EXIT_LATE: u8 = 77;
/// How long a rank that has finished its work waits for MPI to end.
const FINALIZE_MAX: Duration = Duration::from_secs(10);
/// How much longer than the deadlines of a step, which name the missing ranks, its guard waits.
const GUARD_MARGIN: Duration = Duration::from_secs(5);

/// MpiRanks that meet over MPI.
pub(super) struct MpiRanks<'a> {
    job: MpiJob,
    /// The ranks as they are numbered now; before that, those of `job`.
    renumbered: Option<MpiComm>,
    options: &'a Options,
}

impl MpiRanks<'_> {
    /// Starts MPI. None if this rank is alone.
    pub(super) fn meet(options: &Options) -> Result<Option<MpiRanks<'_>>> {
        let job = start_mpi(options)?;
        if job.world().size() == 1 {
            let _guard = Background::deadline(FINALIZE_MAX, || failure::leave_at_once(EXIT_LATE))?;
            job.finalize();
            return Ok(None);
        }
        Ok(Some(MpiRanks {
            job,
            renumbered: None,
            options,
        }))
    }

    /// MPI, to be ended by [`end`].
    pub(super) fn into_job(self) -> MpiJob {
        self.job
    }

    fn comm(&self) -> &MpiComm {
        self.renumbered.as_ref().unwrap_or(self.job.world())
    }

    /// A guard for a step that ends within the timeout or names the missing ranks: it ends this
    /// process if MPI does neither.
    fn guard(&self) -> Result<Background> {
        let limit = self.options.timeout.saturating_mul(2);
        let limit = limit.saturating_add(GUARD_MARGIN + patience(self.rank()));
        let text = format!(
            "MPI did not bring the ranks together within {}",
            Seconds(limit)
        );
        let help = "check whether they are stopped";
        let leave = report_and_leave(self.options, self.rank(), text, help);
        Background::deadline(limit, leave)
    }
}

impl Meeting for MpiRanks<'_> {
    fn rank(&self) -> usize {
        self.comm().rank()
    }

    fn exchange(&mut self, value: &Value) -> Result<Vec<Value>> {
        const BLOCK_BYTES: usize = 8192;
        let _guard = self.guard()?;
        let mut block = value.to_string().into_bytes();
        block.resize(BLOCK_BYTES, b' ');
        let blocks = self.comm().all_gather(block, self.options.timeout)?;
        let values = blocks
            .iter()
            .map(|block| serde_json::from_slice(block).unwrap_or_default());
        Ok(values.collect())
    }

    fn renumber(&mut self, order: &[usize]) -> Result<()> {
        if order.is_sorted() {
            return Ok(());
        }
        let rank = order.iter().position(|&rank| rank == self.rank());
        let rank = rank.expect("every rank has a number");
        let _guard = self.guard()?;
        self.renumbered = Some(self.comm().reordered(rank, self.options.timeout)?);
        Ok(())
    }

    fn check_hosts(&self, _: &Placement) -> Result<()> {
        if self.job.threads_may_call() {
            return Ok(());
        }
        let reason = "this MPI library may only be used by one thread (no MPI_THREAD_MULTIPLE)";
        let help = "use one built for threads: Open MPI and MPICH are by default";
        Err(Error::setup("bring the ranks together", reason, help))
    }

    fn messages(&mut self, _: &Placement, _: &[&str]) -> Result<messages::Comm> {
        let _guard = self.guard()?;
        let comm = self.comm().duplicate(self.options.timeout)?;
        Ok(messages::Comm::Mpi(comm))
    }
}

/// Refuses limits that are too small for this rank, before MPI fails on them: an error of the first
/// rank of the host that has them.
pub(super) fn check_limits(options: &Options, launch: &Launch) -> Result<()> {
    let checked = limits::check(launch.local_size.unwrap_or(1).max(1), 1);
    checked.map_err(|error| {
        if !is_first_of_host(launcher_folder().as_deref()) {
            return error.reported_by_rank_0();
        }
        let (program, rank) = (&options.program, likely_rank());
        print_line(&format!(
            "{program}: rank {rank} on {}: {error}\n",
            host_name()
        ));
        error.reported_by_rank_0()
    })
}

/// Starts MPI, and ends this process if that takes too long: a rank that never comes would keep the
/// others waiting in there.
fn start_mpi(options: &Options) -> Result<MpiJob> {
    let rank = likely_rank();
    // A busy machine starts processes late, however short the timeout is.
    let limit = options.timeout.max(options.join_timeout);
    let text = format!("not all ranks started MPI within {}", Seconds(limit));
    let help = "check whether one has ended, is stopped or is still starting";
    let action = report_and_leave(options, rank, text, help);
    let limit = limit.saturating_add(patience(rank));
    let _guard = Background::deadline(limit, action)?;
    MpiJob::start()
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
        // Once a rank has ended, mpirun lets stopped ones go on, and ends all.
        let line = format!("{start}{}; help: {help}; {remedy}", stopped_note());
        if is_first_of_host(folder.as_deref()) {
            print_line(&format!("{}\n", line.trim_end_matches("; ")));
        } else {
            std::thread::sleep(patience(1));
        }
        failure::leave_at_once(EXIT_LATE)
    }
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
