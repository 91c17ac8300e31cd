//! The settings of a run that commands other than `train` take.

use std::ops::Deref;

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, FromArgMatches};
use ddp_comm::World;
use ddp_kernels::Device;

use super::layers::{Layer, SettingFlags, SettingLayers, flag, variable};
use crate::config::{Config, SETTINGS, Setting};
use crate::devices::find_devices;
use crate::error::{Error, Result};

/// The settings of a run that another command takes, from its flags and the environment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Taken(pub(crate) Config);

impl Deref for Taken {
    type Target = Config;

    fn deref(&self) -> &Config {
        &self.0
    }
}

impl Taken {
    /// This rank's CPU threads.
    pub(crate) fn thread_count(&self, world: &World) -> usize {
        self.threads.unwrap_or_else(|| world.default_threads())
    }

    /// This rank's device. All ranks call this together.
    pub(crate) fn find_device(&self, world: &World) -> Result<Device> {
        Ok(find_devices(self.device, 1, self.share_gpus, world)?[0])
    }
}

impl Args for Taken {
    fn augment_args(command: clap::Command) -> clap::Command {
        let name = command.get_name().to_string();
        let taken = SETTINGS.iter().filter(|one| one.is_taken_by(&name));
        command.args(taken.map(|one| flag(one).help_heading(None)))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Taken {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Taken, clap::Error> {
        let mut layers = SettingLayers::default();
        let flags = SettingFlags::from_arg_matches(matches)?;
        let mut read = || {
            // A flag wins over the variable, even over a wrong one.
            let is_open = |it: &&Setting| matches!(matches.try_get_raw(it.name()), Ok(None));
            for setting in SETTINGS.iter().filter(is_open) {
                let name = variable(setting.name());
                if let Some(value) = std::env::var_os(&name) {
                    layers.set(setting, &value, (Layer::Variable, name.clone()))?;
                    let wrong = |error| Error::Usage(format!("{name} in the environment: {error}"));
                    layers.config.check_limits().map_err(wrong)?;
                }
            }
            layers.set_flags(&flags)?;
            layers.config.check_limits()
        };
        let wrong = |error: Error| clap::Error::raw(ErrorKind::ValueValidation, error);
        read().map_err(wrong)?;
        Ok(Taken(layers.config))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Taken::from_arg_matches(matches)?;
        Ok(())
    }
}
