//! `ddp-train export`: a saved model for other programs.

use std::path::PathBuf;

use clap::Args;

use crate::error::Result;
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

/// The flags of `export`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct ExportFlags {
    /// What is written: hf, a folder of Hugging Face (config.json and model.safetensors)
    #[arg(long, value_name = "FORMAT", value_parser = ["hf"])]
    pub format: String,
    /// Folder of a checkpoint, or of a run: its best checkpoint by validation, else its newest
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// New folder to write
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Writes a folder of Hugging Face, on rank 0.
pub(crate) fn export(flags: &ExportFlags, say: Say<'_>) -> Result<()> {
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
