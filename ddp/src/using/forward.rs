//! Runs batches through a model without training it. Outputs are copied to host memory.

use ddp_kernels::heartbeat::{self, Work};
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
    /// For losses, which are computed in host memory.
    host: Scratch,
    /// f64 (4): the statistics of one batch.
    stats: Tensor,
    /// i64 (2): the position of random numbers, which only training draws.
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

    /// The model's output for the rows `x`: f32 (B, O) in host memory.
    pub(super) fn run(&mut self, x: &Tensor) -> Result<Tensor> {
        heartbeat::beat(Work::Computes);
        let mut ignored = |_: ParamId| Ok(());
        let options = options(&self.position);
        let mut pass = Pass::new(
            &self.model.params,
            &mut self.scratch,
            &mut self.saved,
            options,
            &mut ignored,
        );
        let output = self.model.forward(&mut pass, x)?;
        Ok(announced("the model's output", || {
            output.to((Device::Cpu, DType::F32))
        })?)
    }

    /// The sum of the losses of a batch, and the weight to divide it by. `output` (B, O) and
    /// `targets` are in host memory.
    pub(super) fn losses(
        &mut self,
        loss: &dyn Loss,
        output: &Tensor,
        targets: &Tensor,
    ) -> Result<[f64; 2]> {
        let mut ignored = |_: ParamId| Ok(());
        let options = options(&self.position);
        let mut pass = Pass::new(
            &self.model.params,
            &mut self.host,
            &mut self.saved,
            options,
            &mut ignored,
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
