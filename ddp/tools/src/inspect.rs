//! `ddp-train inspect`: the contents of a checkpoint, a model's file or folder, or a run's folder,
//! and whether they are intact.
//!
//! Each kind has a file, which makes a sheet for people and JSON. Damage is printed with the rest,
//! and is also the error at the end.

mod checkpoint;
mod model;
mod run;
mod sheet;

use std::path::Path;

use self::sheet::Inspected;
use crate::checkpoint::is_checkpoint;
use crate::error::{Error, Result};
use crate::hugging_face;
use crate::metrics_log::EVENTS_FILE;
use crate::output::Say;
use crate::setting::DATA;

/// Prints what is in a file or folder; of a run with the head of the first `lines` lines of its
/// log, else of all.
pub fn inspect(path: &Path, lines: Option<u64>, as_json: bool, say: Say<'_>) -> Result<()> {
    let Inspected(sheet, json, problem) = find(path, lines)?;
    if as_json {
        say(&json)?
    } else {
        say(&sheet)?
    }
    problem.map_or(Ok(()), Err)
}

fn find(path: &Path, lines: Option<u64>) -> Result<Inspected> {
    if hugging_face::is_folder(path) {
        return model::of_folder(path);
    }
    if path.is_dir() && is_checkpoint(path) {
        return checkpoint::found(path);
    }
    if path.join(EVENTS_FILE).exists() || path.join("checkpoints").is_dir() {
        return run::found(path, lines);
    }
    if path.extension().is_some_and(|it| it == "safetensors") {
        return model::found(path);
    }
    let unread = hugging_face::help_for_unread(path);
    let (path, exists) = (path.display(), path.exists());
    let (got, help) = if let Some(help) = unread {
        (if exists { "GGUF" } else { "none" }, help)
    } else if exists {
        (
            "another",
            format!("a dry run with {DATA} {path} says what training would make of data"),
        )
    } else {
        ("none", "check the path".into())
    };
    Err(Error::Usage(format!(
        "inspect {path}: expected the folder of a run, of a checkpoint or of Hugging Face, or a .safetensors file, got {got}; help: {help}"
    )))
}
