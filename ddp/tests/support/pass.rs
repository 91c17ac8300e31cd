//! A pass over a model, outside of a step.

use ddp::models::Model;
use ddp::nn::{Pass, PassOptions, Saved, Scratch};
use ddp_kernels::Tensor;

/// Runs `body` in the first pass over a model, on its device.
pub(crate) fn in_pass<R>(model: &Model, training: bool, body: impl FnOnce(Pass<'_>) -> R) -> R {
    let device = model.params.values().device();
    let position = Tensor::from_slice(&[1i64, 0], &[2], device).unwrap();
    let options = PassOptions {
        training,
        accumulate: false,
        last: true,
        seed: 1,
        position: &position,
    };
    let (mut scratch, mut saved) = (Scratch::new(device), Saved::default());
    let mut ready = |_| Ok(());
    let params = &model.params;
    body(Pass::new(
        params,
        &mut scratch,
        &mut saved,
        options,
        &mut ready,
    ))
}
