//! This rank's copy of the model: usually one stage, or one for each device that the model is split
//! over. A step calls the same functions for both.
//!
//! In a forward, activations go from each stage to the next, and in a backward their gradient goes
//! back: one tensor per pair of neighbours. The host waits for neither.
//!
//! A tied parameter is owned by the first stage that uses it. Later ones borrow it: they get its
//! values once a step. In a backward each adds to the sum so far, in the order of an unsplit model,
//! and the owner, which is last, has it reduced.

use ddp_comm::Group;
use ddp_data::Batch;
use ddp_kernels::Tensor;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::announced;
use ddp_nn::Loss;
use ddp_nn::pass::Listener;

use super::scalars::StepScalars;
use super::stage::{Stage, StagePass};
use crate::error::Result;

/// What varies from step to step is sent to the device.
const SCALARS: Label = Label::new(Lane::Copies, "send scalars");

/// The stages, from the input to the output: at least one.
#[derive(Debug)]
pub(super) struct Replica(pub(super) Vec<Stage>);

impl Replica {
    /// The stage of the output. Loss and statistics are on its device.
    pub(super) fn last(&self) -> &Stage {
        self.0.last().expect("a model has a stage")
    }

    fn last_mut(&mut self) -> &mut Stage {
        self.0.last_mut().expect("a model has a stage")
    }

    /// The ranks that train together.
    pub(super) fn group(&self) -> &Group {
        self.last().reducer.group()
    }

    /// (4), on the last device: [`Stats`](super::Stats) of this rank's rows, and after the join of
    /// all rows.
    pub(super) fn stats(&self) -> &Tensor {
        self.last().scalars.stats()
    }

    /// i64 (1), on the last device: the number of the step.
    pub(super) fn step(&self) -> &Tensor {
        self.last().scalars.step()
    }

    /// Sends what the work of the step on `batch` reads. Returns whether the memory for it moved.
    pub(super) fn send_scalars(&mut self, batch: &Batch, learning_rate: f64) -> Result<bool> {
        let moved = self.make_room(batch)?;
        for stage in &mut self.0 {
            let device = stage.device();
            let (scalars, optimizer) = (&mut stage.scalars, &stage.optimizer);
            let send = || scalars.send(optimizer, batch, learning_rate);
            trace::record_on(device, SCALARS, send)?;
        }
        Ok(moved)
    }

    /// As `send_scalars`, without the optimizer's.
    pub(super) fn send_positions(&mut self, batch: &Batch) -> Result<bool> {
        let moved = self.make_room(batch)?;
        for stage in &mut self.0 {
            stage.scalars.send_positions(batch)?;
        }
        Ok(moved)
    }

    /// Makes room for the scalars of `batch`. Returns whether memory moved.
    fn make_room(&mut self, batch: &Batch) -> Result<bool> {
        // The room is for any rank's rows, so that memory moves on all ranks in the same step.
        let room = batch.micro_count_max(self.group().size());
        let moves = room > self.last().scalars.room();
        for stage in self.0.iter_mut().filter(|_| moves) {
            stage.scalars = StepScalars::new(&mut stage.optimizer, room)?;
        }
        Ok(moves)
    }

    /// Begins a step: no gradient is complete.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.0
            .iter_mut()
            .try_for_each(|stage| stage.reducer.begin())
    }

    /// Copies the values of tied parameters to the stages that borrow them. Call it before a
    /// forward whenever values may have changed.
    pub(super) fn lend_values(&self) -> Result<()> {
        for stage in &self.0 {
            for loan in stage.model.params.loans() {
                let owner = &self.0[loan.part];
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
    fn move_gradients(&self, index: usize, how: &StagePass, back: bool) -> Result<()> {
        let here = &self.0[index].model.params;
        for loan in here.loans() {
            let there = &self.0[loan.part].model.params;
            let (Some(borrowed), Some(sum)) = (here.gradient(loan.id), there.gradient(loan.owner))
            else {
                continue;
            };
            if back {
                let what = "tied gradients to the owner's device";
                announced(what, || sum.copy_from(borrowed))?;
            } else if how.micro_batch > 0 || here.is_used_above(loan.id) {
                let what = "tied gradients so far to a later device";
                announced(what, || borrowed.copy_from(sum))?;
            }
        }
        Ok(())
    }

    /// Begins a step that is launched as a graph.
    pub(super) fn begin_launch(&mut self) {
        for stage in &mut self.0 {
            stage.reducer.begin_launch();
        }
    }

    /// The output, on the last device, for `x` on the first.
    pub(super) fn forward(&mut self, how: &StagePass, x: &Tensor) -> Result<Tensor> {
        heartbeat::beat(Work::Computes);
        let (first, others) = self.0.split_first_mut().expect("a model has a stage");
        let mut output = first.forward(how, x)?;
        for stage in others {
            let input = stage.bring(output, "activations to the next device")?;
            output = stage.forward(how, &input)?;
        }
        Ok(output)
    }

    /// The gradient of the sum of losses by the output of the forward before. Losses are added to
    /// `stats`.
    pub(super) fn loss_gradient(
        &mut self,
        how: &StagePass,
        loss: &dyn Loss,
        of: [&Tensor; 3],
    ) -> Result<Tensor> {
        self.move_gradients(self.0.len() - 1, how, false)?;
        let (model, mut pass) = self.last_mut().pass(how, false);
        let gradient = || model.loss_gradient(&mut pass, loss, of);
        Ok(trace::record_on(
            of[2].device(),
            how.label("loss"),
            gradient,
        )?)
    }

    /// The loss of each row of the output of the forward before. They are added to `stats`.
    pub(super) fn losses(
        &mut self,
        how: &StagePass,
        loss: &dyn Loss,
        of: [&Tensor; 3],
    ) -> Result<Tensor> {
        let (model, mut pass) = self.last_mut().pass(how, false);
        let losses = || model.losses(&mut pass, loss, of);
        Ok(trace::record_on(of[2].device(), how.label("loss"), losses)?)
    }

    /// The backward of the forward before, from the gradient of its output. The reducers hear of
    /// complete gradients.
    pub(super) fn backward(&mut self, how: &StagePass, mut gradient: Tensor) -> Result<()> {
        for index in (0..self.0.len()).rev() {
            if index + 1 < self.0.len() {
                self.move_gradients(index, how, false)?;
            }
            let (before, rest) = self.0.split_at_mut(index);
            let (stage, wants_input_gradient) = (&mut rest[0], before.iter().any(Stage::trains));
            if !wants_input_gradient && !stage.trains() {
                break;
            }
            let here = stage.bring(gradient, "gradients to the device before")?;
            let next = stage.backward(how, &here, wants_input_gradient)?;
            self.move_gradients(index, how, true)?;
            match next {
                Some(next) => gradient = next,
                None => break,
            }
        }
        Ok(())
    }

    /// Sums `stats`, a small tensor on the last device, over the ranks with the next gradients.
    pub(super) fn reduce(&mut self, stats: &Tensor) -> Result<()> {
        self.last_mut().reducer.reduce(stats)
    }

    /// Takes part in a step without rows: the gradients are zero, and other ranks wait for them in
    /// the order in which a backward completes them.
    pub(super) fn reduce_zeros(&mut self, stats: &Tensor) -> Result<()> {
        self.reduce(stats)?;
        self.0
            .iter_mut()
            .rev()
            .try_for_each(|stage| stage.reducer.all_ready_with_zeros())
    }

    /// Waits until all gradients are sums over the ranks.
    pub(super) fn join(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|stage| stage.reducer.join())
    }

    /// Makes the values of all parameters current on this rank. Only ZeRO-1 has something to do.
    pub(super) fn gather(&mut self) -> Result<()> {
        self.0
            .iter_mut()
            .try_for_each(|stage| stage.reducer.gather_all(&stage.model.params))
    }
}
