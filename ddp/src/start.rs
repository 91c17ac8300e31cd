//! `--ranks N` and `--hosts a:4,b:4`: starts the ranks of a job, on this machine or over ssh on
//! several, without MPI.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) use ddp_comm::spawn::serve;
use ddp_comm::spawn::{Host, HostList, Losses, Spawner, StartedBy, Task, started_by};
use ddp_kernels::device::discover;

use crate::about::about;
use crate::cli::{Command, HOST_AGENT};
use crate::config::DeviceChoice;
use crate::error::{Error, Result};
use crate::flags::{RankCount, StartFlags};

/// How long to wait before a job starts again.
const PAUSE: Duration = Duration::from_secs(2);
/// Exit codes of a job that lost a rank: 77, or 128 plus the signal of a crash or a kill.
const OF_LOST_RANKS: [u8; 6] = [77, 134, 135, 136, 137, 139];

/// Starts the ranks of `command`, which wait for each other for `timeout`, and stays with them.
/// Returns their exit code; None if this process is one of them.
pub(crate) fn start(
    ranks: &StartFlags,
    command: &Command,
    timeout: Duration,
) -> Result<Option<u8>> {
    match started_by()? {
        StartedBy::NoLauncher => {}
        StartedBy::Spawner => return Ok(None),
        StartedBy::Launcher => {
            let flag = ranks.min_ranks.map_or("--ranks", |_| "--min-ranks");
            return Err(Error::Usage(format!(
                "{flag}: a launcher has started this process as one of several ranks; help: leave \
                 out --ranks, --hosts and --min-ranks, or start {} without the launcher",
                about().name
            )));
        }
    }
    let hosts = hosts(ranks, command)?;
    let failed = Error::io("find", "this program", "start it by its path");
    let program = std::env::current_exe().map_err(failed)?;
    let mut task = Task {
        program,
        arguments: std::env::args_os().skip(1).collect(),
        agent: HOST_AGENT,
        losses: losses(ranks, &hosts)?,
    };
    let grace = Duration::from_secs_f64(ranks.grace_s);
    let mut spawner = Spawner::new(about().name, grace, timeout);
    for restart in 0.. {
        let ended = spawner.run(&hosts, &task);
        let code = ended
            .as_ref()
            .map_or_else(|error| error.exit_code(), |code| *code);
        // A job that continues without lost ranks has started them again one by one.
        let is_lost = OF_LOST_RANKS.contains(&code) && task.losses.is_none();
        let is_lost = is_lost && !spawner.was_stopped();
        if !is_lost || restart == ranks.restarts {
            return Ok(Some(ended?));
        }
        let (program, number, of) = (about().name, restart + 1, ranks.restarts);
        if let Err(error) = ended {
            eprintln!("{program}: {error}");
        }
        let again = "starting again with --resume auto";
        eprintln!("{program}: the job ended with {code}: {again} ({number} of {of})");
        task.arguments = resuming(task.arguments);
        if let Some(code) = spawner.pause(PAUSE) {
            return Ok(Some(code));
        }
    }
    unreachable!("the loop ends at the last restart")
}

/// How the job continues without lost ranks, if it does.
fn losses(ranks: &StartFlags, hosts: &[Host]) -> Result<Option<Losses>> {
    let Some(min_ranks) = ranks.min_ranks else {
        return Ok(None);
    };
    let (count, restarts) = (hosts.iter().map(|host| host.ranks).sum(), ranks.restarts);
    if !(1..=count).contains(&min_ranks) {
        let wrong = "expected from 1 to the number of ranks; help: give fewer";
        return Err(Error::Usage(format!("--min-ranks {min_ranks}: {wrong}")));
    }
    Ok(Some(Losses {
        min_ranks,
        restarts,
    }))
}

/// Where to start ranks, and how many.
fn hosts(ranks: &StartFlags, command: &Command) -> Result<Vec<Host>> {
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
            return Ok(vec![Host { name, ranks }]);
        }
    };
    match places.ranks {
        None => Ok(list.0),
        Some(RankCount::Of(count)) => list
            .first(count)
            .map_err(|why| Error::Usage(format!("--ranks with hosts: {why}"))),
        Some(RankCount::Auto) => {
            let text = "--ranks auto counts the GPUs of this machine only; help: give each host \
                its number of ranks, as in node1:4";
            Err(Error::Usage(text.into()))
        }
    }
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
        _ => 1,
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
