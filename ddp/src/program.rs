//! A program that trains: `ddp-train`, or one of your own, with every command and flag.
//!
//! Flags become one checked configuration, and the process finds its place among the ranks of its
//! job. Any error then ends all ranks, with one message and one exit code.

use std::fmt::Display;
use std::process::ExitCode;
use std::time::Duration;

use ddp_comm::{Field, NcclChoice, Options, World};

use crate::about::{self, About};
use crate::cli::{self, Command};
use crate::config::{Config, LogLevel};
use crate::error::{Result, ShownError, remedy_text};
use crate::flags::spell_settings_as_flags;
use crate::models::{self, Family};
use crate::{
    compare, doctor, dry_run, export, inspect, output, progress, report, start, tokenize, train,
    using, watch,
};

/// The timeout of commands whose ranks hardly wait, and of wrong flags.
const SHORT_S: f64 = 60.0;

/// A program called `name`, with the model families `mlp`, `gpt` and `vit`.
///
/// ```no_run
/// # use ddp::models::mlp::MlpSpec as Mine;
/// fn main() -> std::process::ExitCode {
///     ddp::program("my-train").family::<Mine>().run()
/// }
/// ```
///
/// It takes every command and flag of `ddp-train`: `my-train --model mine --ranks auto`, `my-train
/// eval`, and so on. The ranks that `--ranks` starts are this program, too.
pub fn program(name: &'static str) -> Program {
    Program(About {
        name,
        version: env!("CARGO_PKG_VERSION"),
    })
}

/// A program that trains. See [`program`].
#[derive(Debug)]
pub struct Program(About);

impl Program {
    /// The version that it prints, in place of this library's.
    pub fn version(self, version: &'static str) -> Program {
        Program(About { version, ..self.0 })
    }

    /// A model family that `--model` takes, with its settings as flags.
    ///
    /// # Panics
    /// If another family has its name.
    pub fn family<F: Family + Default>(self) -> Program {
        models::register::<F>();
        self
    }

    /// Runs the command line of this process. Returns its exit code.
    pub fn run(self) -> ExitCode {
        about::set(self.0);
        spell_settings_as_flags();
        match ddp_comm::check_stack() {
            Ok(()) => start_or_join(),
            Err(error) => World::refuse(self.0.name, &error),
        }
    }
}

/// Separate from `run`, which checks the stack before these variables need it.
#[inline(never)]
fn start_or_join() -> ExitCode {
    let program = about::about().name;
    let mut command = cli::parse(std::env::args_os());
    if let Ok(Command::Start(ranks)) = command {
        let (_, timeout_s, _) = of_ranks(&ranks.command);
        command = match start::start(&ranks, Duration::from_secs_f64(timeout_s)) {
            Ok(Some(exit_code)) => return ExitCode::from(exit_code),
            Ok(None) => Ok(*ranks.command),
            Err(error) => return World::refuse(program, &ShownError(error)),
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
        program: program.to_string(),
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
    let of = |config: &Config| (config.log_level, config.timeout_s, config.share_gpus);
    match command {
        Command::Train(config) | Command::DryRun(config) => of(config),
        Command::Doctor(flags) => (LogLevel::Warn, flags.timeout_s, false),
        other => {
            let default = (LogLevel::default(), SHORT_S, false);
            other.ranks().map_or(default, |ranks| of(&ranks.settings))
        }
    }
}

fn run(command: Command, world: &World) -> Result<()> {
    // Ranks with different commands would wait for each other in different places.
    let help = "start every rank with the same command";
    match world.handshake(&[Field::must_match("the command", command.name(), help)]) {
        // A job that continues without that rank meets again when it trains.
        Err(error) if error.is_rank_lost() => {}
        compared => compared?,
    }
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
        Command::Compare(flags) => compare::compare(&flags, world, &mut say),
        Command::Watch(flags) => watch::watch(&flags, world, &mut say),
        Command::Doctor(flags) => doctor::examine(&flags, world, &mut say),
        Command::Bench(bench) => bench.run(world, &mut say),
    }
}

/// Prints a line on standard output, on rank 0 only.
fn say(line: &dyn Display, world: &World) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    // Without a reader the command continues: other ranks may wait for this one.
    output::unless_reader_left(output::print(&format_args!("{line}\n")))
}
