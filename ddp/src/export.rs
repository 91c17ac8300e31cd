//! `ddp-train export`: a saved model for other programs.

use ddp_comm::World;

use crate::cli::ExportFlags;
use crate::data::TaskSpec;
use crate::error::Result;
use crate::hugging_face;
use crate::output::{Say, warn_unprinted};
use crate::shown::shown;
use crate::using::on_cpu::{self, OnCpu};

/// Writes a folder of Hugging Face, on rank 0.
pub fn export(flags: &ExportFlags, world: &World, say: Say<'_>) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let OnCpu {
        opened,
        why,
        model,
        spec,
    } = on_cpu::load(&flags.checkpoint)?;
    let state = &opened.state;
    let tokenizer = opened.tokenizer()?;
    let tokenizer = tokenizer.as_ref().map(|tokenizer| {
        let end = match &state.task {
            TaskSpec::NextToken {
                tokenizer: Some(id),
                ..
            } => id.end_of_text,
            _ => None,
        };
        (tokenizer, end)
    });
    let vocabulary = state.task.outputs();
    let class = hugging_face::export(&flags.folder, &spec, vocabulary, &model.params, tokenizer)?;
    warn_unprinted(say(&format!(
        "{} is {class} of {} ({why}), after step {}",
        shown(&flags.folder.to_string_lossy()),
        shown(&opened.folder.to_string_lossy()),
        state.step
    )));
    Ok(())
}
