//! The linear path of a perceptron starts at the linear model of the rows, if that is asked for.

use ddp_data::Dataset;
use ddp_kernels::{Device, Tensor};
use ddp_nn::params::Params;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::setting::{LINEAR_PATH, LINEAR_START};
use crate::tasks::LinearModels;

/// The weights (outputs, features) and the bias (outputs) of the linear model of these rows; None
/// if the path starts at zero.
pub(super) fn of(options: &Config, rows: &dyn Dataset) -> Result<Option<[Vec<f32>; 2]>> {
    let penalty = options.linear_start.unwrap_or_default();
    if penalty == 0.0 {
        return Ok(None);
    }
    let has_path = options.model.value(LINEAR_PATH.0) == true;
    let models = LinearModels::of(rows)?.filter(|_| has_path);
    let model = models.and_then(|models| models.fit(penalty));
    let refused = || {
        Error::Usage(format!(
            "{LINEAR_START} {penalty}: expected a perceptron with {LINEAR_PATH} true, and data of classes or \
             numbers with fewer than 512 features and outputs together; help: give {LINEAR_START} 0"
        ))
    };
    Ok(Some(model.ok_or_else(refused)?.layer()))
}

/// Gives the linear path and the last bias of a perceptron these values.
pub(super) fn set(options: &Config, values: &[Vec<f32>; 2], parts: &[&Params]) -> Result<()> {
    let hidden = options.model.value("hidden").as_array().map_or(0, Vec::len);
    let names = ["linear.weight".to_string(), format!("{}.bias", 2 * hidden)];
    for (name, values) in names.iter().zip(values) {
        let owner = parts
            .iter()
            .find_map(|part| Some((part, part.find(name).ok()?)));
        let Some((part, parameter)) = owner else {
            return Err(Error::Internal(format!("no part of the model has {name}")));
        };
        let values = Tensor::from_slice(values, &parameter.shape, Device::Cpu)?;
        part.set(parameter, &values, "the linear model that it starts at")?;
    }
    Ok(())
}
