//! `ddp-train`: every mode in one `match`.
//!
//! Flags become one checked configuration, the process finds its place among the ranks of its job, and whatever goes wrong
//! from then on ends all of them, with one message and one exit code.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use ddp::cli::{self, Command};
use ddp::config::LogLevel;
use ddp::{Error, bench, progress, trainer};
use ddp_comm::{Options, World};

fn main() -> ExitCode {
    let command = cli::parse(std::env::args_os());
    let (level, timeout_s) = match &command {
        Ok(Command::Train(config)) => (config.log_level, config.timeout_s),
        Ok(Command::BenchMlp(config)) => (LogLevel::default(), config.timeout_s),
        Ok(Command::BenchAllreduce(config)) => (LogLevel::default(), config.timeout_s),
        Ok(Command::Show(_)) | Err(_) => (LogLevel::default(), 60.0),
    };
    progress::start_log(level, ddp_comm::likely_rank());
    let options = Options { timeout: Duration::from_secs_f64(timeout_s), ..Default::default() };
    World::run(&options, |world| {
        // Whatever is said next is not to be drawn into a bar.
        command.and_then(|command| run(command, world)).inspect_err(|_| progress::clear_bar())
    })
}

fn run(command: Command, world: &World) -> Result<(), Error> {
    let line = match command {
        Command::Show(text) => text.trim_end().to_string(),
        Command::Train(config) => return trainer::train(&config, world),
        Command::BenchMlp(config) => bench::mlp::on_ranks(&config, world)?.to_string(),
        Command::BenchAllreduce(config) => bench::allreduce::on_ranks(&config, world)?.to_string(),
    };
    if world.rank() == 0 {
        writeln!(std::io::stdout(), "{line}").map_err(|source| Error::Io {
            action: "write to",
            path: "standard output".into(),
            source,
            way_out: "Let whatever reads it read to the end.".into(),
        })?;
    }
    Ok(())
}
