//! The model of a run: for training, and for use after training.

use ddp_data::{RowSpec, TaskSpec};
use ddp_kernels::Device;
use ddp_nn::models::{DataShape, Model, ModelSpec};
use ddp_nn::params::{Precision, Sharing};

use crate::error::{Error, Result};
use crate::lora::LoraSetting;
use crate::setting::DEVICES_PER_RANK;
use crate::tasks::LossOptions;

/// A model and its loss. Input and output widths follow from the data.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelOptions {
    /// The family and its settings.
    pub spec: ModelSpec,
    /// What the model computes in.
    pub precision: Precision,
    /// The seed of the initial weights and of dropout.
    pub seed: u64,
    /// Options of the loss.
    pub loss: LossOptions,
    /// Adapters, beside which all else is frozen.
    pub lora: Option<LoraSetting>,
    /// See [`Model::recompute_parts`].
    pub recompute_parts: usize,
}

/// What a model of these rows is built for.
pub fn data_shape(rows: &RowSpec) -> DataShape<'_> {
    DataShape {
        row_shape: &rows.inputs.shape,
        image: &rows.image,
        dtype: rows.inputs.dtype,
        outputs: rows.task.outputs(),
        documents: matches!(rows.task, TaskSpec::NextToken { packed: true, .. }),
    }
}

impl ModelOptions {
    /// The parts of the model on `devices`, for these data. `frozen` says by name what is not
    /// trained, `sharing` how ranks share what is.
    pub fn models(
        &self,
        data: &DataShape<'_>,
        devices: &[Device],
        frozen: &dyn Fn(&str) -> bool,
        sharing: impl Into<Sharing>,
    ) -> Result<Vec<Model>> {
        if data.documents && devices.len() > 1 {
            return Err(Error::Usage(format!(
                "rows of several documents: expected a model on one device, got {} devices; help: \
                 leave out {DEVICES_PER_RANK}, or give each document a row of its own",
                devices.len()
            )));
        }
        let mut layers = self.spec.layers(data)?;
        if let Some(lora) = &self.lora {
            layers = layers.adapted(lora.of_model(&self.spec));
        }
        let (precision, seed, sharing) = (self.precision, self.seed, sharing.into());
        let models = Model::split(layers, data.row_shape, devices, |layers, shape, device| {
            Model::with_shares(
                layers,
                shape,
                precision,
                device,
                seed,
                frozen,
                sharing.clone(),
            )
        });
        let mut models = models?;
        let count = self.recompute_parts;
        models.iter_mut().for_each(|it| it.recompute_parts(count));
        Ok(models)
    }
}
