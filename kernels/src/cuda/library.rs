//! Loading NVIDIA's libraries at first use, from the files that discovery found: a file that cannot
//! be used is skipped for the next one. `foreign.rs` offers this to other crates.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::device::Library as Part;
use crate::error::Help;
use crate::library::{Library, loader_message};
use crate::sync::lock;

/// The files that were tried and refused, and why.
static REFUSED: Mutex<Vec<(PathBuf, String)>> = Mutex::new(Vec::new());

impl Library {
    /// NCCL: what `accept` makes of the first file that it takes.
    pub fn nccl<T>(accept: impl Fn(Library) -> Result<T, String>) -> Result<T, String> {
        let part = &crate::device::discover().nccl;
        Library::first(part, &["libnccl.so.2", "libnccl.so"], accept)
    }

    /// The files of all libraries that this process tried and refused, and why.
    pub fn refused() -> Vec<(PathBuf, String)> {
        lock(&REFUSED).clone()
    }

    /// Loads the files that discovery found, then the `names` that the loader knows, until `accept`
    /// takes one; else the first refusal. Not public: a caller could make a `Part` of any path,
    /// whose code would run.
    pub(crate) fn first<T>(
        part: &Part,
        names: &[&str],
        accept: impl Fn(Library) -> Result<T, String>,
    ) -> Result<T, String> {
        let what = part.what;
        let usable = part.candidates.iter().filter(|it| it.skipped.is_none());
        let files = usable.map(|it| it.path.as_path());
        let advice = part.advice.as_deref();
        let mut refusal = None;
        for path in files.chain(names.iter().map(Path::new)) {
            // SAFETY: loading runs the library's initialisers. It is NVIDIA's, from where the user
            // installed it or told this process to look; every CUDA program loads it like this.
            let why = match unsafe { libloading::Library::new(path) } {
                Ok(handle) => match accept(Library::new(handle, what)) {
                    Ok(accepted) => return Ok(accepted),
                    Err(why) => why,
                },
                Err(error) if path.is_absolute() => {
                    let help =
                        "reinstall it, or put the folder of a working one in LD_LIBRARY_PATH";
                    let (message, help) = (loader_message(&error), Help(help));
                    format!("{what} cannot be loaded: {message}{help}")
                }
                Err(_) => continue,
            };
            tracing::debug!("{} is not used: {why}", path.display());
            lock(&REFUSED).push((path.to_owned(), why.clone()));
            refusal.get_or_insert(why);
        }
        Err(match (refusal, advice) {
            (Some(why), _) => why,
            (None, Some(advice)) if part.found.is_some() => {
                format!("{what} cannot be used: {advice}")
            }
            (None, advice) => format!("{what} was not found{}", Help(advice.unwrap_or_default())),
        })
    }
}
