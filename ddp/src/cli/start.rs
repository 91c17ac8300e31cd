//! The flags that start ranks, and what they become.

use std::time::Duration;

use clap::Args;
use ddp_comm::spawn::HostList;

use super::command::{Command, StartRanks};
use crate::config::TIMEOUT_S;
use crate::flags::{PlaceFlags, number, whole};

/// The ranks to start for a training.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct StartFlags {
    #[command(flatten, next_help_heading = RANKS)]
    #[allow(missing_docs)]
    pub places: PlaceFlags,
    /// Continue without lost ranks while at least N are left; --restarts then counts ranks. Also
    /// for processes that srun or the variables RANK and WORLD_SIZE start, one on each host
    #[arg(long, value_name = "N", help_heading = RANKS, group = "places")]
    #[arg(allow_negative_numbers = true)]
    pub min_ranks: Option<usize>,
    /// Hosts that take over the ranks of a lost one, with the number of ranks each has room for
    #[arg(long, value_name = "HOST:N,…", help_heading = RANKS, requires = "min_ranks")]
    pub spares: Option<HostList>,
    /// How often to start again, with --resume auto, after a rank was lost
    #[arg(long, value_name = "N", help_heading = RANKS, requires = "places", default_value = "0")]
    #[arg(value_parser = whole(0..=u32::MAX), allow_negative_numbers = true)]
    pub restarts: u32,
    /// Seconds that ranks have to save after a signal to stop
    #[arg(long, value_name = "S", help_heading = RANKS, requires = "places", default_value = "60")]
    #[arg(value_parser = number(TIMEOUT_S), allow_negative_numbers = true)]
    pub grace_s: f64,
}

const RANKS: &str = "Ranks started here";

impl StartRanks {
    /// What flags of training ask for: `command`, on ranks to start if there are any.
    pub(crate) fn asked_for(flags: &StartFlags, command: Command) -> Command {
        match command {
            Command::Train(_) | Command::DryRun(_) => {
                let grace = Duration::from_secs_f64(flags.grace_s);
                if flags.places == PlaceFlags::default() && flags.min_ranks.is_none() {
                    return command;
                }
                Command::Start(StartRanks {
                    places: flags.places.clone(),
                    restarts: flags.restarts,
                    min_ranks: flags.min_ranks,
                    spares: flags.spares.clone(),
                    grace,
                    command: Box::new(command),
                })
            }
            _ => command,
        }
    }

    /// What the flags of other commands ask for.
    pub(crate) fn asked_for_elsewhere(command: Command) -> Command {
        let places = match &command {
            Command::Doctor(flags) => Some(&flags.places),
            other => other.ranks().map(|ranks| &ranks.places),
        };
        let places = places.cloned().unwrap_or_default();
        if places == PlaceFlags::default() {
            return command;
        }
        Command::Start(StartRanks {
            places,
            restarts: 0,
            min_ranks: None,
            spares: None,
            grace: Duration::from_secs(60),
            command: Box::new(command),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parse;
    use crate::flags::RankCount;

    fn parsed(line: &str) -> Command {
        parse(line.split(' ').collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn every_command_of_ranks_can_start_them() {
        for command in [
            "",
            " --dry-run",
            " train",
            " eval --checkpoint c --data d",
            " predict --checkpoint c --data d --out o.csv",
            " bench addmm",
            " doctor",
        ] {
            let alone = parsed(&format!("ddp-train{command}"));
            let Command::Start(start) = parsed(&format!("ddp-train{command} --ranks 3")) else {
                panic!("{command} starts ranks");
            };
            assert_eq!(start.places.ranks, Some(RankCount::Of(3)), "{command}");
            // Other commands keep the flag, which ranks read and ignore.
            assert_eq!(start.command.name(), alone.name(), "{command}");
        }
        // Settings are printed once.
        assert!(matches!(
            parsed("ddp-train --ranks 2 --print-config"),
            Command::Show(_)
        ));
    }

    #[test]
    fn flags_of_ranks_are_checked() {
        let Command::Start(start) = parsed("ddp-train --ranks auto --restarts 2 --grace-s 9")
        else {
            panic!("it starts ranks");
        };
        assert_eq!(start.places.ranks, Some(RankCount::Auto));
        assert_eq!((start.restarts, start.grace), (2, Duration::from_secs(9)));
        for hosts in ["--hosts a:2,b", "--hostfile c --restarts 1"] {
            let words = format!("ddp-train {hosts}");
            assert!(matches!(parsed(&words), Command::Start(_)), "{hosts}");
        }
        for wrong in [
            "--ranks 0",
            "--ranks 513",
            "--ranks all",
            "--restarts 1",
            "--grace-s 1",
            "--hosts a:0",
            "--hosts a,b --hostfile c",
        ] {
            let words = format!("ddp-train {wrong}");
            let error = parse(words.split(' ').collect::<Vec<_>>()).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong}");
        }
    }
}
