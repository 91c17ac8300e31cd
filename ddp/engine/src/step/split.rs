//! What passes between the devices of a model that is split over several. On one device nothing
//! here does anything.
//!
//! In a forward, activations go from each stage to the next, and in a backward their gradient goes
//! back: one tensor per pair of neighbours. The host waits for neither.
//!
//! A tied parameter is owned by the first stage that uses it. Later ones borrow it: they get its
//! values once a step. In a backward each adds to the sum so far, in the order of an unsplit model,
//! and the owner, which is last, has it reduced.
//!
//! Each device sums the squares of its gradients by quantum, and these sums go to the last device:
//! 8 bytes for 1,024 gradients. There they are in the order of a model on one device (the last
//! layers first), so the norm has the same bits. Scale and flags of the step go back.

use ddp_kernels::Tensor;
use ddp_kernels::transfer::announced;
use ddp_nn::pass::Listener as _;

use super::model::TrainedModel;
use super::stage::{Stage, StagePass};
use crate::error::Result;

impl Stage {
    /// `tensor` of the neighbouring stage, on this device.
    pub(super) fn bring(&mut self, tensor: Tensor, what: &'static str) -> Result<Tensor> {
        if tensor.device() == self.device() {
            return Ok(tensor);
        }
        let here = self.scratch.take(tensor.shape(), tensor.dtype())?;
        announced(what, || here.copy_from(&tensor))?;
        Ok(here)
    }
}

impl TrainedModel {
    /// Copies the values of tied parameters to the stages that borrow them. Call it before a
    /// forward whenever values may have changed.
    pub(super) fn lend_values(&self) -> Result<()> {
        for stage in &self.stages {
            for loan in stage.model.params.loans() {
                let owner = &self.stages[loan.part];
                owner.reducer.needed(loan.owner)?;
                let values = owner.model.params.value(loan.owner);
                announced("tied values to a later device", || {
                    stage.model.params.value(loan.id).copy_from(values)
                })?;
            }
        }
        Ok(())
    }

    /// Copies the gradients of tied parameters that stage `index` borrows: the sums so far from
    /// their owners, or with `back` to them.
    pub(super) fn move_gradients(&self, index: usize, how: &StagePass, back: bool) -> Result<()> {
        let here = &self.stages[index].model.params;
        for loan in here.loans() {
            let there = &self.stages[loan.part].model.params;
            let (Some(borrowed), Some(sum)) = (here.gradient(loan.id), there.gradient(loan.owner))
            else {
                continue;
            };
            if back {
                let what = "tied gradients to the owner's device";
                announced(what, || sum.copy_from(borrowed))?;
            } else if how.accumulates || here.is_used_above(loan.id) {
                let what = "tied gradients so far to a later device";
                announced(what, || borrowed.copy_from(sum))?;
            }
        }
        Ok(())
    }

    /// The sums of squares of all stages' gradients, in `all` on the last device.
    pub(super) fn collect_squares<'a>(&self, all: &'a Tensor) -> Result<&'a Tensor> {
        let mut end = all.count();
        announced("squares of gradients to the last device", || {
            for stage in &self.stages {
                let squares = stage.clip.partials();
                let start = end - squares.count();
                if squares.count() > 0 {
                    all.slice(start..end)?.copy_from(squares)?;
                }
                end = start;
            }
            Ok(all)
        })
    }

    /// Copies scale and flags of the step from the last stage to the others.
    pub(super) fn share_outcome(&self) -> Result<()> {
        let (last, others) = self.stages.split_last().expect("a model has a stage");
        announced("scale and first bad step to every device", || {
            for stage in others {
                stage.clip.out().copy_from(last.clip.out())?;
                stage.bad_step.copy_from(&last.bad_step)?;
            }
            Ok(())
        })
    }
}
