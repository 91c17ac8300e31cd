//! `ddp-train export`: a saved model for other programs.

use std::path::PathBuf;

use clap::Args;

use crate::config::{Config, FloatType};
use crate::error::{Error, Result};
use crate::flags::{Taken, choice};
use crate::hugging_face::{self, Base, Exported};
use crate::lora;
use crate::shown::shown;
use crate::using::choose::described;
use crate::using::load;
use ddp_tools::output::{Say, warn_unprinted};

/// Printed after the help of `export`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train export --format hf --checkpoint out exported
  ddp-train export --format hf --checkpoint out/checkpoints/step-00000785 exported

  ddp-train export --format hf --checkpoint out --merge exported

Models of the family gpt become the class of transformers that they came from, or that has their settings (docs/fine-tuning.md); others are refused. A run with --lora becomes a \
PEFT adapter, or with --merge a whole model.";

/// The flags of `export`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct ExportFlags {
    /// What is written: hf, a Hugging Face folder (config.json and model.safetensors; for a run
    /// with --lora adapter_config.json and adapter_model.safetensors)
    #[arg(long, value_name = "FORMAT", value_parser = ["hf"])]
    pub format: String,
    /// Folder of a checkpoint, of a run (its best checkpoint by validation, else its newest), or
    /// with --merge of an adapter
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// Add the adapters of a run with --lora to the weights they belong to, and write all
    #[arg(long)]
    pub merge: bool,
    /// Type of the numbers in model.safetensors: f32, or bf16 in half the bytes
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = choice::<FloatType>())]
    pub dtype: FloatType,
    /// New folder to write
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
    /// Where a base is.
    #[command(flatten)]
    pub settings: Taken,
}

/// Writes a Hugging Face folder, on rank 0.
pub(crate) fn export(flags: &ExportFlags, say: Say<'_>) -> Result<()> {
    let from = &flags.settings;
    let dtype = Some(FloatType::F32);
    let (chosen, model, ()) = load::on_cpu(&flags.checkpoint, from, dtype, |_| Ok(()))?;
    let (opened, state) = (&chosen.opened, &chosen.opened.state);
    let (config, vocabulary) = (Config::of_checkpoint(opened)?, state.task.outputs());
    let (spec, params) = (&config.model, &model.params);
    let (name, of) = (shown(&flags.folder.to_string_lossy()), described(&chosen));
    let tokenizer = opened.tokenizer()?;
    match (&config.lora, &config.init_from) {
        (Some(_), Some(_)) if !flags.merge && flags.dtype != FloatType::F32 => {
            let why = "--dtype bf16: expected f32, as adapters are written; help: leave it out, or \
                       add --merge";
            return Err(Error::Usage(why.into()));
        }
        (Some(lora), Some(base)) if !flags.merge => {
            let base = (base.as_path(), state.base.as_deref());
            lora::export(&flags.folder, lora, spec, params, base, tokenizer.as_ref())?;
            if !hugging_face::is_folder(base.0) {
                tracing::warn!(
                    "{name} names a base that PEFT cannot read: export that as well, and write its folder into adapter_config.json"
                );
            }
            let base = shown(&base.0.to_string_lossy()).to_string();
            warn_unprinted(say(&format!("{name} is a PEFT adapter to {base}, of {of}")));
            return Ok(());
        }
        (Some(lora), _) => lora::merge(lora, spec, params)?,
        (None, _) if flags.merge => {
            return Err(Error::Usage(format!(
                "--merge: expected a run with --lora, got {of}; help: leave --merge out"
            )));
        }
        (None, _) => {}
    }
    // Of a foreign folder the end token is only a guess.
    let end = state.end_of_text().filter(|_| !opened.is_foreign());
    let base = config.init_from.as_deref();
    let base = base.and_then(|base| Base::of(base, tokenizer.as_ref()));
    let exported = Exported {
        model: spec,
        vocabulary,
        params,
        tokenizer: tokenizer.as_ref().map(|known| (known, end)),
        base,
        dtype: flags.dtype.dtype(),
    };
    let class = hugging_face::export(&flags.folder, exported)?;
    warn_unprinted(say(&format!("{name} is {class} of {of}")));
    Ok(())
}
