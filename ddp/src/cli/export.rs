//! The flags of `ddp-train export`.

use std::path::PathBuf;

use clap::Args;
use ddp_kernels::choices;

use crate::flags::choice;

/// Printed after the help of `export`.
pub(super) const EXAMPLES: &str = "\
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
