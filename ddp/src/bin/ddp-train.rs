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
use ddp_comm::{World, world};

fn main() -> ExitCode {
    let command = cli::parse(std::env::args_os());
    let (level, timeout_s) = match &command {
        Ok(Command::Train(config)) => (config.log_level, config.timeout_s),
        Ok(Command::BenchMlp(config)) => (LogLevel::default(), config.timeout_s),
        Ok(Command::BenchAllreduce(config)) => (LogLevel::default(), config.timeout_s),
        Ok(Command::Show(_)) | Err(_) => (LogLevel::default(), 60.0),
    };
    progress::start_log(level, ddp_comm::likely_rank());
    // First of all: it may only set up MPI while there are no other threads.
    let options = world::Options { timeout: Duration::from_secs_f64(timeout_s), ..Default::default() };
    let world = match World::connect(&options) {
        Ok(world) => world,
        Err(error) => {
            // Who failed first has said why.
            if !matches!(error, ddp_comm::Error::PeerFailed(_)) {
                eprintln!("ddp-train: {error}");
            }
            return ExitCode::from(error.exit_code());
        }
    };
    world.install_panic_hook();
    let result = world.watch().map_err(Error::from).and_then(|()| run(command?, &world));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::clear_bar();
            world.fail(&error, error.exit_code())
        }
    }
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
