//! A program that trains: `ddp-train`, or one of your own, with every command and flag.
//!
//! Flags become one checked configuration, and the process joins the ranks of its job. From then on
//! any error ends all ranks, with one message and one exit code.

use std::ffi::OsString;
use std::fmt::Display;
use std::process::ExitCode;
use std::time::Duration;

use ddp_comm::{Field, Options, World};
use ddp_tools::{compare, doctor, inspect, output, report, verify, warm_up, watch};

use crate::about::{self, ProgramName};
use crate::cli::{self, Command};
use crate::config::{Config, LogLevel};
use crate::error::{Error, Result, ShownError, remedy_text};
use crate::flags::spell_settings_as_flags;
use crate::models::{self, Family};
use crate::train::TrainProgram;
use crate::{dry_run, export, progress, show_tokens, start, tokenize, train, using};

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
    Program(ProgramName {
        name,
        version: env!("CARGO_PKG_VERSION"),
    })
}

/// A program that trains. See [`program`].
#[derive(Debug)]
pub struct Program(ProgramName);

impl Program {
    /// The version that it prints, in place of this library's.
    pub fn version(self, version: &'static str) -> Program {
        Program(ProgramName { version, ..self.0 })
    }

    /// A model family that `--model` takes, with its settings as flags.
    ///
    /// # Panics
    /// If another family has its name.
    pub fn family<F: Family + Default>(self) -> Program {
        models::register::<F>();
        self
    }

    /// The settings that a command line of training gives, the program's name first: for tests.
    pub fn settings(
        self,
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Config> {
        about::set(self.0);
        spell_settings_as_flags();
        match cli::parse(words)?.0 {
            Command::Train(config) => Ok(*config),
            Command::Show(text) => Err(Error::Usage(text)),
            other => Err(Error::Usage(format!("`{}` does not train", other.name()))),
        }
    }

    /// Runs the command line of this process. Returns its exit code.
    pub fn run(self) -> ExitCode {
        ddp_comm::hold_stops();
        ddp_comm::spawn::stop_with_parent();
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
    let parsed = cli::parse(std::env::args_os());
    let settings = settings(parsed.as_ref().ok().map(|(command, _)| command));
    let timeout = Duration::from_secs_f64(settings.timeout_s);
    progress::start_log(settings.log_level, ddp_comm::likely_rank());
    if let Ok((command, flags)) = &parsed
        && flags.starts()
    {
        match start::start(flags, command, timeout) {
            Ok(Some(exit_code)) => return ExitCode::from(exit_code),
            Ok(None) => {}
            Err(error) => return World::refuse(program, &ShownError(error)),
        }
    }
    if let Ok((command, _)) = &parsed
        && command.config().is_some()
        && let Err(error) = start::refuse_variables()
    {
        return World::refuse(program, &ShownError(error));
    }
    let command = parsed.map(|(command, _)| command);
    if let Ok(Command::HostAgent) = command {
        start::serve();
        return ExitCode::SUCCESS;
    }
    let options = Options {
        program: program.to_string(),
        timeout,
        share_gpus: settings.share_gpus,
        catches_stop: matches!(command, Ok(Command::Train(_))),
        nccl: settings.nccl,
        remedy_text,
        ..Default::default()
    };
    World::run(&options, |world| {
        command
            .and_then(|command| run(command, world))
            .inspect_err(|_| progress::clear_bar())
            .map_err(ShownError)
    })
}

/// What the ranks of a command log, share, and how long they wait for each other.
fn settings(command: Option<&Command>) -> Config {
    let otherwise = |log_level, timeout_s| Config {
        log_level,
        timeout_s,
        ..Config::default()
    };
    match command {
        Some(Command::Doctor(flags)) => otherwise(LogLevel::Warn, flags.timeout_s),
        other => {
            let config = other.and_then(Command::config).cloned();
            config.unwrap_or_else(|| otherwise(LogLevel::default(), SHORT_S))
        }
    }
}

/// The program around a run whose steps are repeated.
const MAKE: compare::MakeProgram = |config| Box::new(TrainProgram::new(config));

fn run(command: Command, world: &World) -> Result<()> {
    ddp_engine::at_command(world.generation())?;
    // Ranks with different commands would wait for each other in different places. In an elastic
    // job the launcher gives all the same one, and only the trainer survives the loss of a rank.
    if !world.is_elastic() {
        let help = "start every rank with the same command";
        world.handshake(&[Field::must_match("the command", command.name(), help)])?;
    }
    let mut say = |line: &dyn Display| say(line, world);
    let is_alone = matches!(
        command,
        Command::Export(_)
            | Command::Inspect(_)
            | Command::Report(_)
            | Command::Compare(_)
            | Command::Watch(_)
            | Command::WarmUp(_)
    );
    // Rank 0 does these alone.
    if is_alone && world.rank() > 0 {
        return Ok(());
    }
    match command {
        Command::Show(text) => say(&text.trim_end()),
        Command::HostAgent => unreachable!("it has no world"),
        Command::Train(config) => train::train(&config, world),
        Command::DryRun(config) => dry_run::dry_run(&config, world, &mut say),
        Command::Eval(flags) => using::eval::eval(&flags, world, &mut say),
        Command::Predict(flags) => using::predict::predict(&flags, world),
        Command::Generate(flags) => {
            output::unless_reader_left(using::generate::generate(&flags, world))
        }
        Command::Chat(flags) => output::unless_reader_left(using::chat::chat(&flags, world)),
        Command::Export(flags) => export::export(&flags, &mut say),
        Command::Tokenize(flags) => tokenize::tokenize(&flags, world, &mut say),
        Command::ShowTokens(flags) => show_tokens::show_tokens(&flags, world, &mut say),
        Command::Inspect(it) => inspect::inspect(&it.path, it.lines, it.json, &mut say),
        Command::Report(it) => {
            report::report(&it.folders, it.out.as_deref(), it.svg.as_deref(), &mut say)
        }
        Command::Compare(it) => {
            let replay = it.replay.then_some(MAKE);
            compare::compare([&it.first, &it.second], replay, it.json, world, &mut say)
        }
        Command::Verify(flags) => verify::verify(&flags.request(), MAKE, world, &mut say),
        Command::Watch(flags) => watch::watch(&flags.folder, world, &mut say),
        Command::Doctor(it) => doctor::examine(&it.out, it.quick, it.json, world, &mut say),
        Command::WarmUp(it) => warm_up::warm_up(&it.architectures, &mut say),
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
