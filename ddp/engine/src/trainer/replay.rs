//! Steps of a run that are repeated to look at what they compute. Nothing of the run is written.

use ddp_comm::World;
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_nn::observe::{Observer, observed};
use serde_json::json;

use super::carried::Carried;
use super::matmuls;
use super::program::Program;
use super::setup::{self, Prepared};
use crate::config::Config;
use crate::digest::{self, StepDigests};
use crate::error::{Error, Result};

/// Repeats the steps up to `last` of the run with these settings, from the checkpoint that they
/// resume, or else from the first. Each step has an `observer` of what it computes. Returns what a
/// metrics log says of each step.
pub fn replay(
    options: &Config,
    program: &dyn Program,
    world: &World,
    last: u64,
    observer: &dyn Fn(u64) -> Observer,
) -> Result<Vec<String>> {
    let mut carried = Carried::default();
    let assemble = || setup::assemble(options, program, world, u64::MAX, &mut carried, None);
    let Prepared::Ready(mut run) = in_phase(Phase::Setup, assemble)? else {
        let text = format!("a replay: expected a run of {last} steps or more");
        return Err(Error::Usage(text));
    };
    if let Some(opened) = &run.resumed
        && let Some(saved) = &opened.state.products
    {
        in_phase(Phase::Setup, || matmuls::reuse(saved, &run.devices, world))?;
    }
    let schedule = options.learning_rate(&run.plan)?;
    let kept = carried.kept();
    kept.step.measure_norm(true);
    let steps = kept.totals.steps..last;
    let mut take = |step0: u64| -> Result<String> {
        let batch = in_phase(Phase::Step, || run.loader.load(step0))?;
        kept.step.run(batch, schedule.learning_rate(step0))?;
        let report = kept.step.report()?;
        let [gradients, weights] = kept.step.digests(report.stats.weight_sum, false)?;
        let digests = StepDigests {
            batch: digest::of_batch(run.loader.sampler(), step0),
            gradients,
            weights,
        };
        let step = json!({ "step": step0 + 1, "loss": report.loss(), "digests": digests });
        Ok(step.to_string())
    };
    steps
        .map(|step0| observed(observer(step0 + 1), || take(step0)))
        .collect()
}
