//! `ddp-train export`: a saved model for other programs.

use ddp_comm::World;

use crate::cli::ExportFlags;
use crate::error::Result;
use crate::hugging_face;
use crate::output::{Say, warn_unprinted};
use crate::shown::shown;
use crate::using::on_cpu;

/// Writes a folder of Hugging Face, on rank 0.
pub fn export(flags: &ExportFlags, world: &World, say: Say<'_>) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let loaded = on_cpu::load(&flags.checkpoint)?;
    let (opened, state) = (&loaded.opened, &loaded.opened.state);
    let tokenizer = opened.tokenizer()?;
    let tokenizer = tokenizer.as_ref().map(|known| (known, state.end_of_text()));
    let (params, vocabulary) = (&loaded.model.params, state.task.outputs());
    let class = hugging_face::export(&flags.folder, &loaded.spec, vocabulary, params, tokenizer)?;
    let [folder, of] = [&flags.folder, &opened.folder].map(|path| shown(&path.to_string_lossy()));
    let (why, step) = (&loaded.why, state.step);
    warn_unprinted(say(&format!(
        "{folder} is {class} of {of} ({why}), after step {step}"
    )));
    Ok(())
}
