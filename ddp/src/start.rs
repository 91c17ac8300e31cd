//! `--ranks N` and `--hosts a:4,b:4`: starts the ranks of a job, on this machine or over ssh on
//! several, without MPI.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use ddp_comm::spawn::serve;
use ddp_comm::spawn::{
    HostList, JobPlace, ListedHost, Losses, RankCommand, Spawner, StartedBy, serve_at, started_by,
};
use ddp_comm::{HOST_RANKS_MAX, print_line};
use ddp_engine::checkpoint;
use ddp_kernels::device::discover;

use crate::about::about;
use crate::cli::{Command, HOST_AGENT};
use crate::config::DeviceChoice;
use crate::error::{Error, Result, ShownError};
use crate::flags::layers::variable;
use crate::flags::{PlaceFlags, RankCount, StartFlags};
use crate::shown::shown;

/// How long to wait before a job starts again.
const PAUSE: Duration = Duration::from_secs(2);
/// How long processes that something else starts may take to find the first one, at least.
const GATHERING_MAX: Duration = Duration::from_secs(60);
/// Exit codes of a job that lost a rank: 77, or 128 plus the signal of a crash or a kill.
const OF_LOST_RANKS: [u8; 6] = [77, 134, 135, 136, 137, 139];

/// Starts the ranks of `command`, which wait for each other for `timeout`, and stays with them.
/// Returns their exit code; None if this process is one of them.
pub(crate) fn start(
    ranks: &StartFlags,
    command: &Command,
    timeout: Duration,
) -> Result<Option<u8>> {
    let has_places = ranks.places != PlaceFlags::default();
    let place = match (started_by()?, ranks.min_ranks) {
        (StartedBy::Spawner, _) => return Ok(None),
        (StartedBy::NoLauncher, Some(_)) if !has_places => {
            let text = "--min-ranks: expected --ranks, --hosts, --hostfile, or RANK, a WORLD_SIZE \
                of at least 2, MASTER_ADDR and MASTER_PORT, got none of these; help: add --ranks N";
            return Err(Error::Usage(text.into()));
        }
        (StartedBy::NoLauncher, _) => None,
        (StartedBy::Launcher, Some(_)) => Some(JobPlace::of_this_process().map_err(|why| {
            Error::Usage(format!(
                "--min-ranks: {why}; help: start one process on each host, with --ranks N for its \
                 ranks, or leave out the launcher, and give --hosts"
            ))
        })?),
        (StartedBy::Launcher, None) => {
            return Err(Error::Usage(format!(
                "--ranks: a launcher has started this process as one of several ranks; help: leave \
                 out --ranks and --hosts, or start {} without the launcher",
                about().name
            )));
        }
    };
    if let Some(place) = place.as_ref().filter(|place| !place.is_first()) {
        return Ok(Some(match serve_at(place, timeout.max(GATHERING_MAX)) {
            Ok(exit_code) => exit_code,
            // Each process has its own: the first one knows nothing of it.
            Err(error) => {
                let exit_code = error.exit_code();
                print_line(&format!("{}: {}\n", about().name, ShownError::from(error)));
                exit_code
            }
        }));
    }
    let hosts = match &place {
        None => hosts(ranks, command)?,
        Some(_) if ranks.places.hosts.is_some() || ranks.places.hostfile.is_some() => {
            let text = "--hosts: the processes of this job are started already; help: leave it out";
            return Err(Error::Usage(text.into()));
        }
        Some(place) => place.hosts(ranks.places.ranks.map_or(1, |_| count(ranks, command))),
    };
    if let Some(host) = hosts.iter().find(|host| host.ranks > HOST_RANKS_MAX) {
        return Err(Error::Usage(format!(
            "--ranks: expected at most {HOST_RANKS_MAX} ranks on a host, got {} on {}; help: start \
             fewer there, each with more --threads",
            host.ranks, host.name
        )));
    }
    let failed = Error::io("find", "this program", "start it by its path");
    let program = std::env::current_exe().map_err(failed)?;
    let mut task = RankCommand {
        program,
        arguments: std::env::args_os().skip(1).collect(),
        agent: HOST_AGENT,
        losses: losses(ranks, &hosts)?,
        place,
    };
    let grace = Duration::from_secs_f64(ranks.grace_s);
    let mut spawner = Spawner::new(about().name, grace, timeout);
    for restart in 0.. {
        let ended = spawner.run(&hosts, &task);
        let code = match &ended {
            Ok(code) => *code,
            Err(error) => error.exit_code(),
        };
        // An elastic job has started its ranks again one by one.
        let is_lost = OF_LOST_RANKS.contains(&code) && task.losses.is_none();
        if !is_lost || restart == ranks.restarts {
            if let Command::Train(config) = command
                && spawner.lost_all()
                && code > 0
            {
                print_line(&format!("{}: {}\n", about().name, saved(&config.out)));
            }
            return Ok(Some(ended?));
        }
        let (program, number, of) = (about().name, restart + 1, ranks.restarts);
        if let Err(error) = ended {
            print_line(&format!("{program}: {error}\n"));
        }
        let follows = if spawner.was_stopped() {
            "it was asked to stop, and is not started again; help: --resume auto continues".into()
        } else {
            format!("starting again with --resume auto ({number} of {of})")
        };
        print_line(&format!(
            "{program}: the job ended with {code}: {follows}\n"
        ));
        task.arguments = resuming(task.arguments);
        if let Some(code) = spawner.pause(PAUSE) {
            return Ok(Some(code));
        }
    }
    unreachable!("the loop ends at the last restart")
}

/// What of a run in `out` is saved.
fn saved(out: &Path) -> String {
    match checkpoint::newest_folder(out) {
        Some(newest) => format!(
            "the newest checkpoint is {}; help: continue with the same command and --resume auto",
            newest.display()
        ),
        None => format!(
            "{} holds no checkpoint; help: run the same command again",
            out.display()
        ),
    }
}

/// Refuses variables such as `DDP_RANKS` if no launcher has started this process: nothing reads
/// them, so that a single rank would train.
pub(crate) fn refuse_variables() -> Result<()> {
    if started_by().ok() != Some(StartedBy::NoLauncher) {
        return Ok(());
    }
    for flag in ["ranks", "hosts", "hostfile", "min-ranks"] {
        let name = variable(flag);
        if let Some(value) = std::env::var_os(&name) {
            let value = value.to_string_lossy();
            return Err(Error::Usage(format!(
                "{name} in the environment: only flags start ranks; help: write --{flag} {}, or \
                 unset {name}",
                shown(&value)
            )));
        }
    }
    Ok(())
}

/// How the job continues without lost ranks, if it does.
fn losses(ranks: &StartFlags, hosts: &[ListedHost]) -> Result<Option<Losses>> {
    let Some(min_ranks) = ranks.min_ranks else {
        return Ok(None);
    };
    if ranks.spares.is_some() && (ranks.restarts == 0 || hosts.iter().all(|host| !host.is_spare)) {
        let text = "--spares: expected --hosts or --hostfile, and --restarts with how many ranks may \
            be started again, got none; help: give both, or leave out --spares";
        return Err(Error::Usage(text.into()));
    }
    let of_job = hosts.iter().filter(|host| !host.is_spare);
    let count = of_job.map(|host| host.ranks).sum();
    if (1..=count).contains(&min_ranks) {
        let restarts = ranks.restarts;
        return Ok(Some(Losses {
            min_ranks,
            restarts,
        }));
    }
    Err(Error::Usage(format!(
        "--min-ranks {min_ranks}: expected from 1 to the number of ranks, which is {count}"
    )))
}

/// Where to start ranks, and how many.
fn hosts(ranks: &StartFlags, command: &Command) -> Result<Vec<ListedHost>> {
    let places = &ranks.places;
    let of_file = |path: &PathBuf| {
        let wrong = |why: String| Error::Usage(format!("--hostfile {}: {why}", path.display()));
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| wrong(error.to_string()))?;
        HostList::of_file(&text).map_err(wrong)
    };
    let list = match (&places.hosts, &places.hostfile) {
        (Some(list), _) => list.clone(),
        (None, Some(path)) => of_file(path)?,
        (None, None) => {
            let (name, ranks) = ("localhost".into(), count(ranks, command));
            let is_spare = false;
            return Ok(vec![ListedHost {
                name,
                ranks,
                is_spare,
            }]);
        }
    };
    let mut hosts = match places.ranks {
        None => list.0,
        Some(RankCount::Of(count)) => list
            .first(count)
            .map_err(|why| Error::Usage(format!("--ranks with hosts: {why}")))?,
        Some(RankCount::Auto) => {
            let text = "--ranks auto counts the GPUs of this machine only; help: give each host \
                its number of ranks, as in node1:4";
            return Err(Error::Usage(text.into()));
        }
    };
    for spare in ranks.spares.iter().flat_map(|list| &list.0) {
        if spare.is_here() || hosts.iter().any(|host| host.name == spare.name) {
            return Err(Error::Usage(format!(
                "--spares {}: expected another host than those of the job",
                spare.name
            )));
        }
        hosts.push(ListedHost {
            is_spare: true,
            ..spare.clone()
        });
    }
    Ok(hosts)
}

/// How many ranks to start on this machine.
fn count(ranks: &StartFlags, command: &Command) -> usize {
    let config = command.config();
    let (device, per_rank) = config.map_or((DeviceChoice::Auto, 1), |config| {
        (config.device, config.devices_per_rank)
    });
    match (ranks.places.ranks, device) {
        (Some(RankCount::Of(count)), _) => count,
        (_, DeviceChoice::Auto | DeviceChoice::Cuda) => (discover().gpus.len() / per_rank).max(1),
        (_, DeviceChoice::Cpu | DeviceChoice::CudaAt(_)) => 1,
    }
}

/// The same command line with `--resume auto` in place of what it says about resuming.
fn resuming(words: Vec<OsString>) -> Vec<OsString> {
    let mut kept = Vec::with_capacity(words.len() + 2);
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        if word == "--resume" {
            words.next();
        } else if !word.as_encoded_bytes().starts_with(b"--resume=") {
            kept.push(word);
        }
    }
    kept.extend(["--resume".into(), "auto".into()]);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_starts_again_resumes_what_is_there() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let given = words("train --resume off --out o --resume=last --ranks 2");
        assert_eq!(
            resuming(given),
            words("train --out o --ranks 2 --resume auto")
        );
    }
}
