//! The flags that start ranks, and what they become.

use std::time::Duration;

use clap::Args;

use super::command::{Command, StartRanks};
use crate::config::TIMEOUT_S;
use crate::flags::{RankCount, number, whole};

/// The ranks to start, if no launcher starts them.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct StartFlags {
    /// Start so many ranks on this machine, without MPI; auto: one for each GPU, else one
    #[arg(long, value_name = "N", help_heading = RANKS)]
    pub ranks: Option<RankCount>,
    /// How often to start again, with --resume auto, after a rank was lost
    #[arg(long, value_name = "N", help_heading = RANKS, requires = "ranks", default_value = "0")]
    #[arg(value_parser = whole(0..=u32::MAX), allow_negative_numbers = true)]
    pub restarts: u32,
    /// Seconds that ranks have to save after a signal to stop
    #[arg(long, value_name = "S", help_heading = RANKS, requires = "ranks", default_value = "60")]
    #[arg(value_parser = number(TIMEOUT_S), allow_negative_numbers = true)]
    pub grace_s: f64,
}

const RANKS: &str = "Ranks started here";

impl StartRanks {
    /// What flags of training ask for: `command`, on ranks to start if there are any.
    pub(crate) fn asked_for(flags: &StartFlags, command: Command) -> Command {
        match (flags.ranks, &command) {
            (Some(count), Command::Train(_) | Command::DryRun(_)) => Command::Start(StartRanks {
                count,
                restarts: flags.restarts,
                grace: Duration::from_secs_f64(flags.grace_s),
                command: Box::new(command),
            }),
            _ => command,
        }
    }

    /// What the flags of other commands ask for.
    pub(crate) fn asked_for_elsewhere(command: Command) -> Command {
        let count = match &command {
            Command::Eval(flags) => flags.using.ranks.ranks,
            Command::Predict(flags) => flags.using.ranks.ranks,
            Command::Bench(bench) => bench.ranks().ranks,
            Command::Doctor(flags) => flags.ranks,
            _ => None,
        };
        match count {
            None => command,
            Some(count) => Command::Start(StartRanks {
                count,
                restarts: 0,
                grace: Duration::from_secs(60),
                command: Box::new(command),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::parse;

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
            assert_eq!(start.count, RankCount::Of(3), "{command}");
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
        assert_eq!(start.count, RankCount::Auto);
        assert_eq!((start.restarts, start.grace), (2, Duration::from_secs(9)));
        for wrong in [
            "--ranks 0",
            "--ranks 513",
            "--ranks all",
            "--restarts 1",
            "--grace-s 1",
        ] {
            let words = format!("ddp-train {wrong}");
            let error = parse(words.split(' ').collect::<Vec<_>>()).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong}");
        }
    }
}
