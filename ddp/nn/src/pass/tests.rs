//! A pass over a model, for tests.

use ddp_kernels::{Device, Tensor};

use crate::models::Model;
use crate::{Pass, PassOptions, Saved, Scratch};

/// Runs `body` in the first pass over a model on the CPU.
pub(crate) fn in_pass<R>(model: &Model, training: bool, body: impl FnOnce(Pass<'_>) -> R) -> R {
    let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
    let options = PassOptions {
        training,
        accumulate: false,
        last: true,
        seed: 4,
        position: &position,
    };
    let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
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
