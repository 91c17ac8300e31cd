//! `ddp-train export`: a saved model for other programs.

use std::path::PathBuf;

use clap::Args;
use ddp_comm::World;
use ddp_kernels::choices;

use crate::error::Result;
use crate::flags::choice;
use crate::hugging_face;
use crate::output::{Say, warn_unprinted};
use crate::shown::shown;
use crate::using::load;

/// Printed after the help of `export`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train export --format hf --checkpoint out exported
  ddp-train export --format hf --checkpoint out/checkpoints/step-00000785 exported

Models of the family gpt become GPT2LMHeadModel or LlamaForCausalLM; one that is neither is refused.";

choices! {
    /// A format of exported models.
    pub enum ExportFormat {
        /// A folder of Hugging Face: config.json and model.safetensors
        HuggingFace = "hf",
    }
}

/// The flags of `export`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct ExportFlags {
    /// What is written
    #[arg(long, value_name = "FORMAT", value_parser = choice::<ExportFormat>())]
    pub format: ExportFormat,
    /// Folder of a checkpoint, or of a run: its best checkpoint by validation, else its newest
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// New folder to write
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Writes a folder of Hugging Face, on rank 0.
pub fn export(flags: &ExportFlags, world: &World, say: Say<'_>) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let loaded = load::on_cpu(&flags.checkpoint)?;
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
