//! Runs batches through a model without training it. Outputs are copied to host memory.

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;
use crate::models::Model;
use crate::nn::loss::STATS;
use crate::nn::{Loss, Pass, PassOptions, Saved, Scratch};
use crate::params::ParamId;

/// A model on its device, and the memory of its activations.
#[derive(Debug)]
pub(super) struct LoadedModel {
    model: Model,
    scratch: Scratch,
    saved: Saved,
    /// For losses, which are computed in host memory.
    host: Scratch,
    /// i64 (2): the position of random numbers, which only training draws.
    position: Tensor,
}

impl LoadedModel {
    pub(super) fn new(model: Model) -> Result<LoadedModel> {
        let device = model.params.device();
        Ok(LoadedModel {
            model,
            scratch: Scratch::new(device),
            saved: Saved::default(),
            host: Scratch::new(Device::Cpu),
            position: Tensor::zeros(&[2], DType::I64, device)?.named("position"),
        })
    }

    /// The model's output for the rows `x`: f32 (B, O) in host memory.
    pub(super) fn run(&mut self, x: &Tensor) -> Result<Tensor> {
        let output = self.in_pass(false, |model, mut pass| model.forward(&mut pass, x))?;
        let copy = || output.to((Device::Cpu, DType::F32));
        Ok(announced("the model's output", copy)?)
    }

    /// The loss of each target for the rows `x`, f32 in host memory. A last layer with many classes
    /// processes the rows in pieces, so its outputs are never in memory as a whole.
    pub(super) fn losses_of(
        &mut self,
        loss: &dyn Loss,
        x: &Tensor,
        targets: &Tensor,
    ) -> Result<Tensor> {
        // f32 (4): statistics that are not read.
        let stats = Tensor::zeros(&[STATS], DType::F32, self.model.params.device())?;
        let losses = self.in_pass(false, |model, pass| {
            let mut pass = pass.leaving_head(loss.is_by_position());
            let output = model.forward(&mut pass, x)?;
            model.losses(&mut pass, loss, [&output, targets, &stats])
        })?;
        let copy = || losses.to((Device::Cpu, DType::F32));
        Ok(announced("the losses", copy)?)
    }

    /// The sum of the losses of a batch, and the weight to divide it by. `output` (B, O) and
    /// `targets` are in host memory.
    pub(super) fn losses(
        &mut self,
        loss: &dyn Loss,
        output: &Tensor,
        targets: &Tensor,
    ) -> Result<[f64; 2]> {
        let stats = Tensor::zeros(&[STATS], DType::F64, Device::Cpu)?;
        let stats = stats.named("statistics of a batch");
        self.in_pass(true, |_, mut pass| {
            loss.compute(&mut pass, [output, targets, &stats], None)
        })?;
        let stats = stats.to_vec::<f64>()?;
        Ok([stats[0], stats[1]])
    }

    /// Calls `body` with the model and a pass that trains nothing.
    fn in_pass<T>(
        &mut self,
        is_on_host: bool,
        body: impl FnOnce(&Model, Pass<'_>) -> crate::nn::Result<T>,
    ) -> Result<T> {
        heartbeat::beat(Work::Computes);
        let mut ignored = |_: ParamId| Ok(());
        let options = PassOptions {
            training: false,
            accumulate: false,
            last: true,
            seed: 0,
            position: &self.position,
        };
        let scratch = if is_on_host {
            &mut self.host
        } else {
            &mut self.scratch
        };
        let (params, saved) = (&self.model.params, &mut self.saved);
        let pass = Pass::new(params, scratch, saved, options, &mut ignored);
        Ok(body(&self.model, pass)?)
    }
}

#[cfg(test)]
mod tests {
    use ddp_kernels::Random;

    use super::*;
    use crate::nn::{CrossEntropy, Head};

    #[test]
    fn losses_of_many_classes_need_no_room_for_all_outputs() {
        let (rows, classes, random) = (1024, 900, &mut Random::new(1));
        let head = Box::new(Head::new(classes));
        let model = Model::new(head, &[5], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
        let mut forward = LoadedModel::new(model).unwrap();
        let x = Tensor::randn(&[rows, 5], DType::F32, Device::Cpu, random).unwrap();
        let targets = Tensor::randint(classes as u32, &[rows], DType::I64, Device::Cpu, random);
        let (targets, loss) = (targets.unwrap(), CrossEntropy::default());
        let losses = forward.losses_of(&loss, &x, &targets).unwrap();
        assert!(forward.scratch.bytes() < rows * classes * 4 / 3);
        let losses = losses.to_vec::<f32>().unwrap();
        assert_eq!(losses.len(), rows);
        let output = forward.run(&x).unwrap();
        let [sum, weight] = forward.losses(&loss, &output, &targets).unwrap();
        let in_pieces: f64 = losses.iter().map(|&loss| f64::from(loss)).sum();
        assert_eq!(weight, rows as f64);
        assert!((in_pieces / sum - 1.0).abs() < 1e-6, "{in_pieces} {sum}");
    }
}
