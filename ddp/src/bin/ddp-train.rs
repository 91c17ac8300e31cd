//! `ddp-train`: every mode in one `match`.
//!
//! Flags become one checked configuration, the process finds its place among the ranks of its job, and whatever goes wrong
//! from then on ends all of them, with one message and one exit code.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use ddp::cli::{self, Command};
use ddp::config::{AddmmConfig, AllreduceConfig, LogLevel, MlpBenchConfig, UseConfig};
use ddp::{Error, Told, bench, config, doctor, inspect, progress, report, trainer, using};
use ddp_comm::{Options, World};

/// Of commands that wait for nobody, and of wrong ones, which all ranks have to hear of.
const SHORT_S: f64 = 60.0;

fn main() -> ExitCode {
    let asked = cli::parse(std::env::args_os()).and_then(|command| {
        let (level, timeout_s, share_gpus) = of_ranks(&command);
        Ok((level, Options { timeout: config::timeout(timeout_s)?, share_gpus, ..Default::default() }, command))
    });
    let (level, options, command) = match asked {
        Ok((level, options, command)) => (level, options, Ok(command)),
        Err(error) => {
            let timeout = config::timeout(SHORT_S).unwrap_or_default();
            (LogLevel::default(), Options { timeout, ..Default::default() }, Err(error))
        }
    };
    progress::start_log(level, ddp_comm::likely_rank());
    World::run(&options, |world| {
        // Whatever is said next is not to be drawn into a bar.
        command.and_then(|command| run(command, world)).inspect_err(|_| progress::clear_bar()).map_err(Told)
    })
}

/// What a command logs, how many seconds its ranks wait for each other, and whether they may share GPUs.
fn of_ranks(command: &Command) -> (LogLevel, f64, bool) {
    match command {
        Command::Train(config) | Command::DryRun(config) => (config.log_level, config.timeout_s, config.share_gpus),
        Command::BenchMlp(MlpBenchConfig { common, .. })
        | Command::BenchAddmm(AddmmConfig { common, .. })
        | Command::BenchAllreduce(AllreduceConfig { common, .. }) => {
            (LogLevel::default(), common.timeout_s, common.share_gpus)
        }
        Command::Eval(UseConfig { using, .. }) | Command::Predict(UseConfig { using, .. }) => {
            (using.log_level, using.timeout_s, using.share_gpus)
        }
        Command::Doctor(flags) => (LogLevel::Warn, flags.timeout_s, false),
        Command::Inspect(_) | Command::Report(_) | Command::Show(_) => (LogLevel::default(), SHORT_S, false),
    }
}

fn run(command: Command, world: &World) -> Result<(), Error> {
    let mut say = |line: &dyn Display| say(line, world);
    match command {
        Command::Show(text) => say(&text.trim_end()),
        Command::Train(config) => trainer::train(&config, world),
        Command::DryRun(config) => trainer::dry_run(&config, world, &mut say),
        Command::Eval(config) => using::eval(&config, world, &mut say),
        Command::Predict(config) => using::predict(&config, world),
        Command::Inspect(flags) => inspect::inspect(&flags, &mut say),
        Command::Report(flags) => report::again(&flags.folder, world, &mut say),
        Command::Doctor(flags) => doctor::examine(&flags, world, &mut say),
        Command::BenchMlp(config) => say(&bench::mlp::on_ranks(&config, world)?),
        Command::BenchAddmm(config) => bench::addmm::on_ranks(&config, world, &mut say),
        Command::BenchAllreduce(config) => bench::allreduce::on_ranks(&config, world, &mut say),
    }
}

/// A line on standard output, once for all ranks.
fn say(line: &dyn Display, world: &World) -> Result<(), Error> {
    if world.rank() > 0 {
        return Ok(());
    }
    writeln!(std::io::stdout(), "{line}").map_err(|source| Error::Io {
        action: "write to",
        path: "standard output".into(),
        source,
        way_out: "Let whatever reads it read to the end.".into(),
    })
}
