//! Loading NVIDIA's libraries at first use, from the files that discovery found. `foreign.rs`
//! offers this to other crates.

use std::path::Path;

pub(crate) use super::loaded::file_of;
use super::loaded::loader_message;
pub use super::loaded::{Library, functions};
use crate::device::Library as Part;
use crate::error::Help;

impl Library {
    /// NCCL, as discovery found it.
    pub fn nccl() -> Result<Library, String> {
        let part = &crate::device::discover().nccl;
        Library::open(part, &["libnccl.so.2", "libnccl.so"])
    }

    /// Loads the file that discovery found or, if it found none, the first of `names` that the
    /// loader finds. Not public: a caller could make a `Part` of any path, whose code would run.
    pub(crate) fn open(part: &Part, names: &[&str]) -> Result<Library, String> {
        let what = part.what;
        let found = part.found.as_deref().filter(|_| part.is_sound());
        let mut refusal = None;
        for name in found.into_iter().chain(names.iter().map(Path::new)) {
            // SAFETY: loading runs the library's initialisers. It is NVIDIA's, from where the user
            // installed it or told this process to look; every CUDA program loads it like this.
            match unsafe { libloading::Library::new(name) } {
                Ok(handle) => {
                    return Ok(Library::new(handle, what));
                }
                Err(error) if Some(name) == found => refusal = Some(loader_message(&error)),
                Err(_) => {}
            }
        }
        let reinstall = "reinstall it, or put the folder of a working one in LD_LIBRARY_PATH";
        let advice = part.advice.as_deref().unwrap_or(reinstall);
        Err(match refusal {
            Some(message) => format!("{what} cannot be loaded: {message}{}", Help(advice)),
            None if advice.starts_with("broken") => format!("{what} cannot be used: {advice}"),
            None => format!("{what} was not found{}", Help(advice)),
        })
    }
}
