//! Checks a model's outputs, and converts between its units and those of the labels.

use ddp_kernels::{Device, Tensor};

use crate::data::Normalization;
use crate::error::{Error, Result};

/// Refuses non-finite values, which the message calls `what`. Each row has `outputs` of them;
/// `number` says which row of the data it is.
pub(super) fn check_finite(
    what: &str,
    values: &[f32],
    outputs: usize,
    number: impl Fn(u64) -> u64,
) -> Result<()> {
    let Some(at) = values.iter().position(|value| !value.is_finite()) else {
        return Ok(());
    };
    let row = number((at / outputs.max(1)) as u64);
    Err(Error::NonFinite(format!(
        "row {row}: {what} {}, which is not finite; help: look at that row: its features \
         may be far from those of training",
        values[at]
    )))
}

/// The numbers of `tensor` (B, O), f32 in host memory, changed by `change`, if targets were
/// normalized.
pub(super) fn rescaled(
    tensor: &Tensor,
    normalization: Option<&Normalization>,
    change: fn(&Normalization, &mut [f32], usize),
) -> Result<Tensor> {
    let Some(normalization) = normalization else {
        return Ok(tensor.clone());
    };
    let mut numbers = tensor.to_vec::<f32>()?;
    change(normalization, &mut numbers, normalization.shift.len());
    let shape = tensor.shape().dims();
    Ok(Tensor::from_slice(&numbers, shape, Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_non_finite_output_is_named_with_its_row() {
        check_finite("the model gives", &[0.0; 6], 3, |row| 10 + row).unwrap();
        let values = [0.0, 1.0, 2.0, 3.0, f32::NAN, f32::INFINITY];
        let error = check_finite("the model gives", &values, 3, |row| 10 + row).unwrap_err();
        assert_eq!(error.exit_code(), 76);
        assert!(
            error.to_string().starts_with("row 11: the model gives NaN"),
            "{error}"
        );
    }
}
