//! Checkpoints: OUT/checkpoints/step-%08d/, which has
//!
//! - `model.safetensors`: the values, f32, under the parameters' names (`model.rs`);
//! - `optimizer.safetensors`, or under ZeRO-1 a file a rank: the optimizer's moments (`optimizer.rs`);
//! - `state.json`: everything else (`state.rs`);
//! - `manifest.json`: the length and BLAKE3 of each of these, written last (`manifest.rs`).
//!
//! A checkpoint appears whole or not at all: it is written aside in the same folder, made durable, and renamed. It is made from a snapshot (`snapshot.rs`),
//! by a thread of its own (`saver.rs`, `writer.rs`), so training goes on meanwhile. Nothing of one is believed before every byte of it is checked, and a
//! header's claims are checked against its file before anything is allocated.

mod exchange;
mod find;
mod manifest;
mod model;
mod optimizer;
mod prune;
mod read_from;
mod restore;
pub(crate) mod safetensors;
mod saver;
mod snapshot;
mod state;
mod tensors;
mod together;
mod writer;

use std::path::{Path, PathBuf};

pub(crate) use self::find::is_gone;
pub use self::find::{Chosen, PassedOver, best, newest};
pub use self::manifest::{FileEntry, MANIFEST_FILE, Opened, open};
pub use self::model::{load_model, write_model};
pub(crate) use self::model::{load_opened, load_unchecked};
pub(crate) use self::restore::restore_if_fits;
pub use self::restore::{restore, restore_values};
pub(crate) use self::saver::SAVING_MAX;
pub use self::saver::Saver;
pub use self::state::{Best, Position, STATE_FILE, ScheduleState, State, WorldState};
pub(crate) use self::together::{open_together, wait_for_all};
use crate::error::Result;
use crate::files;
use crate::params::Params;

/// The file of a checkpoint that holds the model.
pub const MODEL_FILE: &str = "model.safetensors";

/// The folder of the checkpoint of step `step` under a run's folder.
pub fn folder(out: &Path, step: u64) -> PathBuf {
    find::checkpoints(out).join(find::name(step))
}

/// Removes what a run that was killed has left half done in its folder, and gives a checkpoint its name back that was being replaced. For whoever
/// holds the folder's record.
pub(crate) fn clear_up(out: &Path) -> Result<()> {
    let checkpoints = find::checkpoints(out);
    if checkpoints.is_dir() { prune::clean(&checkpoints) } else { Ok(()) }
}

/// Saves the model alone as it is after step `step`: its parameters, or those of its parts from the input on. Returns the file. Fails if
/// that step is saved already. [`Saver`] saves what is needed to go on, too.
pub fn save_model(out: &Path, step: u64, parts: &[&Params]) -> Result<PathBuf> {
    let folder = folder(out, step);
    files::make_whole_folder(&folder, |aside| write_model(&aside.join(MODEL_FILE), parts))?;
    Ok(folder.join(MODEL_FILE))
}

/// What is wrong with a file of another version.
fn other_format(got: impl Into<u64>, known: u32) -> String {
    let got = got.into();
    format!("is of format {got}, and this program reads format {known}: use the ddp-train that wrote it")
}

/// Reads `bytes` as each of the files of a checkpoint, for the fuzzer: whatever they are, nothing panics, and nothing is allocated because they
/// claim it.
pub(crate) fn read_as_anything(bytes: &[u8]) {
    let _ = State::parse(bytes);
    let _ = manifest::Manifest::parse(bytes);
    if let Ok(Ok(header)) = safetensors::Header::read(&mut &bytes[..], bytes.len() as u64) {
        let mut held = optimizer::Held::default();
        if held.add(0, &header).is_ok() {
            let _ = held.check([("0.weight", "exp_avg", 10)].into_iter());
        }
    }
}

#[cfg(test)]
mod tests;
