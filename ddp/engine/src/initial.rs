//! The values that a model starts with: those of `init-from`. Where a run trains adapters, they are
//! the base, which is read again whenever the run is resumed or its model is used.

use std::path::Path;

use ddp_nn::models::family::refuse;
use ddp_nn::params::Params;

use crate::checkpoint::{self, MODEL_FILE, Opened};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::hugging_face;
use crate::setting::{INIT_FROM, LORA};

/// Fills a model, or the base of its adapters, with the values that `path` names. Rank 0 checks the
/// bytes of a checkpoint's file. Returns a digest of the values.
pub fn load(path: &Path, parts: &[&Params], rank: usize) -> Result<String> {
    if hugging_face::is_folder(path) {
        return hugging_face::load(path, parts);
    }
    let file = path.join(MODEL_FILE);
    if path.is_dir() && !file.exists() {
        let expected = "a model file, or the folder of a checkpoint or of Hugging Face";
        let help = "give a folder in its checkpoints, if this is a run";
        return Err(refuse("init-from", path.display(), expected, help).into());
    }
    let path = if path.is_dir() { &file } else { path };
    if path.exists() && !path.is_file() {
        let expected = "an ordinary file";
        let help = "save what a pipe or a device gives as a file first";
        return Err(refuse("init-from", path.display(), expected, help).into());
    }
    checkpoint::load_initial(path, parts, rank)
}

/// Fills the base of the adapters that `config` asks for, if it does. It must have the digest
/// `then`, if that is known. Returns its digest.
pub(crate) fn load_base(
    config: &Config,
    parts: &[&Params],
    rank: usize,
    then: Option<&String>,
) -> Result<Option<String>> {
    let (Some(_), Some(path)) = (&config.lora, &config.init_from) else {
        return Ok(None);
    };
    let now = load(path, parts, rank)?;
    match then.filter(|then| **then != now) {
        None => Ok(Some(now)),
        Some(then) => Err(Error::Data(format!(
            "{INIT_FROM} {}: expected the base model that the adapters were trained on ({LORA}), of \
             digest {then}, got other weights, of digest {now}; help: put back the folder as it was",
            path.display()
        ))),
    }
}

/// Fills a model with the values of a checkpoint, which has these settings.
pub fn load_opened(opened: &Opened, config: &Config, parts: &[&Params]) -> Result<()> {
    load_base(config, parts, 0, opened.state.base.as_ref())?;
    checkpoint::load_opened(opened, parts)
}
