//! `ddp-train`: every mode in one `match`.
//!
//! Flags become one checked configuration, and the process finds its place among the ranks of its
//! job. Any error then ends all ranks, with one message and one exit code.

use std::fmt::Display;
use std::process::ExitCode;
use std::time::Duration;

use ddp::cli::{self, Command, EvalFlags, PredictFlags, RankFlags};
use ddp::config::LogLevel;
use ddp::error::remedy_text;
use ddp::{
    Error, ShownError, doctor, dry_run, export, inspect, output, progress, report, start, tokenize,
    train, using, watch,
};
use ddp_comm::{Field, NcclChoice, Options, World};

/// The timeout of commands whose ranks hardly wait, and of wrong flags.
const SHORT_S: f64 = 60.0;

fn main() -> ExitCode {
    match ddp_comm::check_stack() {
        Ok(()) => start_or_join(),
        Err(error) => World::refuse("ddp-train", &error),
    }
}

/// Separate from `main`, which checks the stack before these variables need it.
#[inline(never)]
fn start_or_join() -> ExitCode {
    let mut command = cli::parse(std::env::args_os());
    if let Ok(Command::Start(ranks)) = command {
        let (_, timeout_s, _) = of_ranks(&ranks.command);
        command = match start::start(&ranks, Duration::from_secs_f64(timeout_s)) {
            Ok(Some(exit_code)) => return ExitCode::from(exit_code),
            Ok(None) => Ok(*ranks.command),
            Err(error) => return World::refuse("ddp-train", &ShownError(error)),
        };
    }
    if let Ok(Command::HostAgent) = command {
        start::serve();
        return ExitCode::SUCCESS;
    }
    let (level, timeout_s, share_gpus) = match &command {
        Ok(command) => of_ranks(command),
        Err(_) => (LogLevel::default(), SHORT_S, false),
    };
    let nccl = match &command {
        Ok(Command::Train(config)) => config.nccl,
        _ => NcclChoice::Fixed,
    };
    let options = Options {
        timeout: Duration::from_secs_f64(timeout_s),
        share_gpus,
        catches_stop: matches!(command, Ok(Command::Train(_))),
        nccl,
        remedy_text,
        ..Default::default()
    };
    progress::start_log(level, ddp_comm::likely_rank());
    World::run(&options, |world| {
        command
            .and_then(|command| run(command, world))
            .inspect_err(|_| progress::clear_bar())
            .map_err(ShownError)
    })
}

/// What a command logs, how many seconds its ranks wait for each other, and whether they may share
/// GPUs.
fn of_ranks(command: &Command) -> (LogLevel, f64, bool) {
    let of = |level, ranks: &RankFlags| (level, ranks.timeout_s, ranks.share_gpus);
    match command {
        Command::Train(config) | Command::DryRun(config) => {
            (config.log_level, config.timeout_s, config.share_gpus)
        }
        Command::Eval(EvalFlags { using, .. }) | Command::Predict(PredictFlags { using, .. }) => {
            of(using.log_level, &using.ranks)
        }
        Command::Bench(bench) => of(LogLevel::default(), bench.ranks()),
        Command::Doctor(flags) => (LogLevel::Warn, flags.timeout_s, false),
        Command::Generate(_)
        | Command::Export(_)
        | Command::Tokenize(_)
        | Command::Inspect(_)
        | Command::Report(_)
        | Command::Start(_)
        | Command::HostAgent
        | Command::Watch(_)
        | Command::Show(_) => (LogLevel::default(), SHORT_S, false),
    }
}

fn run(command: Command, world: &World) -> Result<(), Error> {
    // Ranks with different commands would wait for each other in different places.
    let help = "start every rank with the same command";
    world.handshake(&[Field::must_match("the command", command.name(), help)])?;
    let mut say = |line: &dyn Display| say(line, world);
    match command {
        Command::Show(text) => say(&text.trim_end()),
        Command::Start(ranks) => run(*ranks.command, world),
        Command::HostAgent => unreachable!("it has no world"),
        Command::Train(config) => train::train(&config, world),
        Command::DryRun(config) => dry_run::dry_run(&config, world, &mut say),
        Command::Eval(flags) => using::eval(&flags, world, &mut say),
        Command::Predict(flags) => using::predict(&flags, world),
        Command::Generate(flags) => output::unless_reader_left(using::generate(&flags, world)),
        Command::Export(flags) => export::export(&flags, world, &mut say),
        Command::Tokenize(flags) => tokenize::tokenize(&flags, world, &mut say),
        Command::Inspect(flags) => inspect::inspect(&flags, &mut say),
        Command::Report(flags) => report::report(&flags, world, &mut say),
        Command::Watch(flags) => watch::watch(&flags, world, &mut say),
        Command::Doctor(flags) => doctor::examine(&flags, world, &mut say),
        Command::Bench(bench) => bench.run(world, &mut say),
    }
}

/// Prints a line on standard output, on rank 0 only.
fn say(line: &dyn Display, world: &World) -> Result<(), Error> {
    if world.rank() > 0 {
        return Ok(());
    }
    // Without a reader the command continues: other ranks may wait for this one.
    output::unless_reader_left(output::print(&format_args!("{line}\n")))
}
