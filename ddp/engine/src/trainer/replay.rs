//! Steps of a run that are repeated: for `compare --replay`, which sees their tensors through nn's
//! `observe`, and for `verify`, which compares them with a metrics log and checkpoints. Nothing is
//! written.

use std::collections::BTreeMap;

use ddp_comm::World;
use ddp_data::Loader;
use ddp_kernels::ops::Bf16Order;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_nn::optim::Schedule;
use serde_json::{Value, json};

use super::program::RunProgram;
use super::run::Run;
use super::setup::AgreedRun;
use crate::checkpoint::{self, Opened};
use crate::config::Config;
use crate::devices;
use crate::digest::{self, StepDigests};
use crate::elastic::run::RankRun;
use crate::error::{Error, Result};

/// What is said of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logs {
    /// Nothing.
    Nothing,
    /// What a metrics log says of it.
    Step,
}

/// What of a checkpoint does not follow from the steps before it: evaluations, which are not
/// repeated, and what depends on ranks, machine and program.
const NOT_REPEATED: [&str; 9] = [
    "best", "config", "format", "held_out", "last", "program", "progress", "versions", "world",
];

/// A run of which steps are repeated.
pub struct Replay<'a> {
    world: &'a World,
    run: AgreedRun,
    loader: Loader,
    rank_run: RankRun,
    schedule: Schedule,
    /// Steps and rows that are done.
    taken: u64,
    samples: u64,
}

impl<'a> Replay<'a> {
    /// The run with these settings, at the checkpoint that they resume, or else before its first
    /// step. Its matmuls add in this order, unless the checkpoint names one. All ranks call it
    /// together.
    pub fn new(
        options: &Config,
        program: &dyn RunProgram,
        world: &'a World,
        order: Option<Bf16Order>,
    ) -> Result<Replay<'a>> {
        let mut whole = Run::new(options);
        whole.bf16_order = order;
        let assemble = || whole.assemble(program, world, u64::MAX, None);
        let (run, Some((_, loader, _))) = in_phase(Phase::Setup, assemble)? else {
            let text = "a replay: expected a run with steps to repeat, got one that has ended; help: begin at an earlier checkpoint";
            return Err(Error::Usage(text.into()));
        };
        let rank_run = whole.rank_run.expect("the run is built");
        Ok(Replay {
            world,
            schedule: run.settled.learning_rate(&run.plan)?,
            taken: rank_run.totals.steps,
            samples: rank_run.totals.samples,
            run,
            loader,
            rank_run,
        })
    }

    /// The steps that are done.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// The BLAKE3 of the training data and of the held-out data.
    pub fn data_blake3(&self) -> Result<[String; 2]> {
        let data = &self.run.data;
        Ok([data.train.blake3()?, data.held_out.blake3()?])
    }

    /// The fingerprint of the training data.
    pub fn fingerprint(&self) -> Result<String> {
        Ok(self.run.data.train.fingerprint()?)
    }

    /// Where each rank computes, and the versions that its bits depend on.
    pub fn machine(&self) -> (&[String], BTreeMap<String, String>) {
        (&self.run.places, devices::versions(self.run.devices[0]))
    }

    /// What a metrics log says of the weights before the first step. All ranks call it together.
    pub fn initial_weights(&mut self) -> Result<Value> {
        let stages = self.rank_run.step.stages().iter();
        let parts = stages.map(|stage| (&stage.model().params, stage.reducer().group()));
        Ok(json!(digest::of_weights(parts)?))
    }

    /// Takes the next step, and says what a metrics log says of it. All ranks call it together.
    pub fn take(&mut self, logs: Logs) -> Result<Option<String>> {
        let (step0, step) = (self.taken, &mut self.rank_run.step);
        let is_logged = logs == Logs::Step;
        let lr = self.schedule.learning_rate(step0);
        step.measure_norm(is_logged);
        let batch = in_phase(Phase::Step, || self.loader.load(step0))?;
        step.run(batch, lr)?;
        self.taken += 1;
        self.samples += batch.rows;
        if !is_logged {
            return Ok(None);
        }
        let report = step.report()?;
        let [gradients, weights] = step.digests(report.stats.weight_sum, false)?;
        let digests = StepDigests {
            batch: digest::of_batch(&mut self.loader, step0),
            gradients,
            weights,
        };
        let line = json!({
            "step": step0 + 1, "loss": report.loss(), "lr": lr, "digests": digests,
        });
        Ok(Some(line.to_string()))
    }

    /// What of a checkpoint after the steps taken is not as they made it, as texts. All ranks call
    /// it together.
    pub fn differences(&mut self, saved: &Opened) -> Result<Vec<String>> {
        let mut found = checkpoint::differences(saved, &mut self.rank_run.step, self.world)?;
        let mut state = self.run.state(&self.rank_run, self.world)?;
        let next = self.loader.sampler().at(self.taken);
        (state.step, state.samples) = (self.taken, self.samples);
        (state.position.epoch, state.position.in_epoch) = (next.epoch, next.in_epoch);
        state.schedule.learning_rate = self.schedule.learning_rate(self.taken);
        state.optimizer_since = self.rank_run.step.stages()[0].optimizer().since();
        let known = [state, saved.state.clone()].map(|state| json!(state));
        let fields = known[1].as_object().into_iter().flatten();
        let names = fields.map(|(name, _)| &**name);
        let names = names.filter(|name| !NOT_REPEATED.contains(name));
        let others = names.filter(|name| known[0][*name] != known[1][*name]);
        found.extend(others.map(|name| format!("{name} of {}", checkpoint::STATE_FILE)));
        Ok(found)
    }
}
