//! Checkpoints, in OUT/checkpoints/step-%08d/:
//!
//! - `model.safetensors`: parameters and buffers, f32 (`model.rs`)
//! - `optimizer.safetensors`, or under ZeRO-1 a file a rank: the optimizer's moments
//!   (`optimizer.rs`)
//! - `state.json`: everything else (`state.rs`)
//! - `tokenizer.json`, if the model takes tokens that have one
//! - `manifest.json`: size and BLAKE3 of each file, written last (`manifest.rs`)
//!
//! A checkpoint is written whole or not at all: under another name in the same folder, synced, then
//! renamed. A thread (`saver.rs`, `writer.rs`) writes it from a copy (`snapshot.rs`) while training
//! continues. A checkpoint is used only after all its bytes are checked, and no claim of a header
//! is trusted for an allocation.

mod difference;
mod files;
mod find;
mod folders;
mod manifest;
mod model;
mod optimizer;
mod restore;
mod saver;
mod snapshot;
mod state;
mod tensors;
mod writer;

pub(crate) use self::difference::differences;
pub(crate) use self::files::ReadFrom;
pub use self::files::{damaged, unreadable, with_help};
pub use self::find::{Chosen, best, is_gone, newest, open_together};
pub use self::folders::{
    CHECKPOINTS, MODEL_FILE, STATE_FILE, folder, is_checkpoint, newest_folder,
};
pub(crate) use self::folders::{MANIFEST_FILE, clear_up, put_aside, put_aside_after};
pub(crate) use self::manifest::manifest_blake3;
pub use self::manifest::{FileEntry, Opened, open};
pub(crate) use self::model::{Foreign, fill, header_of, initial, load_initial, refuse, text_of};
pub use self::model::{load_model, load_opened, write_model};
pub(crate) use self::restore::restore_if_fits;
pub use self::restore::{restore, restore_values};
pub use self::saver::Saver;
pub use self::state::{Best, Plateau, Position, ScheduleState, State, WorldState};
pub(crate) use self::tensors::{FileDType, PIECE, write_file};
use ddp_data::safetensors;

/// Reads `bytes` as each of the files of a checkpoint, for the fuzzer: nothing may panic, or
/// allocate what a header claims.
#[doc(hidden)]
pub fn read_as_anything(bytes: &[u8]) {
    let _ = State::parse(bytes);
    let _ = manifest::Manifest::parse(bytes);
    if let Ok(Ok(header)) = safetensors::Header::read(&mut &bytes[..], bytes.len() as u64) {
        let mut saved = optimizer::SavedMoments::default();
        if saved.add(0, &header).is_ok() {
            let _ = saved.check([("0.weight", "exp_avg", 10)].into_iter());
        }
    }
}

#[cfg(test)]
mod tests;
