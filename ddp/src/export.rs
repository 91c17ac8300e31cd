//! `ddp-train export`: a saved model for other programs.

use std::fmt::Display;

use ddp_comm::World;
use ddp_kernels::{DType, Device};

use crate::checkpoint::{self, Chosen};
use crate::cli::ExportFlags;
use crate::config::{Config, Precision};
use crate::data::TaskSpec;
use crate::error::{Error, Result};
use crate::hugging_face;
use crate::models::{DataShape, ModelSpec};
use crate::shown::shown;
use crate::using::choose::choose;
use crate::using::load::check_size;

/// Writes a folder of Hugging Face, on rank 0.
pub fn export(
    flags: &ExportFlags,
    world: &World,
    say: &mut dyn FnMut(&dyn Display) -> Result<()>,
) -> Result<()> {
    if world.rank() > 0 {
        return Ok(());
    }
    let Chosen { opened, why } = choose(&flags.checkpoint)?;
    let config = Config {
        dtype: Precision::F32,
        ..Config::of_checkpoint(&opened)?
    };
    let ModelSpec::Gpt(spec) = &config.model else {
        let got = config.model.name();
        return Err(Error::Usage(format!(
            "--checkpoint {}: expected a model of the family gpt, got {got}; help: {got} has no \
             class in transformers: use its model.safetensors",
            flags.checkpoint.display()
        )));
    };
    let state = &opened.state;
    let shape = DataShape {
        row_shape: &state.row_shape,
        dtype: DType::I64,
        outputs: state.task.outputs(),
    };
    check_size(&opened, &config, &shape)?;
    let everything = |_: &str| true;
    let mut models = config
        .model_options()
        .models(&shape, &[Device::Cpu], &everything, 1)?;
    let model = models.pop().expect("a model for one device");
    checkpoint::load_opened(&opened, &[&model.params])?;
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
    let class = hugging_face::export(&flags.folder, spec, shape.outputs, &model.params, tokenizer)?;
    say(&format!(
        "{} is {class} of {} ({why}), after step {}",
        shown(&flags.folder.to_string_lossy()),
        shown(&opened.folder.to_string_lossy()),
        state.step
    ))
}
