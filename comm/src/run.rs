//! How a program of ranks begins and ends: `World::run` around everything.

use std::fmt::Display;
use std::process::ExitCode;

use crate::error::{Error, Result};
use crate::failure;
use crate::world::{Options, World};

/// An error that says which exit code a process ends with because of it.
pub trait Failure: Display {
    /// The exit code.
    fn exit_code(&self) -> u8;
}

impl Failure for Error {
    fn exit_code(&self) -> u8 {
        Error::exit_code(self)
    }
}

impl World {
    /// Brings the ranks together, runs `body` as one of them, and ends the process well: where `body` returns an error, or
    /// panics, on any rank, all ranks end, the first cause is printed once, and its exit code is that of all. Call it
    /// first in `main`, and return what it returns.
    ///
    /// A program that calls [`World::connect`] itself has to hand errors to [`World::fail`]: one that leaves by `?` drops the
    /// world, which waits for the other ranks, and they for it.
    pub fn run<E: Failure + From<Error>>(options: &Options, body: impl FnOnce(&World) -> Result<(), E>) -> ExitCode {
        let world = match World::connect(options) {
            Ok(world) => world,
            Err(error) => {
                // Who failed first has said why.
                if !matches!(error, Error::PeerFailed(_)) {
                    failure::say(&format!("{}: {error}\n", options.program));
                }
                return ExitCode::from(error.exit_code());
            }
        };
        world.install_panic_hook();
        match world.watch().map_err(E::from).and_then(|()| body(&world)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => world.fail(&error, error.exit_code()),
        }
    }
}
