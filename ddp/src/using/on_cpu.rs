//! A saved transformer on the CPU, in f32 and without gradients: for `generate` and `export`.

use std::path::Path;

use ddp_kernels::{DType, Device};

use super::choose::{check_run, choose};
use super::load::check_size;
use crate::checkpoint::{self, Chosen, Opened};
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
    let config = Config::of_checkpoint(&opened)?;
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
    check_size(&opened, &config, &shape)?;
    let model = empty(config, &shape)?;
    checkpoint::load_opened(&opened, &[&model.params])?;
    Ok(OnCpu {
        opened,
        why,
        spec,
        model,
    })
}

/// A model with first values.
pub(super) fn empty(config: Config, shape: &DataShape<'_>) -> Result<Model> {
    let config = Config {
        dtype: Precision::F32,
        ..config
    };
    let (options, everything) = (config.model_options(), |_: &str| true);
    let mut models = options.models(shape, &[Device::Cpu], &everything, 1)?;
    Ok(models.pop().expect("a model for one device"))
}
