//! `ddp-train export`: a saved model for other programs.

use std::path::PathBuf;

use clap::Args;

use crate::config::{Config, FloatType};
use crate::error::Result;
use crate::hugging_face;
use crate::shown::shown;
use crate::using::choose::described;
use crate::using::load;
use ddp_tools::output::{Say, warn_unprinted};

/// Printed after the help of `export`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train export --format hf --checkpoint out exported
  ddp-train export --format hf --checkpoint out/checkpoints/step-00000785 exported

Models of the family gpt become GPT2LMHeadModel or LlamaForCausalLM; one that is neither is refused.";

/// The flags of `export`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct ExportFlags {
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
    let (chosen, model) = load::on_cpu(&flags.checkpoint, Some(FloatType::F32))?;
    let (opened, state) = (&chosen.opened, &chosen.opened.state);
    let (spec, vocabulary) = (Config::of_checkpoint(opened)?.model, state.task.outputs());
    let tokenizer = opened.tokenizer()?;
    let tokenizer = tokenizer.as_ref().map(|known| (known, state.end_of_text()));
    let class = hugging_face::export(&flags.folder, &spec, vocabulary, &model.params, tokenizer)?;
    let (folder, of) = (shown(&flags.folder.to_string_lossy()), described(&chosen));
    warn_unprinted(say(&format!("{folder} is {class} of {of}")));
    Ok(())
}
