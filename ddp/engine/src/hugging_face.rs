//! Models of the family `gpt` from and to folders of Hugging Face's transformers: `config.json` and
//! tensors in `.safetensors` files.
//!
//! `architecture.rs` reads the tables of keys and names of each class, keys.txt first; `config.rs`
//! and `special.rs` read and write settings by them, and `names.rs` says which tensors there make
//! which parameter here. `folder.rs` finds tensors in files, `load.rs` and `export.rs` move the
//! values, and `base.rs` what training did not change. Settings that this program does not support
//! are refused by name, never ignored.

mod architecture;
mod base;
mod config;
mod export;
mod folder;
mod keys;
mod load;
mod names;
mod special;
mod unread;

use std::path::Path;

pub use self::base::Base;
pub use self::config::describe;
pub use self::export::{Exported, export, is_conv1d, modules, write_folder};
pub use self::load::{checked, load};
pub use self::unread::help_for_unread;
use crate::checkpoint::{MANIFEST_FILE, STATE_FILE};

/// The file that says that a folder has adapters alone.
pub const ADAPTER_FILE: &str = "adapter_config.json";
/// The file with a model's settings.
pub const CONFIG_FILE: &str = "config.json";

/// Whether `folder` is one of Hugging Face (`describe` refuses an adapter), not a checkpoint.
pub fn is_folder(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).exists();
    (has(CONFIG_FILE) || has(ADAPTER_FILE)) && !has(STATE_FILE) && !has(MANIFEST_FILE)
}

#[cfg(test)]
mod tests;
