//! What flags, variables and a file of settings ask for: a run, a dry run, or a list of the
//! settings.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::Args;
use toml::Table;

use super::command::Command;
use crate::config::{Resume, find};
use crate::error::{Error, Result, refuse};
use crate::flags::layers::{
    CONFIG, DRY_RUN, PREFIX, PRINT_CONFIG, SettingFlags, SettingLayers, Variables, variable,
};
use crate::hugging_face;
use crate::initial_weights::InitialWeights;
use crate::lora;
use crate::metrics_log::CONFIG_FILE;

/// Where settings come from, and what to do with them instead of training.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub(super) struct LayerFlags {
    /// Read settings from this TOML file (or DDP_CONFIG), as in batch-size = 64; the environment
    /// (DDP_BATCH_SIZE=64) wins over it, and flags over both
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub(super) config: Option<PathBuf>,
    /// Print every setting as TOML with its origin, and exit
    #[arg(long, help_heading = HEADING)]
    pub(super) print_config: bool,
    /// Check everything, print the memory and disk space (on GPUs also the time) that the
    /// run will take, and exit
    #[arg(long, help_heading = HEADING)]
    pub(super) dry_run: bool,
}

const HEADING: &str = "Settings";

/// Printed after the help of `resume`.
pub(super) const RESUME_EXAMPLES: &str = "\
Examples:
  ddp-train resume out                           to its end, from its newest checkpoint
  ddp-train resume out --ranks 4                 on other ranks
  ddp-train resume out --steps 2000 --override   longer; without --override if --schedule is constant

As ddp-train --config DIR/config.toml --out DIR --resume auto. Flags change settings of the run; those that change its results \
need --override. So does another number of steps, unless the run has --schedule constant. \
Start it in the folder where the run was started, if its paths are relative.";

/// The run in `folder`, continued with its settings, but for those that flags and the environment
/// change.
pub(super) fn resume(
    folder: &Path,
    mut flags: SettingFlags,
    mut how: LayerFlags,
) -> Result<Command> {
    let file = folder.join(CONFIG_FILE);
    if !file.is_file() {
        return Err(Error::Usage(format!(
            "resume {}: expected the folder of a run, which has {CONFIG_FILE}, got none; help: \
             give what its --out was",
            folder.display()
        )));
    }
    if flags.0.iter().any(|(setting, _)| setting.name() == "out") {
        return Err(Error::Usage(format!(
            "resume {0}: --out cannot be given: it is {0}; help: leave it out, or start a new run \
             with --config {1} --out FOLDER",
            folder.display(),
            file.display()
        )));
    }
    how.config.get_or_insert(file);
    // First, so that a --resume CHECKPOINT wins.
    let own = [("out", folder.as_os_str()), ("resume", OsStr::new("auto"))];
    let own = own.map(|(name, value)| (find(name).expect("a setting"), value.to_os_string()));
    flags.0.splice(0..0, own);
    train(&flags, &how)
}

/// The run that flags, the environment and a file ask for.
pub(super) fn train(flags: &SettingFlags, how: &LayerFlags) -> Result<Command> {
    let is_ours = |name: &OsString| name.as_encoded_bytes().starts_with(PREFIX.as_bytes());
    let variables = std::env::vars_os().filter(|(name, _)| is_ours(name));
    layered(flags, how, &variables.collect())
}

fn layered(flags: &SettingFlags, how: &LayerFlags, variables: &Variables) -> Result<Command> {
    let how = how_also(how, variables)?;
    let mut layers = SettingLayers::default();
    // Once: it may be a pipe.
    let text = how.config.as_ref().map(|path| {
        let help = "--config takes a TOML file, as --print-config writes it";
        std::fs::read_to_string(path).map_err(Error::io("read", path, help))
    });
    let text = text.transpose()?;
    if let Some(path) = how.config.as_ref().filter(|path| is_pipe(path))
        && text.as_deref() == Some("")
    {
        return Err(Error::Usage(format!(
            "--config {}: expected settings, got an empty pipe; help: write them to a file: \
             --ranks reads them again for each rank",
            path.display()
        )));
    }
    let first = initial_weights(flags, variables, text.as_deref())?;
    if let Some(first) = &first {
        layers.config.model = first.model.clone();
    }
    if let Some((path, text)) = how.config.as_ref().zip(text) {
        layers.read_file(path, &text)?;
    }
    layers.read_environment(variables)?;
    layers.set_flags(flags)?;
    if let Some(first) = first {
        first.settle(&mut layers.config)?;
    }
    // A resumed run reads the adapters in its checkpoint instead.
    let begins = layers.config.resume == Resume::Never;
    if let Some(lora) = layers.config.lora.as_mut()
        && let Some(from) = &lora.from
        && (begins || lora.rank == 0)
    {
        let (there, rank) = (lora::describe(from)?.0, lora.rank);
        // Until then it may say only which folder it is of.
        if rank == 0 {
            *lora = there;
        } else if rank != there.rank {
            let expected = format!("rank={}, as in {}", there.rank, from.display());
            let help = "give from=FOLDER alone: the rest follows from it";
            return Err(refuse("--lora", format!("rank={rank}"), &expected, help));
        }
    }
    layers.check()?;
    if how.print_config {
        return Ok(Command::Show(layers.describe()?));
    }
    let config = Box::new(layers.config);
    if how.dry_run {
        return Ok(Command::DryRun(config));
    }
    // Before the data are read. A resumed run reads the weights in its checkpoint instead.
    if config.resume == Resume::Never
        && let Some(folder) = config
            .init_from
            .as_deref()
            .filter(|it| hugging_face::is_folder(it))
    {
        hugging_face::checked(folder)?;
    }
    Ok(Command::Train(config))
}

fn is_pipe(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}

/// What `--init-from` names. It is read before other settings, which start from its model.
fn initial_weights(
    flags: &SettingFlags,
    variables: &Variables,
    text: Option<&str>,
) -> Result<Option<InitialWeights>> {
    const NAME: &str = "init-from";
    let flag = flags.0.iter().find(|(setting, _)| setting.name() == NAME);
    let flag = flag.map(|(_, path)| path.clone());
    // Mistakes in the file are reported when all of it is read.
    let in_file = || {
        let table: Table = toml::from_str(text?).ok()?;
        Some(OsString::from(table.get(NAME)?.as_str()?))
    };
    let set = || variables.get(OsStr::new(&variable(NAME))).cloned();
    let path = flag.or_else(set).or_else(in_file);
    path.map_or(Ok(None), |path| InitialWeights::of(Path::new(&path)))
}

/// `how`, with what the environment says; a --config flag wins over DDP_CONFIG.
fn how_also(how: &LayerFlags, variables: &Variables) -> Result<LayerFlags> {
    let variable = |name: &str| variables.get(OsStr::new(name));
    let is_set = |name: &str| match variable(name).map(|value| value.to_str()) {
        None | Some(Some("false")) => Ok(false),
        Some(Some("true")) => Ok(true),
        Some(other) => Err(Error::Usage(format!(
            "{name} in the environment: expected true or false, got {:?}; help: set one of these, or unset it",
            other.unwrap_or("another text")
        ))),
    };
    let config = || variable(CONFIG).map(PathBuf::from);
    Ok(LayerFlags {
        config: how.config.clone().or_else(config),
        print_config: how.print_config | is_set(PRINT_CONFIG)?,
        dry_run: how.dry_run | is_set(DRY_RUN)?,
    })
}

#[cfg(test)]
mod tests;
