//! What crosses between the stages of a split model besides activations.

use ddp_kernels::Tensor;
use ddp_kernels::transfer::announced;
use ddp_nn::pass::Listener as _;

use super::{StagePass, TrainedModel};
use crate::error::Result;

impl TrainedModel {
    /// Copies the values of tied parameters to the stages that borrow them. Call it before a
    /// forward whenever values may have changed.
    pub(in crate::step) fn lend_values(&self) -> Result<()> {
        for stage in &self.stages {
            for tied in stage.model.params.tied_copies() {
                let owner = &self.stages[tied.part];
                owner.reducer.needed(tied.owner)?;
                let values = owner.model.params.value(tied.owner);
                announced("tied values to a later device", || {
                    stage.model.params.value(tied.id).copy_from(values)
                })?;
            }
        }
        Ok(())
    }

    /// Copies the gradients of tied parameters that stage `index` borrows: the sums so far from
    /// their owners, or with `back` to them.
    pub(in crate::step) fn move_gradients(
        &self,
        index: usize,
        how: &StagePass,
        back: bool,
    ) -> Result<()> {
        let here = &self.stages[index].model.params;
        let frees = self.stages[index].reducer.frees_gradients();
        for tied in here.tied_copies() {
            let there = &self.stages[tied.part].model.params;
            let (Some(borrowed), Some(sum)) = (here.gradient(tied.id), there.gradient(tied.owner))
            else {
                continue;
            };
            if back {
                self.stages[tied.part].reducer.writes(tied.owner);
                let what = "tied gradients to the owner's device";
                announced(what, || sum.copy_from(borrowed))?;
            // ZeRO-2 reduces each micro-batch and uses the gradient's memory again: there is no sum
            // so far.
            } else if how.accumulates && !frees || here.is_used_above(tied.id) {
                let what = "tied gradients so far to a later device";
                announced(what, || borrowed.copy_from(sum))?;
            }
        }
        Ok(())
    }

    /// The sums of squares of all stages' gradients, in `all` on the last device.
    pub(in crate::step) fn collect_squares<'a>(&self, all: &'a Tensor) -> Result<&'a Tensor> {
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
    pub(in crate::step) fn share_outcome(&self) -> Result<()> {
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
