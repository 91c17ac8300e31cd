//! `--ranks N`: starts the ranks of a job on this machine, without MPI.

use std::ffi::OsString;
use std::process::Command as Process;
use std::time::Duration;

use ddp_comm::spawn::{Spawner, StartedBy, started_by};
use ddp_kernels::device::discover;

use crate::about::about;
use crate::cli::{Command, RankCount, StartRanks};
use crate::config::DeviceChoice;
use crate::error::{Error, Result};

/// How long to wait before a job starts again.
const PAUSE: Duration = Duration::from_secs(2);
/// Exit codes of a job that lost a rank: 77, or 128 plus the signal of a crash or a kill.
const OF_LOST_RANKS: [u8; 6] = [77, 134, 135, 136, 137, 139];

/// Starts the ranks, which wait for each other for `timeout`, and stays with them. Returns their
/// exit code; None if this process is one of them.
pub fn start(ranks: &StartRanks, timeout: Duration) -> Result<Option<u8>> {
    match started_by()? {
        StartedBy::NoLauncher => {}
        StartedBy::Spawner => return Ok(None),
        StartedBy::Launcher => {
            let text = "--ranks: a launcher has started this process as one of several ranks; \
                help: leave out --ranks, or start ddp-train without the launcher";
            return Err(Error::Usage(text.into()));
        }
    }
    let count = count(ranks);
    let program = std::env::current_exe().map_err(|source| Error::Io {
        action: "find",
        path: "this program".into(),
        source,
        help: "start it by its path".into(),
    })?;
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut spawner = Spawner::new(about().name, ranks.grace, timeout);
    for restart in 0.. {
        let command = || {
            let mut process = Process::new(&program);
            process.args(&words);
            process
        };
        let code = spawner.run(count, &command)?;
        let is_lost = OF_LOST_RANKS.contains(&code) && !spawner.was_stopped();
        if !is_lost || restart == ranks.restarts {
            return Ok(Some(code));
        }
        eprintln!(
            "{}: the job ended with {code}: starting again with --resume auto ({} of {})",
            about().name,
            restart + 1,
            ranks.restarts
        );
        words = resuming(words);
        spawner.pause(PAUSE);
        if spawner.was_stopped() {
            // It can resume.
            return Ok(Some(75));
        }
    }
    unreachable!("the loop ends at the last restart")
}

/// How many ranks to start.
fn count(ranks: &StartRanks) -> usize {
    let (device, per_rank) = match &*ranks.command {
        Command::Train(config) | Command::DryRun(config) => {
            (config.device, config.devices_per_rank)
        }
        Command::Eval(flags) => (flags.using.ranks.settings.device, 1),
        Command::Predict(flags) => (flags.using.ranks.settings.device, 1),
        Command::Bench(bench) => (bench.ranks().settings.device, 1),
        Command::Doctor(_) => (DeviceChoice::Auto, 1),
        _ => (DeviceChoice::Cpu, 1),
    };
    match (ranks.count, device) {
        (RankCount::Of(count), _) => count,
        (RankCount::Auto, DeviceChoice::Auto | DeviceChoice::Cuda) => {
            (discover().gpus.len() / per_rank).max(1)
        }
        (RankCount::Auto, _) => 1,
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
