//! Taking batches through a model that is only used: what it gives comes to host memory.

use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor, ops};

use crate::error::Result;
use crate::models::Model;
use crate::nn::loss::STATS;
use crate::nn::{Loss, Pass, PassOptions, Saved, Scratch};
use crate::params::ParamId;

/// A model on its device, and the memory of its activations.
#[derive(Debug)]
pub(super) struct Forward {
    model: Model,
    scratch: Scratch,
    saved: Saved,
    /// For losses, which are found out in host memory.
    host: Scratch,
    /// f64 `[4]`, of one batch: what losses add to.
    stats: Tensor,
    /// i64 `[2]`: nothing is drawn outside of training, so that it does not matter which.
    position: Tensor,
}

impl Forward {
    pub(super) fn new(model: Model) -> Result<Forward> {
        let device = model.params.device();
        let position = Tensor::zeros(&[2], DType::I64, device)?.named("position");
        let stats =
            Tensor::zeros(&[STATS], DType::F64, Device::Cpu)?.named("statistics of a batch");
        let (scratch, host) = (Scratch::new(device), Scratch::new(Device::Cpu));
        Ok(Forward {
            model,
            scratch,
            saved: Saved::default(),
            host,
            stats,
            position,
        })
    }

    /// What the model gives for the rows `x`, f32 `[B, O]` in host memory, as in training's evaluation.
    pub(super) fn run(&mut self, x: &Tensor) -> Result<Tensor> {
        let mut nobody = |_: ParamId| Ok(());
        let options = options(&self.position);
        let mut pass = Pass::new(
            &self.model.params,
            &mut self.scratch,
            &mut self.saved,
            options,
            &mut nobody,
        );
        let output = self.model.forward(&mut pass, x)?;
        Ok(announced("what the model gives", || {
            output.to((Device::Cpu, DType::F32))
        })?)
    }

    /// The sums over a batch of its losses and of what to divide them by, as training's evaluation adds them: `output` f32 `[B, O]` and
    /// `targets`, both in host memory.
    pub(super) fn losses(
        &mut self,
        loss: &dyn Loss,
        output: &Tensor,
        targets: &Tensor,
    ) -> Result<[f64; 2]> {
        let mut nobody = |_: ParamId| Ok(());
        let options = options(&self.position);
        let mut pass = Pass::new(
            &self.model.params,
            &mut self.host,
            &mut self.saved,
            options,
            &mut nobody,
        );
        ops::zero(&self.stats)?;
        loss.compute(&mut pass, output, targets, &self.stats)?;
        let stats = self.stats.to_vec::<f64>()?;
        Ok([stats[0], stats[1]])
    }
}

fn options(position: &Tensor) -> PassOptions<'_> {
    PassOptions {
        training: false,
        accumulate: false,
        last: true,
        seed: 0,
        position,
    }
}
