//! Compiles all kernels before any is needed: on all cores, and without a GPU where one builds an
//! image.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::cuda::cache;
use crate::cuda::nvrtc::Compilation;
use crate::error::{Error, Result};
use crate::ops::SOURCES;
use crate::panics::lock;
use crate::progress;

/// How many files are compiled at the same time.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Compiles the kernels that the cache lacks for GPUs of these compute capabilities, (9, 0) for
/// sm_90, and keeps them there: how many files, and in which folder. `say` is called before, if
/// there are any. Without a cache nothing is compiled.
pub fn compile(
    capabilities: &[(u32, u32)],
    say: impl FnOnce(usize, &str),
) -> Result<Option<(usize, String)>> {
    let Some(folder) = cache::folder_of_process() else {
        return Ok(None);
    };
    let folder = folder.display().to_string();
    let problem = |why: String| Error::Kernel(format!("cannot compile kernels ahead: {why}"));
    let mut missing = Vec::new();
    for &capability in capabilities {
        let sources = SOURCES.into_iter().chain([&progress::SOURCE]);
        missing.extend(Compilation::all(sources, capability).map_err(problem)?);
    }
    missing.retain(|compilation| compilation.entry.read().is_none());
    if missing.is_empty() {
        return Ok(Some((0, folder)));
    }
    say(missing.len(), &folder);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failed = Mutex::new(None);
    let work = || {
        while let Some(compilation) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
            // Another rank of this host may compile it meanwhile.
            let _turn = compilation.entry.turn();
            if compilation.entry.read().is_none() {
                match compilation.run() {
                    Ok(image) => compilation.entry.write(&image),
                    Err(why) => {
                        *lock(&failed) = Some(why);
                        continue;
                    }
                }
            }
            let (name, done) = (compilation.name, done.fetch_add(1, Ordering::Relaxed) + 1);
            tracing::info!("compiled {name}, {done} of {}", missing.len());
        }
    };
    thread::scope(|scope| {
        for _ in 0..cores().min(missing.len()) {
            scope.spawn(work);
        }
    });
    match lock(&failed).take() {
        Some(why) => Err(problem(why)),
        None => Ok(Some((missing.len(), folder))),
    }
}
