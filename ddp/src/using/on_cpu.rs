//! A saved transformer on the CPU, in f32 and without gradients: for `generate` and `export`.

use std::path::Path;

use ddp_kernels::{DType, Device};

use super::choose::{check_run, choose};
use super::load;
use crate::checkpoint::{Chosen, Opened};
use crate::config::{Config, Precision};
use crate::error::{Error, Result};
use crate::models::{DataShape, Model, ModelSpec};

/// A model of a checkpoint.
pub(crate) struct OnCpu {
    pub(crate) opened: Opened,
    /// Why this checkpoint, for people.
    pub(crate) why: String,
    pub(crate) spec: ModelSpec,
    pub(crate) model: Model,
}

/// The model of the checkpoint that `path` means.
pub(crate) fn load(path: &Path) -> Result<OnCpu> {
    let Chosen { opened, why } = choose(path)?;
    check_run(&opened)?;
    let mut config = Config::of_checkpoint(&opened)?;
    config.dtype = Precision::F32;
    let spec = config.model.clone();
    if !spec.generates() {
        return Err(Error::Usage(format!(
            "--checkpoint {}: expected a model of the family {}, got {}; help: for other models \
             there are eval, predict and model.safetensors",
            path.display(),
            ModelSpec::that_generate(),
            spec.name()
        )));
    }
    let state = &opened.state;
    let shape = DataShape {
        row_shape: &state.row_shape,
        image: &state.image,
        dtype: DType::I64,
        outputs: state.task.outputs(),
    };
    let model = load::saved(&opened, &config, &shape, Device::Cpu)?;
    Ok(OnCpu {
        opened,
        why,
        spec,
        model,
    })
}
